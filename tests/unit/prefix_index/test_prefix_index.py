"""The prefix index: single operations, memory, and comparison with a naive index under random operations."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import Tier
from baton.prefix_index.index import PrefixIndex, PrefixOverlap
from tests.builders import hashes_of, worker_ref
from tests.scale import sized

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
W0, W1 = worker_ref("w0"), worker_ref("w1")
CHAIN = hashes_of(range(24))  # 6 blocks


def index_of(*workers: WorkerRef) -> PrefixIndex:
    index = PrefixIndex()
    for worker in workers:
        index.join(worker)
    return index


def overlap(
    num_blocks: int, held: int | None = None, device: int | None = None, in_memory: int | None = None
) -> PrefixOverlap:
    held = num_blocks if held is None else held
    return PrefixOverlap(
        num_blocks=num_blocks,
        num_held_blocks=held,
        num_device_blocks=held if device is None else device,
        num_disk_blocks=0 if in_memory is None else held - in_memory,
    )


def test_overlap_is_the_leading_run_of_each_worker() -> None:
    index = index_of(W0, W1, worker_ref("w2"))
    index.stored(W0, DEVICE, CHAIN[:4])
    index.stored(W1, DEVICE, (*CHAIN[:2], *CHAIN[3:]))
    index.stored(worker_ref("w2"), DEVICE, CHAIN[1:])
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(4), "w1": overlap(2)}
    assert index.overlaps(CHAIN[:3], 0.0) == {"w0": overlap(3), "w1": overlap(2)}
    assert index.overlaps((), 0.0) == {}


def test_block_in_two_tiers_is_held_until_evicted_from_both() -> None:
    index = index_of(W0)
    index.stored(W0, DEVICE, CHAIN[:2])
    index.stored(W0, HOST, CHAIN[1:4])
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(4, device=2)}
    index.evicted(W0, DEVICE, CHAIN[1:2])
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(4, device=1)}
    index.evicted(W0, HOST, CHAIN[1:4])
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(1)}


def test_blocks_on_disk_only_are_held_but_not_in_memory() -> None:
    index = index_of(W0, W1)
    index.stored(W0, DEVICE, CHAIN[:1])
    index.stored(W0, HOST, CHAIN[1:2])
    index.stored(W0, DISK, CHAIN[:4])
    index.stored(W1, DISK, CHAIN[:3])
    found = index.overlaps(CHAIN, 0.0)
    assert found == {"w0": overlap(4, device=1, in_memory=2), "w1": overlap(3, device=0, in_memory=0)}
    assert [found[each].num_reloaded_blocks for each in ("w0", "w1")] == [3, 3]
    index.stored(W0, HOST, CHAIN[2:4])
    assert index.overlaps(CHAIN, 0.0)["w0"] == overlap(4, device=1)


def test_new_incarnation_starts_empty_and_events_of_the_old_one_are_ignored() -> None:
    index, reborn = index_of(W0), worker_ref("w0", epoch=2)
    index.stored(W0, DEVICE, CHAIN)
    index.join(reborn)
    assert index.overlaps(CHAIN, 0.0) == {}
    index.stored(W0, DEVICE, CHAIN)
    index.drop(W0)
    index.stored(reborn, DEVICE, CHAIN[:1])
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(1)}


def test_expected_blocks_count_until_stored_or_expired() -> None:
    index = index_of(W0, W1)
    index.expect(W0, CHAIN[:4], until_s=10.0)
    index.expect(W1, CHAIN[:4], until_s=10.0)
    index.stored(W0, DEVICE, CHAIN[:1])
    assert index.overlaps(CHAIN, 9.0) == {"w0": overlap(4, 1), "w1": overlap(4, 0)}
    index.stored(W0, DEVICE, CHAIN[1:4])
    index.evicted(W0, DEVICE, CHAIN[3:4])
    assert index.overlaps(CHAIN, 9.0) == {"w0": overlap(3), "w1": overlap(4, 0)}
    assert index.overlaps(CHAIN, 10.0) == {"w0": overlap(3)}


def test_held_blocks_after_expected_ones_extend_the_run() -> None:
    index = index_of(W0)
    index.stored(W0, DEVICE, CHAIN[3:5])
    index.expect(W0, CHAIN[:3], until_s=10.0)
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(5, 0)}


def test_eviction_by_one_worker_keeps_claims_of_another() -> None:
    index = index_of(W0, W1)
    for worker in (W0, W1):
        index.stored(worker, DEVICE, CHAIN)
    index.evicted(W0, DEVICE, CHAIN[2:])
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(2), "w1": overlap(6)}


def test_claims_beyond_the_pool_size_are_ignored() -> None:
    index = PrefixIndex()
    index.join(W0, max_blocks=4)
    index.stored(W0, DEVICE, (*CHAIN, *CHAIN))
    assert (index.num_held(W0), index.num_refused) == (4, 4)
    index.evicted(W0, DEVICE, CHAIN[:1])
    index.stored(W0, DEVICE, CHAIN[4:5])
    assert index.num_held(W0) == 4


def test_claims_of_ended_incarnation_are_swept_gradually_and_its_slot_is_reused() -> None:
    index, hashes = index_of(W0, W1), hashes_of(range(4_000))
    index.stored(W0, DEVICE, hashes)
    index.stored(W1, DEVICE, hashes[:10])
    index.drop(W0)
    assert index.overlaps(hashes, 0.0) == {"w1": overlap(10)}
    assert (index.num_claims, index.num_ended_claims, index.num_blocks) == (10, 1_000, 1_000)
    assert index.sweep(600) == 600
    assert index.num_ended_claims == 400
    index.stored(W1, DEVICE, hashes[:200])  # each change sweeps a little
    assert (index.sweep(600), index.num_blocks) == (0, 200)
    for epoch in range(50):
        index.join(worker_ref("w0", epoch=epoch))
        index.stored(worker_ref("w0", epoch=epoch), DEVICE, hashes[:10])
        index.sweep(100)
    assert len(index._by_slot) <= 4  # masks stay short


def test_consecutive_blocks_of_the_same_holders_share_one_mask() -> None:
    index = index_of(*(worker_ref(f"w{i}") for i in range(100)))
    for i in (7, 99):
        index.stored(worker_ref(f"w{i}"), DEVICE, CHAIN)
    extents = [extent for table in index._tiers[DEVICE]._tables for extent in table.values()]
    assert (len(extents), len({id(extent) for extent in extents})) == (len(CHAIN), 1)
    assert sys.getsizeof(extents[0].mask) <= 40


def test_worker_that_announces_some_blocks_is_known_up_to_the_last_one() -> None:
    chain = hashes_of(range(4 * 30))
    index = PrefixIndex()
    index.join(W0, announce_every=8)
    index.join(W1)
    index.stored(W0, DEVICE, (chain[7], chain[15], chain[20]))
    index.stored(W1, DEVICE, chain[:12])
    assert index.overlaps(chain, 0.0) == {"w0": overlap(21), "w1": overlap(12)}
    assert index.overlaps(chain[:20], 0.0)["w0"] == overlap(16), "another chain may differ in the blocks after them"
    index.evicted(W0, DEVICE, (chain[20],))
    assert index.overlaps(chain, 0.0)["w0"] == overlap(16)
    index.evicted(W0, DEVICE, (chain[7],))
    assert "w0" not in index.overlaps(chain, 0.0), "the beginning is not there"


def test_short_chain_is_known_by_its_last_block() -> None:
    index = PrefixIndex()
    index.join(W0, announce_every=8)
    index.stored(W0, DEVICE, (CHAIN[4],))
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(5)}
    assert index.overlaps(CHAIN[:4], 0.0) == {}


def test_expectation_ends_with_the_last_block_of_the_chain() -> None:
    index = PrefixIndex()
    index.join(W0, announce_every=4)
    index.expect(W0, CHAIN, 9.0)
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(6, held=0)}
    index.stored(W0, DEVICE, (CHAIN[3], CHAIN[5]))
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(6)}
    index.evicted(W0, DEVICE, (CHAIN[5],))
    assert index.overlaps(CHAIN, 0.0) == {"w0": overlap(4)}, "nothing is expected any more"


def test_announced_blocks_go_on_after_expected_ones() -> None:
    chain = hashes_of(range(4 * 12))
    index = PrefixIndex()
    index.join(W0, announce_every=4)
    index.stored(W0, DEVICE, (chain[7], chain[8]))
    index.expect(W0, chain[:5], 9.0)
    assert index.overlaps(chain, 0.0) == {"w0": overlap(9, held=0)}
    index.evicted(W0, DEVICE, (chain[7],))
    assert index.overlaps(chain, 0.0) == {"w0": overlap(5, held=0)}, "the block at which it would have been announced"


# -- against a naive index ---------------------------------------------------------------------------------------------


def tree_of_chains() -> list[tuple[bytes, ...]]:
    """Return twelve prompts of up to 9 blocks with many shared prefixes."""
    turns = [[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]
    paths = [
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (0, 0, 1),
        (0, 1, 2, 0),
        (1, 1, 1),
        (0, 0, 1, 2, 1),
        (0,) * 9,
        (0, 0, 1, 2, 2, 0, 1),
        (1, 2),
        (2,),
    ]
    return [hashes_of([token for turn in path for token in turns[turn]]) for path in paths]


CHAINS = tree_of_chains()
BLOCKS = sorted({block for chain in CHAINS for block in chain})
WORKERS = [worker_ref(worker_id, epoch) for worker_id in ("w0", "w1", "w2") for epoch in (1, 2)]


@dataclass
class NaiveHolder:
    worker: WorkerRef
    announce_every: int = 1
    held: dict[Tier, set[bytes]] = field(default_factory=lambda: {tier: set() for tier in Tier})
    expected: dict[tuple[bytes, ...], float] = field(default_factory=dict)


class NaiveIndex:
    """Sets of hashes that are searched on every call."""

    def __init__(self) -> None:
        self.holders: dict[str, NaiveHolder] = {}

    def holder(self, worker: WorkerRef) -> NaiveHolder | None:
        holder = self.holders.get(worker.worker_id)
        return holder if holder is not None and holder.worker == worker else None

    def join(self, worker: WorkerRef, announce_every: int) -> None:
        if self.holder(worker) is None:
            self.holders[worker.worker_id] = NaiveHolder(worker, announce_every)

    def drop(self, worker: WorkerRef) -> None:
        if self.holder(worker):
            del self.holders[worker.worker_id]

    def reset(self, worker: WorkerRef) -> None:
        holder = self.holder(worker)
        if holder and any(holder.held.values()):
            self.holders[worker.worker_id] = NaiveHolder(worker, holder.announce_every)

    def stored(self, worker: WorkerRef, tier: Tier, hashes: Iterable[bytes]) -> None:
        if holder := self.holder(worker):
            holder.held[tier].update(hashes)
            holder.expected = {chain: until for chain, until in holder.expected.items() if chain[-1] not in set(hashes)}

    def evicted(self, worker: WorkerRef, tier: Tier, hashes: Iterable[bytes]) -> None:
        if holder := self.holder(worker):
            holder.held[tier].difference_update(hashes)

    def expect(self, worker: WorkerRef, hashes: tuple[bytes, ...], until_s: float) -> None:
        if holder := self.holder(worker):
            holder.expected[hashes] = max(until_s, holder.expected.get(hashes, 0.0))

    def overlaps(self, hashes: tuple[bytes, ...], now_s: float) -> dict[str, PrefixOverlap]:
        found = {}
        for worker_id, holder in self.holders.items():
            holder.expected = {chain: until for chain, until in holder.expected.items() if until > now_s}
            device, held = holder.held[DEVICE], set().union(*holder.held.values())
            soon = held.union(*holder.expected)
            in_memory = device | holder.held[HOST]
            lengths = [run(hashes, among, holder.announce_every) for among in (soon, held, device, in_memory)]
            if lengths[0]:
                found[worker_id] = overlap(*lengths)
        return found


def run(hashes: tuple[bytes, ...], among: set[bytes], announce_every: int = 1) -> int:
    """Return the last known length, up to the first block that would have been announced and was not."""
    length = 0
    for i, block in enumerate(hashes, 1):
        if block in among:
            length = i
        elif i % announce_every == 0:
            break
    return length


INTERVALS = {"w0": 1, "w1": 2, "w2": 4}


some_blocks = st.lists(st.sampled_from(BLOCKS), max_size=12).map(tuple)
leading = st.builds(lambda chain, length: chain[: 1 + length % len(chain)], st.sampled_from(CHAINS), st.integers(0, 8))
workers, tiers, moments = st.sampled_from(WORKERS), st.sampled_from([DEVICE, DEVICE, HOST, DISK]), st.integers(0, 9)
acts = st.one_of(
    st.tuples(st.just("join"), workers),
    st.tuples(st.just("stored"), workers, tiers, st.one_of(leading, some_blocks)),
    st.tuples(st.just("stored"), workers, tiers, st.one_of(leading, some_blocks)),
    st.tuples(st.just("evicted"), workers, tiers, some_blocks),
    st.tuples(st.just("expect"), workers, leading, moments),
    st.tuples(st.just("expect"), workers, leading, moments),
    st.tuples(st.just("evicted"), workers, tiers, leading),
    st.tuples(st.sampled_from(["drop", "reset"]), workers),
    st.tuples(st.just("sweep"), st.integers(1, 5)),
    st.tuples(st.just("wait")),
)


@settings(max_examples=sized(300, 10_000), deadline=None)
@given(st.lists(acts, min_size=5, max_size=60))
def test_index_equals_naive_index(script: list[tuple]) -> None:
    index, naive, now_s = index_of(WORKERS[0], WORKERS[2]), NaiveIndex(), 0.0
    for worker in (WORKERS[0], WORKERS[2]):
        naive.join(worker, 1)
    for name, *arguments in script:
        if name == "wait":
            now_s += 1.0
        elif name == "sweep":
            index.sweep(*arguments)
        else:
            more = {}
            if name == "expect":
                arguments[2] = now_s + arguments[2]
            elif name == "join":
                more["announce_every"] = INTERVALS[arguments[0].worker_id]
            getattr(index, name)(*arguments, **more)
            getattr(naive, name)(*arguments, **more)
        for chain in CHAINS:
            assert index.overlaps(chain, now_s) == naive.overlaps(chain, now_s), (name, arguments)
    assert index.num_claims == sum(len(held) for holder in naive.holders.values() for held in holder.held.values())
    while index.sweep(10):
        pass
    held = {tier: set().union(*(holder.held[tier] for holder in naive.holders.values())) for tier in Tier}
    assert index.num_blocks == sum(len(of_tier) for of_tier in held.values())
