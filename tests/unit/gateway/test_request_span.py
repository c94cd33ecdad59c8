"""The trace span of a request covers all its attempts and ends exactly once."""

import asyncio

import pytest

from baton.core.cluster.placement import Rejection
from baton.core.errors import Reason, Refused
from tests.recorded_spans import RecordedTracing
from tests.unit.gateway.fakes import StubWorker, cluster
from tests.unit.gateway.virtual import virtual


@virtual
async def test_queries_and_jobs_carry_the_request_span() -> None:
    tracing = RecordedTracing()
    async with cluster(("p0", "prefill"), ("d0", "decode"), tracing=tracing) as c:
        response = await c.complete("hello", max_tokens=12)
        span = tracing.only("request")
        assert span.parent == ""
        assert {query.trace_context for query in c.scheduler.queries} == {span.context}
        assert {job.trace_context for worker in c.scheduler.workers for job in worker.jobs} == {span.context}
        assert span.attributes["gen_ai.usage.input_tokens"] == 5
        assert span.attributes["gen_ai.usage.output_tokens"] == len(response.token_ids[0]) == 12
        assert (span.attributes["baton.attempts"], span.attributes["baton.outcome"], span.problem) == (
            1,
            "finished",
            "",
        )
        (placed, placed_s), (first, first_s) = span.events
        assert (placed, first) == ("placed", "first token")
        assert span.started_s <= placed_s < first_s < (span.ended_s or 0)


@virtual
async def test_failed_attempt_is_an_event_of_the_span() -> None:
    tracing = RecordedTracing()
    async with cluster(("p0", "prefill"), ("d0", "decode"), ("d1", "decode"), tracing=tracing) as c:

        def die(worker: StubWorker, _job: object, _sample: int, index: int) -> None:
            if index == 3:
                worker.die()

        c.scheduler.workers[1].before_token = die
        await c.complete("hello", max_tokens=12)
        span = tracing.only("request")
        assert span.attributes["baton.attempts"] == 2
        assert [name for name, _ in span.events if name == "attempt lost"] == ["attempt lost"]
        assert {query.trace_context for query in c.scheduler.queries} == {span.context}


@virtual
async def test_each_prompt_of_a_call_has_a_span() -> None:
    tracing = RecordedTracing()
    async with cluster(("h0", "hybrid"), tracing=tracing) as c:
        await c.complete(["one", "two"], max_tokens=4)
        assert len({span.context for span in tracing.named("request")}) == 2


@virtual
async def test_span_of_a_rejected_request_has_the_reason() -> None:
    tracing = RecordedTracing()
    async with cluster(("h0", "hybrid"), tracing=tracing) as c:
        c.scheduler.answer = lambda _: Rejection(reason=Reason.TTFT_SLO, message="too late", retry_after_s=1.0)
        with pytest.raises(Refused):
            await c.complete("hello")
        span = tracing.only("request")
        assert (span.attributes["baton.outcome"], span.problem) == ("ttft_slo", "ttft_slo")


@virtual
async def test_span_of_a_cancelled_request_is_not_an_error() -> None:
    tracing = RecordedTracing()
    async with cluster(("h0", "hybrid"), tracing=tracing) as c:
        asking = asyncio.create_task(c.complete("hello", max_tokens=200))
        await asyncio.sleep(0.5)
        asking.cancel()
        await asyncio.wait((asking,))
        span = tracing.only("request")
        assert (span.attributes["baton.outcome"], span.problem) == ("cancelled", "")
