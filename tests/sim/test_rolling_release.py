"""Rolls out another KV layout worker by worker under load: no worker reads from the other release (F-50)."""

import asyncio
from random import Random

import pytest

from baton.core.kv.kv_layout import LAYOUT_VERSION
from baton.sim import virtual_time
from baton.sim.chaos.cache_audit import audit_caches, expected_blocks
from baton.sim.chaos.profile import ChaosProfile
from baton.sim.chaos.requests import plan_requests
from baton.sim.sim_clients import run_client
from baton.sim.sim_cluster import SimCluster
from tests.scale import sized
from tests.sim.storm_cluster import MODEL, POLICY_BY_SEED, config

pytestmark = [pytest.mark.sim, pytest.mark.slow]

LOAD = ChaosProfile(num_requests=100, duration_s=14.0, cancelled=0.0, stopped=0.0, hurried=0.0)


@pytest.mark.fault("F-50")
@pytest.mark.parametrize("seed", range(sized(1, 40)))
def test_rolling_release_fails_no_request_and_pairs_only_equal_layouts(seed: int) -> None:
    async def main() -> None:
        rng = Random(seed)
        cluster = SimCluster(config(POLICY_BY_SEED[seed % len(POLICY_BY_SEED)]), MODEL, seed)
        await cluster.start()
        await asyncio.sleep(1.0)
        release: dict[str, int] = {}

        def note() -> None:
            for worker in cluster.workers.values():
                release.setdefault(f"sim-{worker.worker}", cluster.layout_version)

        note()
        requests = plan_requests(LOAD, rng, start_s=asyncio.get_running_loop().time())
        clients = [asyncio.create_task(run_client(request, cluster.gateway)) for request in requests]
        names = sorted(cluster.workers)
        for name in rng.sample(names, len(names)):
            await asyncio.sleep(rng.uniform(1.5, 3.0))
            role = cluster.workers[name].role
            await cluster.stop_worker(name)
            cluster.layout_version = LAYOUT_VERSION + 1
            cluster.start_worker(name, role)
            note()
        for client in clients:
            answer = await client
            answer.check(MODEL.vocab_size)
            assert answer.outcome == "finished"
        pairs = {(release[reader], release[owner]) for reader, owner in cluster.fabric.pairs}
        assert pairs == {(version, version) for version in (LAYOUT_VERSION, LAYOUT_VERSION + 1)}
        await asyncio.sleep(20.0)  # the last worker is replaced, and its reports have arrived
        assert {report.layout.layout_version for report in cluster.gateway.view.reports} == {LAYOUT_VERSION + 1}, (
            "no worker of the old release is left"
        )
        for worker in cluster.workers.values():
            worker.check_clean()
        assert audit_caches(cluster, expected_blocks(cluster, requests)) > 0
        cluster.raise_failures()
        await cluster.aclose()

    virtual_time.run(main())
