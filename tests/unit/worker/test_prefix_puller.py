"""Tests of pulling a prefix from another worker, and of computing it if the pull fails.

`SimExecutor` compares every slot that a sample attends to with the request's own history, so a wrong block
fails the test.
"""

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import Reason
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import first_visible_block
from baton.core.messages.jobs import Cancel, PrefixSource
from baton.core.reload_limits import MAX_COMPUTE_RATIO, MIN_PULL_S
from baton.core.request import Sampling
from baton.sim.sim_executor import SimStepCost
from baton.sim.sim_transfer_backend import LinkModel
from baton.worker.jobs.prefix_puller import (
    DEFAULT_PULL_S,
    MAX_PULLED_SHARE,
    PrefixPuller,
)
from tests import builders
from tests.unit.worker.harness import BLOCK, expected_tokens
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.prefix_trio import BLOCK_BYTES, NUM_BLOCKS, NUM_TOKENS, trio
from tests.unit.worker.virtual_loop import virtual


@virtual
async def test_prefix_is_pulled_and_only_the_rest_is_computed() -> None:
    async with trio() as workers:
        await workers.hold()
        assert await workers.answered(*workers.send()) == NUM_BLOCKS * BLOCK
        assert workers.computed_tokens == NUM_TOKENS - NUM_BLOCKS * BLOCK
        assert workers.p.worker.engine.counters.cached_tokens == NUM_BLOCKS * BLOCK


@pytest.mark.parametrize("kv_windows", [(9, 9), (0, 9), (2, 0, 13)], ids=str)
@virtual
async def test_only_what_is_seen_after_the_prefix_is_pulled(kv_windows: tuple[int, ...]) -> None:
    async with trio(kv_windows=kv_windows) as workers:
        await workers.hold()
        assert await workers.answered(*workers.send()) == NUM_BLOCKS * BLOCK
        layout = workers.p.layout
        unseen = [first_visible_block(NUM_BLOCKS * BLOCK, table.window, BLOCK) for table in layout.tables]
        assert workers.p.pool.num_replicas == sum(NUM_BLOCKS - first for first in unseen)


@pytest.mark.parametrize(("num_held", "num_reused"), [(40, 0), (82, 80)])
@virtual
async def test_a_prefix_that_ends_earlier_at_its_source_is_computed(num_held: int, num_reused: int) -> None:
    """Without the windowed blocks before its end, the shorter prefix cannot be continued, nor is it read."""
    async with trio(kv_windows=(0, 9)) as workers:
        await workers.hold(num_held)
        assert await workers.answered(*workers.send()) == num_reused
        assert (workers.p.pool.num_replicas > 0) == (num_reused > 0)


@virtual
async def test_cached_blocks_are_not_pulled() -> None:
    async with trio() as workers:
        await workers.hold()
        await workers.answered(*workers.send(0))
        before = workers.p.worker.reader.links()
        assert await workers.answered(*workers.send(1)) == NUM_BLOCKS * BLOCK
        assert (
            [link.peer for link in before]
            == [link.peer for link in workers.p.worker.reader.links()]
            == [workers.holder.ref]
        )
        assert workers.holder.worker.owner.counts.followed == 1


@pytest.mark.parametrize("num_held", [0, 3, 40])
@virtual
async def test_source_with_fewer_blocks_provides_what_it_has(num_held: int) -> None:
    async with trio() as workers:
        if num_held:
            await workers.hold(num_held)
        assert await workers.answered(*workers.send()) == num_held // BLOCK * BLOCK


@virtual
async def test_no_more_blocks_are_pulled_than_the_job_names() -> None:
    async with trio() as workers:
        await workers.hold()
        assert (
            await workers.answered(*workers.send(prefix_source=PrefixSource(worker=workers.holder.ref, num_blocks=5)))
            == 5 * BLOCK
        )


@pytest.mark.parametrize(
    "source",
    [
        WorkerRef(worker_id="nobody", worker_epoch=1, address="nobody:1"),
        WorkerRef(worker_id="h", worker_epoch=99, address="h:1"),
    ],
)
@virtual
async def test_unreachable_source_only_delays_the_request(source: WorkerRef) -> None:
    async with trio() as workers:
        await workers.hold()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert (
            await workers.answered(*workers.send(prefix_source=PrefixSource(worker=source, num_blocks=NUM_BLOCKS))) == 0
        )
        assert loop.time() - began_s < MIN_PULL_S + 0.1


@virtual
async def test_source_that_is_the_worker_itself_is_ignored() -> None:
    async with trio() as workers:
        assert (
            await workers.answered(
                *workers.send(prefix_source=PrefixSource(worker=workers.p.ref, num_blocks=NUM_BLOCKS))
            )
            == 0
        )


@pytest.mark.parametrize("after_s", [0.0005, 0.005, 0.03, 0.08])
@virtual
async def test_source_death_during_the_pull_does_not_fail_the_request(after_s: float) -> None:
    async with trio(link=LinkModel(bytes_per_s=BLOCK_BYTES / 0.005)) as workers:
        await workers.hold()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        jobs = workers.send()
        await asyncio.sleep(after_s)
        await workers.pair.cluster.kill("h")
        assert await workers.answered(*jobs) <= NUM_BLOCKS * BLOCK
        assert loop.time() - began_s < MIN_PULL_S + 0.5
        assert workers.p.pool.counts().receiving == 0


@virtual
async def test_pull_slower_than_computing_is_cancelled() -> None:
    async with trio(link=LinkModel(bytes_per_s=BLOCK_BYTES / 0.03)) as workers:
        await workers.hold()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        prefill, decode = workers.send()
        first = await workers.to_p.ended_prefill(prefill.job)
        assert loop.time() - began_s < MIN_PULL_S + 0.1
        assert first.timeline is not None
        assert 0 < first.timeline.num_cached_tokens < NUM_BLOCKS * BLOCK, "what had landed is used"
        workers.to_d.send(Cancel(job=decode.job, reason=Reason.CANCELLED))
        await workers.to_d.failed(decode.job)


@virtual
async def test_stuck_prefix_reads_fail_no_request() -> None:
    async with trio(link=LinkModel(stuck=0.3, stuck_s=1.5)) as workers:
        await workers.hold()
        prefill, decode = workers.send()
        first = await workers.to_p.ended_prefill(prefill.job)
        assert first.token_ids[0] == expected_tokens(decode)[0]
        await asyncio.sleep(5.0)


@virtual
async def test_many_requests_with_one_new_prefix_pull_it_once() -> None:
    async with trio(max_num_seqs=32) as workers:
        await workers.hold()
        workers.d.executor.gate.clear()  # so that they all arrive before the first is done
        sent = [workers.send(number, sampling=Sampling(max_tokens=4, ignore_eos=True)) for number in range(20)]
        workers.d.executor.gate.set()
        for prefill, decode in sent:
            assert await workers.answered(prefill, decode) == NUM_BLOCKS * BLOCK
        assert workers.holder.worker.owner.counts.followed == 1
        assert workers.computed_tokens == 20 * (NUM_TOKENS - NUM_BLOCKS * BLOCK)


@virtual
async def test_pull_respects_the_replica_budget() -> None:
    async with trio(p_blocks=40) as workers:
        await workers.hold()
        assert await workers.answered(*workers.send()) == int(MAX_PULLED_SHARE * 40) * BLOCK


@pytest.mark.parametrize(("num_blocks", "num_pulled"), [(6, 6), (7, 0)])
@virtual
async def test_pull_leaves_a_spare_block_per_running_sequence(num_blocks: int, num_pulled: int) -> None:
    async with trio(p_blocks=40) as workers:
        await workers.hold()
        workers.p.executor.gate.clear()
        others = [decode_job(62, request=b"other-%d" % number) for number in range(2)]
        for other in others:
            workers.to_p.send(other)
            await asyncio.sleep(0.01)
        workers.p.executor.gate.set()
        await asyncio.sleep(0.012)
        workers.p.executor.gate.clear()
        assert (workers.p.worker.engine.running_seqs, workers.p.pool.num_allocatable) == (2, 8)
        jobs = workers.send(prefix_source=PrefixSource(worker=workers.holder.ref, num_blocks=num_blocks))
        await asyncio.sleep(0.1)
        assert workers.p.pool.count_cached(workers.holder.pool.hashes()) == num_pulled
        workers.p.executor.gate.set()
        for other in others:
            await workers.to_p.ended(other.job)
            assert workers.to_p.tokens(other.job) == expected_tokens(other)
        await workers.answered(*jobs)


@virtual
async def test_cancel_during_a_prefix_pull_frees_everything() -> None:
    async with trio(link=LinkModel(bytes_per_s=BLOCK_BYTES / 0.005)) as workers:
        await workers.hold()
        prefill, _ = workers.send()
        await asyncio.sleep(0.03)
        assert workers.p.worker.jobs.num_following == 1
        for gateway in (workers.to_p, workers.to_d):
            gateway.send(Cancel(job=prefill.job, reason=Reason.CANCELLED))
            await gateway.failed(prefill.job)
        await asyncio.sleep(0.015)  # a slice takes 10 ms, all of them 100
        assert workers.p.pool.counts().receiving == 0
        await workers.pair.until_clean()
        assert workers.p.executor.plans == []
        assert workers.holder.worker.owner.open_leases == 0
        assert await workers.answered(*workers.send(1)) == NUM_BLOCKS * BLOCK


@virtual
async def test_sample_cancelled_during_the_pull_is_not_sampled() -> None:
    async with trio(link=LinkModel(bytes_per_s=BLOCK_BYTES / 0.005)) as workers:
        await workers.hold()
        prefill, decode = workers.send(sample_indices=(0, 1))
        await asyncio.sleep(0.03)
        for gateway in (workers.to_p, workers.to_d):
            gateway.send(Cancel(job=prefill.job, reason=Reason.CANCELLED, sample_indices=(0,)))
        await workers.to_d.ended(decode.job, samples=(1,))
        assert {delta.sample_index for delta in workers.to_p.deltas[prefill.job]} == {1}
        assert workers.to_d.tokens(decode.job, 1) == expected_tokens(decode, 1)


@virtual
async def test_draining_worker_finishes_jobs_that_wait_for_a_prefix() -> None:
    async with trio(link=LinkModel(bytes_per_s=BLOCK_BYTES / 0.005)) as workers:
        await workers.hold()
        jobs = workers.send()
        await asyncio.sleep(0.03)
        workers.p.worker.drain()
        assert await workers.answered(*jobs) == NUM_BLOCKS * BLOCK
        await asyncio.wait_for(workers.p.running, 5.0)


@virtual
async def test_decision_is_counted_when_its_load_is_in_the_report() -> None:
    async with trio(link=LinkModel(bytes_per_s=BLOCK_BYTES / 0.005)) as workers:
        await workers.hold()
        prefill, decode = workers.jobs()
        counted = replace(prefill, decision_id="one")  # type: ignore[arg-type]
        workers.to_p.send(counted)
        workers.to_d.send(decode)
        await asyncio.sleep(0.03)
        assert list(workers.p.worker.jobs.counted_decisions()) == []
        await workers.answered(counted, decode)
        reports = workers.pair.cluster.scheduler.reports["p"]
        await asyncio.sleep(0.5)
        assert [d for report in reports for d in report.counted_decision_ids] == ["one"]


@pytest.mark.parametrize(
    ("token_s", "limit_s"), [(None, DEFAULT_PULL_S), (1e-6, MIN_PULL_S), (0.01, MAX_COMPUTE_RATIO * 0.8)]
)
@virtual
async def test_pull_time_limit_is_a_multiple_of_the_compute_time(token_s: float | None, limit_s: float) -> None:
    async with trio(link=LinkModel(stuck=1.0, stuck_s=1e6)) as workers:
        costs = None if token_s is None else SimStepCost(base_s=0.0, per_token_s=token_s).model
        puller = PrefixPuller(engine=workers.p.worker.engine, reader=workers.p.worker.reader, costs=lambda: costs)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await workers.pair.cluster.network.kill(workers.holder.ref.address)
        source = PrefixSource(worker=workers.holder.ref, num_blocks=NUM_BLOCKS)
        await puller.pull(source, builders.hashes_of(range(NUM_TOKENS), BLOCK))
        assert loop.time() - began_s == pytest.approx(limit_s, abs=0.01)
