"""Requests that are rejected, retried or queued: each ends by its deadline, with the right reason."""

import asyncio

import pytest

from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.errors import Code, Failure, Reason, Refused
from baton.runtime.process.byte_budget import Account, ByteBudget
from tests.unit.gateway.fakes import PROMPT, answer_to, cluster, kill_at
from tests.unit.gateway.virtual import virtual


@virtual
async def test_running_request_waits_for_workers_until_its_deadline() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.before_token = kill_at(3)
        response = asyncio.create_task(c.complete(PROMPT))
        await asyncio.sleep(20)
        assert h0.is_dead
        assert not response.done()
        c.worker("h1")
        assert (await response).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_running_request_waits_while_the_scheduler_has_no_memory_for_its_query() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        c.scheduler.workers[0].before_token = kill_at(3)
        budget = ByteBudget({Account.QUERIES: 100})
        taken = budget.reserve(Account.QUERIES, 100, "another query")

        def answer(query: PlacementQuery) -> None:
            with budget.reserve(Account.QUERIES, 50 if query.attempt else 0, "the placement query"):
                pass

        c.scheduler.answer = answer
        response = asyncio.create_task(c.complete(PROMPT))
        await asyncio.sleep(20)
        assert c.scheduler.queries[-1].attempt == 1
        assert not response.done()
        taken.release()
        assert (await response).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@pytest.mark.parametrize("attempt", [0, 1])
@virtual
async def test_query_that_never_fits_into_the_schedulers_memory_ends_the_request(attempt: int) -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        c.scheduler.workers[0].before_token = kill_at(3)
        budget = ByteBudget({Account.QUERIES: 100})
        c.scheduler.answer = lambda query: budget.reserve(
            Account.QUERIES, 101 * (query.attempt == attempt), "the query"
        ).release()
        with pytest.raises(Refused, match="101 bytes"):
            await c.complete(PROMPT)
        assert len(c.scheduler.queries) == attempt + 1


@virtual
async def test_new_request_without_workers_is_rejected_immediately() -> None:
    async with cluster() as c:
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason) == (Code.UNAVAILABLE, Reason.NO_WORKERS)
        assert refused.value.failure.retry_after_s == 1.0


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.QUEUE_FULL, Code.RESOURCE_EXHAUSTED),
        (Reason.TENANT_QUOTA, Code.RESOURCE_EXHAUSTED),
        (Reason.NO_CAPACITY, Code.RESOURCE_EXHAUSTED),
        (Reason.TTFT_SLO, Code.RESOURCE_EXHAUSTED),
        (Reason.TPOT_SLO, Code.RESOURCE_EXHAUSTED),
        (Reason.NO_WORKERS, Code.UNAVAILABLE),
        (Reason.DRAINING, Code.UNAVAILABLE),
        (Reason.DEADLINE, Code.DEADLINE_EXCEEDED),
    ],
)
@virtual
async def test_rejection_keeps_its_reason(reason: Reason, code: Code) -> None:
    async with cluster(("h0", "hybrid")) as c:
        c.scheduler.answer = lambda _: Rejection(reason=reason, message="no", retry_after_s=3.0)
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason, refused.value.failure.retry_after_s) == (
            code,
            reason,
            3.0,
        )


@virtual
async def test_retriable_job_failure_is_retried_on_another_worker() -> None:
    async with cluster(("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")) as c:
        p0, p1, d0 = c.scheduler.workers
        failure = Failure(
            code=Code.UNAVAILABLE, reason=Reason.TRANSFER_FAILED, message="no", retriable=True, blamed=p0.ref
        )
        d0.fail_job = lambda job: failure if job.job.attempt == 0 else None
        response = await c.complete(PROMPT)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert c.scheduler.queries[1].avoid == (p0.ref,)
        assert len(p1.jobs) == 1


@virtual
async def test_failure_that_is_not_retriable_ends_the_request() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="nan")
        c.scheduler.workers[0].fail_job = lambda _: failure
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert refused.value.failure == failure
        assert len(c.scheduler.queries) == 1


@virtual
async def test_attempts_are_bounded_and_the_last_failure_is_returned() -> None:
    async with cluster(("h0", "hybrid")) as c:
        c.scheduler.workers[0].fail_job = lambda job: Failure(
            code=Code.UNAVAILABLE,
            reason=Reason.TRANSFER_FAILED,
            message=f"failed {job.job.attempt}",
            retry_after_s=2.0,
            retriable=True,
        )
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert (refused.value.failure.reason, refused.value.failure.message) == (Reason.TRANSFER_FAILED, "failed 7")
        assert len(c.scheduler.queries) == 8


@virtual
async def test_new_request_is_rejected_after_two_full_queues() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid"), ("h2", "hybrid")) as c:
        full = Failure(
            code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message="full", retry_after_s=2.0, retriable=True
        )
        for worker in c.scheduler.workers:
            worker.fail_job = lambda _: full
        begin_s = asyncio.get_running_loop().time()
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 2.0)
        assert asyncio.get_running_loop().time() - begin_s < 0.05
        assert len(c.scheduler.queries) == 2


@virtual
async def test_running_request_is_not_rejected_by_a_full_queue() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0, h1 = c.scheduler.workers
        h0.before_token = kill_at(3)
        full = Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message="full", retriable=True)
        h1.fail_job = lambda job: full if job.job.attempt < 4 else None
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_request_that_kills_its_workers_is_stopped() -> None:
    async with cluster(*((f"h{i}", "hybrid") for i in range(5))) as c:
        for worker in c.scheduler.workers:
            worker.before_token = kill_at(2)
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason) == (Code.INTERNAL, Reason.POISON)
        assert sum(worker.is_dead for worker in c.scheduler.workers) == 3


@virtual
async def test_deaths_of_workers_that_only_wait_for_kv_do_not_count() -> None:
    async with cluster(("p0", "prefill"), *((f"d{i}", "decode") for i in range(4))) as c:
        p0, *decode = c.scheduler.workers
        p0.prefill_s = 0.3
        for worker in decode[:3]:
            worker.prefill_s = 1e6  # the job waits for KV
        response = asyncio.create_task(c.complete(PROMPT))
        for worker in decode[:3]:
            await asyncio.sleep(0.15)
            worker.die()
        assert (await response).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@pytest.mark.parametrize("phase", ["no scheduler", "hanging scheduler", "prefill", "decode"])
@virtual
async def test_every_request_ends_at_its_deadline(phase: str) -> None:
    async with cluster(("h0", "hybrid"), request_timeout_s=1.5, scheduler_wait_s=30.0) as c:
        loop = asyncio.get_running_loop()
        if phase == "no scheduler":
            c.scheduler.die()
        c.scheduler.hangs = phase == "hanging scheduler"
        h0 = c.scheduler.workers[0]
        h0.prefill_s = 1e6 if phase == "prefill" else 0.01
        h0.step_s = 0.4
        begin_s = loop.time()
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT, max_tokens=50)
        expected = Reason.SCHEDULER_LOST if phase in ("no scheduler", "hanging scheduler") else Reason.DEADLINE
        assert refused.value.failure.reason in (expected, Reason.DEADLINE)
        assert 1.4 < loop.time() - begin_s < 1.6
        await asyncio.sleep(0.1)
        assert h0.open_jobs == []
        assert {cancel.reason for cancel in h0.cancels} <= {Reason.DEADLINE}
