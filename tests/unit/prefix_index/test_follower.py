"""The order in which events count; and an index fed through a follower against the truth, whatever the log
loses, repeats or mixes up."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import KvEvent, KvEventKind, KvSnapshot, Tier, UnreadableEvent
from baton.prefix_index.event_order import EventAction, EventOrder
from baton.prefix_index.index import PrefixIndex
from tests.builders import hashes_of, worker_ref
from tests.scale import sized

W = worker_ref("w0", epoch=7)
CHAIN = hashes_of(range(32))


def event(event_seq: int, kind: str = "stored", worker: WorkerRef = W, **more: Any) -> KvEvent:
    return KvEvent(worker=worker, event_seq=event_seq, kind=KvEventKind(kind), block_size_tokens=4, **more)


def snapshot(event_seq: int, *hashes: bytes, worker: WorkerRef = W) -> KvSnapshot:
    return KvSnapshot(worker=worker, event_seq=event_seq, block_size_tokens=4, hashes={Tier.DEVICE: hashes})


def unreadable(event_seq: int, **more: Any) -> UnreadableEvent:
    return UnreadableEvent(worker=W, event_seq=event_seq, problem="?", **more)


def follower_at(event_seq: int) -> EventOrder:
    follower = EventOrder(W)
    assert follower.take_snapshot(snapshot(event_seq)) is EventAction.APPLY
    return follower


def test_nothing_counts_before_a_first_snapshot_of_any_age() -> None:
    follower = EventOrder(W)
    assert follower.take_event(event(1)) is EventAction.WAITING
    assert follower.take_snapshot(snapshot(4)) is EventAction.APPLY
    assert (follower.needs_snapshot, follower.event_seq) == (False, 4)


def test_events_count_once_and_in_order() -> None:
    follower = follower_at(4)
    said = [follower.take_event(event(seq)) for seq in (3, 4, 5, 5, 6)]
    assert said == [
        EventAction.DUPLICATE,
        EventAction.DUPLICATE,
        EventAction.APPLY,
        EventAction.DUPLICATE,
        EventAction.APPLY,
    ]
    assert follower.event_seq == 6
    assert follower.take_snapshot(snapshot(9)) is EventAction.DUPLICATE


def test_a_gap_is_closed_by_a_newer_snapshot_only() -> None:
    follower = follower_at(4)
    assert follower.take_event(event(7)) is EventAction.GAP
    assert follower.take_event(event(8)) is EventAction.WAITING
    assert follower.take_snapshot(snapshot(4)) is EventAction.TOO_OLD
    assert follower.needs_snapshot
    assert follower.take_snapshot(snapshot(7)) is EventAction.APPLY
    assert follower.take_event(event(8)) is EventAction.APPLY


def test_a_reset_needs_its_snapshot_whether_or_not_numbers_are_missing() -> None:
    for event_seq in (5, 50):
        follower = follower_at(4)
        assert follower.take_event(event(event_seq, "reset")) is EventAction.RESET
        assert (follower.needs_snapshot, follower.event_seq) == (True, 4)


def test_what_a_later_release_says_is_counted_and_what_is_damaged_is_a_loss() -> None:
    follower = follower_at(4)
    assert follower.take_event(unreadable(5, is_from_later_release=True)) is EventAction.SKIPPED
    assert follower.take_event(event(6)) is EventAction.APPLY
    assert follower.take_event(unreadable(7)) is EventAction.DAMAGED
    assert follower.needs_snapshot


def test_other_lives_say_nothing_about_this_one() -> None:
    follower, earlier = follower_at(4), worker_ref("w0", epoch=8)
    assert follower.take_event(event(5, worker=earlier)) is EventAction.OTHER_LIFE
    assert EventOrder(W).take_snapshot(snapshot(5, worker=earlier)) is EventAction.OTHER_LIFE
    assert follower.take_event(event(5)) is EventAction.APPLY


def test_an_entry_from_nowhere_cannot_stop_a_follower_for_good() -> None:
    follower = follower_at(4)
    assert follower.take_event(event(2**63)) is EventAction.GAP
    assert follower.take_snapshot(snapshot(5)) is EventAction.APPLY
    assert follower.take_event(event(6)) is EventAction.APPLY


# -- any interleaving ---------------------------------------------------------------------------------------------------------------------

BLOCKS = st.lists(st.sampled_from(CHAIN), min_size=1, max_size=4, unique=True).map(tuple)
ACTS = st.one_of(
    st.tuples(st.just("store"), BLOCKS),
    st.tuples(st.just("store"), BLOCKS),
    st.tuples(st.just("evict"), BLOCKS),
    st.tuples(
        st.sampled_from(
            ["snapshot", "reset", "restart", "trim", "damage", "read", "read", "read-one", "repeat", "skip"]
        ),
        st.just(()),
    ),
)


class World:
    """One worker with its log as a feed would keep it, and one follower that reads it badly."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.worker = worker_ref("w0", epoch=self.epoch)
        self.held: set[bytes] = set()
        self.seq = 0
        self.log: list[KvEvent | UnreadableEvent] = []
        self.reset()
        self.index.join(self.worker)
        self.follower = EventOrder(self.worker)

    def say(self, kind: str, hashes: tuple[bytes, ...] = ()) -> None:
        self.seq += 1
        self.log.append(event(self.seq, kind, self.worker, hashes=hashes))

    def store(self, hashes: tuple[bytes, ...]) -> None:
        self.held |= set(hashes)
        self.say("stored", hashes)

    def evict(self, hashes: tuple[bytes, ...]) -> None:
        self.held -= set(hashes)
        self.say("evicted", hashes)

    def snapshot(self) -> None:
        self.kept = snapshot(self.seq, *sorted(self.held), worker=self.worker)

    def reset(self) -> None:
        self.log.clear()
        self.say("reset")
        self.snapshot()

    def damage(self) -> None:
        last = self.log.pop()
        self.log.append(UnreadableEvent(worker=last.worker, event_seq=last.event_seq, problem="?"))

    def read(self, entries: list[KvEvent | UnreadableEvent] | None = None) -> None:
        if self.follower.needs_snapshot and self.follower.take_snapshot(self.kept) is EventAction.APPLY:
            self.index.reset(self.worker)
            for tier, hashes in self.kept.hashes.items():
                self.index.stored(self.worker, tier, hashes)
        after = self.follower.event_seq
        for entry in entries if entries is not None else [e for e in self.log if e.event_seq > after]:
            if self.follower.take_event(entry) is EventAction.APPLY and isinstance(entry, KvEvent):
                put = self.index.stored if entry.kind is KvEventKind.STORED else self.index.evicted
                put(entry.worker, entry.tier, entry.hashes)

    def act(self, name: str, hashes: tuple[bytes, ...]) -> None:
        if name in ("store", "evict"):
            getattr(self, name)(hashes)
        elif name == "trim":
            del self.log[: len(self.log) // 2]
        elif name == "read-one":
            self.read([e for e in self.log if e.event_seq > self.follower.event_seq][:1])
        elif name == "repeat":
            self.read(self.log[:])
        elif name == "skip":
            self.read([e for e in self.log if e.event_seq > self.follower.event_seq + 1])
        elif self.log or name != "damage":
            getattr(self, name)()


@settings(max_examples=sized(400, 20_000), deadline=None)
@given(st.lists(ACTS, min_size=3, max_size=50))
def test_who_needs_no_snapshot_and_has_read_to_the_end_knows_exactly_what_is_held(
    script: list[tuple[str, tuple[bytes, ...]]],
) -> None:
    world = World()
    for name, hashes in script:
        world.act(name, hashes)
        if not world.follower.needs_snapshot and world.follower.event_seq == world.seq:
            assert known(world) == world.held
    world.snapshot()  # asked for
    for _ in range(2):
        world.read()
    assert not world.follower.needs_snapshot
    assert known(world) == world.held


def known(world: World) -> set[bytes]:
    return {block for block in CHAIN if world.index.overlaps((block,), 0.0)}
