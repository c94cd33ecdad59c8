"""64 streaming clients with random cancels (acceptance 4 of the spine): no error, exact, nothing leaked, nothing grows, caches right."""

import asyncio
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from random import Random
from statistics import median

import psutil
import pytest

from tests.cache_audit import CacheAuditor
from tests.cluster import ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Ask, Client, Got, random_asks
from tests.scale import sized

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_CLIENTS = 64
NUM_ASKS = 600
"""Different requests, of which clients choose: their blocks are found in caches, and driven out of them, all the time."""
LEAVE_SHARE = 0.25
WARM_UP_S = sized(2.0, 10.0)
SECONDS = sized(12.0, 60.0)
SETTLE_S = 10.0
MAX_CHECKED = sized(60, 1000)
PROCESSES = ("gateway", "scheduler", "p0", "d0")
FILLED = 5_000
"""Requests after which a scheduler remembers as many decisions as it ever will."""
MEMORY_S = 240.0
MEMORY_BIN_S = 10.0
KEPT_BYTES = {"p0": 140, "d0": 140}
"""What a process means to keep of each request: a worker knows of the last 65,536 which attempt has been there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Of one process: open files, threads, tasks of its event loop."""

    files: int
    threads: int
    tasks: int

    def is_more_than(self, before: "Resources") -> bool:
        """Than 5 % and three that come and go."""
        return any(now > was * 1.05 + 3 for now, was in zip(astuple(self), astuple(before), strict=True))


async def run_client(cluster: ProcessCluster, asks: Sequence[Ask], rng: Random, end_s: float) -> list[tuple[Got, bool]]:
    """Requests one after another until the end; (what came, whether the client left early)."""
    loop = asyncio.get_running_loop()
    results: list[tuple[Got, bool]] = []
    async with Client(cluster) as client:
        while loop.time() < end_s:
            leave_after = rng.randrange(1, 8) if rng.random() < LEAVE_SHARE else None
            got = await client.ask(rng.choice(asks), leave_after=leave_after)
            results.append((got, leave_after is not None))
    return results


async def run_clients(cluster: ProcessCluster, asks: Sequence[Ask], seed: int, seconds: float) -> list[tuple[Got, bool]]:
    end_s = asyncio.get_running_loop().time() + seconds
    rng = Random(seed)
    clients = [run_client(cluster, asks, Random(rng.getrandbits(32)), end_s) for _ in range(NUM_CLIENTS)]
    return [result for results in await asyncio.gather(*clients) for result in results]


async def resources(cluster: ProcessCluster) -> dict[str, Resources]:
    """Of each process; without the connections to the gateway that this process holds, which grpc closes late."""
    tasks = {name: int(await cluster.metric(name, "baton_event_loop_tasks")) for name in PROCESSES}
    processes = {name: psutil.Process(cluster.pid(name)) for name in PROCESSES}
    port = int(cluster.grpc_address.rsplit(":", 1)[1])
    ours = sum(1 for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port)
    return {
        name: Resources(files=process.num_fds() - ours * (name == "gateway"), threads=process.num_threads(), tasks=tasks[name])
        for name, process in processes.items()
    }


async def until_small(cluster: ProcessCluster, before: dict[str, Resources]) -> dict[str, tuple[Resources, Resources]]:
    """What is still more than before when `SETTLE_S` have passed; connections take a moment to be closed on both sides."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SETTLE_S
    while True:
        after = await resources(cluster)
        grown = {name: (before[name], after[name]) for name in PROCESSES if after[name].is_more_than(before[name])}
        if not grown or loop.time() > end_s:
            return grown
        await asyncio.sleep(0.2)


async def watch_memory(cluster: ProcessCluster, samples: dict[str, list[tuple[float, float]]]) -> None:
    """Adds (time, resident MB) of each process, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        for name in PROCESSES:
            samples[name].append((loop.time(), psutil.Process(cluster.pid(name)).memory_info().rss / 1e6))
        await asyncio.sleep(0.5)


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """In MB a minute: the median slope between any two of the least sizes in each `MEMORY_BIN_S` (Theil and Sen). What is used for a
    moment, and a heap that grows once, count for little."""
    least: dict[int, float] = {}
    for time_s, size in samples:
        number = int(time_s // MEMORY_BIN_S)
        least[number] = min(size, least.get(number, size))
    slopes = [(b - a) / ((j - i) * MEMORY_BIN_S) for (i, a), (j, b) in combinations(sorted(least.items()), 2)]
    return 60 * median(slopes)


async def test_clients_that_come_and_go_leave_nothing_behind(checker: ExactnessChecker, auditor: CacheAuditor) -> None:
    asks = random_asks(Random(4), NUM_ASKS, max_prompt=200, vocab_size=4096, max_tokens=24)
    async with process_cluster(prefill=1, decode=1, admin_port=0) as cluster:
        await run_clients(cluster, asks, seed=1, seconds=WARM_UP_S)
        await cluster.check_clean()
        before = await resources(cluster)
        results = await run_clients(cluster, asks, seed=2, seconds=SECONDS)
        await cluster.check_clean()
        cluster.check_alive()
        grown = await until_small(cluster, before)
        await auditor.audit(cluster)
        evictions = [await cluster.metric(name, "baton_evictions_total") for name in ("p0", "d0")]
    assert [got.failure for got, _ in results if got.failure] == []
    stayed = [got for got, has_left in results if not has_left]
    assert all(got.is_whole for got in stayed)
    assert any(not got.is_whole for got, has_left in results if has_left), "some must have left in the middle"
    assert any(got.usage and got.usage.num_cached_tokens for got in stayed), "some prompts must have been found in a cache"
    assert sum(evictions) > 0, "and some must have been driven out of it"
    assert grown == {}, "nothing may grow; before and after"
    checker.check([answer for got in stayed[:MAX_CHECKED] for answer in got.answers()])


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_memory_stays_as_large_as_it_is() -> None:
    """I7. Requests are small and alike, so that what still grows grows with their number."""
    asks = random_asks(Random(5), NUM_ASKS, max_prompt=40, vocab_size=4096, max_tokens=8)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in PROCESSES}
    async with process_cluster(prefill=1, decode=1, scheduler_wait_s=30.0) as cluster:
        num_before = 0
        while num_before < FILLED:
            num_before += len(await run_clients(cluster, asks, seed=num_before, seconds=WARM_UP_S))
            cluster.history.clear()
        watching = asyncio.create_task(watch_memory(cluster, samples))
        results = await run_clients(cluster, asks, seed=2, seconds=MEMORY_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await cluster.check_clean()
    assert [got.failure for got, _ in results if got.failure] == []
    kept = {name: KEPT_BYTES.get(name, 0) * len(results) / MEMORY_S * 60 / 1e6 for name in PROCESSES}
    grown = {name: growth(samples[name]) for name in PROCESSES}
    assert all(grown[name] < kept[name] + 1.0 for name in PROCESSES), f"MB a minute: {grown}, of which on purpose {kept}"
