"""TTFT and TPOT: one definition, for any number of tokens, samples, repeats and attempts."""

import asyncio
from typing import Any

import pytest

from baton.core.ids import JobId
from baton.core.request import LegTimeline, TokenDelta, Usage
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.latency import TokenLatency
from tests.unit.gateway.fakes import cluster, until
from tests.unit.gateway.virtual import virtual

JOB = JobId(request_id=b"r", attempt=0)


def delta(begin: int, *tokens: int, sample: int = 0, **fields: Any) -> TokenDelta:
    return TokenDelta(job=JOB, sample_index=sample, output_index=begin, token_ids=tokens, **fields)


def test_tpot_is_none_without_two_tokens() -> None:
    latency = TokenLatency()
    assert (latency.ttft_s(1.0), latency.tpot_s) == (None, None)
    latency.record(0, 1, 3.0)
    assert (latency.ttft_s(1.0), latency.tpot_s) == (2.0, None)
    latency.record(0, 0, 9.0)
    assert (latency.tpot_s, latency.last_s) == (None, 3.0)


def test_tpot_is_the_mean_gap_after_the_first_token() -> None:
    latency = TokenLatency()
    for num_tokens, now_s in ((1, 3.0), (1, 5.0), (2, 6.0)):
        latency.record(0, num_tokens, now_s)
    assert (latency.tpot_s, latency.num_tokens) == (1.0, 4)


def test_tokens_delivered_together_have_a_gap_of_zero() -> None:
    latency = TokenLatency()
    latency.record(0, 2, 3.0)
    assert latency.tpot_s == 0.0


def test_tpot_averages_gaps_within_samples_only() -> None:
    latency = TokenLatency()
    for sample, now_s in ((0, 1.0), (1, 1.0), (0, 2.0), (1, 5.0), (1, 6.0), (2, 50.0)):
        latency.record(sample, 1, now_s)
    assert latency.tpot_s == pytest.approx((1 + 5) / 3)


@virtual
async def test_repeated_token_does_not_change_latency() -> None:
    delivery = Delivery([0])
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    delivery.accept(delta(0, 7))
    await asyncio.sleep(1)
    assert delivery.accept(delta(0, 7)) is None
    assert (delivery.latency.tpot_s, delivery.latency.last_s) == (None, began_s)
    await asyncio.sleep(1)
    delivery.accept(delta(0, 7, 8, 9))
    assert delivery.latency.tpot_s == pytest.approx(1.0)


@virtual
async def test_prefill_report_repeated_by_the_decode_worker_counts_once() -> None:
    timeline = LegTimeline(worker_id="p0", pid=1, num_computed_tokens=5)
    usage = Usage(num_prompt_tokens=5, num_cached_tokens={"device": 4})
    delivery = Delivery([0])
    for _ in range(2):
        delivery.accept(delta(0, 7, timeline=timeline, usage=usage))
    assert delivery.legs == {JOB: [timeline]}
    assert (delivery.num_cached_tokens, delivery.cached_tokens_of(JobId(request_id=b"r", attempt=1))) == (4, {})


@virtual
async def test_scheduler_gets_values_of_one_attempt_and_client_of_all() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0, h1 = c.scheduler.workers
        h0.before_token = lambda worker, _job, _sample, index: worker.die() if index == 1 else None
        h1.prefill_s = 5.0
        timeline = await c.timeline("hello", max_tokens=4)
        await until(lambda: len(c.scheduler.actuals) == 2)
        lost, finished = c.scheduler.actuals
        assert (lost.num_output_tokens, lost.tpot_s, lost.legs) == (1, None, ())
        assert (finished.num_output_tokens, [leg.worker_id for leg in finished.legs]) == (3, ["h1"])
        assert finished.tpot_s == pytest.approx(0.01, abs=0.001)
        assert timeline.tpot_s == pytest.approx((5.0 + 0.03) / 3, rel=0.05)
        assert timeline.attempts == 2
