"""Blocks that an infinite cache would have had: exact below the limit, sampled in bounded memory beyond."""

import tracemalloc
from random import Random

import pytest

from baton.core.kv.block_hash import BlockHash
from baton.scheduler.decisions.infinite_cache import HASH_MEMORY_BYTES, InfiniteCache
from tests.builders import hashes_of

TREE = hashes_of(range(80), 4)  # 20 blocks
BRANCH = hashes_of([*range(40), *range(900, 940)], 4)  # the first 10 of them, then 10 others


def random_prompts(rng: Random, count: int) -> list[tuple[BlockHash, ...]]:
    """Prompts of sessions that grow by some blocks per turn."""
    sessions: list[tuple[BlockHash, ...]] = [() for _ in range(40)]
    prompts = []
    for _ in range(count):
        number = min(int(rng.expovariate(0.1)), len(sessions) - 1)
        if len(sessions[number]) > 60:
            sessions[number] = ()
        sessions[number] += tuple(rng.randbytes(16) for _ in range(rng.randrange(1, 12)))
        prompts.append(sessions[number])
    return prompts


def test_only_blocks_of_earlier_prompts_count() -> None:
    cache = InfiniteCache()
    assert cache.add(TREE, num_known=0, num_usable=19) == 0
    assert cache.add(BRANCH, num_known=0, num_usable=20) == 10
    assert cache.add(TREE, num_known=0, num_usable=19) == 19
    assert cache.add((), num_known=0, num_usable=0) == 0
    assert cache.sampled_share == 1


def test_answers_that_a_worker_is_known_to_have_had_count() -> None:
    cache = InfiniteCache()
    cache.add(TREE[:5], num_known=0, num_usable=5)
    assert cache.add(TREE, num_known=12, num_usable=20) == 12
    assert cache.add(TREE, num_known=0, num_usable=20) == 20


@pytest.mark.parametrize("seed", range(5))
def test_sample_agrees_with_the_exact_number(seed: int) -> None:
    prompts = random_prompts(Random(seed), 8000)
    sampled, seen, num_hits, estimated = InfiniteCache(max_hashes=2048), set[BlockHash](), 0, 0.0
    for prompt in prompts:
        num_hits += sum(block in seen for block in prompt)
        seen.update(prompt)
        estimated += sampled.add(prompt, num_known=0, num_usable=len(prompt))
        assert sampled.num_hashes <= 2048
    num_blocks = sum(map(len, prompts))
    assert sampled.sampled_share <= 1 / 16
    # The standard error of the new blocks is at most 1 / sqrt(1024); six of them cannot happen by chance.
    assert abs(estimated - num_hits) < 6 / 32 * (num_blocks - num_hits)
    assert abs(estimated - num_hits) < 0.03 * num_blocks


def test_memory_is_bounded() -> None:
    rng, max_hashes = Random(1), 16_384
    cache = InfiniteCache(max_hashes)
    tracemalloc.start()
    for _ in range(100):
        cache.add([rng.randbytes(16) for _ in range(1000)], num_known=0, num_usable=1000)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max_hashes / 2 <= 1.05 * cache.num_hashes <= 1.05 * max_hashes
    assert taken <= max_hashes * HASH_MEMORY_BYTES
