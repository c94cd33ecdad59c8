"""Helpers that build small block pools and allocate from them."""

from baton.core.kv.kv_events import KvEventKind
from baton.engine.kv_cache.block_pool import BlockPool
from tests.fake_executor import FakeGenerationTable

STORED, EVICTED = KvEventKind.STORED, KvEventKind.EVICTED
A, B, C, D = (bytes([n]) * 16 for n in range(1, 5))


def make_pool(num_blocks: int = 4) -> tuple[BlockPool, FakeGenerationTable]:
    generation_table = FakeGenerationTable(num_blocks)
    return BlockPool(num_blocks, 4, generation_table), generation_table


def allocated(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def receiving(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.allocate_receiving(num_blocks)
    assert block_ids is not None
    return block_ids


def stored_chain(pool: BlockPool, hashes: tuple[bytes, ...]) -> list[int]:
    """Allocate blocks and publish `hashes` for them. They keep one reference each."""
    block_ids = allocated(pool, len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.set_hash(block_id, block_hash)
    return block_ids
