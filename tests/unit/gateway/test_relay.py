"""Requests over stub workers without faults: responses, stop strings and cancellation."""

import asyncio

import pytest

from baton.core.errors import Reason
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import FinishReason
from tests.unit.gateway.fakes import PROMPT, OutputCollector, answer_to, cluster, token_at
from tests.unit.gateway.virtual import virtual


@virtual
async def test_prefill_and_decode_workers_produce_one_response() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        response = await c.complete(PROMPT, max_tokens=12)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 12)
        assert response.finishes[0] == [FinishReason.LENGTH]
        prefill, decode = (w.jobs[0] for w in c.scheduler.workers)
        assert isinstance(prefill, PrefillJob)
        assert isinstance(decode, DecodeJob)
        assert prefill.reader == c.scheduler.workers[1].ref
        assert decode.owner == c.scheduler.workers[0].ref
        assert prefill.job == decode.job
        assert prefill.token_ids == decode.token_ids


@virtual
async def test_ended_jobs_are_not_cancelled() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        await c.complete(PROMPT)
        await asyncio.sleep(1)
        assert [w.cancels for w in c.scheduler.workers] == [[], []]


@virtual
async def test_request_for_one_token_uses_no_decode_worker() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        response = await c.complete(PROMPT, max_tokens=1)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 1)
        p0, d0 = c.scheduler.workers
        assert isinstance(p0.jobs[0], PrefillJob)
        assert p0.jobs[0].reader is None
        assert d0.jobs == []


@virtual
async def test_hybrid_worker_computes_its_own_prefill() -> None:
    async with cluster(("h0", "hybrid")) as c:
        response = await c.complete(PROMPT)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert [job.owner for job in c.scheduler.workers[0].jobs] == [None]


@virtual
async def test_stop_at_the_first_token_cancels_the_decode_job() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        p0.finish_at = 1
        d0.prefill_s = 5
        response = await c.complete(PROMPT)
        assert response.finishes[0] == [FinishReason.STOP]
        await asyncio.sleep(0.1)
        assert [cancel.job for cancel in d0.cancels] == [d0.jobs[0].job]
        assert d0.open_jobs == []


@virtual
async def test_each_sample_of_each_prompt_is_a_choice() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        response = await c.complete(["one", "two"], n=3)
        assert {index: text.encode() for index, text in response.texts.items()} == {
            3 * p + s: answer_to(prompt, 8, s) for p, prompt in enumerate((b"one", b"two")) for s in range(3)
        }
        assert [job.sample_indices for job in c.scheduler.workers[0].jobs] == [(0, 1, 2)] * 2


@virtual
async def test_cancelling_a_call_cancels_both_jobs() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        p0.prefill_s = 5
        response = asyncio.create_task(c.complete(PROMPT))
        await asyncio.sleep(0.01)
        response.cancel()
        await asyncio.wait((response,))
        await asyncio.sleep(0.01)
        assert [w.open_jobs for w in (p0, d0)] == [[], []]
        assert [w.cancels[0].reason for w in (p0, d0)] == [Reason.CANCELLED] * 2
        assert c.gateway.num_open == 0


@virtual
async def test_stop_string_ends_and_cancels_one_sample() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        full_text = answer_to(PROMPT.encode(), 30, 1).decode()
        stop = full_text[9:12]
        response = await c.complete(PROMPT, n=2, max_tokens=30, stop=[stop])
        other = answer_to(PROMPT.encode(), 30, 0).decode()
        assert response.texts[1] == full_text[: full_text.find(stop)]
        assert response.texts[0] == (other[: other.find(stop)] if stop in other else other)
        assert response.finishes[1] == [FinishReason.STOP]
        await asyncio.sleep(0.1)
        d0 = c.scheduler.workers[1]
        assert [cancel.sample_indices for cancel in d0.cancels] == [(1,)]
        assert d0.open_jobs == []


@virtual
async def test_stop_string_of_the_only_sample_cancels_the_job() -> None:
    async with cluster(("h0", "hybrid")) as c:
        full_text = answer_to(PROMPT.encode(), 30).decode()
        response = await c.complete(PROMPT, max_tokens=30, stop=full_text[5:9])
        assert response.texts[0] == full_text[: full_text.find(full_text[5:9])]
        await asyncio.sleep(0.1)
        assert c.scheduler.workers[0].open_jobs == []


@virtual
async def test_token_that_ends_a_sample_has_no_text_unless_asked_for() -> None:
    async with cluster(("h0", "hybrid")) as c:
        c.scheduler.workers[0].finish_at = 5
        full_text = answer_to(PROMPT.encode(), 5).decode()
        response = await c.complete(PROMPT, max_tokens=30)
        assert response.texts[0] == full_text[:4]
        assert response.finishes[0] == [FinishReason.STOP]
        assert len(response.token_ids[0]) == 5
        response = await c.complete(PROMPT, max_tokens=30, include_stop_str_in_output=True)
        assert response.texts[0] == full_text
        response = await c.complete(PROMPT, max_tokens=5)  # the last token counts as the end of the model's answer
        assert response.texts[0] == full_text[:4]


@virtual
async def test_response_has_timeline_and_usage() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        call = await c.call(PROMPT, n=2, timeline=True)
        ending = await c.gateway.run(call, OutputCollector())
        assert (ending.usage.num_prompt_tokens, ending.usage.num_output_tokens, ending.usage.num_cached_tokens) == (
            5,
            16,
            4,
        )
        (timeline,) = ending.timeline
        assert [leg.worker_id for leg in timeline.legs] == ["p0", "d0"]
        assert (timeline.attempts, timeline.policy) == (1, "first")
        assert timeline.ttft_s == pytest.approx(0.02, abs=0.005)
        assert timeline.tpot_s == pytest.approx(0.01, abs=0.005)


def test_stub_tokens_depend_only_on_prompt_sample_and_position() -> None:
    assert answer_to(b"x", 9)[4:] == bytes(token_at(list(b"x"), 0, i) for i in range(4, 9))
    assert answer_to(b"x", 9) != answer_to(b"x", 9, 1)
