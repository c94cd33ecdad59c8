"""Tests of the spans of jobs, pulls and leases: one each, ended once, with the right parent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.core.errors import Reason
from baton.core.messages.jobs import Cancel
from tests.recorded_spans import RecordedTracing
from tests.unit.worker.harness import cluster, pair
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.prefix_trio import trio
from tests.unit.worker.scripted_gateway import Gateway
from tests.unit.worker.virtual_loop import virtual

REQUEST = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
SETTINGS = {"max_num_batched_tokens": 64, "max_num_seqs": 16}


@virtual
async def test_prefill_pull_and_decode_spans_form_one_trace() -> None:
    tracing = RecordedTracing()
    async with pair(tracing=tracing) as both:
        _, job = both.send(num_tokens=30, trace_context=REQUEST)
        await both.to_d.ended(job.job)
        await both.until_clean()
        prefill, decode, pull, lease = (tracing.only(name) for name in ("prefill", "decode", "kv pull", "kv lease"))
        assert prefill.parent == decode.parent == REQUEST
        assert (pull.parent, lease.parent) == (decode.context, pull.context)
        assert (pull.kind, lease.kind) == ("client", "server")
        assert (prefill.attributes["baton.output_tokens"], decode.attributes["baton.output_tokens"]) == (1, 8)
        assert pull.attributes["baton.outcome"] == "received"
        assert pull.attributes["baton.blocks"] == 8
        assert lease.attributes["baton.outcome"] == "released"
        assert all(span.ended_s is not None and not span.problem for span in tracing.spans)
        assert [name for name, _ in prefill.events] == ["admitted"]
        assert [name for name, _ in pull.events] == ["first ready", "final ready"]
        ((_, first_token_s),) = decode.events
        assert pull.ended_s is not None
        assert decode.ended_s is not None
        assert pull.ended_s <= first_token_s < decode.ended_s


@virtual
async def test_prefix_pull_span_is_a_child_of_the_prefill_span() -> None:
    tracing = RecordedTracing()
    async with trio(tracing=tracing) as workers:
        await workers.hold()
        tracing.spans.clear()
        await workers.answered(*workers.send(trace_context=REQUEST))
        (prefix,) = (span for span in tracing.named("kv pull") if span.attributes.get("baton.pulls") == "prefix")
        assert prefix.parent == tracing.only("prefill").context
        assert prefix.attributes["baton.bytes"] > 0
        assert {span.parent for span in tracing.named("kv lease")} == {
            span.context for span in tracing.named("kv pull")
        }


@virtual
async def test_cancelled_or_refused_job_ends_its_spans() -> None:
    tracing = RecordedTracing()
    async with pair(tracing=tracing) as both:
        _, cancelled = both.jobs(num_tokens=30, trace_context=REQUEST)
        both.to_d.send(cancelled)  # without its prefill job: it waits
        await both.settle()
        both.to_d.send(Cancel(job=cancelled.job, reason=Reason.CANCELLED))
        refused = replace(decode_job(30, request=b"refused", trace_context=REQUEST), sample_indices=(1, 1))
        both.to_d.send(refused)
        await both.to_d.until(lambda: both.to_d.failures[refused.job])
        await both.until_clean()
        first, second = tracing.named("decode")
        assert (first.attributes["baton.outcome"], first.problem) == ("cancelled", "")
        assert (second.attributes["baton.outcome"], second.problem) == ("invalid_request", "invalid_request")
        assert (tracing.only("kv pull").attributes["baton.outcome"], tracing.only("kv pull").problem) == (
            "cancelled",
            "",
        )
        assert all(span.ended_s is not None for span in tracing.spans)


@asynccontextmanager
async def one_worker(tracing: RecordedTracing) -> AsyncIterator[Gateway]:
    """Return a connected gateway."""
    async with cluster(tracing=tracing) as workers:
        gateway = workers.gateway(workers.start("h", **SETTINGS))
        await gateway.connect()
        yield gateway


@virtual
async def test_repeated_job_has_one_span() -> None:
    tracing = RecordedTracing()
    async with one_worker(tracing) as gateway:
        job = decode_job(30, trace_context=REQUEST)
        gateway.send(job)
        gateway.send(job)
        await gateway.ended(job.job)
        await asyncio.sleep(0.1)
        decode = tracing.only("decode")
        assert [name for name, _ in decode.events] == ["first token", "admitted"]
        assert decode.attributes["baton.output_tokens"] == 8


@virtual
async def test_tokens_of_every_sample_count_and_replayed_ones_do_not() -> None:
    tracing = RecordedTracing()
    async with one_worker(tracing) as gateway:
        both = decode_job(30, trace_context=REQUEST, sample_indices=(0, 1))
        gateway.send(both)
        await gateway.ended(both.job)
        later = replace(
            decode_job(30, request=b"later", attempt=1, trace_context=REQUEST), num_prompt_tokens=27
        )  # 3 were delivered
        gateway.send(later)
        await gateway.ended(later.job)
        first, second = tracing.named("decode")
        assert first.attributes["baton.output_tokens"] == 16
        assert (second.attributes["baton.output_tokens"], second.attributes["baton.replayed_tokens"]) == (5, 3)
