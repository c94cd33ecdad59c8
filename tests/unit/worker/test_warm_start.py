"""Workers that load content from their disk after a start, before requests ask for it."""

import asyncio

import pytest

from baton.core.kv.block_hash import tenant_root
from baton.core.kv.kv_events import Tier
from baton.worker.tiers.clear_tenant import clear_tenant
from baton.worker.tiers.warm_start import LEFT_FREE_SHARE, MEASURING_PARTS
from tests.unit.worker.harness import BLOCK, cluster
from tests.unit.worker.test_disk_tier_worker import ALL_CACHED, answered, disk_of, restarted, start
from tests.unit.worker.test_host_tier_worker import NUM_BLOCKS
from tests.unit.worker.virtual_loop import virtual

LARGE = 128
"""Device blocks that hold all prompts."""


@virtual
async def test_first_requests_find_their_prompts_on_the_device() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1, 2)
        host = await restarted(simulated, num_blocks=LARGE)
        await asyncio.sleep(1)
        for prompt in (0, 1, 2):
            assert await host.answer(prompt) == {Tier.DEVICE.value: ALL_CACHED}
        assert host.reloads.totals.reloads == 0
        await simulated.until_clean()


@virtual
async def test_a_quarter_of_the_device_stays_free_and_gets_what_the_disk_evicts_last() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1, 2)
        host = await restarted(simulated)
        await asyncio.sleep(1)
        counts = host.node.pool.counts()
        assert counts.free >= LEFT_FREE_SHARE * counts.total > 0.5 * counts.free
        assert (await host.answer(2))[Tier.DEVICE.value] == ALL_CACHED
        await simulated.until_clean()


@virtual
async def test_a_chain_is_evicted_from_its_end() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1)
        host = await restarted(simulated, num_blocks=2 * NUM_BLOCKS)
        await asyncio.sleep(1)
        pool = host.node.pool
        taken = pool.allocate(pool.counts().free + 5)
        assert taken is not None
        pool.unref(taken)
        cached = await host.answer(1)
        assert sum(cached.values()) == ALL_CACHED
        assert cached[Tier.DEVICE.value] >= ALL_CACHED // 2
        await simulated.until_clean()


@virtual
async def test_requests_come_first() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1, 2)
        simulated.disks["p"].latency_s = 0.002
        host = await restarted(simulated, num_blocks=LARGE)
        await asyncio.sleep(0.01)
        job = host.send(9)
        await host.gateway.until(lambda: host.gateway.tokens(job.job))
        loaded = disk_of(host.node).totals
        num_loaded = loaded.loaded_blocks
        assert 0 < num_loaded < 3 * NUM_BLOCKS
        await host.gateway.ended(job.job)
        assert loaded.loaded_blocks - num_loaded <= LARGE // 16
        await asyncio.sleep(1)
        assert loaded.loaded_blocks >= 3 * NUM_BLOCKS
        assert await host.answer(2) == {Tier.DEVICE.value: ALL_CACHED}
        await simulated.until_clean()


@virtual
async def test_content_with_a_defect_is_left_out() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1)
        for slot in range(0, 2 * NUM_BLOCKS, 3):
            assert simulated.disks["p"].corrupt(slot)
        host = await restarted(simulated, num_blocks=LARGE)
        await asyncio.sleep(1)
        assert disk_of(host.node).totals.invalid_blocks > 2
        assert 0 < host.node.pool.counts().cached < NUM_BLOCKS
        await host.answer(0)
        await host.answer(1)
        await simulated.until_clean()


@virtual
async def test_content_of_an_erased_tenant_does_not_come_back() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1, 2)
        simulated.disks["p"].latency_s = 0.002
        host = await restarted(simulated, num_blocks=LARGE)
        await asyncio.sleep(0.012)
        assert 0 < disk_of(host.node).totals.loaded_blocks < 3 * NUM_BLOCKS, "it is loading"
        root = tenant_root(
            model_fingerprint=host.node.layout.model_fingerprint, cache_salt=bytes(16), block_size_tokens=BLOCK
        )
        await clear_tenant(host.node.pool, host.node.worker.kv.tiers, root)
        await asyncio.sleep(1)
        assert host.node.pool.counts().cached == 0
        await simulated.until_clean()


@pytest.mark.parametrize(
    ("changes", "most"), [({"kv_windows": (0, 9)}, 0), ({}, MEASURING_PARTS * LARGE // 16)], ids=["windows", "slow"]
)
def test_content_that_is_computed_as_fast_is_left_on_the_disk(changes: dict[str, object], most: int) -> None:
    @virtual
    async def run() -> None:
        async with cluster() as simulated:
            await answered(await start(simulated, num_blocks=LARGE, **changes), 0, 1, 2)
            if not changes:
                simulated.disks["p"].latency_s = 0.1
            host = await restarted(simulated, num_blocks=LARGE, **changes)
            assert disk_of(host.node).num_restored > 2 * most
            await asyncio.sleep(10)
            assert host.node.pool.counts().cached == most
            await simulated.until_clean()

    run()
