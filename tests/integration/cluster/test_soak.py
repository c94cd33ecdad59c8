"""64 streaming clients with random cancels: no errors, exact tokens, no leaks, no growth, correct caches."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import psutil
import pytest

from tests.cache_audit import CacheAuditor
from tests.cluster import ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Client, Request, Response, random_requests
from tests.scale import sized

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_CLIENTS = 64
NUM_REQUESTS = 600
"""Number of distinct requests, which clients choose from. Their blocks are cached and evicted all the
time."""
CANCEL_SHARE = 0.25
WARM_UP_S = sized(1.0, 10.0)
SECONDS = sized(5.0, 60.0)
MORE_ROUNDS = 5
"""Number of further rounds of `SECONDS` until a slow machine has evicted blocks."""
SETTLE_S = 10.0
MAX_CHECKED = sized(24, 1000)
PROCESSES = ("gateway", "scheduler", "p0", "d0")
GROWTH_MB = 20.0
"""Allowed growth of memory beyond 5 %. Most of it is the scheduler's record of its last 4,096 decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of one process: open files, threads, tasks of its event loop, resident memory."""

    files: int
    threads: int
    tasks: int
    memory_mb: float

    def is_more_than(self, before: "Resources") -> bool:
        """Return True if a count grew by more than 5 % plus three, or memory by more than 5 % plus
        `GROWTH_MB`."""
        pairs = [(self.files, before.files), (self.threads, before.threads), (self.tasks, before.tasks)]
        return any(now > was * 1.05 + 3 for now, was in pairs) or self.memory_mb > before.memory_mb * 1.05 + GROWTH_MB


async def run_client(
    cluster: ProcessCluster, requests: Sequence[Request], rng: Random, end_s: float
) -> list[tuple[Response, bool]]:
    """Send requests one after another until `end_s`.

    Return the answers, and whether each was to be cancelled.
    """
    loop = asyncio.get_running_loop()
    results: list[tuple[Response, bool]] = []
    async with Client(cluster) as client:
        while loop.time() < end_s:
            cancel_after = rng.randrange(1, 8) if rng.random() < CANCEL_SHARE else None
            response = await client.send(rng.choice(requests), cancel_after=cancel_after)
            results.append((response, cancel_after is not None))
    return results


async def run_clients(
    cluster: ProcessCluster, requests: Sequence[Request], seed: int, seconds: float
) -> list[tuple[Response, bool]]:
    end_s = asyncio.get_running_loop().time() + seconds
    rng = Random(seed)
    clients = [run_client(cluster, requests, Random(rng.getrandbits(32)), end_s) for _ in range(NUM_CLIENTS)]
    return [result for results in await asyncio.gather(*clients) for result in results]


async def resources(cluster: ProcessCluster) -> dict[str, Resources]:
    """Return the resources of each process, without connections of this process to the gateway, which gRPC
    closes late."""
    tasks = {name: int(await cluster.metric(name, "baton_event_loop_tasks")) for name in PROCESSES}
    processes = {name: psutil.Process(cluster.pid(name)) for name in PROCESSES}
    port = int(cluster.grpc_address.rsplit(":", 1)[1])
    ours = sum(1 for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port)
    return {
        name: Resources(
            files=process.num_fds() - ours * (name == "gateway"),
            threads=process.num_threads(),
            tasks=tasks[name],
            memory_mb=process.memory_info().rss / 1e6,
        )
        for name, process in processes.items()
    }


async def evictions(cluster: ProcessCluster) -> float:
    return sum([await cluster.metric(name, "baton_evictions_total") for name in ("p0", "d0")])


async def until_small(cluster: ProcessCluster, before: dict[str, Resources]) -> dict[str, tuple[Resources, Resources]]:
    """Wait until no resource has grown. Return what has still grown after `SETTLE_S`, as (before, after)."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SETTLE_S
    while True:
        after = await resources(cluster)
        grown = {name: (before[name], after[name]) for name in PROCESSES if after[name].is_more_than(before[name])}
        if not grown or loop.time() > end_s:
            return grown
        await asyncio.sleep(0.2)


@pytest.mark.long  # `make test` covers this by test_nemesis.py, whose clients cancel at random, too
async def test_clients_with_random_cancels_leak_nothing(checker: ExactnessChecker, auditor: CacheAuditor) -> None:
    requests = random_requests(Random(4), NUM_REQUESTS, max_prompt=200, vocab_size=4096, max_tokens=24)
    # A long scheduler_wait_s, so that a slow machine causes no errors.
    async with process_cluster(prefill=1, decode=1, admin_port=0, scheduler_wait_s=30.0) as cluster:
        await run_clients(cluster, requests, seed=1, seconds=WARM_UP_S)
        await cluster.check_clean()
        before = await resources(cluster)
        results = await run_clients(cluster, requests, seed=2, seconds=SECONDS)
        for seed in range(3, 3 + MORE_ROUNDS):
            if await evictions(cluster):
                break
            results += await run_clients(cluster, requests, seed=seed, seconds=SECONDS)
        await cluster.check_clean()
        cluster.check_alive()
        grown = await until_small(cluster, before)
        await auditor.audit(cluster)
        num_evictions = await evictions(cluster)
    assert [response.failure for response, _ in results if response.failure] == []
    completed = [response for response, is_cancelled in results if not is_cancelled]
    assert all(response.is_complete for response in completed)
    assert any(not response.is_complete for response, is_cancelled in results if is_cancelled), (
        "some clients must have cancelled in mid-stream"
    )
    assert any(response.usage and response.usage.num_cached_tokens for response in completed), (
        "some prompts must have hit the prefix cache"
    )
    assert num_evictions > 0, "some blocks must have been evicted"
    assert grown == {}, "no resource may grow (before, after)"
    checker.check([answer for response in completed[:MAX_CHECKED] for answer in response.answers()])
