"""All workers of one role are lost and come back, without a restart of gateway or scheduler."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.cluster.worker_report import WorkerRole
from baton.core.errors import Code, Reason, Refused
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from tests.sim.one_request import ask
from tests.sim.storm_cluster import config

pytestmark = [pytest.mark.sim, pytest.mark.fault("F-9")]
policies = pytest.mark.parametrize("policy", ["kv_centric", "least_loaded"])


async def started(policy: str) -> SimCluster:
    cluster = SimCluster(replace(config(policy), prefill=2, decode=2), SimModel(), seed=9)
    await cluster.start()
    await asyncio.sleep(3.0)
    return cluster


async def lose(cluster: SimCluster, role: WorkerRole) -> None:
    for index in range(2):
        await cluster.kill(f"{role.value}-{index}")
    await asyncio.sleep(3.0)


async def bring_back(cluster: SimCluster, role: WorkerRole) -> None:
    for index in range(2):
        cluster.start_worker(f"{role.value}-{index}", role)
    await asyncio.sleep(3.0)


@policies
def test_decode_workers_compute_prompts_until_a_prefill_worker_is_back(policy: str) -> None:
    async def main() -> None:
        cluster = await started(policy)
        right = [await ask(cluster, number) for number in range(4)]
        assert any(answer.pulled_bytes for answer in right)
        await lose(cluster, WorkerRole.PREFILL)
        alone = [await ask(cluster, number) for number in range(4)]
        assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in right]
        for answer in alone:
            assert {leg.worker_id for leg in answer.known_timeline.legs} <= {"decode-0", "decode-1"}
            assert answer.known_timeline.attempts == 1
        await bring_back(cluster, WorkerRole.PREFILL)
        again = [await ask(cluster, number) for number in range(10, 30)]
        legs = [leg for answer in again for leg in answer.known_timeline.legs]
        assert any(leg.worker_id.startswith("prefill") for leg in legs)
        await cluster.aclose()

    virtual_time.run(main())


@policies
def test_requests_get_503_until_a_decode_worker_is_back(policy: str) -> None:
    async def main() -> None:
        cluster = await started(policy)
        right = await ask(cluster, 1)
        await lose(cluster, WorkerRole.DECODE)
        with pytest.raises(Refused) as refused:
            await ask(cluster, 1)
        failure = refused.value.failure
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, Reason.NO_WORKERS)
        assert failure.retry_after_s
        await bring_back(cluster, WorkerRole.DECODE)
        assert (await ask(cluster, 1)).token_ids == right.token_ids
        await cluster.aclose()

    virtual_time.run(main())
