"""Tests of what a worker reports: held blocks, step costs, queued work and answer lengths."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Reason, StoreUnavailable
from baton.core.ids import WorkerRef
from baton.core.interfaces import Member, MemberKind
from baton.core.kv.kv_events import KvEvent, KvEventKind, KvSnapshot, Tier
from baton.core.messages.jobs import Cancel
from baton.core.request import Sampling
from baton.core.step_cost import attended_tokens
from baton.sim.sim_transfer_backend import LinkModel
from baton.store.memory.memory_stores import MemoryKvEventFeed
from baton.worker.worker_metrics import WorkerMetrics
from baton.worker.worker_parts import KV_EVENTS_TTL_S
from tests.unit.worker.harness import SCHEDULER, STEP_COST, Cluster, Node, Pair, cluster, pair
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.virtual_loop import virtual

SOON_S = 0.1
"""Several intervals of the publisher."""


async def known_blocks(cluster: Cluster, node: Node) -> set[bytes]:
    """Return the blocks that a scheduler believes the worker to hold."""
    snapshot = await cluster.feed.snapshot(node.ref)
    assert snapshot is not None
    held = set(snapshot.hashes[Tier.DEVICE])
    events = await cluster.feed.read({node.ref: snapshot.event_seq}, max_events=1_000, wait_s=0.001)
    for event in events.get(node.ref, ()):
        assert isinstance(event, KvEvent)
        held = held | set(event.hashes) if event.kind is KvEventKind.STORED else held - set(event.hashes)
    return held


def last_report(workers: Pair, worker_id: str) -> WorkerReport:
    return workers.cluster.scheduler.reports[worker_id][-1]


@virtual
async def test_both_workers_publish_the_blocks_that_they_hold() -> None:
    async with pair() as workers:
        _, decode = workers.send(num_tokens=30)
        await workers.to_d.ended(decode.job)
        await asyncio.sleep(SOON_S)
        for node, num_blocks in ((workers.p, 7), (workers.d, 9)):
            assert await known_blocks(workers.cluster, node) == set(node.pool.hashes())
            assert len(node.pool.hashes()) == num_blocks
        await asyncio.sleep(1.0)
        assert last_report(workers, "d").event_seq == workers.d.worker.publisher.event_seq > 1  # type: ignore[union-attr]


@virtual
async def test_blocks_received_for_a_cancelled_request_are_published() -> None:
    async with pair(link=LinkModel(bytes_per_s=2e5)) as workers:
        prefill, decode = workers.send(num_tokens=200)
        while len(workers.d.pool.hashes()) < 20:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
        workers.to_p.send(Cancel(job=prefill.job, reason=Reason.CANCELLED))
        workers.to_d.send(Cancel(job=decode.job, reason=Reason.CANCELLED))
        await workers.to_d.failed(decode.job)
        await asyncio.sleep(SOON_S)
        assert 0 < len(workers.d.pool.hashes()) < 50
        assert await known_blocks(workers.cluster, workers.d) == set(workers.d.pool.hashes())


@virtual
async def test_scheduler_can_request_a_snapshot() -> None:
    async with pair() as workers:
        _, decode = workers.send(num_tokens=30)
        await workers.to_d.ended(decode.job)
        await asyncio.sleep(1.0)
        before = await workers.cluster.feed.snapshot(workers.p.ref)
        workers.cluster.scheduler.send("p", WorkerCommand(kind=CommandKind.SNAPSHOT))
        await asyncio.sleep(SOON_S)
        after = await workers.cluster.feed.snapshot(workers.p.ref)
        assert before is not None
        assert after is not None
        assert (before.hashes[Tier.DEVICE], set(after.hashes[Tier.DEVICE])) == ((), set(workers.p.pool.hashes()))


@virtual
async def test_kv_events_expire_after_the_worker_has_ended() -> None:
    async with pair() as workers:
        await asyncio.sleep(SOON_S)
        feed, ref = workers.cluster.feed, workers.d.ref
        await workers.cluster.kill("d")
        await asyncio.sleep(KV_EVENTS_TTL_S - 2.0)
        assert await feed.snapshot(ref) is not None
        await asyncio.sleep(3.0)
        assert await feed.snapshot(ref) is None


class BrokenFeed(MemoryKvEventFeed):
    async def reset(self, snapshot: KvSnapshot, ttl_s: float) -> None:
        raise AssertionError("a bug")


class UnavailableFeed(MemoryKvEventFeed):
    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        raise StoreUnavailable("away")


@virtual
async def test_failing_publisher_makes_the_worker_unhealthy() -> None:
    async with pair() as workers:
        workers.cluster.feed = BrokenFeed()
        node = workers.cluster.start("x")
        await asyncio.wait((node.running,), timeout=5.0)
        assert node.running.done()
        assert "a bug" in str(node.running.exception())


@virtual
async def test_unavailable_store_fails_no_request() -> None:
    async with pair() as workers:
        workers.cluster.feed = UnavailableFeed()
        node = workers.cluster.start("x")
        gateway = workers.cluster.gateway(node)
        await gateway.connect()
        job = decode_job(30)
        gateway.send(job)
        await gateway.ended(job.job)
        registry = CollectorRegistry()
        WorkerMetrics(registry).refresh(node.worker)
        assert registry.get_sample_value("baton_kv_publisher_behind") == 1
        assert registry.get_sample_value("baton_kv_resets_total") == 0


@virtual
async def test_publisher_counters_are_in_the_metrics() -> None:
    async with pair(num_blocks=16) as workers:
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry)
        for number in range(3):
            job = decode_job(40, request=b"r%d" % number)
            workers.to_d.send(job)
            await workers.to_d.ended(job.job)
            await asyncio.sleep(SOON_S)
            metrics.refresh(workers.d.worker)
        assert registry.get_sample_value("baton_kv_publisher_behind") == 0
        assert registry.get_sample_value("baton_kv_resets_total") == 1
        assert registry.get_sample_value("baton_evictions_total") == 3 * 11 - len(workers.d.pool.hashes()) > 0
        assert await known_blocks(workers.cluster, workers.d) == set(workers.d.pool.hashes())


# -- costs and load -----------------------------------------------------------


@virtual
async def test_exact_costs_stay_exact() -> None:
    async with pair() as workers:
        for number in range(3):
            _, decode = workers.send(num_tokens=100, request=b"r%d" % number)
            await workers.to_d.ended(decode.job)
        await asyncio.sleep(1.0)
        for worker_id in ("p", "d"):
            costs = last_report(workers, worker_id).costs
            assert costs is not None
            exact = STEP_COST.model
            assert costs.coefficients == exact.coefficients
            assert [costs.prefill_factor, costs.decode_factor, costs.mixed_factor] == pytest.approx([1.0, 1.0, 1.0])


@virtual
async def test_corrected_costs_are_stored_for_the_next_incarnation() -> None:
    async with pair() as workers:
        workers.d.executor.inner._cost = replace(STEP_COST, base_s=4 * STEP_COST.base_s)  # type: ignore[attr-defined]
        job = decode_job(30, sampling=Sampling(max_tokens=200, ignore_eos=True))
        workers.to_d.send(job)
        await workers.to_d.ended(job.job)
        await asyncio.sleep(1.0)
        costs = last_report(workers, "d").costs
        assert costs is not None
        assert costs.decode_step_s(1, 100) == pytest.approx(0.0081, rel=0.05)
        await workers.cluster.kill("d")
        assert await workers.cluster.cost_store.get("sim") == costs


@virtual
async def test_failed_step_does_not_correct_the_costs() -> None:
    async with pair() as workers:
        workers.d.executor.error = RuntimeError("bad")
        job = decode_job(30)
        workers.to_d.send(job)
        await workers.to_d.failed(job.job)
        await asyncio.sleep(1.0)
        costs = last_report(workers, "d").costs
        assert costs == STEP_COST.model


@virtual
async def test_report_contains_attended_tokens_of_the_queue() -> None:
    async with pair(max_num_batched_tokens=16) as workers:
        workers.d.executor.gate.clear()
        for number in range(2):
            workers.to_d.send(decode_job(50, request=b"r%d" % number))
        await asyncio.sleep(0.5)
        report = last_report(workers, "d")
        assert report.max_num_batched_tokens == 16
        assert (report.waiting_prefill_tokens, report.waiting_prefill_attended_tokens) == (
            100,
            2 * attended_tokens(50, 0),
        )
        workers.d.executor.gate.set()
        await workers.to_d.until(lambda: len(workers.to_d.deltas) == 2)
        await asyncio.sleep(0.5)
        assert last_report(workers, "d").waiting_prefill_attended_tokens == 0


@virtual
async def test_decode_worker_reports_mean_output_tokens() -> None:
    async with pair() as workers:
        lengths = (4, 10, 16)
        for length in lengths:
            _, decode = workers.send(
                num_tokens=30, request=b"r%d" % length, sampling=Sampling(max_tokens=length, ignore_eos=True)
            )
            await workers.to_d.ended(decode.job)
        await asyncio.sleep(1.0)
        assert last_report(workers, "d").mean_output_tokens == pytest.approx(10.0)
        assert last_report(workers, "p").mean_output_tokens == 0.0


@virtual
async def test_scheduler_that_answers_is_kept_although_it_is_not_listed() -> None:
    """A store that was emptied, or is too full for announcements, lists no scheduler."""
    async with cluster() as simulated:
        member = Member(kind=MemberKind.SCHEDULER, member_id="scheduler", epoch=1, address=SCHEDULER)
        await simulated.membership.announce(member, 1.0)
        node = simulated.start("w", schedulers=())
        await asyncio.sleep(1.0)
        await simulated.membership.withdraw(member)
        await asyncio.sleep(1.0)
        assert simulated.cut("w", "scheduler") == 1
        before = len(simulated.scheduler.reports["w"])
        await asyncio.sleep(1.0)
        assert len(simulated.scheduler.reports["w"]) > before
        await simulated.network.kill(SCHEDULER)
        await asyncio.sleep(1.0)
        assert not any(task.get_name() == f"report-{SCHEDULER}" for task in asyncio.all_tasks()), "it is gone"
        assert node.health.is_alive
