"""The fair queue: order, displacement and expiry."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import Reason
from baton.core.request import Slo
from baton.scheduler.admission.fair_queue import FairQueue, QueueEntry, displaced_rejection, overdue_rejection
from tests.builders import query


def asked(tenant: str = "default", *, within_s: float = 10.0, priority: int = 0, attempt: int = 0) -> dict[str, object]:
    return {"tenant": tenant, "deadline_s": within_s, "priority": priority, "attempt": attempt}


def queue_of(*requests: dict[str, object], max_queued_requests: int = 100) -> FairQueue[int]:
    """A queue of these requests. Each handle is the position in `requests`."""
    queue: FairQueue[int] = FairQueue(max_queued_requests=max_queued_requests)
    for handle, fields in enumerate(requests):
        queue.add(query(**fields), handle, 0.0)
    return queue


def take_next(queue: FairQueue[int]) -> QueueEntry[int] | None:
    if (first := queue.peek()) is not None:
        queue.take(first)
    return first


def order(queue: FairQueue[int], count: int = 1000) -> list[int]:
    taken = []
    while len(taken) < count and (waiting := take_next(queue)) is not None:
        taken.append(waiting.handle)
    return taken


def test_earliest_due_goes_first_and_ties_in_order_of_arrival() -> None:
    assert order(queue_of(asked(within_s=9), asked(within_s=3), asked(within_s=3), asked(within_s=6))) == [1, 2, 3, 0]


def test_ttft_slo_sets_the_due_time_of_a_first_attempt_only() -> None:
    queue: FairQueue[int] = FairQueue(max_queued_requests=9)
    first, _ = queue.add(query(slo=Slo(ttft_s=0.5), deadline_s=60.0), 0, 100.0)
    again, _ = queue.add(query(slo=Slo(ttft_s=0.5), deadline_s=60.0, attempt=1), 1, 100.0)
    assert (first.due_s, again.due_s) == (100.5, 160.0)
    assert queue.next_due_s == 100.5


def test_lower_priority_number_goes_before_any_deadline() -> None:
    assert order(queue_of(asked(within_s=1, priority=3), asked(within_s=99, priority=-1), asked(within_s=50))) == [
        1,
        2,
        0,
    ]


def test_tenants_are_served_in_turn_regardless_of_arrival() -> None:
    queue = queue_of(*[asked("rush", within_s=1.0)] * 50, *[asked("calm", within_s=9.0)] * 3)
    assert [handle >= 50 for handle in order(queue, 6)] == [False, True, False, True, False, True]


def test_returning_tenant_gets_no_more_than_its_share() -> None:
    queue = queue_of(*[asked("patient", within_s=100.0)] * 10)
    taken = []
    for _ in range(10):
        if "hasty" in taken[-1:] or not taken:
            queue.add(query(tenant="hasty", deadline_s=1.0), -1, 0.0)
        waiting = take_next(queue)
        assert waiting is not None
        taken.append(waiting.query.tenant)
    assert 4 <= taken.count("patient") <= 6


def test_full_queue_displaces_the_last_due_of_the_largest_tenant() -> None:
    queue = queue_of(*[asked("rush", within_s=s) for s in (1, 8, 2)], asked("calm", within_s=9), max_queued_requests=4)
    new, victim = queue.add(query(tenant="calm", deadline_s=5.0), 4, 0.0)
    assert victim is not None
    assert (new.handle, victim.handle, len(queue)) == (4, 1, 4)
    refusal = displaced_rejection(queue, 0.7)
    assert (refusal.reason, refusal.retry_after_s) == (Reason.QUEUE_FULL, 0.7)


def test_full_queue_displaces_a_new_request_without_precedence() -> None:
    queue = queue_of(*[asked(within_s=1)] * 3, max_queued_requests=3)
    new, victim = queue.add(query(deadline_s=2.0), 3, 0.0)
    assert victim is new
    new, victim = queue.add(query(deadline_s=2.0, priority=-1), 4, 0.0)
    assert victim is not None
    assert victim.query.priority == 0


def test_overdue_rejection_names_the_reason_and_limit() -> None:
    queue: FairQueue[int] = FairQueue(max_queued_requests=9)
    queue.add(query(slo=Slo(ttft_s=0.5)), 0, 0.0)
    queue.add(query(deadline_s=2.0), 1, 0.0)
    queue.add(query(deadline_s=9.0), 2, 0.0)
    assert queue.expire(0.4) == []
    late, dead = sorted(queue.expire(2.0), key=lambda waiting: waiting.handle)
    assert (overdue_rejection(late, 2.0).reason, overdue_rejection(late, 2.0).limit_s) == (Reason.TTFT_SLO, 0.5)
    assert (overdue_rejection(dead, 2.0).reason, overdue_rejection(dead, 2.0).predicted_s) == (Reason.DEADLINE, 2.0)
    assert overdue_rejection(dead, 2.0).retry_after_s > 0
    assert order(queue) == [2]


def test_deadline_is_never_reported_as_an_slo() -> None:
    queue: FairQueue[int] = FairQueue(max_queued_requests=1000)
    for number in range(200):
        queue.add(query(deadline_s=0.1 + number / 7), number, number / 3)
    assert {overdue_rejection(late, 1e6).reason for late in queue.expire(1e6)} == {Reason.DEADLINE}


def test_handles_before_a_new_request() -> None:
    """Earlier ones of its tenant, one more of each other tenant, and all of lower priority numbers."""
    rush = [asked("rush", within_s=60.0 + i) for i in range(60)]
    queue = queue_of(
        *rush,
        asked("calm", within_s=3.0),
        asked("calm", within_s=90.0),
        asked("first", priority=-1),
        asked("last", priority=9),
    )
    assert sorted(queue.handles_before(query(tenant="calm", deadline_s=5.0), 0.0)) == [0, 1, 60, 62]
    assert list(queue.handles_before(query(tenant="calm", deadline_s=5.0, priority=-1), 0.0)) == [62]
    assert len(list(queue.handles_before(query(tenant="rush", deadline_s=61.5), 0.0))) == 2 + 2 + 1, (
        "two of its own, two of calm's, and the first priority"
    )


def test_earliest_due_ignores_tenants() -> None:
    queue = queue_of(
        asked("a", within_s=5.0),
        asked("a", within_s=1.0),
        asked("b", within_s=3.0),
        asked("c", within_s=9.0, priority=-1),
    )
    assert [each.handle for each in queue.earliest_due(3)] == [3, 1, 2]
    queue.take(queue.earliest_due(2)[1])
    assert sorted(order(queue)) == [0, 2, 3]


def test_short_sessions_do_not_wait_behind_long_ones_of_their_tenant() -> None:
    queue: FairQueue[str] = FairQueue(max_queued_requests=9)
    for handle, since_s, attained_s in (("long", 0.0, 40.0), ("short", 1.0, 2.0), ("new", 5.0, 0.0)):
        queue.add(query(deadline_s=100.0), handle, since_s, attained_s=attained_s)
    queue.add(query(deadline_s=100.0, tenant="other"), "other", 6.0, attained_s=90.0)
    before = queue.handles_before(query(deadline_s=100.0), 7.0, attained_s=10.0)
    assert sorted(before) == ["new", "other", "short"]
    taken = []
    while (first := take_next(queue)) is not None:
        taken.append(first.handle)
    assert taken == ["short", "other", "new", "long"], "tenants take turns, whatever their sessions have attained"


def test_long_session_waits_at_most_half_of_its_time_longer() -> None:
    """It is overtaken by requests that arrive within half of the time until it is due, and by no others."""
    queue: FairQueue[str] = FairQueue(max_queued_requests=9)
    queue.add(query(deadline_s=10.0), "long", 0.0, attained_s=1e9)
    queue.add(query(deadline_s=10.0), "soon", 4.9, attained_s=0.0)
    queue.add(query(deadline_s=10.0), "late", 5.1, attained_s=0.0)
    taken = []
    while (first := take_next(queue)) is not None:
        taken.append(first.handle)
    assert taken == ["soon", "long", "late"]


def test_attained_service_changes_no_due_time() -> None:
    queue: FairQueue[str] = FairQueue(max_queued_requests=9)
    queue.add(query(deadline_s=10.0), "long", 0.0, attained_s=1e9)
    queue.add(query(deadline_s=12.0), "short", 0.0)
    assert queue.next_due_s == 10.0
    assert [each.handle for each in queue.earliest_due(2)] == ["long", "short"]
    assert [each.handle for each in queue.expire(11.0)] == ["long"]
    assert queue.next_due_s == 12.0


@given(seed=st.integers(0, 2**32))
def test_queue_equals_a_sorted_list(seed: int) -> None:
    """One tenant: the order of service, of due times and of expiry, under random operations."""
    rng = Random(seed)
    queue: FairQueue[int] = FairQueue(max_queued_requests=1000)
    naive: dict[int, QueueEntry[int]] = {}
    for number in range(120):
        now_s, action = number / 10, rng.random()
        if action < 0.6:
            within_s, attained_s = rng.uniform(0.1, 20.0), rng.choice([0.0, rng.uniform(0.0, 30.0)])
            entry, _ = queue.add(query(deadline_s=within_s), number, now_s, attained_s=attained_s)
            assert entry.rank_s == pytest.approx(now_s + within_s + min(attained_s, within_s / 2))
            naive[number] = entry
        elif action < 0.8 and naive:
            first = queue.peek()
            assert first is min(naive.values(), key=lambda each: (each.rank_s, each.seq))
            taken = first if rng.random() < 0.7 else rng.choice(list(naive.values()))
            if rng.random() < 0.5:
                queue.take(taken)
            else:
                assert queue.remove(taken)
            assert not queue.remove(taken)
            del naive[taken.handle]
        else:
            overdue = [each.handle for each in queue.expire(now_s)]
            assert sorted(overdue) == sorted(handle for handle, each in naive.items() if each.due_s <= now_s)
            for handle in overdue:
                del naive[handle]
        assert queue.next_due_s == min((each.due_s for each in naive.values()), default=None)
        assert len(queue) == len(naive)


def test_entries_that_have_left_take_bounded_memory() -> None:
    queue: FairQueue[int] = FairQueue(max_queued_requests=9)
    queue.add(query(deadline_s=1.0), -1, 0.0)
    for number in range(2000):
        queue.take(queue.add(query(deadline_s=600.0), number, 0.0)[0])
    assert len(queue._by_due) < 200


def test_removed_request_is_not_served() -> None:
    queue: FairQueue[int] = FairQueue(max_queued_requests=9)
    places = [queue.add(query(), handle, 0.0)[0] for handle in range(3)]
    assert queue.remove(places[1])
    assert not queue.remove(places[1])
    assert order(queue) == [0, 2]
    assert (len(queue), take_next(queue), queue.peek(), queue.next_due_s) == (0, None, None, None)


def test_remaining_requests_keep_their_order() -> None:
    queue: FairQueue[int] = FairQueue(max_queued_requests=100)
    dues = Random(0).sample(range(1, 100), 40)
    places = [queue.add(query(deadline_s=float(due)), due, 0.0)[0] for due in dues]
    for place in places[5:30]:
        assert queue.remove(place)
    assert order(queue) == sorted(dues[:5] + dues[30:])


def test_queue_without_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="max_queued_requests is 0; must be at least 1"):
        FairQueue(max_queued_requests=0)


@given(seed=st.integers(0, 100_000))
def test_every_request_leaves_once_in_the_order_of_the_rules(seed: int) -> None:
    random = Random(seed)
    queue: FairQueue[int] = FairQueue(max_queued_requests=random.randrange(1, 12))
    inside: dict[int, QueueEntry[int]] = {}
    for handle in range(60):
        now_s = handle / 4
        match random.randrange(6):
            case 0 | 1 | 2:
                fields = asked(random.choice("abc"), within_s=random.uniform(0.1, 9), priority=random.randrange(2))
                new, victim = queue.add(query(**fields), handle, now_s)
                inside[handle] = new
                if victim is not None:
                    assert inside.pop(victim.handle) is victim
            case 3:
                taken = take_next(queue)
                assert (taken is None) == (not inside)
                if taken is not None:
                    assert inside.pop(taken.handle) is taken
                    same = [w for w in inside.values() if w.query.tenant == taken.query.tenant]
                    assert all(
                        (taken.query.priority, taken.due_s, taken.seq) < (w.query.priority, w.due_s, w.seq)
                        for w in same
                    )
                    assert all(taken.query.priority <= w.query.priority for w in inside.values())
            case 4 if inside:
                assert queue.remove(inside.pop(random.choice(sorted(inside))))
            case 5:
                gone = {waiting.handle for waiting in queue.expire(now_s)}
                assert gone == {handle for handle, w in inside.items() if w.due_s <= now_s}
                inside = {handle: w for handle, w in inside.items() if handle not in gone}
        assert len(queue) == len(inside)
