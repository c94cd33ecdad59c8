"""Workers with a disk tier: the next process reloads what the last one left. A bad disk costs only time.

`SimExecutor` compares every slot that a sample attends to with the request's own history, so a wrong block
fails the test.
"""

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.core.kv.block_hash import BlockHash, tenant_root
from baton.core.kv.kv_events import Tier
from baton.engine.tiers.copy_policy import MIN_RELOAD_WAIT_S
from baton.engine.tiers.kv_tier import BlockToStore
from baton.engine.tiers.load_times import LATE_S
from baton.sim.sim_disk import STAGING_ROWS
from baton.worker.disk.disk_format import DiskDefect
from baton.worker.tiers import warm_start
from baton.worker.tiers.clear_tenant import RETRY_S, clear_tenant
from baton.worker.tiers.disk_tier import SILENT_S, STORE_PAUSE_S, DiskTier
from baton.worker.worker_metrics import WorkerMetrics
from tests.unit.worker.harness import BLOCK, Cluster, Node, cluster
from tests.unit.worker.test_host_tier_worker import MIB, NUM_BLOCKS, Host
from tests.unit.worker.virtual_loop import virtual

ALL_CACHED = NUM_BLOCKS * BLOCK
TENANT = b"tenant-a" * 2


def hash_of(number: int) -> BlockHash:
    return number.to_bytes(8, "little") * 2


def block_to_store(block_hash: BlockHash, block_id: int) -> BlockToStore:
    return BlockToStore(block_id=block_id, block_hash=block_hash, tenant_root=TENANT)


def disk_of(node: Node) -> DiskTier:
    (tier,) = (each for each in node.worker.kv.tiers if isinstance(each, DiskTier))
    return tier


async def start(simulated: Cluster, epoch: int = 1, **changes: object) -> Host:
    settings = {"num_blocks": 40, "max_num_batched_tokens": 64, "disk_kv": Path("disk"), "disk_kv_size": 4 * MIB}
    node = simulated.start("p", epoch=epoch, **(settings | changes))
    host = Host(simulated, node, simulated.gateway(node, f"g-{epoch}"))
    await host.gateway.connect()
    return host


async def restarted(simulated: Cluster, **changes: object) -> Host:
    """Kill the worker and start it again; only its disk is as before."""
    await simulated.kill("p")
    return await start(simulated, epoch=2, **changes)


async def answered(host: Host, *prompts: int) -> None:
    for prompt in prompts:
        await host.answer(prompt)
        await asyncio.sleep(1)


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the content of a disk there until requests ask for it."""
    monkeypatch.setattr(warm_start, "LEFT_FREE_SHARE", 1.0)


@pytest.mark.parametrize("host_kv_memory", [0, 4 * MIB], ids=["disk", "host and disk"])
@virtual
async def test_a_restarted_worker_reloads_what_the_last_one_left(host_kv_memory: int) -> None:
    async with cluster() as simulated:
        await answered(await start(simulated, host_kv_memory=host_kv_memory), 0, 1, 2)
        host = await restarted(simulated, host_kv_memory=host_kv_memory)
        assert disk_of(host.node).num_restored > 2 * NUM_BLOCKS
        for prompt in (0, 1, 2):
            assert sum((await host.answer(prompt)).values()) == ALL_CACHED
        assert disk_of(host.node).totals.loaded_blocks >= 3 * NUM_BLOCKS
        await simulated.until_clean()


@pytest.mark.parametrize("kv_windows", [(9, 9), (0, 9), (2, 0, 13)], ids=str)
@virtual
async def test_windowed_tables_are_reloaded_after_a_restart(kv_windows: tuple[int, ...]) -> None:
    async with cluster() as simulated:
        await answered(await start(simulated, kv_windows=kv_windows, num_blocks=80), 0, 1)
        host = await restarted(simulated, kv_windows=kv_windows, num_blocks=80)
        for prompt in (0, 1):
            assert sum((await host.answer(prompt)).values()) == ALL_CACHED
        await simulated.until_clean()


@virtual
async def test_a_prefix_on_host_and_disk_comes_from_both() -> None:
    async with cluster() as simulated:
        host = await start(simulated, host_kv_memory=4 * MIB, num_blocks=24)
        await answered(host, 0)
        tier, disk = host.node.worker.kv.tiers
        for block_hash in list(tier.slots.all_hashes())[1::2]:
            tier.discard(block_hash)
        assert disk.counts().held > tier.counts().held > 0
        await answered(host, 1, 2)
        cached = await host.answer(0)
        assert sum(cached.values()) == ALL_CACHED
        assert cached[Tier.HOST.value] > 0 < cached[Tier.DISK.value]
        await simulated.until_clean()


@pytest.mark.usefixtures("cold_start")
@virtual
async def test_corrupt_blocks_are_computed_again_and_counted() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1)
        for slot in range(0, 20, 3):
            assert simulated.disks["p"].corrupt(slot)
        host = await restarted(simulated)
        for prompt in (0, 1):
            await host.answer(prompt)
        disk = disk_of(host.node)
        assert disk.defects[DiskDefect.DAMAGED_PAYLOAD] == disk.totals.invalid_blocks > 0
        await asyncio.sleep(1)
        again = await restarted(simulated)
        for prompt in (0, 1):
            assert sum((await again.answer(prompt)).values()) == ALL_CACHED
        assert not disk_of(again.node).defects
        await simulated.until_clean()


@pytest.mark.fault("F-60")
@virtual
async def test_a_full_disk_fails_no_request_and_is_tried_again_later() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        simulated.disks["p"].file.is_full = True
        await answered(host, 0, 1)
        disk = disk_of(host.node)
        assert disk.counts().held == 0
        num_failed = disk.totals.failed_copies
        assert disk.defects.keys() == {DiskDefect.NO_SPACE}
        assert disk.defects[DiskDefect.NO_SPACE] >= num_failed
        assert 0 < num_failed < 4
        simulated.disks["p"].file.is_full = False
        await asyncio.sleep(STORE_PAUSE_S)
        cached = host.node.pool.hashes()
        assert len(cached) >= 2 * NUM_BLOCKS
        assert all(disk.holds(each) for each in cached), "they were candidates during the pause"
        await simulated.until_clean()


@pytest.mark.fault("F-60")
@pytest.mark.usefixtures("cold_start")
@virtual
async def test_a_slow_disk_delays_no_job_for_longer_than_computing_takes() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1)
        simulated.disks["p"].latency_s = 0.1
        host = await restarted(simulated, num_blocks=128)
        await asyncio.sleep(1)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await host.answer(0) == {}  # measured at start, so nothing is reloaded
        assert host.reloads.totals.reloads == 0
        took_s = loop.time() - began_s
        simulated.disks["p"].latency_s = 0.0001
        faster = await restarted(simulated)  # the job needs blocks that the reload took
        await asyncio.sleep(1)
        simulated.disks["p"].latency_s = 5.0
        began_s = loop.time()
        waiting = asyncio.ensure_future(faster.answer(1))
        await asyncio.sleep(MIN_RELOAD_WAIT_S / 2)
        jobs = faster.node.worker.jobs
        assert (jobs.num_preparing, jobs.num_following) == (1, 0), "it takes no place of those that wait for peers"
        assert await waiting == {}
        assert faster.reloads.totals.late == 1
        assert loop.time() - began_s < MIN_RELOAD_WAIT_S + 2 * took_s
        await simulated.until_clean()


@pytest.mark.fault("F-60")
@pytest.mark.usefixtures("cold_start")
@virtual
async def test_a_disk_that_does_not_answer_keeps_no_blocks_and_delays_one_job() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1, 2)
        host = await restarted(simulated)
        await asyncio.sleep(1)
        disk, loop = disk_of(host.node), asyncio.get_running_loop()
        simulated.disks["p"].latency_s = 100.0
        began_s = loop.time()
        assert await host.answer(0) == {}
        first_s = loop.time() - began_s
        await asyncio.sleep(SILENT_S)
        assert not disk.answers
        began_s = loop.time()
        for prompt in (1, 2):
            assert await host.answer(prompt) == {}
        assert (loop.time() - began_s) / 2 < first_s
        counts = host.node.pool.counts()
        assert counts.free + counts.cached == counts.total
        assert (host.reloads.totals.reloads, host.reloads.totals.late) == (1, 1)
        simulated.disks["p"].latency_s = 0.0001
        await asyncio.sleep(100)
        assert disk.answers
        assert sum((await host.answer(0)).values()) == ALL_CACHED
        await simulated.until_clean()


@pytest.mark.fault("F-60")
@pytest.mark.usefixtures("cold_start")
@virtual
async def test_a_disk_that_became_slow_is_left_alone_until_it_is_tried_again() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1, 2)
        host = await restarted(simulated)
        await asyncio.sleep(1)
        simulated.disks["p"].latency_s = SILENT_S / 2
        for prompt in (0, 1, 2, 0, 1):
            await host.answer(prompt)
            await asyncio.sleep(SILENT_S)
        totals = host.reloads.totals
        assert disk_of(host.node).answers
        assert 1 <= totals.late == totals.reloads <= 2
        simulated.disks["p"].latency_s = 0.0001
        await asyncio.sleep(LATE_S)
        await host.answer(2)
        assert totals.reloads > totals.late
        await simulated.until_clean()


@pytest.mark.fault("F-60")
@pytest.mark.usefixtures("cold_start")
@virtual
async def test_a_disk_whose_reads_became_slow_delays_few_jobs() -> None:
    """Each read ends in time, but not all reads of a job do."""
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1, 2)
        host = await restarted(simulated)
        await asyncio.sleep(1)
        disk, whole = disk_of(host.node), simulated.disks["p"].bytes_per_s
        simulated.disks["p"].bytes_per_s = ALL_CACHED / BLOCK * disk.block_bytes / (4 * MIN_RELOAD_WAIT_S)
        for prompt in (0, 1, 2, 0, 1, 2):
            await host.answer(prompt)
            await asyncio.sleep(1)
        totals = host.reloads.totals
        assert 1 <= totals.late <= 2
        simulated.disks["p"].bytes_per_s = whole
        await asyncio.sleep(LATE_S)
        assert sum((await host.answer(2)).values()) == ALL_CACHED
        await simulated.until_clean()


@virtual
async def test_erased_content_is_gone_on_all_tiers_and_after_a_restart() -> None:
    async with cluster() as simulated:
        host = await start(simulated, host_kv_memory=4 * MIB, num_blocks=128)
        await host.answer(0, cache_salt=b"tenant-a" * 2)
        await host.answer(0, cache_salt=b"tenant-b" * 2 + b"client")
        await host.answer(0, cache_salt=b"tenant-b" * 2)
        await asyncio.sleep(1)
        layout = host.node.layout
        root = tenant_root(
            model_fingerprint=layout.model_fingerprint, cache_salt=b"tenant-b" * 2, block_size_tokens=BLOCK
        )
        assert await clear_tenant(host.node.pool, host.node.worker.kv.tiers, root) >= 4 * NUM_BLOCKS
        assert await host.answer(0, cache_salt=b"tenant-a" * 2) == {Tier.DEVICE.value: ALL_CACHED}
        assert await host.answer(0, cache_salt=b"tenant-b" * 2) == {}
        again = await restarted(simulated)
        assert await again.answer(0, cache_salt=b"tenant-b" * 2 + b"client") == {}
        await simulated.until_clean()


@pytest.mark.fault("F-60")
@virtual
async def test_content_that_cannot_be_erased_is_not_used_and_is_erased_later() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        await answered(host, 0)
        disk, file = disk_of(host.node), simulated.disks["p"].file
        slots = list(disk.slots._content)
        assert len(slots) >= NUM_BLOCKS
        file.is_full = True
        clearing = asyncio.ensure_future(host.node.worker.kv.clear_tenant(b""))
        await asyncio.sleep(RETRY_S / 2)
        assert not clearing.done()
        assert disk.defects[DiskDefect.NO_SPACE] > 0
        file.is_full = False
        assert await host.answer(0) == {}
        await clearing
        assert not any(any(simulated.disks["p"].payload(slot)) for slot in slots)
        assert disk.counts().held == 0
        await simulated.until_clean()


@virtual
async def test_a_failed_erase_marks_what_it_has_left() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        await answered(host, 0, 1, 2)  # the first prompt is on the disk only
        disk = disk_of(host.node)
        assert disk.counts().held >= 3 * NUM_BLOCKS

        def fail(_: bytes) -> int:
            raise OSError(errno.EIO, "Input/output error")

        disk._store.erase = fail  # type: ignore[method-assign]
        clearing = asyncio.ensure_future(host.node.worker.kv.clear_tenant(b""))
        await asyncio.sleep(RETRY_S / 2)
        clearing.cancel()
        again = await restarted(simulated)
        assert disk_of(again.node).num_restored == 0
        assert await again.answer(0) == {}
        await simulated.until_clean()


@virtual
async def test_content_that_is_discarded_before_its_turn_is_not_written() -> None:
    """A store of several parts waits for its turn between them, and an erasure may come first."""
    async with cluster() as simulated:
        host = await start(simulated, num_blocks=128)
        await answered(host, 0)
        disk, file = disk_of(host.node), simulated.disks["p"]
        hashes = {hash_of(1000 + number): number for number in range(2 * STAGING_ROWS)}
        file.write_begun.clear()
        storing = asyncio.ensure_future(disk.store([block_to_store(each, n) for each, n in hashes.items()]))
        await file.write_begun.wait()
        assert await disk.erase_tenant(TENANT) > 0
        await storing
        assert not any(disk.holds(each) for each in hashes)
        others = [slot for slot in range(disk.slots.num_slots) if not disk.slots.has_content(slot)]
        assert len(others) > 2 * STAGING_ROWS
        assert not any(any(file.payload(slot)) for slot in others)
        await simulated.until_clean()


@virtual
async def test_many_blocks_are_discarded_by_few_tasks() -> None:
    async with cluster() as simulated:
        host = await start(simulated, num_blocks=128)
        await host.answer(0)
        await asyncio.sleep(1)
        hashes = list(disk_of(host.node).slots.all_hashes())
        assert len(hashes) >= NUM_BLOCKS
        before = len(asyncio.all_tasks())
        for block_hash in hashes:
            disk_of(host.node).discard(block_hash)
        assert len(asyncio.all_tasks()) <= before + 1
        await asyncio.sleep(1)
        again = await restarted(simulated)
        assert await again.answer(0) == {}
        await simulated.until_clean()


@virtual
async def test_the_disk_keeps_no_owners_of_its_content() -> None:
    """Its slots are many, and each request without a session is an owner."""
    async with cluster() as simulated:
        host = await start(simulated, host_kv_memory=4 * MIB)
        await answered(host, 0)
        tier, disk = host.node.worker.kv.tiers
        uses = [{block.use.owner for block in each.slots._content.values()} for each in (tier, disk)]
        assert None not in uses[0]
        assert uses[1] == {None}


@virtual
async def test_report_and_metrics_show_the_disk() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        await answered(host, 0, 1, 2, 0)
        disk = disk_of(host.node)
        (reported,) = simulated.scheduler.reports["p"][-1].tiers
        assert (reported.tier, reported.total, reported.held) == ("disk", disk.counts().total, disk.counts().held)
        assert reported.load_bytes_per_s > 0
        disk.defects[DiskDefect.TRUNCATED] += 2
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry)
        for _ in range(2):
            metrics.refresh(host.node.worker)
        value = registry.get_sample_value
        assert value("baton_kv_blocks", {"tier": "disk", "state": "cached"}) == disk.counts().held > 0
        assert value("baton_disk_kv_defects_total", {"defect": "truncated"}) == 2
        assert value("baton_disk_kv_defects_total", {"defect": "no_space"}) == 0
        assert value("baton_late_reloads_total") == 0


@virtual
async def test_schedulers_learn_what_the_disk_holds_at_start() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1)
        host = await restarted(simulated)
        await asyncio.sleep(1)
        snapshot = await simulated.feed.snapshot(host.node.ref)
        assert snapshot is not None
        assert set(snapshot.hashes[Tier.DISK]) == set(disk_of(host.node).announced_hashes()) != set()


@virtual
async def test_what_the_disk_announces_later_is_announced_after_a_restart() -> None:
    async with cluster() as simulated:
        host = await start(simulated, kv_announce_every=8)
        await answered(host, 0)
        disk, end = disk_of(host.node), host.hashes_of(0)[9]
        assert disk.holds(end)
        assert end not in disk.announced_hashes()
        await host.answer(0, **host.beginning(0, 10))
        assert end in disk.announced_hashes()
        await asyncio.sleep(1)
        again = await restarted(simulated, kv_announce_every=8)
        assert end in disk_of(again.node).announced_hashes()


@virtual
async def test_what_is_announced_while_it_is_written_is_announced_after_a_restart() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        disk, file = disk_of(host.node), simulated.disks["p"]
        await answered(host, 0)
        file.write_begun.clear()
        blocks = [replace(block_to_store(hash_of(1000 + n), n), is_announced=False) for n in range(2)]
        storing = asyncio.ensure_future(disk.store(blocks))
        await file.write_begun.wait()
        disk.announce(hash_of(1000))
        await storing
        await asyncio.sleep(1)
        found = disk_of((await restarted(simulated, kv_announce_every=8)).node)
        assert all(found.holds(hash_of(1000 + n)) for n in range(2))
        assert [hash_of(1000 + n) in found.announced_hashes() for n in range(2)] == [True, False]


@pytest.mark.usefixtures("cold_start")
@virtual
async def test_the_first_read_after_a_start_says_nothing_about_the_next_ones() -> None:
    async with cluster() as simulated:
        await answered(await start(simulated), 0)
        simulated.disks["p"].latency_s = 5.0
        host = await restarted(simulated, num_blocks=128)
        await asyncio.sleep(1)
        simulated.disks["p"].latency_s = 0.0001
        await asyncio.sleep(10)
        assert disk_of(host.node).load_s(1) < 0.1
        assert disk_of(host.node).totals.loaded_blocks == 0
        await simulated.until_clean()
