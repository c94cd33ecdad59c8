"""All decode workers quarantine too many blocks at the same time: they are replaced one after the other."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from baton.core.cluster.worker_report import WorkerState
from baton.core.ids import WorkerRef
from baton.sim import virtual_time
from baton.sim.sim_clients import SimAnswer, SimRequest, run_client
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_transfer_backend import LinkModel
from tests.scale import sized
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim

DECODE = ("decode-0", "decode-1", "decode-2")
MODEL = SimModel(num_blocks=9)  # the one block that may be in flight to a peer is more than a tenth of the pool
STUCK = LinkModel(stuck=1.0, stuck_s=10_000.0)


def request(number: int, rng: Random) -> SimRequest:
    prompt = tuple(rng.randrange(1, 200) for _ in range(10))
    return SimRequest(number=number, start_s=0.0, prompt=prompt, max_tokens=4, seed=number, timeout_s=60.0)


async def generate(cluster: SimCluster, number: int, rng: Random) -> SimAnswer:
    return await run_client(request(number, rng), cluster.gateway)


def incarnations(cluster: SimCluster) -> dict[str, WorkerRef]:
    return {name: cluster.workers[name].worker for name in DECODE}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(sized(2, 20)))
def test_workers_of_a_role_are_replaced_one_at_a_time(seed: int) -> None:
    async def main() -> None:
        rng = Random(seed)
        cluster = SimCluster(replace(config(), prefill=1, decode=len(DECODE)), MODEL, seed=seed)
        await cluster.start()
        await asyncio.sleep(2.0)
        before = incarnations(cluster)
        cluster.fabric.link = STUCK
        stuck_requests = [asyncio.create_task(generate(cluster, number, rng)) for number in range(6)]
        while any(cluster.workers[name].reader.quarantined_blocks == 0 for name in DECODE):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cluster.fabric.link = LinkModel()

        fewest_ready, number, answers = len(DECODE), 6, []
        async with asyncio.timeout(120.0):
            while any(worker in before.values() for worker in incarnations(cluster).values()):
                fewest_ready = min(
                    fewest_ready, sum(cluster.workers[name].state is WorkerState.READY for name in DECODE)
                )
                if not number % 10:
                    answers.append(asyncio.create_task(generate(cluster, number, rng)))
                number += 1
                await asyncio.sleep(0.01)
        assert fewest_ready == len(DECODE) - 1
        for answer in [await task for task in (*stuck_requests, *answers)]:
            answer.check(MODEL.vocab_size)
            assert answer.outcome == "finished"
        await asyncio.sleep(10.0)
        assert [cluster.workers[name].pool.counts().quarantined for name in DECODE] == [0, 0, 0]
        cluster.raise_failures()
        await cluster.aclose()

    virtual_time.run(main())
