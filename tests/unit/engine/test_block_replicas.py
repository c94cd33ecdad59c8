"""Replicas: content pulled from another worker's cache, its eviction order and its end."""

import pytest

from baton.core.kv.block_hash import NO_HASH
from baton.engine.kv_cache.block_pool import BlockPool
from tests.unit.engine.pool_helpers import EVICTED, A, B, C, D, allocated, make_pool, receiving, stored_chain


def received_replicas(pool: BlockPool, hashes: tuple[bytes, ...]) -> list[int]:
    """Receive blocks as replicas. They are idle afterwards."""
    block_ids = receiving(pool, len(hashes))
    pool.mark_replicas(block_ids)
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.mark_received(block_id, block_hash)
    pool.unref(block_ids)
    pool.check()
    return block_ids


def use(pool: BlockPool, hashes: tuple[bytes, ...]) -> None:
    """Act as a request that finds these blocks in the cache, and ends."""
    found = pool.match(hashes, len(hashes))
    pool.count_use(found)
    pool.check()
    pool.unref(found)
    pool.check()


@pytest.mark.parametrize("num_uses", [0, 1])
def test_idle_replica_is_evicted_after_free_blocks_and_before_older_content(num_uses: int) -> None:
    pool, _ = make_pool(5)
    older = stored_chain(pool, (A, B))
    pool.unref(older)
    copies = received_replicas(pool, (C, D))
    for _ in range(num_uses):
        use(pool, (C, D))
    (free,) = {*range(5)} - {*older, *copies}
    assert [allocated(pool, 1)[0] for _ in range(5)] == [free, *reversed(copies), *reversed(older)]
    assert pool.num_replicas == 0


@pytest.mark.parametrize("is_idle", [True, False])
def test_second_use_makes_a_replica_an_ordinary_cached_block(is_idle: bool) -> None:
    pool, _ = make_pool(3)
    copies = received_replicas(pool, (A, B))
    use(pool, (A, B))
    if is_idle:
        pool.count_use(copies[:1])
        pool.check()
    else:
        use(pool, (A,))
    assert (pool.num_replicas, pool.num_idle_replicas) == (1, 1)
    younger = stored_chain(pool, (C,))
    pool.unref(younger)
    assert [allocated(pool, 1)[0] for _ in range(3)] == [copies[1], copies[0], *younger]


def test_replica_in_use_is_counted_and_not_evicted() -> None:
    pool, _ = make_pool(4)
    copies = received_replicas(pool, (A, B, C))
    held = pool.match((A,), 1)
    assert (pool.num_replicas, pool.num_idle_replicas) == (3, 2)
    pool.take_events()
    assert pool.evict_replicas(1) == 1
    assert pool.take_events() == [(EVICTED, C)], "the tail of the chain"
    assert pool.evict_replicas(5) == 1
    assert (pool.num_replicas, pool.counts().free, pool.lookup((A, B, C))) == (1, 3, copies[:1])
    pool.unref(held)
    assert (pool.num_replicas, pool.num_idle_replicas) == (1, 1)
    pool.check()


def test_block_that_was_not_received_is_no_replica() -> None:
    pool, _ = make_pool(4)
    blocks = receiving(pool, 4)
    pool.mark_replicas(blocks)
    pool.quarantine(blocks[:1])
    pool.drop_receiving(blocks[1:2])
    pool.mark_received(blocks[2], NO_HASH)
    pool.mark_received(blocks[3], A)
    pool.check()
    assert pool.num_replicas == 2
    pool.unref(blocks)
    pool.check()
    assert (pool.num_replicas, pool.num_idle_replicas) == (2, 1), "a quarantined block still takes memory"
    pool.end_quarantine(blocks[:1])
    pool.unpublish(pool.match((A,), 1))
    assert pool.num_replicas == 0
    pool.check()


def test_replica_of_content_that_is_in_use_is_freed() -> None:
    pool, _ = make_pool(2)
    blocks = receiving(pool, 1)
    pool.mark_replicas(blocks)
    stored_chain(pool, (A,))
    pool.mark_received(blocks[0], A)
    pool.unref(blocks)
    assert (pool.num_replicas, pool.counts().free, pool.counts().cached) == (0, 1, 0)
    pool.check()
