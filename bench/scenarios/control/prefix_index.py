"""Measures event rate, lookup time and memory of the prefix index in one process on one core.

python -m bench prefix_index [--workers 100] [--pairs 1000000] [--json]

The index is filled with chains of 8 to 8,192 blocks (log-uniform; 128 to 131,072 tokens in blocks of 16). Two
to four workers hold the same chain for a third of the chains. Looked-up prompts begin with 0 to 95 % of a
stored chain and continue with unknown blocks. `scheduler` uses the same population.

The last figures compare workers that announce all blocks with those that announce every 8th and the last:
the share of blocks that events name, and the share of held blocks that the index finds, for prompts of at
most 32 blocks and for longer ones. `cut` prompts leave a stored chain anywhere, `next` prompts continue it,
as the next turn of a conversation does.
"""

import argparse
import gc
import json
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
MIN_PAIRS = 100_000
SHORT_BLOCKS = 32
INTERVALS = (1, 8)
NUM_ANNOUNCED_CHAINS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The blocks of one chain that one worker holds."""

    worker: WorkerRef
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """A filled index.

    chains: a fifth of the chains in the index, sorted by length.
    num_pairs: (worker, block) pairs in the index.
    build_s: seconds spent in `PrefixIndex.stored` while filling it.
    index_mb: growth of the process's resident memory, without `chains`.
    """

    index: PrefixIndex
    workers: tuple[WorkerRef, ...]
    chains: tuple[tuple[BlockHash, ...], ...]
    num_pairs: int
    build_s: float
    index_mb: float


def worker_refs(num_workers: int) -> tuple[WorkerRef, ...]:
    """Return references to workers with different addresses."""
    return tuple(
        WorkerRef(worker_id=f"w{i:03}", worker_epoch=i + 1, address=f"10.0.0.{i}:1") for i in range(num_workers)
    )


def prompt_blocks(rng: Random) -> int:
    """Draw the number of full blocks of a prompt whose length is log-uniform."""
    return round(exp(rng.uniform(log(MIN_PROMPT_TOKENS), log(MAX_PROMPT_TOKENS)))) // BLOCK_SIZE_TOKENS


def random_hashes(rng: Random, num_blocks: int) -> tuple[BlockHash, ...]:
    """Return random hashes, which serve as a chain: two random chains share no block."""
    return tuple(rng.randbytes(16) for _ in range(num_blocks))


def claims_of(workers: Sequence[WorkerRef], num_pairs: int, rng: Random) -> Iterator[Claim]:
    """Yield claims with `num_pairs` (worker, block) pairs in total.

    Each claim has its own `bytes` objects, as if its hashes had been received from the network.
    """
    left = num_pairs
    while left > 0:
        chain = random_hashes(rng, min(prompt_blocks(rng), left))
        num_holders = rng.randint(2, MAX_HOLDERS) if rng.random() < SHARED_FRACTION else 1
        for worker in rng.sample(workers, num_holders):
            held = chain[: max(0, left)]
            left -= len(held)
            yield Claim(worker=worker, hashes=tuple(bytes(bytearray(block)) for block in held))


def populate(num_workers: int, num_pairs: int, rng: Random, index: PrefixIndex | None = None) -> Population:
    """Fill `index`, or a new one, in batches of the size that workers publish."""
    workers, index = worker_refs(num_workers), index or PrefixIndex()
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
    """Return the block hashes of a prompt as new objects, whose Python hash values are not cached yet."""
    num_blocks = num_blocks or prompt_blocks(rng)
    num_shared = int(num_blocks * rng.uniform(0.0, MAX_OVERLAP))
    first = min(bisect_left(population.chains, num_shared, key=len), len(population.chains) - 1)
    shared = population.chains[rng.randrange(first, len(population.chains))][:num_shared]
    return (*(bytes(bytearray(block)) for block in shared), *random_hashes(rng, num_blocks - len(shared)))


def seconds_each(
    call: Callable[[tuple[BlockHash, ...]], object], prompts: Sequence[tuple[BlockHash, ...]]
) -> list[float]:
    """Return the seconds that `call` takes for each prompt."""
    taken = []
    for hashes in prompts:
        began_s = time.perf_counter()
        call(hashes)
        taken.append(time.perf_counter() - began_s)
    return taken


def measure_index(num_workers: int, num_pairs: int, num_prompts: int, seed: int = 0) -> dict[str, float]:
    """Return all figures by name. The end of a name is its unit."""
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
    figures |= _measure_expected(population, rng, num_prompts)
    figures["drop_worker_us"], figures["sweep_4096_max_us"] = _measure_drop(population)
    return figures


def churn(population: Population, rng: Random, num_batches: int = 2_000) -> float:
    """Return block events per second at a full index.

    Each round stores 64 new blocks and evicts them again.
    """
    batches = [(rng.choice(population.workers), random_hashes(rng, BATCH_BLOCKS)) for _ in range(num_batches)]
    began_s = time.perf_counter()
    for worker, hashes in batches:
        population.index.stored(worker, Tier.DEVICE, hashes)
        population.index.evicted(worker, Tier.DEVICE, hashes)
    return 2 * num_batches * BATCH_BLOCKS / (time.perf_counter() - began_s)


def _measure_expected(population: Population, rng: Random, num_prompts: int) -> dict[str, float]:
    """Measure `expect`, and `overlaps` while many blocks are expected.

    Simulates 100 prompts per second; each is expected at two workers for 5 s.
    """
    index, lookup_s, expect_s = population.index, [], []
    for number in range(num_prompts):
        hashes, now_s = prompt(population, rng), number / 100
        lookup_s += seconds_each(partial(index.overlaps, now_s=now_s), [hashes])
        for worker in rng.sample(population.workers, 2):
            expect_s += seconds_each(partial(index.expect, worker, until_s=now_s + 5.0), [hashes])
    return {
        "expect_p50_us": quantiles(expect_s, n=100)[49] * 1e6,
        "expect_p99_us": quantiles(expect_s, n=100)[98] * 1e6,
        "overlaps_expecting_p50_us": quantiles(lookup_s, n=100)[49] * 1e6,
        "overlaps_expecting_p99_us": quantiles(lookup_s, n=100)[98] * 1e6,
    }


def _measure_drop(population: Population) -> tuple[float, float]:
    """Return microseconds to drop a worker, and of the longest sweep that removes its claims."""
    began_s = time.perf_counter()
    population.index.drop(population.workers[0])
    dropped_s = time.perf_counter() - began_s
    steps = [0.0]
    while population.index.num_ended_claims:
        began_s = time.perf_counter()
        population.index.sweep(4_096)
        steps.append(time.perf_counter() - began_s)
    return dropped_s * 1e6, max(steps) * 1e6


def announcement_figures(num_chains: int, seed: int) -> dict[str, float]:
    """Return what announcing fewer blocks saves in events, and costs in blocks that the index finds."""
    figures: dict[str, float] = {}
    for interval in INTERVALS:
        rng, index, worker = Random(seed), PrefixIndex(), worker_refs(1)[0]
        index.join(worker, announce_every=interval)
        num_announced = num_blocks = 0
        held, found = dict[str, int](), dict[str, int]()
        for _ in range(num_chains):
            chain = random_hashes(rng, prompt_blocks(rng))
            announced = dict.fromkeys((*chain[interval - 1 :: interval], chain[-1]))
            index.stored(worker, Tier.DEVICE, tuple(announced))
            num_announced, num_blocks = num_announced + len(announced), num_blocks + len(chain)
            size = "short" if len(chain) <= SHORT_BLOCKS else "long"
            for kind, num_shared in (("cut", rng.randint(1, len(chain))), ("next", len(chain))):
                overlap = index.overlaps((*chain[:num_shared], *random_hashes(rng, 8)), 0.0).get(worker.worker_id)
                held[f"{kind}_{size}"] = held.get(f"{kind}_{size}", 0) + num_shared
                found[f"{kind}_{size}"] = found.get(f"{kind}_{size}", 0) + (overlap.num_held_blocks if overlap else 0)
        figures[f"announced_{interval}_percent"] = 100 * num_announced / num_blocks
        figures |= {f"found_{interval}_{key}_percent": 100 * found[key] / held[key] for key in sorted(held)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100, help="workers in the index (100)")
    parser.add_argument("--pairs", type=int, default=1_000_000, help="(worker, block) pairs (1000000)")
    parser.add_argument("--prompts", type=int, default=1_000, help="prompts per figure (1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the population (0)")
    parser.add_argument("--json", action="store_true", help="also print one line of JSON")
    options = parser.parse_args()
    if options.pairs < MIN_PAIRS:
        parser.error(
            f"--pairs is {options.pairs}; must be at least {MIN_PAIRS}, so that the index holds several chains"
        )
    if options.prompts < 2:
        parser.error(f"--prompts is {options.prompts}; must be at least 2, because percentiles need two values")
    if options.workers < MAX_HOLDERS:
        parser.error(f"--workers is {options.workers}; must be at least {MAX_HOLDERS}, the most that hold one chain")
    figures = measure_index(options.workers, options.pairs, options.prompts, options.seed)
    figures |= announcement_figures(NUM_ANNOUNCED_CHAINS, options.seed)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, value in figures.items():
        print(f"{name:32} {value:14,.1f}")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
