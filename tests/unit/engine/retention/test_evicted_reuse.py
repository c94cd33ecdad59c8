"""Tests of the measured cost of evictions, against caches that also store useless blocks."""

from collections import OrderedDict
from hashlib import blake2b
from random import Random

import pytest

from baton.engine.retention.evicted_reuse import MIN_STORED, EvictedReuse


def block(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()


class Cache:
    """A least recently used cache of `size` blocks that reports to an `EvictedReuse`."""

    def __init__(self, size: int, reuse: EvictedReuse) -> None:
        self.size, self.reuse = size, reuse
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.num_computed = 0

    def use(self, block_hash: bytes) -> None:
        if block_hash in self.blocks:
            self.blocks.move_to_end(block_hash)
            return
        self.num_computed += 1
        self.reuse.stored(block_hash, is_computed=True)
        self.blocks[block_hash] = None
        if len(self.blocks) > self.size:
            self.reuse.evicted(self.blocks.popitem(last=False)[0])


def played(numbers: list[int], size: int, *, one_useless_in: int, reuse: EvictedReuse) -> tuple[int, int]:
    """Return how many of `numbers` were computed, and how many useless blocks were stored between them."""
    cache, num_useless, of_useless = Cache(size, reuse), 0, 0
    for index, number in enumerate(numbers):
        cache.use(block(number))
        if one_useless_in and index % one_useless_in == 0:
            before = cache.num_computed
            cache.use(block(-1 - index))
            of_useless += cache.num_computed - before
            num_useless += 1
    return cache.num_computed - of_useless, num_useless


def draws(skew: float, count: int, seed: int) -> list[int]:
    """Draw block numbers of which the first are drawn most often."""
    rng = Random(seed)
    return [int(3000 * rng.random() ** skew) for _ in range(count)]


@pytest.mark.parametrize("max_remembered", [8192, 100])
@pytest.mark.parametrize(("skew", "size"), [(1.0, 600), (2.0, 600), (3.0, 300), (2.0, 1000)])
def test_share_is_what_a_stored_block_costs(skew: float, size: int, max_remembered: int) -> None:
    """Useless blocks are 2 % of all. The cost of each is compared with what the share said without them."""
    numbers = draws(skew, 60_000, seed=1)
    reuse = EvictedReuse(size, max_remembered)
    alone, _ = played(numbers, size, one_useless_in=0, reuse=reuse)
    with_useless, num_useless = played(numbers, size, one_useless_in=50, reuse=EvictedReuse(size))
    cost = (with_useless - alone) / num_useless
    assert reuse.share == pytest.approx(cost, rel=0.35 if max_remembered > size else 0.6)


def test_nothing_is_lost_while_the_cache_is_not_full() -> None:
    reuse = EvictedReuse(1000)
    played(draws(1.0, 20_000, seed=2), 3000, one_useless_in=0, reuse=reuse)
    assert reuse.share == 0.0


def test_share_is_0_if_nothing_returns_or_what_returns_is_read_from_another_worker() -> None:
    never, read = EvictedReuse(100), EvictedReuse(100)
    played(list(range(1000)), 100, one_useless_in=0, reuse=never)
    for number in range(1000):
        read.evicted(block(number))
        read.stored(block(number), is_computed=False)
    assert never.share == read.share == 0.0


def test_share_is_unknown_before_enough_blocks_were_stored() -> None:
    reuse = EvictedReuse(100)
    for number in range(MIN_STORED):
        assert reuse.share == 0.0
        reuse.evicted(block(number))
        reuse.stored(block(number), is_computed=True)
    assert reuse.share == 1.0


def test_share_follows_a_change_of_the_load() -> None:
    reuse = EvictedReuse(200)
    cache = Cache(200, reuse)
    for number in draws(1.0, 10_000, seed=3):
        cache.use(block(number % 300))
    assert reuse.share > 0.3
    for number in range(2_000):
        cache.use(block(10_000 + number))
    assert reuse.share < 0.1


def test_memory_is_bounded() -> None:
    reuse = EvictedReuse(1_000_000, max_remembered=50)
    for number in range(100_000):
        reuse.evicted(block(number))
    assert len(reuse._evicted) <= 50
