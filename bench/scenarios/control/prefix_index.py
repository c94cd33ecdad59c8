"""The prefix index alone, in one process on one core: events a second, seconds to ask, megabytes.
`bench/scenarios/control/scheduler.py` builds on it.

python -m bench prefix_index [--workers 100] [--pairs 1000000] [--json]

The population: chains of 8 to 8,192 blocks (log-uniform, 128 to 131,072 tokens in blocks of 16); a third of
the blocks are held by two to four workers. Prompts to ask for begin with 0 to 95 % of a chain that is held,
and go on with blocks that nobody has.
"""

import argparse
import gc
import json
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import quantiles

import psutil

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import Tier
from baton.prefix_index.index import PrefixIndex

BLOCK_SIZE_TOKENS = 16
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 128, 131_072
BATCH_BLOCKS = 64
MAX_OVERLAP = 0.95
SHARED_FRACTION = 1 / 3
MAX_HOLDERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One worker holds one chain."""

    worker: WorkerRef
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """An index that is full, and a fifth of the chains in it, by length. `build_s`: of that in
    `PrefixIndex.stored` alone."""

    index: PrefixIndex
    workers: tuple[WorkerRef, ...]
    chains: tuple[tuple[BlockHash, ...], ...]
    num_pairs: int
    build_s: float
    index_mb: float


def workers_of(num_workers: int) -> tuple[WorkerRef, ...]:
    return tuple(
        WorkerRef(worker_id=f"w{i:03}", worker_epoch=i + 1, address=f"10.0.0.{i}:1") for i in range(num_workers)
    )


def prompt_blocks(rng: Random) -> int:
    """Full blocks of a prompt whose length is log-uniform."""
    return round(exp(rng.uniform(log(MIN_PROMPT_TOKENS), log(MAX_PROMPT_TOKENS)))) // BLOCK_SIZE_TOKENS


def random_hashes(rng: Random, num_blocks: int) -> tuple[BlockHash, ...]:
    """As good as a chain: what is random twice agrees nowhere."""
    return tuple(rng.randbytes(16) for _ in range(num_blocks))


def claims_of(workers: Sequence[WorkerRef], num_pairs: int, rng: Random) -> Iterator[Claim]:
    """Until there are so many (worker, block) pairs. The hashes of each claim are objects of its own, as if
    they had come over the wire."""
    left = num_pairs
    while left > 0:
        chain = random_hashes(rng, min(prompt_blocks(rng), left))
        num_holders = rng.randint(2, MAX_HOLDERS) if rng.random() < SHARED_FRACTION else 1
        for worker in rng.sample(workers, num_holders):
            held = chain[: max(0, left)]
            left -= len(held)
            yield Claim(worker=worker, hashes=tuple(bytes(bytearray(block)) for block in held))


def populate(num_workers: int, num_pairs: int, rng: Random, index: PrefixIndex | None = None) -> Population:
    """A full index (that one, if it is given), stored in batches as workers would publish them."""
    workers, index = workers_of(num_workers), index or PrefixIndex()
    for worker in workers:
        index.join(worker)
    chains, build_s = [], 0.0
    gc.collect()
    before, own = psutil.Process().memory_info().rss, 0
    for claim in claims_of(workers, num_pairs, rng):
        began_s = time.perf_counter()
        for first in range(0, len(claim.hashes), BATCH_BLOCKS):
            index.stored(claim.worker, Tier.DEVICE, claim.hashes[first : first + BATCH_BLOCKS])
        build_s += time.perf_counter() - began_s
        if rng.random() < 0.2:
            chains.append(claim.hashes)
            own += 8 * len(claim.hashes)
    gc.collect()
    index_mb = (psutil.Process().memory_info().rss - before - own) / 1e6
    return Population(
        index=index,
        workers=workers,
        chains=tuple(sorted(chains, key=len)),
        num_pairs=index.num_claims,
        build_s=build_s,
        index_mb=index_mb,
    )


def prompt(population: Population, rng: Random, num_blocks: int | None = None) -> tuple[BlockHash, ...]:
    """A prompt as a gateway would send it: its own objects, whose hash values nobody has computed yet."""
    num_blocks = num_blocks or prompt_blocks(rng)
    num_shared = int(num_blocks * rng.uniform(0.0, MAX_OVERLAP))
    first = min(bisect_left(population.chains, num_shared, key=len), len(population.chains) - 1)
    shared = population.chains[rng.randrange(first, len(population.chains))][:num_shared]
    return (*(bytes(bytearray(block)) for block in shared), *random_hashes(rng, num_blocks - len(shared)))


def seconds_each(
    ask: Callable[[tuple[BlockHash, ...]], object], prompts: Sequence[tuple[BlockHash, ...]]
) -> list[float]:
    taken = []
    for hashes in prompts:
        began_s = time.perf_counter()
        ask(hashes)
        taken.append(time.perf_counter() - began_s)
    return taken


def measure_index(num_workers: int, num_pairs: int, num_prompts: int, seed: int = 0) -> dict[str, float]:
    """All that this page promises, by name; times in the unit that the name ends with."""
    rng = Random(seed)
    population = populate(num_workers, num_pairs, rng)
    index, workers = population.index, population.workers
    figures = {"num_pairs": population.num_pairs, "num_blocks": index.num_blocks, "index_mb": population.index_mb}
    figures["mb_per_million_pairs"] = population.index_mb / population.num_pairs * 1e6
    figures["build_events_per_s"] = population.num_pairs / population.build_s
    figures["events_per_s"] = churn(population, rng)
    for name, num_blocks in (
        ("8k", 8_192 // BLOCK_SIZE_TOKENS),
        ("131k", MAX_PROMPT_TOKENS // BLOCK_SIZE_TOKENS),
        ("any", None),
    ):
        taken = seconds_each(
            lambda h: index.overlaps(h, 0.0), [prompt(population, rng, num_blocks) for _ in range(num_prompts)]
        )
        cuts = quantiles(taken, n=100)
        figures |= {f"overlaps_{name}_p50_us": cuts[49] * 1e6, f"overlaps_{name}_p99_us": cuts[98] * 1e6}
    hot = random_hashes(rng, 512)
    for worker in workers:
        index.stored(worker, Tier.DEVICE, hot)
    taken = seconds_each(lambda h: index.overlaps(h, 0.0), [hot] * 200)
    figures["overlaps_held_by_all_p50_us"] = quantiles(taken, n=100)[49] * 1e6
    figures |= _expecting(population, rng, num_prompts)
    figures["drop_life_us"], figures["sweep_4096_max_us"] = _ending(population)
    return figures


def churn(population: Population, rng: Random, num_batches: int = 2_000) -> float:
    """Block events a second at a full index: each batch stores 64 new blocks, the next one evicts them."""
    batches = [(rng.choice(population.workers), random_hashes(rng, BATCH_BLOCKS)) for _ in range(num_batches)]
    began_s = time.perf_counter()
    for worker, hashes in batches:
        population.index.stored(worker, Tier.DEVICE, hashes)
        population.index.evicted(worker, Tier.DEVICE, hashes)
    return 2 * num_batches * BATCH_BLOCKS / (time.perf_counter() - began_s)


def _expecting(population: Population, rng: Random, num_prompts: int) -> dict[str, float]:
    """What a placement writes, and what asking costs with so many written: each is expected at two workers
    for 5 s, 100 come a second."""
    index, asked, wrote = population.index, [], []
    for number in range(num_prompts):
        hashes, now_s = prompt(population, rng), number / 100
        asked += seconds_each(lambda h, now_s=now_s: index.overlaps(h, now_s), [hashes])
        for worker in rng.sample(population.workers, 2):
            wrote += seconds_each(lambda h, worker=worker, now_s=now_s: index.expect(worker, h, now_s + 5.0), [hashes])
    return {
        "expect_p50_us": quantiles(wrote, n=100)[49] * 1e6,
        "expect_p99_us": quantiles(wrote, n=100)[98] * 1e6,
        "overlaps_expecting_p50_us": quantiles(asked, n=100)[49] * 1e6,
        "overlaps_expecting_p99_us": quantiles(asked, n=100)[98] * 1e6,
    }


def _ending(population: Population) -> tuple[float, float]:
    """Microseconds to drop a life, and of the longest of the steps that clear it away."""
    began_s = time.perf_counter()
    population.index.drop(population.workers[0])
    dropped_s = time.perf_counter() - began_s
    steps = [0.0]
    while population.index.num_ended_claims:
        began_s = time.perf_counter()
        population.index.sweep(4_096)
        steps.append(time.perf_counter() - began_s)
    return dropped_s * 1e6, max(steps) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--prompts", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print a last line that is one JSON object")
    options = parser.parse_args()
    figures = measure_index(options.workers, options.pairs, options.prompts, options.seed)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, value in figures.items():
        print(f"{name:32} {value:14,.1f}")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
