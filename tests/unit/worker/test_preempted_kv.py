"""Preempted sequences of workers with a host tier: their KV comes back the way that is predicted faster.

`SimExecutor` compares every slot that a sample attends to with the request's own history, so a wrong block
fails the test.
"""

import asyncio
from math import inf
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.core.errors import Reason
from baton.core.kv.block_hash import NO_HASH
from baton.core.messages.jobs import Cancel, DecodeJob
from baton.core.request import Sampling
from baton.engine.tiers.way_back import WayBack
from baton.worker.tiers.host_tier import HostTier
from baton.worker.worker_metrics import WorkerMetrics
from tests.unit.worker.harness import BLOCK, Cluster, cluster, expected_tokens
from tests.unit.worker.test_host_tier_worker import Host, start
from tests.unit.worker.virtual_loop import virtual

LONG = Sampling(max_tokens=70, ignore_eos=True)
"""Two such answers to prompts of 82 tokens need 76 blocks. The prompts alone need 42."""
NUM_BLOCKS = 60


async def started(simulated: Cluster, **changes: object) -> Host:
    """Start a worker that copies nothing but the blocks of preempted sequences."""
    host = await start(simulated, **({"num_blocks": NUM_BLOCKS} | changes))
    (copy_out,) = host.node.worker.kv.copies_out
    copy_out._is_worth_copying = lambda **_: False
    return host


def send(host: Host) -> list[DecodeJob]:
    return [host.send(prompt, sampling=LONG) for prompt in (0, 1)]


async def assert_answered(host: Host, jobs: list[DecodeJob]) -> None:
    """Check the answers, and that their timelines contain what the engine has counted."""
    counters = host.node.worker.engine.counters
    before = counters.preemptions, counters.recomputed_tokens
    timelines = []
    for job in jobs:
        deltas = await host.gateway.ended(job.job)
        assert host.gateway.tokens(job.job) == expected_tokens(job)
        timelines.append(deltas[-1].timeline)
    assert sum(each.num_preemptions for each in timelines) == counters.preemptions - before[0]
    assert sum(each.num_recomputed_tokens for each in timelines) == counters.recomputed_tokens - before[1]


@pytest.mark.parametrize("kv_windows", [(0,), (0, 9)], ids=str)
@virtual
async def test_what_a_preempted_sequence_has_lost_is_reloaded(kv_windows: tuple[int, ...]) -> None:
    async with cluster() as simulated:
        host = await started(simulated, kv_windows=kv_windows, num_blocks=NUM_BLOCKS + 12 * (len(kv_windows) - 1))
        await assert_answered(host, send(host))
        counters, totals = host.node.worker.engine.counters, host.node.worker.kv.preempted_kv.totals
        assert counters.preemptions > 0
        assert totals.chosen == {WayBack.RECOMPUTE: 0, WayBack.RELOAD: counters.preemptions}
        assert totals.predicted_s[WayBack.RELOAD] < totals.predicted_s[WayBack.RECOMPUTE]
        assert host.reloads.totals.reloaded_tokens > 0
        assert counters.recomputed_tokens <= BLOCK * counters.preemptions, "only tokens of partial blocks"
        pool = host.node.pool
        assert NO_HASH not in {pool.tenant_of(each) for each in pool.hashes()}
        await simulated.until_clean()


@virtual
async def test_without_a_tier_it_is_computed() -> None:
    async with cluster() as simulated:
        host = await start(simulated, num_blocks=NUM_BLOCKS, host_kv_memory=0)
        await assert_answered(host, send(host))
        counters = host.node.worker.engine.counters
        assert counters.recomputed_tokens > 4 * BLOCK * counters.preemptions > 0
        await simulated.until_clean()


@virtual
async def test_it_is_computed_if_copies_are_predicted_to_be_slower() -> None:
    async with cluster() as simulated:
        host = await started(simulated)
        await asyncio.sleep(1)
        host.tier.store_s = lambda num_blocks: 1.0 * num_blocks
        await assert_answered(host, send(host))
        counters, totals = host.node.worker.engine.counters, host.node.worker.kv.preempted_kv.totals
        assert totals.chosen == {WayBack.RECOMPUTE: counters.preemptions, WayBack.RELOAD: 0}
        assert host.tier.totals.stored_blocks == 0
        assert counters.recomputed_tokens > 4 * BLOCK * counters.preemptions > 0
        await simulated.until_clean()


@pytest.mark.parametrize("pause_s", [10.0, inf])
@virtual
async def test_it_is_computed_if_its_tier_takes_no_copies(pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as simulated:
        host = await started(simulated)
        await asyncio.sleep(1)
        monkeypatch.setattr(HostTier, "store_pause_s", pause_s)
        await assert_answered(host, send(host))
        counters, totals = host.node.worker.engine.counters, host.node.worker.kv.preempted_kv.totals
        assert totals.chosen == {WayBack.RECOMPUTE: counters.preemptions, WayBack.RELOAD: 0}
        assert counters.preemptions > 0
        await simulated.until_clean()


@virtual
async def test_it_is_computed_if_its_reload_fails() -> None:
    async with cluster() as simulated:
        host = await started(simulated)

        def fail(*_: object) -> None:
            raise RuntimeError("the device failed")

        host.tier._copies.to_device = fail
        await assert_answered(host, send(host))
        assert host.reloads.totals.incomplete > 0
        assert host.node.worker.engine.counters.recomputed_tokens > 0
        await simulated.until_clean()


@virtual
async def test_it_can_be_cancelled_during_its_reload() -> None:
    async with cluster() as simulated:
        host = await started(simulated)
        runner, loading, go_on = host.tier._runner, asyncio.Event(), asyncio.Event()

        class Held:
            async def run(self, copy: Any, num_bytes: int) -> float:
                if copy.func == host.tier._copies.to_device:
                    loading.set()
                    await go_on.wait()
                return await runner.run(copy, num_bytes)

        host.tier._runner = Held()
        first, second = send(host)
        await host.gateway.ended(first.job)
        await loading.wait()
        host.gateway.send(Cancel(job=second.job, reason=Reason.CANCELLED))
        await host.gateway.failed(second.job)
        go_on.set()
        await simulated.until_clean()
        await assert_answered(host, send(host))


@virtual
async def test_metrics_show_the_way_back() -> None:
    async with cluster() as simulated:
        host = await started(simulated)
        await assert_answered(host, send(host))
        registry = CollectorRegistry()
        WorkerMetrics(registry).refresh(host.node.worker)
        counters = host.node.worker.engine.counters
        for way, number in ((WayBack.RELOAD, counters.preemptions), (WayBack.RECOMPUTE, 0)):
            labels = {"way": way.value}
            assert registry.get_sample_value("baton_preemptions_by_way_total", labels) == number
            assert registry.get_sample_value("baton_preemption_predicted_seconds_total", labels) > 0
        assert registry.get_sample_value("baton_preempted_tokens_total") == counters.lost_tokens
        assert registry.get_sample_value("baton_recomputed_tokens_total") == counters.recomputed_tokens
