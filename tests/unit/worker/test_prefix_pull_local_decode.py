"""Tests of a local decode leg that pulls a prefix.

`SimExecutor` compares every slot that a sample attends to with the request's own history, so a wrong block
fails the test.
"""

import asyncio

import pytest

from baton.core.errors import Code, Reason
from baton.core.ids import WorkerRef
from baton.core.messages.jobs import Cancel, PrefixSource
from baton.core.reload_limits import MIN_PULL_S
from baton.sim.sim_transfer_backend import LinkModel
from tests.unit.worker.harness import BLOCK, expected_tokens
from tests.unit.worker.prefix_trio import BLOCK_BYTES, NUM_BLOCKS, NUM_TOKENS, trio
from tests.unit.worker.virtual_loop import virtual

SLOW = LinkModel(bytes_per_s=BLOCK_BYTES / 0.005)
"""Reading a whole prefix takes 0.1 s."""


@virtual
async def test_prefix_is_pulled_for_a_local_decode_leg_and_the_rest_computed() -> None:
    async with trio() as workers:
        await workers.hold()
        job = workers.send_local()
        assert await workers.answered_locally(job) == NUM_BLOCKS * BLOCK
        assert workers.d.executor.plans[0].num_tokens == NUM_TOKENS - NUM_BLOCKS * BLOCK
        assert workers.d.pool.num_replicas == NUM_BLOCKS


@pytest.mark.parametrize("num_held", [0, 3, 40])
@virtual
async def test_source_with_fewer_blocks_provides_what_it_has(num_held: int) -> None:
    async with trio() as workers:
        if num_held:
            await workers.hold(num_held)
        assert await workers.answered_locally(workers.send_local()) == num_held // BLOCK * BLOCK


@pytest.mark.parametrize("worker_id", ["nobody", "d"])
@virtual
async def test_missing_source_does_not_fail_a_local_decode_leg(worker_id: str) -> None:
    async with trio() as workers:
        began_s = asyncio.get_running_loop().time()
        source = PrefixSource(
            worker=WorkerRef(worker_id=worker_id, worker_epoch=1, address=f"{worker_id}:1"), num_blocks=NUM_BLOCKS
        )
        assert await workers.answered_locally(workers.send_local(prefix_source=source)) == 0
        assert asyncio.get_running_loop().time() - began_s < MIN_PULL_S + 0.1
        assert workers.d.ref not in [link.peer for link in workers.d.worker.reader.links()], "nobody dials itself"


@pytest.mark.parametrize("after_s", [0.0005, 0.005, 0.03, 0.08])
@virtual
async def test_source_death_during_the_pull_does_not_fail_the_request(after_s: float) -> None:
    async with trio(link=SLOW) as workers:
        await workers.hold()
        job = workers.send_local()
        await asyncio.sleep(after_s)
        await workers.pair.cluster.kill("h")
        assert await workers.answered_locally(job) <= NUM_BLOCKS * BLOCK
        assert workers.d.pool.counts().receiving == 0


@pytest.mark.parametrize("ends_by", ["cancel", "deadline"])
@virtual
async def test_job_ended_during_the_pull_frees_everything(ends_by: str) -> None:
    async with trio(link=SLOW) as workers:
        await workers.hold()
        job = workers.send_local(deadline_s=60.0 if ends_by == "cancel" else 0.03)
        await asyncio.sleep(0.02)
        assert workers.d.worker.jobs.num_following == 1
        assert workers.d.pool.counts().receiving > 0
        if ends_by == "cancel":
            workers.to_d.send(Cancel(job=job.job, reason=Reason.CANCELLED))
        failure = await workers.to_d.failed(job.job)
        assert failure.code is (Code.CANCELLED if ends_by == "cancel" else Code.DEADLINE_EXCEEDED)
        await asyncio.sleep(0.015)  # a slice takes 10 ms
        assert workers.d.pool.counts().receiving == 0
        await workers.pair.until_clean()
        assert workers.d.executor.plans == []
        assert workers.holder.worker.owner.open_leases == 0
        assert await workers.answered_locally(workers.send_local(1)) == NUM_BLOCKS * BLOCK


@virtual
async def test_sample_cancelled_during_the_pull_is_not_sampled() -> None:
    async with trio(link=SLOW) as workers:
        await workers.hold()
        job = workers.send_local(sample_indices=(0, 1))
        await asyncio.sleep(0.03)
        workers.to_d.send(Cancel(job=job.job, reason=Reason.CANCELLED, sample_indices=(0,)))
        deltas = await workers.to_d.ended(job.job, samples=(1,))
        assert {delta.sample_index for delta in deltas} == {1}
        assert workers.to_d.tokens(job.job, 1) == expected_tokens(job, 1)


@virtual
async def test_jobs_that_wait_for_a_prefix_are_bounded_and_not_counted() -> None:
    async with trio(link=SLOW, max_queued_jobs=2) as workers:
        await workers.hold()
        waiting = [workers.send_local(0, decision_id="zero"), workers.send_local(1, decision_id="one")]
        await asyncio.sleep(0.02)
        refused = workers.send_local(2)
        assert (await workers.to_d.failed(refused.job)).reason is Reason.QUEUE_FULL
        assert list(workers.d.worker.jobs.counted_decisions()) == []
        for job in waiting:
            assert await workers.answered_locally(job) == NUM_BLOCKS * BLOCK
        assert workers.holder.worker.owner.counts.followed == 1, "the second waited for the pull of the first"


@virtual
async def test_draining_worker_finishes_jobs_that_wait_for_a_prefix() -> None:
    async with trio(link=SLOW) as workers:
        await workers.hold()
        job = workers.send_local()
        await asyncio.sleep(0.03)
        workers.d.worker.drain()
        assert await workers.answered_locally(job) == NUM_BLOCKS * BLOCK
        await asyncio.wait_for(workers.d.running, 5.0)


@virtual
async def test_decode_leg_with_an_owner_pulls_no_prefix() -> None:
    async with trio() as workers:
        await workers.hold()
        prefill, decode = workers.jobs(prefix_source=None)
        workers.to_p.send(prefill)
        job = workers.send_local(owner=workers.p.ref)
        assert job.job == decode.job
        await workers.to_d.ended(job.job)
        assert workers.to_d.tokens(job.job) == expected_tokens(job)
        assert workers.holder.worker.owner.counts.followed == 0
