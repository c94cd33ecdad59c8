"""The block pool, one operation at a time: allocation, cache, events, pins, receiving, fence."""

import pytest

from baton.core.kv.block_hash import NO_HASH
from baton.engine.retention.content_owner import ContentOwner, OwnerKind
from tests.unit.engine.pool_helpers import EVICTED, STORED, A, B, C, D, allocated, make_pool, receiving, stored_chain


def test_allocation_is_all_or_nothing() -> None:
    pool, _ = make_pool(3)
    assert pool.allocate(4) is None
    assert len(allocated(pool, 2)) == 2
    assert pool.allocate(2) is None
    assert pool.counts().free == 1
    assert pool.allocate(0) == []
    pool.check()


def test_allocation_starts_a_new_generation_without_hash() -> None:
    pool, generation_table = make_pool(1)
    (block,) = stored_chain(pool, (A,))
    assert (pool.generation(block), generation_table.hashes[block]) == (1, A)
    pool.unref([block])
    assert generation_table.hashes[block] == A  # reads can still be validated while the block is cached
    assert pool.match([A], 1) == [block]
    assert pool.generation(block) == 1  # used again, not written
    pool.unref([block])
    allocated(pool, 1)
    assert (pool.generation(block), generation_table.hashes[block]) == (2, NO_HASH)


def test_least_recently_used_chain_is_evicted_first_from_its_tail() -> None:
    pool, _ = make_pool(4)
    first, second = stored_chain(pool, (A, B)), stored_chain(pool, (C, D))
    pool.unref(second)
    pool.unref(first)
    assert [allocated(pool, 1)[0] for _ in range(4)] == [*reversed(second), *reversed(first)]


def test_free_blocks_are_allocated_before_cached_ones() -> None:
    pool, _ = make_pool(3)
    cached = stored_chain(pool, (A,))
    pool.unref(cached)
    assert cached[0] not in allocated(pool, 2)
    assert allocated(pool, 1) == cached


def test_use_of_a_cached_block_makes_it_most_recently_used() -> None:
    pool, _ = make_pool(2)
    old, young = stored_chain(pool, (A,)), stored_chain(pool, (B,))
    pool.unref(old)
    pool.unref(young)
    pool.unref(pool.match([A], 1))
    assert allocated(pool, 1) == young


def test_block_without_content_has_no_owner() -> None:
    """The next content of the block would else count as shared by both owners."""
    pool, _ = make_pool()
    owners = [ContentOwner(OwnerKind.LATER_TURN, "t", clock=lambda: 0.0) for _ in range(2)]
    for owner in owners:
        owner.shared = ContentOwner(OwnerKind.SHARED, "t", clock=lambda: 0.0)
    pool.unref(allocated(pool, 4), owners[0])
    blocks = stored_chain(pool, (A, B))
    pool.unref(blocks, owners[1])
    assert [pool.use_of(block_id).owner for block_id in blocks] == [owners[1]] * 2


def test_block_in_use_is_never_evicted() -> None:
    pool, _ = make_pool(2)
    held = stored_chain(pool, (A, B))
    pool.unref(held[1:])
    assert allocated(pool, 1) == held[1:]
    assert pool.allocate(1) is None


def test_match_stops_at_the_first_miss_and_at_the_limit() -> None:
    pool, _ = make_pool()
    blocks = stored_chain(pool, (A, B, C))
    assert pool.match([A, D, C], 3) == blocks[:1]
    assert pool.match([A, B, C], 2) == blocks[:2]
    assert [pool.num_refs(b) for b in blocks] == [3, 2, 1]
    assert pool.count_cached([A, B, C, D]) == 3
    assert [pool.num_refs(b) for b in blocks] == [3, 2, 1]


def test_released_block_without_hash_is_free() -> None:
    pool, _ = make_pool(2)
    pool.unref(allocated(pool, 2))
    assert (pool.counts().free, pool.counts().cached) == (2, 0)


def test_events_of_stored_and_evicted_content() -> None:
    pool, _ = make_pool(1)
    block = stored_chain(pool, (A,))
    assert pool.take_events() == [(STORED, A)]
    pool.unref(block)
    assert pool.take_events() == []  # cached, not evicted
    allocated(pool, 1)
    assert pool.take_events() == [(EVICTED, A)]
    assert pool.hashes() == []


def test_only_the_first_and_last_block_of_equal_content_make_events() -> None:
    pool, generation_table = make_pool(2)
    first, second = stored_chain(pool, (A,)), stored_chain(pool, (A,))
    assert pool.take_events() == [(STORED, A)]
    assert generation_table.hashes[second[0]] == A  # a reader of the second block must be able to validate it
    pool.unref(first)
    assert (pool.counts().free, pool.counts().cached) == (
        1,
        0,
    )  # the other block with this content is in use
    assert allocated(pool, 1) == first
    assert (pool.take_events(), pool.match([A], 1)) == ([], second)
    pool.unref([*second, *second])
    assert allocated(pool, 1) == second
    assert pool.take_events() == [(EVICTED, A)]


def test_cached_block_is_reallocated_while_equal_content_is_in_use() -> None:
    pool, _ = make_pool(2)
    first = stored_chain(pool, (A,))
    pool.unref(first)
    second = allocated(pool, 1)
    pool.set_hash(second[0], A)
    assert allocated(pool, 1) == first
    pool.check()
    assert pool.take_events() == [(STORED, A)]
    assert pool.lookup([A]) == second


def test_events_are_net() -> None:
    pool, _ = make_pool(1)
    pool.unref(stored_chain(pool, (A,)))
    pool.unref(stored_chain(pool, (B,)))
    assert pool.take_events() == [(STORED, B)]
    pool.unref(stored_chain(pool, (A,)))
    pool.unref(stored_chain(pool, (B,)))
    assert pool.take_events() == []


def test_pinned_blocks_are_kept_after_their_sequence() -> None:
    pool, _ = make_pool(3)
    blocks = stored_chain(pool, (A, B))
    pool.pin(blocks)
    pool.pin(blocks[:1])
    assert pool.held_for_others == 0
    pool.unref(blocks)
    assert (pool.held_for_others, pool.counts().used) == (2, 2)
    assert pool.allocate(2) is None
    assert pool.match([A], 1) == blocks[:1]
    assert pool.held_for_others == 1
    pool.unref(blocks[:1])
    pool.unpin(blocks)
    assert (pool.held_for_others, pool.counts().cached) == (1, 1)
    pool.unpin(blocks[:1])
    assert (pool.held_for_others, pool.counts().cached) == (0, 2)
    pool.check()


def test_receiving_block_is_not_readable_until_received() -> None:
    pool, generation_table = make_pool(2)
    blocks = receiving(pool, 2)
    assert [pool.generation(b) for b in blocks] == [1, 1]
    assert (pool.counts().receiving, pool.counts().used) == (2, 0)
    assert not any(pool.is_readable(b) for b in blocks)
    pool.mark_received(blocks[0], A)
    pool.mark_received(blocks[1], NO_HASH)
    assert (pool.counts().used, generation_table.hashes, pool.take_events()) == (2, [A, NO_HASH], [(STORED, A)])
    pool.unref(blocks)
    assert (pool.counts().free, pool.counts().cached) == (1, 1)


def test_block_received_after_its_sequence_ended_is_cached() -> None:
    pool, _ = make_pool(2)
    blocks = receiving(pool, 2)
    pool.unref(blocks)
    assert (pool.counts().receiving, pool.allocate(1)) == (2, None)
    pool.mark_received(blocks[0], A)
    pool.mark_received(blocks[1], NO_HASH)
    assert (pool.counts().free, pool.counts().cached) == (1, 1)
    pool.check()


def test_dropped_receiving_block_stays_used_and_unreadable_until_released() -> None:
    pool, _ = make_pool(1)
    blocks = receiving(pool, 1)
    pool.drop_receiving(blocks)
    assert (pool.counts().used, pool.allocate(1), pool.is_readable(blocks[0])) == (1, None, False)
    pool.check()
    pool.unref(blocks)
    assert (pool.counts().free, pool.is_readable(blocks[0])) == (1, True)


def test_receiving_block_dropped_after_its_sequence_is_free() -> None:
    pool, _ = make_pool(1)
    blocks = receiving(pool, 1)
    pool.unref(blocks)
    pool.drop_receiving(blocks)
    assert pool.counts().free == 1


@pytest.mark.parametrize("sequence_ends_first", [True, False])
def test_quarantine_outlives_the_sequence(sequence_ends_first: bool) -> None:
    pool, _ = make_pool(1)
    blocks = receiving(pool, 1)
    pool.quarantine(blocks)
    assert (pool.counts().quarantined, pool.counts().receiving) == (1, 0)
    if sequence_ends_first:
        pool.unref(blocks)
        assert (pool.counts().quarantined, pool.allocate(1)) == (1, None)
        pool.end_quarantine(blocks)
    else:
        pool.end_quarantine(blocks)
        assert (pool.counts().used, pool.is_readable(blocks[0])) == (1, False)
        pool.unref(blocks)
    assert pool.counts().free == 1
    pool.check()


@pytest.mark.parametrize("receives", [False, True])
def test_block_freed_during_a_step_is_not_allocated_before_the_step_ends(receives: bool) -> None:
    pool, _ = make_pool(2)
    take = pool.allocate_receiving if receives else pool.allocate
    blocks = allocated(pool, 2)
    pool.fence.step_launched()
    pool.unref(blocks[:1])
    pool.fence.step_launched()
    pool.unref(blocks[1:])
    assert take(1) is None
    pool.fence.step_finished()
    assert take(2) is None
    assert take(1) == blocks[:1]  # freed before the second step was launched
    pool.check()
    pool.fence.step_finished()
    assert take(1) == blocks[1:]


def test_withdrawn_step_no_longer_fences_blocks() -> None:
    pool, _ = make_pool(2)
    blocks = allocated(pool, 2)
    pool.fence.step_launched()
    pool.fence.step_launched()
    pool.unref(blocks)
    pool.fence.step_withdrawn()
    pool.check()
    assert pool.allocate_receiving(1) is None, "the preceding step is still running"
    pool.fence.step_finished()
    pool.check()
    assert pool.allocate_receiving(2) is not None


def test_unpublished_blocks_are_not_found_and_get_a_new_generation() -> None:
    pool, generation_table = make_pool(2)
    blocks = stored_chain(pool, (A,)) + allocated(pool, 1)
    pool.take_events()
    pool.unpublish(blocks)
    assert (pool.lookup([A]), pool.take_events(), generation_table.hashes) == ([], [(EVICTED, A)], [NO_HASH, NO_HASH])
    assert generation_table.generations == [2, 2]
    pool.unref(blocks)
    assert pool.counts().free == 2


def test_callback_is_called_when_blocks_become_allocatable() -> None:
    pool, _ = make_pool(4)
    freed_counts: list[int] = []
    pool.on_freed(lambda: freed_counts.append(pool.num_allocatable))
    blocks, receiving_blocks = allocated(pool, 2), receiving(pool, 2)
    pool.pin(blocks)
    pool.unref(blocks)
    pool.unpin(blocks)
    pool.unref(receiving_blocks)
    pool.quarantine(receiving_blocks[:1])
    pool.drop_receiving(receiving_blocks[1:])
    pool.end_quarantine(receiving_blocks[:1])
    assert freed_counts[-1] == 4
    assert sorted(set(freed_counts)) == [0, 2, 3, 4]


def test_wrong_use_raises_and_changes_nothing() -> None:
    pool, _ = make_pool(4)
    (used,), (receives,) = allocated(pool, 1), receiving(pool, 1)
    free = 3
    wrong = [
        lambda: pool.ref([free]),
        lambda: pool.unref([free]),
        lambda: pool.pin([free]),
        lambda: pool.pin([receives]),
        lambda: pool.unpin([used]),
        lambda: pool.mark_received(used, A),
        lambda: pool.drop_receiving([used]),
        lambda: pool.quarantine([free]),
        lambda: pool.end_quarantine([receives]),
        lambda: pool.set_hash(free, A),
        lambda: pool.set_hash(used, NO_HASH),
        lambda: pool.set_hash(receives, A),
        lambda: pool.mark_replicas([used]),
        lambda: pool.mark_replicas([free]),
        pool.fence.step_finished,
        pool.fence.step_withdrawn,
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"block \d|no step"):
            call()
    pool.set_hash(used, A)
    with pytest.raises(ValueError, match="block"):
        pool.set_hash(used, B)
    pool.check()
    assert (pool.counts().used, pool.counts().receiving, pool.counts().free) == (1, 1, 2)


def test_a_block_can_be_in_several_copies_at_a_time() -> None:
    pool, _ = make_pool(2)
    (b,) = allocated(pool, 1)
    pool.set_hash(b, A)
    pool.unref([b])
    assert [pool.begin_copy(b), pool.begin_copy(b)] == [A, A]
    pool.end_copy([b])
    assert pool.num_allocatable == 1
    pool.end_copy([b])
    assert pool.num_allocatable == 2
    with pytest.raises(KeyError):
        pool.end_copy([b])


def test_the_content_of_a_tenant_is_forgotten() -> None:
    pool, _ = make_pool(4)
    blocks = allocated(pool, 3)
    for block_id, block_hash in zip(blocks, (A, B, C), strict=True):
        pool.set_hash(block_id, block_hash)
    pool.announce([A], 0, 1, is_end=True, tenant_root=b"t" * 16)
    pool.announce([B], 0, 1, is_end=True, tenant_root=b"u" * 16)
    assert [pool.tenant_of(each) for each in (A, B, C)] == [b"t" * 16, b"u" * 16, NO_HASH]
    pool.unref([blocks[0]])
    generations = [pool.generation(b) for b in blocks]
    assert pool.forget_tenant(b"t" * 16) == 2  # C is of an unknown tenant
    assert [pool.find(each) for each in (A, B, C)] == [None, blocks[1], None]
    assert [pool.generation(b) - before for b, before in zip(blocks, generations, strict=True)] == [1, 0, 1]
    assert (pool.counts().free, pool.counts().used) == (2, 2)
    pool.check()
