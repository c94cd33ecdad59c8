"""Prefixes that are on the disk of another worker only: it reloads them, and they are pulled as from memory.

`SimExecutor` compares every slot that a sample attends to with the request's own history, so a wrong block
fails the test.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.core.errors import Reason
from baton.core.messages.jobs import Cancel, DecodeJob, PrefixSource
from baton.core.reload_limits import MIN_PULL_S, PEER_RELOAD_SHARE, RELOAD_SHARE
from baton.worker.jobs import prefix_puller
from baton.worker.jobs.prefix_puller import PrefixPuller
from baton.worker.tiers import reloads as reloads_module
from baton.worker.tiers.disk_tier import SILENT_S
from tests.unit.worker import test_disk_tier_worker as disks
from tests.unit.worker.harness import BLOCK, Cluster, cluster, expected_tokens
from tests.unit.worker.test_disk_tier_worker import ALL_CACHED, answered, disk_of, restarted
from tests.unit.worker.test_host_tier_worker import MIB, NUM_BLOCKS, Host
from tests.unit.worker.virtual_loop import virtual

pytestmark = pytest.mark.usefixtures("cold_start")
cold_start = disks.cold_start


class PeerDisk:
    """A worker whose prompts 0 and 1 are on its disk only, and one without a cache that reads from it."""

    def __init__(self, simulated: Cluster, holder: Host, reader: Host) -> None:
        self.cluster, self.holder, self.reader = simulated, holder, reader
        self.disk = simulated.disks["p"]

    def source(self, num_disk_blocks: int = NUM_BLOCKS) -> PrefixSource:
        return PrefixSource(worker=self.holder.node.ref, num_blocks=NUM_BLOCKS, num_disk_blocks=num_disk_blocks)

    def send(self, prompt: int = 0) -> DecodeJob:
        return self.reader.send(prompt, prefix_source=self.source())

    async def pulled(self, prompt: int = 0, **changes: object) -> int:
        """Let the reader answer a prompt, and check the answer. Returns how many tokens it has reused."""
        cached = await self.reader.answer(prompt, **({"prefix_source": self.source()} | changes))
        return sum(cached.values())


@asynccontextmanager
async def peer_disk(**changes: object) -> AsyncIterator[PeerDisk]:
    """Yield both workers. `changes`: of the holder after its restart."""
    async with cluster() as simulated:
        await answered(await disks.start(simulated), 0, 1)
        holder = await restarted(simulated, **({"num_blocks": 96} | changes))
        node = simulated.start("q", num_blocks=128, max_num_batched_tokens=64)
        reader = Host(simulated, node, simulated.gateway(node, "g-q"))
        await reader.gateway.connect()
        await asyncio.sleep(1)
        yield PeerDisk(simulated, holder, reader)
        for worker in simulated.nodes.values():
            assert worker.worker.kv.reloads is None or not worker.worker.kv.reloads._num_blocks_for_peers
        await simulated.until_clean()


@pytest.mark.parametrize("host_kv_memory", [0, 4 * MIB], ids=["disk", "host and disk"])
@virtual
async def test_a_prefix_on_the_disk_of_a_peer_is_not_computed_again(host_kv_memory: int) -> None:
    async with peer_disk(host_kv_memory=host_kv_memory) as p:
        assert await p.pulled() == ALL_CACHED
        assert disk_of(p.holder.node).totals.loaded_blocks == NUM_BLOCKS
        assert await p.pulled(prompt=1) == ALL_CACHED


@pytest.mark.parametrize("kv_windows", [(9, 9), (0, 9), (2, 0, 13)], ids=str)
@virtual
async def test_windowed_tables_are_pulled_from_the_disk_of_a_peer(kv_windows: tuple[int, ...]) -> None:
    async with cluster() as simulated:
        await answered(await disks.start(simulated, kv_windows=kv_windows, num_blocks=80), 0)
        holder = await restarted(simulated, kv_windows=kv_windows, num_blocks=128)
        node = simulated.start("q", num_blocks=128, max_num_batched_tokens=64, kv_windows=kv_windows)
        reader = Host(simulated, node, simulated.gateway(node, "g-q"))
        await reader.gateway.connect()
        await asyncio.sleep(1)
        assert await PeerDisk(simulated, holder, reader).pulled() == ALL_CACHED
        await simulated.until_clean()


@virtual
async def test_nothing_is_reloaded_for_a_job_that_does_not_name_the_disk() -> None:
    async with peer_disk() as p:
        assert await p.pulled(prefix_source=p.source(0)) == 0
        assert disk_of(p.holder.node).totals.loaded_blocks == 0


@virtual
async def test_several_readers_wait_for_one_reload() -> None:
    async with peer_disk() as p:
        await p.pulled(prompt=1)  # the link is connected
        p.disk.latency_s = 0.02
        began = disk_of(p.holder.node).totals.loaded_blocks
        job, local = p.send(), p.holder.send(0)
        await asyncio.sleep(0.01)
        assert p.holder.reloads._num_blocks_for_peers == NUM_BLOCKS
        for host, sent in ((p.reader, job), (p.holder, local)):
            deltas = await host.gateway.ended(sent.job)
            assert deltas[0].usage is not None
            assert sum(deltas[0].usage.num_cached_tokens.values()) == ALL_CACHED
        assert disk_of(p.holder.node).totals.loaded_blocks == began + NUM_BLOCKS


@virtual
async def test_a_pull_from_disk_is_no_sample_of_the_fixed_costs_of_the_link() -> None:
    async with peer_disk() as p:
        await p.pulled(prompt=1)
        before = [link.pull_s for link in p.reader.node.worker.reader.links()]
        p.disk.latency_s = 0.05
        assert await p.pulled() == ALL_CACHED
        assert [link.pull_s for link in p.reader.node.worker.reader.links()] == before


@pytest.mark.fault("F-60")
@virtual
async def test_a_disk_that_does_not_answer_costs_a_reader_a_bounded_time_once() -> None:
    async with peer_disk() as p:
        p.disk.latency_s = 100.0
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await p.pulled() == 0
        assert loop.time() - began_s < MIN_PULL_S + 0.1
        assert p.holder.reloads.totals.late == 1
        await asyncio.sleep(SILENT_S)
        assert not disk_of(p.holder.node).answers
        began_s = loop.time()
        assert await p.pulled(prompt=1) == 0
        assert loop.time() - began_s < RELOAD_SHARE * MIN_PULL_S
        counts = p.holder.node.pool.counts()
        assert counts.free + counts.cached == counts.total
        await asyncio.sleep(100)


@virtual
async def test_a_pull_that_waits_for_a_reload_takes_no_budget_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer_disk() as p:
        pool = p.reader.node.pool
        monkeypatch.setattr(prefix_puller, "MAX_PULLED_SHARE", (NUM_BLOCKS + 3) / pool.num_blocks)
        await p.holder.answer(1)
        p.disk.latency_s = 0.05
        puller = PrefixPuller(
            engine=p.reader.node.worker.engine, reader=p.reader.node.worker.reader, costs=lambda: None
        )
        slow = asyncio.ensure_future(puller.pull(p.source(), p.reader.hashes_of(0)))
        await asyncio.sleep(0.02)
        await puller.pull(p.source(0), p.reader.hashes_of(1))
        assert not slow.done()
        held = pool.match(p.reader.hashes_of(1), NUM_BLOCKS)
        assert len(held) == NUM_BLOCKS
        await slow
        assert pool.num_replicas == NUM_BLOCKS + 3, "the whole budget"
        assert pool.count_cached(p.reader.hashes_of(0)) == 3
        pool.unref(held)


@virtual
async def test_a_damaged_block_ends_the_prefix_of_the_reader() -> None:
    async with peer_disk() as p:
        for slot in range(0, 20, 3):
            assert p.disk.corrupt(slot)
        assert await p.pulled() < ALL_CACHED
        assert disk_of(p.holder.node).totals.invalid_blocks > 0


@pytest.mark.parametrize(("kv_windows", "num_reloaded"), [((0,), 7), ((2, 0, 13), 0)], ids=["whole", "windowed"])
@virtual
async def test_a_reload_that_takes_too_long_is_shortened(kv_windows: tuple[int, ...], num_reloaded: int) -> None:
    """A shorter prefix is of no use with windows."""
    async with cluster() as simulated:
        await answered(await disks.start(simulated, kv_windows=kv_windows, num_blocks=80), 0)
        holder = await restarted(simulated, kv_windows=kv_windows, num_blocks=128)
        node = simulated.start("q", num_blocks=128, max_num_batched_tokens=64, kv_windows=kv_windows)
        reader = Host(simulated, node, simulated.gateway(node, "g-q"))
        await reader.gateway.connect()
        await asyncio.sleep(1)
        disk_of(holder.node).load_s = lambda num_blocks: num_blocks * PEER_RELOAD_SHARE * MIN_PULL_S / 7.5
        assert await PeerDisk(simulated, holder, reader).pulled() == num_reloaded * BLOCK
        assert disk_of(holder.node).totals.loaded_blocks == num_reloaded
        await simulated.until_clean()


@virtual
async def test_a_full_device_reloads_what_fits_and_no_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer_disk(num_blocks=40) as p:
        monkeypatch.setattr(reloads_module, "MAX_PEER_SHARE", 0.2)
        assert await p.pulled() == 8 * 4
        held = p.holder.node.pool.allocate(p.holder.node.pool.num_allocatable - 3)
        assert held is not None
        assert await p.pulled(prompt=1) == 3 * 4
        p.holder.node.pool.unref(held)


@virtual
async def test_a_reader_that_is_cancelled_leaves_nothing_behind() -> None:
    async with peer_disk() as p:
        p.disk.latency_s = 0.05
        job = p.send()
        await asyncio.sleep(0.02)
        assert p.holder.node.worker.owner.open_leases == 1
        p.reader.gateway.send(Cancel(job=job.job, reason=Reason.CANCELLED))
        await p.reader.gateway.until(lambda: p.reader.gateway.failures[job.job])
        await asyncio.sleep(0.02)
        assert p.holder.node.worker.owner.open_leases == 0
        assert await p.pulled() == ALL_CACHED, "the reload went on"


@pytest.mark.parametrize("after_s", [0.001, 0.02, 0.06])
@virtual
async def test_a_peer_that_dies_while_it_reloads_only_delays_the_request(after_s: float) -> None:
    async with peer_disk() as p:
        p.disk.latency_s = 0.05
        job = p.send()
        await asyncio.sleep(after_s)
        await p.cluster.kill("p")
        await p.reader.gateway.ended(job.job)
        assert p.reader.gateway.tokens(job.job) == expected_tokens(job)
        assert p.reader.node.pool.counts().receiving == 0


@virtual
async def test_a_lost_stream_during_the_reload_loses_nothing() -> None:
    async with peer_disk() as p:
        p.disk.latency_s = 0.05
        job = p.send()
        await asyncio.sleep(0.02)
        assert p.cluster.cut("q", "p")
        await p.reader.gateway.ended(job.job)
        assert p.reader.gateway.tokens(job.job) == expected_tokens(job)
