"""Tests of what counts as evicted, on a real block pool and the slots of a tier."""

from collections.abc import Iterable
from hashlib import blake2b

from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.tiers.kv_tier import BlockToStore, TierCounts
from baton.engine.tiers.slots import TierSlots
from baton.worker.costs.evicted_kv import EvictedKv
from tests.fake_executor import FakeGenerationTable

NUM_BLOCKS = 100


class Tier:
    """A tier that stores at once."""

    def __init__(self, num_slots: int) -> None:
        self.slots = TierSlots(num_slots, FakeGenerationTable(num_slots))

    def counts(self) -> TierCounts:
        return self.slots.counts()

    def holds(self, block_hash: BlockHash) -> bool:
        return self.slots.slot_of(block_hash) is not None

    def store(self, numbers: Iterable[int]) -> None:
        slots = self.slots.begin_fill([BlockToStore(block_id=0, block_hash=hash_of(n)) for n in numbers])
        self.slots.end_fill(slots, is_complete=True)


def hash_of(number: int) -> BlockHash:
    return blake2b(str(number).encode(), digest_size=len(NO_HASH)).digest()


def new_pool() -> BlockPool:
    return BlockPool(NUM_BLOCKS, 4, FakeGenerationTable(NUM_BLOCKS))


def compute(pool: BlockPool, numbers: Iterable[int]) -> None:
    for number in numbers:
        if pool.find(hash_of(number)) is None:
            blocks = pool.allocate(1)
            assert blocks is not None
            pool.set_hash(blocks[0], hash_of(number))
            pool.unref(blocks)


def receive(pool: BlockPool, numbers: Iterable[int]) -> None:
    for number in numbers:
        blocks = pool.allocate_receiving(1)
        assert blocks is not None
        pool.mark_received(blocks[0], hash_of(number))
        pool.unref(blocks)


def test_what_is_computed_again_after_its_eviction_counts() -> None:
    pool = new_pool()
    evicted = EvictedKv(pool, ())
    compute(pool, range(NUM_BLOCKS))
    assert evicted.reused_share == 0.0
    compute(pool, range(NUM_BLOCKS, 2 * NUM_BLOCKS))
    compute(pool, range(NUM_BLOCKS // 2, NUM_BLOCKS))
    assert evicted.reused_share == 0.5 / 2.5


def test_received_content_does_not_count_as_computed() -> None:
    pool = new_pool()
    evicted = EvictedKv(pool, ())
    compute(pool, range(2 * NUM_BLOCKS))
    receive(pool, range(NUM_BLOCKS // 2, NUM_BLOCKS))
    assert evicted.reused_share == 0.0


def test_withdrawn_content_is_not_evicted() -> None:
    """As after `baton cache clear`, or a failed step."""
    pool = new_pool()
    evicted = EvictedKv(pool, ())
    for _ in range(3):
        compute(pool, range(NUM_BLOCKS))
        assert pool.forget_tenant(NO_HASH) == NUM_BLOCKS
    assert evicted.reused_share == 0.0


def test_content_of_a_slower_tier_is_evicted_when_its_slot_is_reused() -> None:
    pool, tier = new_pool(), Tier(NUM_BLOCKS)
    evicted = EvictedKv(pool, (tier,))  # type: ignore[arg-type]
    compute(pool, range(NUM_BLOCKS))
    tier.store(range(NUM_BLOCKS))
    compute(pool, range(NUM_BLOCKS, 2 * NUM_BLOCKS))
    receive(pool, range(NUM_BLOCKS))  # a reload
    assert evicted.reused_share == 0.0
    compute(pool, range(NUM_BLOCKS, 2 * NUM_BLOCKS))
    assert evicted.reused_share == 1 / 3
    tier.store(range(2 * NUM_BLOCKS, 3 * NUM_BLOCKS))
    compute(pool, range(NUM_BLOCKS))
    assert evicted.reused_share == 2 / 4


def test_discarded_content_of_a_slower_tier_is_not_evicted() -> None:
    pool, tier = new_pool(), Tier(NUM_BLOCKS)
    evicted = EvictedKv(pool, (tier,))  # type: ignore[arg-type]
    tier.store(range(NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        tier.slots.discard(hash_of(number))
    compute(pool, range(NUM_BLOCKS))
    assert evicted.reused_share == 0.0
