"""Event order: decisions about single events, and an index that equals the worker's blocks despite lost,
repeated or reordered log entries."""

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


def order_at(event_seq: int) -> EventOrder:
    order = EventOrder(W)
    assert order.take_snapshot(snapshot(event_seq)) is EventAction.APPLY
    return order


def test_first_snapshot_of_any_age_is_needed_before_events_are_applied() -> None:
    order = EventOrder(W)
    assert order.take_event(event(1)) is EventAction.WAITING
    assert order.take_snapshot(snapshot(4)) is EventAction.APPLY
    assert (order.needs_snapshot, order.event_seq) == (False, 4)


def test_events_are_applied_once_and_in_order() -> None:
    order = order_at(4)
    actions = [order.take_event(event(seq)) for seq in (3, 4, 5, 5, 6)]
    assert actions == [
        EventAction.DUPLICATE,
        EventAction.DUPLICATE,
        EventAction.APPLY,
        EventAction.DUPLICATE,
        EventAction.APPLY,
    ]
    assert order.event_seq == 6
    assert order.take_snapshot(snapshot(9)) is EventAction.DUPLICATE


def test_gap_needs_a_newer_snapshot() -> None:
    order = order_at(4)
    assert order.take_event(event(7)) is EventAction.GAP
    assert order.take_event(event(8)) is EventAction.WAITING
    assert order.take_snapshot(snapshot(4)) is EventAction.TOO_OLD
    assert order.needs_snapshot
    assert order.take_snapshot(snapshot(7)) is EventAction.APPLY
    assert order.take_event(event(8)) is EventAction.APPLY


def test_reset_needs_a_snapshot_with_or_without_a_gap() -> None:
    for event_seq in (5, 50):
        order = order_at(4)
        assert order.take_event(event(event_seq, "reset")) is EventAction.RESET
        assert (order.needs_snapshot, order.event_seq) == (True, 4)


def test_event_of_later_release_is_skipped_and_damaged_event_needs_a_snapshot() -> None:
    order = order_at(4)
    assert order.take_event(unreadable(5, is_from_later_release=True)) is EventAction.SKIPPED
    assert order.take_event(event(6)) is EventAction.APPLY
    assert order.take_event(unreadable(7)) is EventAction.DAMAGED
    assert order.needs_snapshot


def test_events_of_other_incarnations_are_ignored() -> None:
    order, earlier = order_at(4), worker_ref("w0", epoch=8)
    assert order.take_event(event(5, worker=earlier)) is EventAction.OTHER_INCARNATION
    assert EventOrder(W).take_snapshot(snapshot(5, worker=earlier)) is EventAction.OTHER_INCARNATION
    assert order.take_event(event(5)) is EventAction.APPLY


def test_event_with_a_huge_number_does_not_block_later_events() -> None:
    order = order_at(4)
    assert order.take_event(event(2**63)) is EventAction.GAP
    assert order.take_snapshot(snapshot(5)) is EventAction.APPLY
    assert order.take_event(event(6)) is EventAction.APPLY


# -- any interleaving --------------------------------------------------------------------------------------------------

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
    """One worker with its event log, and a reader that loses, repeats and reorders entries."""

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
        self.order = EventOrder(self.worker)

    def log_event(self, kind: str, hashes: tuple[bytes, ...] = ()) -> None:
        self.seq += 1
        self.log.append(event(self.seq, kind, self.worker, hashes=hashes))

    def store(self, hashes: tuple[bytes, ...]) -> None:
        self.held |= set(hashes)
        self.log_event("stored", hashes)

    def evict(self, hashes: tuple[bytes, ...]) -> None:
        self.held -= set(hashes)
        self.log_event("evicted", hashes)

    def snapshot(self) -> None:
        self.latest_snapshot = snapshot(self.seq, *sorted(self.held), worker=self.worker)

    def reset(self) -> None:
        self.log.clear()
        self.log_event("reset")
        self.snapshot()

    def damage(self) -> None:
        last = self.log.pop()
        self.log.append(UnreadableEvent(worker=last.worker, event_seq=last.event_seq, problem="?"))

    def read(self, entries: list[KvEvent | UnreadableEvent] | None = None) -> None:
        if self.order.needs_snapshot and self.order.take_snapshot(self.latest_snapshot) is EventAction.APPLY:
            self.index.reset(self.worker)
            for tier, hashes in self.latest_snapshot.hashes.items():
                self.index.stored(self.worker, tier, hashes)
        after = self.order.event_seq
        for entry in entries if entries is not None else [e for e in self.log if e.event_seq > after]:
            if self.order.take_event(entry) is EventAction.APPLY and isinstance(entry, KvEvent):
                put = self.index.stored if entry.kind is KvEventKind.STORED else self.index.evicted
                put(entry.worker, entry.tier, entry.hashes)

    def act(self, name: str, hashes: tuple[bytes, ...]) -> None:
        if name in ("store", "evict"):
            getattr(self, name)(hashes)
        elif name == "trim":
            del self.log[: len(self.log) // 2]
        elif name == "read-one":
            self.read([e for e in self.log if e.event_seq > self.order.event_seq][:1])
        elif name == "repeat":
            self.read(self.log[:])
        elif name == "skip":
            self.read([e for e in self.log if e.event_seq > self.order.event_seq + 1])
        elif self.log or name != "damage":
            getattr(self, name)()


@settings(max_examples=sized(400, 20_000), deadline=None)
@given(st.lists(ACTS, min_size=3, max_size=50))
def test_index_equals_held_blocks_after_reading_the_whole_log(
    script: list[tuple[str, tuple[bytes, ...]]],
) -> None:
    world = World()
    for name, hashes in script:
        world.act(name, hashes)
        if not world.order.needs_snapshot and world.order.event_seq == world.seq:
            assert known(world) == world.held
    world.snapshot()  # the worker publishes a new one on request
    for _ in range(2):
        world.read()
    assert not world.order.needs_snapshot
    assert known(world) == world.held


def known(world: World) -> set[bytes]:
    return {block for block in CHAIN if world.index.overlaps((block,), 0.0)}
