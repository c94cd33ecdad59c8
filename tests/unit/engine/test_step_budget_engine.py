"""The engine runs steps within the budget, and keeps each request's latency targets from its arrival."""

from dataclasses import replace

import pytest

from baton.core.step_cost import CostCorrection, StepCostModel, StepWork
from baton.core.step_targets import DEFAULT_FACTORS, LatencyTargets, TargetFactors
from baton.engine.engine import unknown_costs
from baton.engine.scheduling.step_budget import DraftSpeedup
from baton.engine.speculation.acceptance import AcceptanceRates
from baton.engine.speculation.sequence_drafts import SequenceDrafts
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.step import StepPlan
from baton.worker.costs.step_cost_keeper import work_of
from tests.builders import sequence_request
from tests.engine_rig import EngineRig

COSTS = StepCostModel(
    step_s=4e-3, prefill_token_s=1e-4, prefill_attended_s=1e-8, decode_seq_s=2e-4, decode_context_s=1e-7
)
WIDE = {"max_num_batched_tokens": 512, "num_blocks": 600, "max_model_len": 1000}


@pytest.mark.parametrize("is_limited", [True, False])
def test_long_prompts_delay_answers_at_most_to_their_targets(is_limited: bool) -> None:
    """Without a limit, 508 prompt tokens take 50 ms of a step, and decodes 5 ms."""
    now_s, factor = 0.0, 3.0
    rig = EngineRig(
        step_costs=(lambda: COSTS) if is_limited else unknown_costs,
        clock=lambda: now_s,
        targets=TargetFactors(tpot=factor),
        **WIDE,
    )

    def step() -> StepPlan:
        nonlocal now_s
        plan = rig.plan()
        now_s += COSTS.step_seconds(work_of(plan))
        rig.apply(plan)
        return plan

    for seq_id in range(4):
        rig.add(sequence_request(seq_id, range(10), max_tokens=20, sampling={"ignore_eos": True}))
    step()
    began_s = now_s
    for seq_id in range(9, 13):
        rig.add(sequence_request(seq_id, range(1000 * seq_id, 1000 * seq_id + 500), max_tokens=2))
    plans = [step() for _ in range(19)]
    assert all(len(plan.sequences) >= 4 for plan in plans), "every sequence is in every step"
    assert (now_s - began_s <= 19 * factor * COSTS.decode_step_s(1, 10)) == is_limited
    assert max(part.num_scheduled_tokens for part in plans[0].sequences) >= 400, "the first is computed at once"


def test_answer_with_a_loose_slo_gives_more_to_a_prompt_that_has_waited() -> None:
    def largest_part(tpot_slo_s: float) -> int:
        rig = EngineRig(step_costs=lambda: COSTS, clock=lambda: 100.0, **WIDE)
        rig.add(sequence_request(1, range(10), max_tokens=3, sampling={"ignore_eos": True}, tpot_slo_s=tpot_slo_s))
        rig.step()
        rig.add(sequence_request(9, range(20, 520), max_tokens=2, waited_s=0.3))
        return max(part.num_scheduled_tokens for part in rig.step().sequences)

    assert largest_part(0.2) >= 450
    assert largest_part(0.0) <= 300


def test_drafts_leave_more_of_the_step_time_to_a_prompt() -> None:
    def largest_part(tokens_per_step: float) -> int:
        speedup = DraftSpeedup(tokens_per_step)
        rig = EngineRig(step_costs=lambda: COSTS, clock=lambda: 100.0, draft_speedup=lambda: speedup, **WIDE)
        rig.add(sequence_request(1, range(10), max_tokens=3, sampling={"ignore_eos": True}))
        rig.step()
        rig.add(sequence_request(9, range(20, 520), max_tokens=2, waited_s=0.3))
        return max(part.num_scheduled_tokens for part in rig.step().sequences)

    assert largest_part(2.5) > largest_part(1.0)


def test_sequences_are_as_fast_as_their_own_recent_steps() -> None:
    """All sequences together get 4 tokens in the time of a plain step, in steps that are half as long
    again."""
    speedup = DraftSpeedup(4.0, 1.5)
    rig = EngineRig(step_costs=lambda: COSTS, speculation=Speculation([]), draft_speedup=lambda: speedup, **WIDE)
    rig.add(sequence_request(1, range(10), max_tokens=200, sampling={"ignore_eos": True}))
    rig.step()
    (seq,) = rig.engine._sequences.running.values()
    tokens_per_step = rig.engine._tokens_per_step(speedup)
    assert tokens_per_step(seq) == pytest.approx(4.0), "the mean, while little is known"
    for _ in range(10):
        rig.step()
    assert tokens_per_step(seq) == pytest.approx(1 / 1.5)
    drafts = SequenceDrafts(seq, (), (), AcceptanceRates(10.0), 0)
    for num_tokens in (8, 7, 9, 8, 8, 1, 15, 8):
        drafts.observe(num_tokens, 2)
    assert drafts.tokens_per_step(1.0) == pytest.approx(8.0, rel=0.1)


def test_targets_follow_from_the_costs_at_arrival() -> None:
    """Later corrections do not move them, and a cached prompt has the target of its length."""
    costs = [COSTS]
    rig = EngineRig(step_costs=lambda: costs[0], targets=TargetFactors(ttft=8.0, tpot=2.0), **WIDE)
    rig.add(sequence_request(1, range(400), max_tokens=2))
    costs[0] = replace(COSTS, prefill_factor=3.0)
    rig.run()
    costs[0] = COSTS
    rig.add(sequence_request(2, range(400), max_tokens=2, waited_s=7.0))
    rig.add(sequence_request(3, range(500, 900), max_tokens=2, ttft_slo_s=0.25, tpot_slo_s=0.03))
    cached, asking = rig.engine._sequences.queue.values()
    assert cached.targets is not None
    assert asking.targets is not None
    full_s = COSTS.prefill_s(400, 0, 512)
    assert cached.targets.ttft.target_s == pytest.approx(8.0 * full_s)
    assert cached.targets.tpot.target_s == pytest.approx(2.0 * COSTS.decode_step_s(1, 400))
    assert cached.arrived_s == -7.0
    assert (asking.targets.ttft.target_s, asking.targets.tpot.target_s) == (0.25, 0.03)
    assert asking.targets.ttft.is_slo
    assert asking.targets.tpot.is_slo


def test_unknown_costs_give_no_targets() -> None:
    rig = EngineRig()
    rig.add(sequence_request(1, range(40), max_tokens=2, tpot_slo_s=0.1))
    assert next(iter(rig.engine._sequences.queue.values())).targets is None


@pytest.mark.parametrize(("ttft", "tpot"), [(1.0, 3.0), (10.0, 0.5), (float("inf"), 3.0), (float("nan"), 3.0)])
def test_factors_must_be_above_one(ttft: float, tpot: float) -> None:
    with pytest.raises(ValueError, match="must be above 1"):
        TargetFactors(ttft=ttft, tpot=tpot)


@pytest.mark.parametrize("costs", [[0.0, 1e-4, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1e-3, 0.0, 0.0]])
def test_costs_of_zero_give_targets(costs: list[float]) -> None:
    """An emulated device may have free decodes, or free prompts."""
    free = StepCostModel.of(costs)
    targets = LatencyTargets.of(free, DEFAULT_FACTORS, num_tokens=10, chunk_tokens=512)
    assert targets.tpot.target_s >= 0
    rig = EngineRig(step_costs=lambda: free, **WIDE)
    for seq_id in range(3):
        rig.add(sequence_request(seq_id, range(10 + seq_id), max_tokens=5, waited_s=0.1))
    assert rig.run() < 20


def test_slow_machine_does_not_starve_prefill() -> None:
    """While prompts keep coming, no decode-only step is seen, so its factor must follow that of mixed
    steps."""
    correction, work = CostCorrection(COSTS), StepWork.of([(64, 0)], [500] * 8)
    for _ in range(500):
        correction.observe(work, 3 * COSTS.step_seconds(work))

    def largest_chunk(costs: StepCostModel) -> int:
        rig = EngineRig(step_costs=lambda: costs, **WIDE)
        for seq_id in range(8):
            rig.add(sequence_request(seq_id, range(10), max_tokens=40, sampling={"ignore_eos": True}))
        rig.step()
        rig.add(sequence_request(9, range(20, 520), max_tokens=2))
        return max(part.num_scheduled_tokens for part in rig.step().sequences)

    before, after = largest_chunk(COSTS), largest_chunk(correction.costs)
    assert before / 2 < after <= 1.5 * before


def test_engine_computes_the_budget_once_per_step() -> None:
    num_budgets = 0

    def count_budget() -> StepCostModel:
        nonlocal num_budgets
        num_budgets += 1
        return COSTS

    rig = EngineRig(step_costs=count_budget)
    rig.add(sequence_request(1, range(60), max_tokens=3))
    counts = []
    for _ in range(3):
        rig.step()
        counts.append(num_budgets)
    assert counts == [2, 3, 3], "once for its targets, and two chunks of prefill; a decode-only step needs no budget"
