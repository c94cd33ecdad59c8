"""Owners of content: pauses are learnt per session and per kind, in bounded memory."""

import tracemalloc
from random import Random

import pytest

from baton.core.request import SessionHints, SessionKey
from baton.engine.retention.content_owner import ContentOwner, OwnerKind
from baton.engine.retention.content_owners import ContentOwners, OwnedRequest
from baton.engine.retention.return_chance import EDGES_S, NUM_BINS, bin_of

FIRST_BLOCK = b"b" * 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.owners = ContentOwners(lambda: self.now_s, turn_blocks=100)

    def begin(self, session: str = "", *, after_s: float = 0.0, **hints: object) -> OwnedRequest:
        self.now_s += after_s
        return self.owners.arrived(SessionHints(session=session, **hints), FIRST_BLOCK)  # type: ignore[arg-type]

    def turn(self, session: str = "", *, after_s: float = 0.0, **hints: object) -> ContentOwner:
        request = self.begin(session, after_s=after_s, **hints)
        self.now_s += 0.5
        request.owner.leave([FIRST_BLOCK], FIRST_BLOCK)
        self.owners.ended(request)
        return request.owner

    def rate(self, owner: ContentOwner, age_s: float) -> float:
        before_s, self.now_s = self.now_s, (owner.idle_since_s or 0.0) + age_s
        rate, self.now_s = self.owners.return_rate(owner), before_s
        return rate


def test_session_is_one_owner_within_its_tenant() -> None:
    clock = Clock()
    assert clock.turn("s") is clock.turn("s")
    assert clock.turn("s") is not clock.turn("s", tenant="other")
    assert clock.turn() is not clock.turn()


def test_session_is_expected_after_its_own_pauses() -> None:
    clock = Clock()
    for _ in range(10):
        fast = clock.turn("fast", after_s=2.0)
        slow = clock.turn("slow", after_s=60.0)
    assert fast.pauses == (bin_of(62.5),) * 8  # the other's pause passes, too
    clock = Clock()
    for _ in range(8):
        fast = clock.turn("fast", after_s=2.0)
    for _ in range(8):
        slow = clock.turn("slow", after_s=60.0)
    assert clock.rate(fast, 0.0) > 2 * clock.rate(slow, 0.0)
    assert clock.rate(slow, 50.0) > 1.5 * clock.rate(slow, 20.0)
    assert clock.rate(fast, 50.0) < clock.rate(fast, 0.0) / 2


def test_announced_pause_counts_until_the_next_request() -> None:
    clock = Clock()
    for _ in range(8):
        owner = clock.turn("s", after_s=2.0)
    usual = clock.rate(owner, 0.0)
    clock.turn("s", after_s=2.0, next_in_s=100.0)
    assert owner.has_announced_turn
    assert clock.rate(owner, 0.0) < usual / 2
    assert clock.rate(owner, 95.0) > 2 * usual / 100
    clock.turn("s", after_s=2.0)
    assert not owner.has_announced_turn
    assert clock.rate(owner, 0.0) == pytest.approx(usual, rel=0.2)


def test_session_that_goes_on_elsewhere_is_not_expected() -> None:
    clock = Clock()
    for _ in range(3):
        owner = clock.turn("s", after_s=2.0, next_in_s=100.0)
    usual, changed = clock.owners.return_rate(owner), []
    assert usual > 0
    clock.owners.on_change(changed.append)
    clock.now_s += 2.0
    owner.num_blocks = 5
    clock.owners.moved(SessionKey("default", "s"), 2)
    assert changed == [], "another branch of it goes on elsewhere"
    clock.owners.moved(SessionKey("default", "s"), 3)
    assert changed == [owner]
    assert clock.owners.return_rate(owner) == 0
    assert not owner.has_announced_turn
    assert owner.pauses == (bin_of(2.0),) * 3, "the read was a use of its content"
    assert clock.turn("s", after_s=500.0) is owner
    assert clock.owners.return_rate(owner) > 0
    assert owner.pauses == (bin_of(2.0),) * 3, "it was not away for that time"


def test_session_that_runs_here_or_is_unknown_has_not_moved() -> None:
    clock = Clock()
    clock.turn("s")
    running = clock.begin("s", after_s=1.0)
    for session in (SessionKey("default", "s"), SessionKey("default", "t"), SessionKey("other", "s")):
        clock.owners.moved(session, 10)
    clock.owners.ended(running)
    assert not running.owner.has_moved
    assert clock.owners.return_rate(running.owner) > 0


def test_kinds_learn_how_often_they_return() -> None:
    """Half of the sessions return after their first turn, all others always."""
    clock = Clock()
    for number in range(200):
        clock.turn(f"s{number}")
        if number % 2:
            for _ in range(3):
                clock.turn(f"s{number}", after_s=1.0)
        clock.now_s += 10.0
    clock.now_s += EDGES_S[-1]
    clock.turn("last")
    first, later = (clock.owners._counts[kind].hazards() for kind in (OwnerKind.FIRST_TURN, OwnerKind.LATER_TURN))
    assert first[bin_of(1.0)] == pytest.approx(0.5, abs=0.1)
    assert later[bin_of(1.0)] == pytest.approx(2 / 3, abs=0.1), "of three later turns two are followed by another"
    assert later[bin_of(30.0)] < 0.05


def test_request_without_a_session_returns_if_another_uses_its_content() -> None:
    clock = Clock()
    for _ in range(100):
        before = clock.turn()
        clock.now_s += 3.0
        used = clock.begin()
        assert used.owner.owner_with(before, 0) is used.shared
        clock.owners.ended(used)
        for _ in range(3):
            clock.owners.return_rate(before)  # its age is counted while it has content
        clock.rate(used.owner, EDGES_S[-1])
    hazard = clock.owners._counts[OwnerKind.UNNAMED].hazards()
    assert hazard[bin_of(3.0)] == pytest.approx(0.5, abs=0.05), "the other request never returns"
    assert hazard[bin_of(30.0)] < 0.05


def test_shared_content_belongs_to_its_first_block() -> None:
    clock = Clock()
    one, two = clock.begin("one"), clock.begin("two")
    assert one.shared is two.shared
    assert one.owner.owner_with(None, 0) is one.owner
    assert one.owner.owner_with(one.owner, 0) is one.owner
    assert two.owner.owner_with(one.owner, 0) is two.shared
    assert two.owner.owner_with(one.shared, 0) is two.shared


def test_retention_goes_before_sharing() -> None:
    clock = Clock()
    retaining, other = clock.begin("one", retain_s=10.0), clock.begin("two")
    assert retaining.owner.owner_with(other.owner, 0) is retaining.owner
    assert other.owner.owner_with(retaining.owner, 0) is retaining.owner
    clock.owners.ended(retaining)
    clock.now_s += 9.0
    assert other.owner.owner_with(retaining.owner, 0) is retaining.owner
    clock.now_s += 2.0
    assert other.owner.owner_with(retaining.owner, 0) is other.shared


def test_retention_ends_with_its_time_or_with_zero() -> None:
    clock = Clock()
    owner = clock.turn("s", retain_s=10.0)
    assert owner.is_retained
    clock.turn("s", after_s=1.0)
    assert owner.is_retained, "a request without the field changes nothing"
    clock.turn("s", after_s=1.0, retain_s=0.0)
    assert not owner.is_retained


def test_running_requests_of_one_session_are_one_use() -> None:
    clock = Clock()
    first, second = clock.begin("s"), clock.begin("s")
    clock.owners.ended(first)
    clock.now_s += 5.0
    assert first.owner.age_s == 0.0
    clock.owners.ended(second)
    clock.now_s += 5.0
    assert first.owner.age_s == 5.0
    clock.begin("s")
    assert first.owner.pauses == (bin_of(5.0),)


@pytest.mark.parametrize("seed", range(5))
def test_pauses_are_counted_as_a_naive_list_would(seed: int) -> None:
    """Each pause counts for the bins that it has reached, however often time is looked at."""
    rng, clock = Random(seed), Clock()
    begun, returned = [0] * NUM_BINS, [0] * NUM_BINS
    ended_s: dict[str, float] = {}
    for _ in range(300):
        clock.now_s += rng.choice([0.1, 1.0, 20.0])
        session = f"s{rng.randrange(5)}"
        if session in ended_s:
            returned[bin_of(clock.now_s - ended_s[session])] += 1
            for index in range(bin_of(clock.now_s - ended_s[session]) + 1):
                begun[index] += 1
        clock.turn(session)
        ended_s[session] = clock.now_s
    clock.owners._count_pauses()
    for at_s in ended_s.values():
        for index in range(bin_of(clock.now_s - at_s) + 1):
            begun[index] += 1
    kinds = [clock.owners._counts[kind] for kind in (OwnerKind.FIRST_TURN, OwnerKind.LATER_TURN)]
    assert [sum(counts._begun[index] for counts in kinds) for index in range(NUM_BINS)] == begun
    assert [sum(counts._returned[index] for counts in kinds) for index in range(NUM_BINS)] == returned


def test_memory_is_bounded() -> None:
    limit, now_s = 100_000, 0.0
    owners = ContentOwners(lambda: now_s, limit)
    tracemalloc.start()
    for number in range(800):
        now_s += 1.0
        for session in (f"{number:0100}", "kept"):
            hints = SessionHints(tenant=f"{number % 5:050}" if session != "kept" else "t", session=session)
            owners.ended(owners.arrived(hints, number.to_bytes(16, "big")))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert owners.num_bytes <= 2 * limit
    assert used < 2 * limit
    assert len(owners.arrived(SessionHints(tenant="t", session="kept"), None).owner.pauses) == 8
