"""Tests of the measured share of step time that prompts take from decoding sequences."""

import asyncio
import math

import pytest

from baton.core.request import Sampling
from baton.core.step_cost import StepCostModel, StepWork
from baton.worker.costs.prefill_share import MIN_DECODING_S, WINDOW_S, RecentPrefillShare
from tests.unit.worker.harness import cluster
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.virtual_loop import virtual

COSTS = StepCostModel(
    step_s=0.01, prefill_token_s=1e-4, prefill_attended_s=0, decode_seq_s=1e-3, decode_context_s=0, decode_factor=2.0
)
DECODE = StepWork.of((), [100] * 10)
DECODE_S = COSTS.step_seconds(DECODE)
MIXED = StepWork.of([(256, 0)], [100] * 10)
PREFILL = StepWork.of([(256, 0)])


class Measuring:
    """A share and the clock that it reads. `steps` lets steps run one after the other."""

    def __init__(self, costs: StepCostModel | None = COSTS) -> None:
        self.now_s = 50.0
        self.of = RecentPrefillShare(lambda: costs, lambda: self.now_s)

    def steps(self, *steps: tuple[StepWork, float], times: int = 1) -> float:
        """Run the steps `times` times and return the share."""
        for work, step_s in steps * times:
            self.now_s += step_s
            self.of.observe(work, step_s)
        return self.of.share


def test_time_beyond_the_decodes_of_mixed_steps_counts() -> None:
    """Half of the time are mixed steps, of which three quarters are prefill."""
    measuring = Measuring()
    assert measuring.steps((DECODE, DECODE_S), times=50) == 0
    share = measuring.steps((MIXED, 4 * DECODE_S), *[(DECODE, DECODE_S)] * 4, times=500)
    assert share == pytest.approx(0.5 * 0.75, rel=0.02)
    mean_step_s = (4 + 4) * DECODE_S / 5
    assert DECODE_S / (1 - share) == pytest.approx(mean_step_s, rel=0.02), "the mean gap of a decoding sequence"


def test_prompts_that_delay_no_token_do_not_count() -> None:
    """One client that sends one request after the other."""
    assert Measuring().steps((PREFILL, 0.5), (DECODE, DECODE_S), times=100) == 0


def test_share_follows_the_load_within_the_window() -> None:
    measuring = Measuring()
    mixed, decode = (MIXED, 2 * DECODE_S), (DECODE, DECODE_S)
    steps_of_window = round(WINDOW_S / DECODE_S)
    assert measuring.steps(mixed, times=2 * steps_of_window) == pytest.approx(0.5)
    after_window = measuring.steps(decode, times=steps_of_window)
    assert after_window == pytest.approx(0.5 / math.e, rel=0.05)


def test_a_single_mixed_step_and_an_old_load_count_little() -> None:
    measuring = Measuring()
    assert measuring.steps((MIXED, 4 * DECODE_S)) == pytest.approx(3 * DECODE_S / MIN_DECODING_S)
    busy = measuring.steps((MIXED, 4 * DECODE_S), times=1000)
    assert busy == pytest.approx(0.75)
    measuring.now_s += WINDOW_S
    assert measuring.of.share == pytest.approx(busy), "a pause changes nothing yet"
    measuring.now_s += 5 * WINDOW_S
    assert measuring.of.share < 0.1 * busy


def test_invalid_durations_and_unknown_costs_count_nothing() -> None:
    measuring = Measuring()
    for step_s in (0.0, -1.0, math.nan, math.inf):
        measuring.of.observe(MIXED, step_s)
    assert measuring.of.share == 0
    assert Measuring(costs=None).steps((MIXED, 4 * DECODE_S), times=100) == 0


@virtual
async def test_hybrid_worker_reports_its_share() -> None:
    """One long answer decodes while prompts keep coming, on a simulated device with exact costs."""
    async with cluster() as made:
        node = made.start("h", num_blocks=2000, max_num_batched_tokens=64)
        gateway = made.gateway(node)
        await gateway.connect()
        gateway.send(decode_job(10, request=b"long", sampling=Sampling(max_tokens=3000, ignore_eos=True)))
        await asyncio.sleep(1.0)
        assert node.worker.report(1, ()).recent_prefill_share == 0
        for number in range(200):
            gateway.send(decode_job(100, request=f"{number}".encode(), sampling=Sampling(max_tokens=1)))
            await asyncio.sleep(0.02)
        # 10 ms of every 20 ms compute a prompt, during 4 of 5 s
        assert node.worker.report(2, ()).recent_prefill_share == pytest.approx(0.5 * 4 / 5, rel=0.15)
