"""64 streaming clients with random cancels (acceptance 4 of the spine): no error, exact, nothing leaked, nothing grows."""

import asyncio
from random import Random

import psutil
import pytest
import torch

from baton.engine.model.hub import DEMO_DIR
from tests.cluster import ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Ask, Client, Got, random_asks
from tests.scale import sized

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_CLIENTS = 64
SECONDS = sized(12.0, 60.0)
SETTLE_S = 10.0
MAX_CHECKED = sized(60, 1000)
PROCESSES = ("gateway", "scheduler", "p0", "d0")


async def run_client(address: str, number: int, end_s: float) -> list[tuple[Got, bool]]:
    """Requests one after another until the end; (what came, whether the client left early)."""
    rng = Random(number)
    loop = asyncio.get_running_loop()
    results: list[tuple[Got, bool]] = []
    async with Client(address) as client:
        while loop.time() < end_s:
            ask: Ask = random_asks(rng, 1, max_prompt=200, vocab_size=4096, max_tokens=24)[0]
            leave_after = rng.randrange(1, 8) if rng.random() < 0.25 else None
            results.append((await client.ask(ask, leave_after=leave_after), leave_after is not None))
    return results


def resources(cluster: ProcessCluster) -> dict[str, tuple[int, int]]:
    """(open files, threads) of each process; without the connections to the gateway that this process holds, which grpc closes late."""
    processes = {name: psutil.Process(cluster.pid(name)) for name in PROCESSES}
    port = int(cluster.grpc_address.rsplit(":", 1)[1])
    ours = sum(1 for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port)
    return {name: (process.num_fds() - ours * (name == "gateway"), process.num_threads()) for name, process in processes.items()}


async def until_small(cluster: ProcessCluster, before: dict[str, tuple[int, int]]) -> dict[str, object]:
    """What is still larger than before when `SETTLE_S` have passed; connections take a moment to be closed on both sides."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SETTLE_S
    while True:
        after = resources(cluster)
        grown: dict[str, object] = {
            name: (before[name], after[name])
            for name in PROCESSES
            if any(now > was * 1.05 + 3 for was, now in zip(before[name], after[name], strict=True))
        }
        if not grown or loop.time() > end_s:
            return grown
        await asyncio.sleep(0.2)


async def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    async with process_cluster(prefill=1, decode=1) as cluster:
        await asyncio.gather(*(run_client(cluster.grpc_address, 1000 + i, 0.0) for i in range(4)))
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(run_client(cluster.grpc_address, 2000 + i, loop.time() + 1.0) for i in range(NUM_CLIENTS)))
        await cluster.check_clean()
        before = resources(cluster)
        end_s = loop.time() + SECONDS
        results = [r for rs in await asyncio.gather(*(run_client(cluster.grpc_address, i, end_s) for i in range(NUM_CLIENTS))) for r in rs]
        await cluster.check_clean()
        cluster.check_alive()
        grown = await until_small(cluster, before)
    assert [got.failure for got, _ in results if got.failure] == []
    stayed = [got for got, left in results if not left]
    assert all(got.is_whole for got in stayed)
    assert grown == {}, "nothing may grow: (files, threads) before and after"
    torch.set_num_threads(1)
    ExactnessChecker(DEMO_DIR).check([answer for got in stayed[:MAX_CHECKED] for answer in got.answers()])
