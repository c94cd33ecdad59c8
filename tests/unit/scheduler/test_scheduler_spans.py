"""Spans of placements: query, answer and reason of a rejection."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.cluster.placement import Placement, Rejection, StillWaiting
from baton.core.errors import Reason, Refused
from baton.scheduler.decisions.scheduler_spans import TracedScheduler
from baton.scheduler.scheduler_service import Scheduler
from tests import builders
from tests.recorded_spans import RecordedTracing
from tests.unit.scheduler.measured_workers import measured, queued
from tests.unit.scheduler.running_scheduler import a_scheduler, join, settle

REQUEST = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def traced(scheduler: Scheduler) -> tuple[TracedScheduler, RecordedTracing]:
    tracing = RecordedTracing()
    return TracedScheduler(scheduler, tracing), tracing


async def test_placement_span_has_workers_and_predictions() -> None:
    async with a_scheduler("kv_centric") as (scheduler, network):
        service, tracing = traced(scheduler)
        await join(network, measured("h0", "hybrid"))
        answer = await service.place(replace(builders.query(), trace_context=REQUEST))
        assert isinstance(answer, Placement)
        span = tracing.only("placement")
        assert span.parent == REQUEST
        assert span.attributes["baton.outcome"] == "placed"
        assert (span.attributes["baton.policy"], span.attributes["baton.decode"]) == ("kv_centric", "h0")
        assert span.attributes["baton.predicted_ttft_s"] == answer.ttft_s
        assert "baton.prefill" not in span.attributes
        assert span.ended_s is not None


async def test_rejection_span_has_reason_and_term() -> None:
    async with a_scheduler() as (scheduler, _):
        service, tracing = traced(scheduler)
        answer = await service.place(builders.query())
        assert isinstance(answer, Rejection)
        span = tracing.only("placement")
        assert (span.attributes["baton.reason"], span.attributes["baton.term"]) == ("no_workers", answer.term)
        assert span.problem == Reason.NO_WORKERS.value


async def test_waiting_request_has_one_span_per_call() -> None:
    async with a_scheduler("kv_centric", max_queued_requests=4) as (scheduler, network):
        service, tracing = traced(scheduler)
        await join(network, measured("h0", "hybrid", **queued(1_000_000)))
        query = replace(builders.query(), answer_within_s=0.05, trace_context=REQUEST)
        for _ in range(2):
            assert isinstance(await service.place(query), StillWaiting)
        assert [span.attributes["baton.outcome"] for span in tracing.named("placement")] == ["waiting", "waiting"]


async def test_spans_of_a_cancelled_call_and_a_draining_scheduler() -> None:
    async with a_scheduler("kv_centric", max_queued_requests=4) as (scheduler, network):
        service, tracing = traced(scheduler)
        await join(network, measured("h0", "hybrid", **queued(1_000_000)))
        asking = asyncio.create_task(service.place(builders.query()))
        await settle()
        asking.cancel()
        await asyncio.wait((asking,))
        await scheduler.aclose()
        with pytest.raises(Refused):
            await service.place(builders.query())
        assert [span.problem for span in tracing.named("placement")] == ["cancelled", "draining"]
