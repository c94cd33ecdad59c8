"""Tests of the measured tokens that drafts give in the time of a step without drafts."""

import asyncio

import pytest

from baton.core.request import Sampling
from baton.core.step_cost import StepCostModel, StepWork
from baton.worker.costs.draft_speedup import WINDOW_S, RecentDraftSpeedup
from tests.unit.worker.harness import cluster
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.virtual_loop import virtual

COSTS = StepCostModel(
    step_s=0.01, prefill_token_s=1e-4, prefill_attended_s=0, decode_seq_s=1e-3, decode_context_s=0, draft_token_s=5e-4
)
DECODE = StepWork.of((), [100] * 4)
VERIFY = StepWork.of((), [100] * 4, [(3, 101)] * 4)
DECODE_S = COSTS.step_seconds(DECODE)


class MeasuredSpeedup:
    """A speed-up and the clock that it reads. `steps` lets steps run one after the other."""

    def __init__(self, costs: StepCostModel | None = COSTS) -> None:
        self.now_s = 50.0
        self.num_accepted = 0
        self.of = RecentDraftSpeedup(lambda: costs, lambda: self.now_s)

    def steps(
        self, work: StepWork, step_s: float, *, accepted: int = 0, model_s: float = 0.0, times: int = 4000
    ) -> float:
        """Run equal steps, of which each accepts as many drafts, and return the tokens per step."""
        for _ in range(times):
            self.now_s += step_s + model_s
            self.of.observe(work, step_s, model_s, self.num_accepted)
            self.num_accepted += accepted
        return self.of.now.tokens_per_step


def test_accepted_drafts_count_for_the_sequences_that_share_a_step() -> None:
    """Of 12 drafts of 4 sequences 8 are right: 3 tokens each, in a step that is half as long again."""
    assert MeasuredSpeedup().steps(VERIFY, 1.5 * DECODE_S, accepted=8) == pytest.approx(2.0, rel=0.06)


def test_length_of_steps_is_that_of_those_without_drafts() -> None:
    measuring = MeasuredSpeedup()
    measuring.steps(VERIFY, 1.5 * DECODE_S, accepted=8)
    assert measuring.of.now.step_length == pytest.approx(1.5, rel=0.06)
    measuring = MeasuredSpeedup()
    measuring.steps(DECODE, 3.0 * DECODE_S)
    assert measuring.of.now.step_length == pytest.approx(1.0)


def test_time_of_the_draft_model_counts() -> None:
    found = MeasuredSpeedup().steps(VERIFY, 1.5 * DECODE_S, accepted=8, model_s=1.5 * DECODE_S)
    assert found == pytest.approx(1.0, rel=0.01)


def test_steps_without_drafts_count_as_predicted_however_long_they_are() -> None:
    for factor in (0.3, 1.0, 3.0):
        assert MeasuredSpeedup().steps(DECODE, factor * DECODE_S, times=100) == pytest.approx(1.0)


def test_it_follows_the_load_and_is_forgotten() -> None:
    measuring = MeasuredSpeedup()
    assert measuring.steps(VERIFY, DECODE_S, accepted=4) > 1.8
    assert measuring.steps(DECODE, DECODE_S, times=round(WINDOW_S / DECODE_S)) < 1.5
    measuring.now_s += 10 * WINDOW_S
    assert measuring.of.now.tokens_per_step == pytest.approx(1.0, abs=0.01)


def test_nothing_is_measured_without_costs_or_decoding_sequences() -> None:
    assert MeasuredSpeedup(None).steps(VERIFY, DECODE_S, accepted=8, times=50) == 1.0
    assert MeasuredSpeedup().steps(StepWork.of([(64, 0)]), DECODE_S, times=50) == 1.0
    assert MeasuredSpeedup().steps(VERIFY, float("inf"), times=5) == 1.0


@virtual
async def test_worker_reports_it() -> None:
    async with cluster() as made:
        node = made.start("h", num_blocks=2000, max_num_batched_tokens=64)
        gateway = made.gateway(node)
        await gateway.connect()
        gateway.send(decode_job(10, request=b"long", sampling=Sampling(max_tokens=300, ignore_eos=True)))
        await asyncio.sleep(1.0)
        assert node.worker.report(1, ()).tokens_per_step == pytest.approx(1.0, abs=0.2)
