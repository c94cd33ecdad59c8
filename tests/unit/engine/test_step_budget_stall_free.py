"""Prefill in a step with decodes: token gaps stay short, and the prompt makes progress."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import baton.engine
from baton.core.step_cost import MIN_MIXED_FACTOR, STALL_FACTOR, CostCorrection, StepCostModel, StepWork
from baton.engine.engine import unknown_costs
from baton.engine.scheduling.step_budget import MixedStep, PrefillPart
from baton.engine.state.step import StepPlan
from tests.builders import sequence_request
from tests.engine_rig import EngineRig

COSTS = StepCostModel(
    step_s=4e-3, prefill_token_s=1e-4, prefill_attended_s=1e-8, decode_seq_s=2e-4, decode_context_s=1e-7
)


def prefill_tokens(
    contexts: Sequence[int],
    prefills: Sequence[PrefillPart],
    *,
    costs: StepCostModel = COSTS,
    slo_step_s: float = 0.0,
    num_before: int = 0,
) -> int:
    step = MixedStep.of(costs, contexts, prefills)
    return step.max_prefill_tokens(slo_step_s, num_before, at_most=512, at_least=16)


def queued(num_tokens: int, num_prompts: int = 1) -> list[PrefillPart]:
    return [(num_tokens // num_prompts, 0)] * num_prompts


@given(
    contexts=st.lists(st.integers(1, 5_000), min_size=1, max_size=64),
    num_before=st.integers(0, 20_000),
    slo_step_s=st.just(0.0) | st.floats(0.001, 0.2),
)
def test_prefill_takes_the_most_tokens_that_keep_the_limit(
    contexts: list[int], num_before: int, slo_step_s: float
) -> None:
    def takes_s(num_tokens: int) -> float:
        return COSTS.step_seconds(StepWork.of([(num_tokens, num_before)], contexts))

    limit_s = max(slo_step_s, STALL_FACTOR * COSTS.step_seconds(StepWork.of((), contexts)))
    taken = prefill_tokens(contexts, queued(100), slo_step_s=slo_step_s, num_before=num_before)
    assert 16 <= taken <= 512
    assert taken == 16 or takes_s(taken) <= limit_s
    assert taken == 512 or takes_s(taken + 1) > limit_s


def test_chunks_stay_useful_if_any_prefill_makes_a_step_long() -> None:
    """A chunk may add a quarter to the decodes' part of a mixed step. Smaller chunks would make more long
    steps."""
    slow_mixed = replace(COSTS, mixed_factor=2.5)
    contexts = [500] * 32
    assert slow_mixed.step_seconds(StepWork.of([(1, 0)], contexts)) > STALL_FACTOR * slow_mixed.step_seconds(
        StepWork.of((), contexts)
    )
    taken = prefill_tokens(contexts, queued(1024), costs=slow_mixed)
    with_s = slow_mixed.step_seconds(StepWork.of([(taken, 0)], contexts))
    assert taken > 16
    assert with_s / slow_mixed.step_seconds(StepWork.of([(1, 0)], contexts)) == pytest.approx(
        MIN_MIXED_FACTOR, rel=0.05
    )


@pytest.mark.parametrize(("costs", "has_decoding"), [(None, True), (COSTS, False)])
def test_step_is_full_without_costs_or_without_decodes(costs: StepCostModel | None, has_decoding: bool) -> None:
    rig = EngineRig(
        max_num_batched_tokens=512, num_blocks=400, max_model_len=1000, step_costs=lambda: costs, clock=lambda: 0.0
    )
    if has_decoding:
        rig.add(sequence_request(1, range(10), max_tokens=200))
        rig.step()
    rig.add(sequence_request(9, range(20, 520), max_tokens=2))
    assert max(part.num_scheduled_tokens for part in rig.step().sequences) == 500


def test_prefill_gets_more_if_the_queue_is_long_in_seconds() -> None:
    def taken(num_queued: int) -> int:
        return prefill_tokens([500] * 8, queued(num_queued))

    assert taken(100) == taken(9_000) < taken(14_000) < taken(16_000) <= taken(300_000)


def test_prefill_gets_more_if_many_prompts_are_queued_for_few_decodes() -> None:
    def taken(num_prompts: int) -> int:
        return prefill_tokens([500] * 8, queued(1600, num_prompts))

    assert taken(1) == taken(6) < taken(8) < taken(16) < taken(100) <= 512


def test_chunks_shrink_if_mixed_steps_are_slower_than_measured() -> None:
    measured, slower = (
        prefill_tokens([500] * 8, queued(100), costs=costs) for costs in (COSTS, replace(COSTS, mixed_factor=1.3))
    )
    assert 16 < slower < measured


def test_slow_machine_does_not_starve_prefill() -> None:
    """While prompts keep coming, no decode-only step is seen, so its factor must follow that of mixed
    steps."""
    correction, work = CostCorrection(COSTS), StepWork.of([(64, 0)], [500] * 8)
    for _ in range(500):
        correction.observe(work, 3 * COSTS.step_seconds(work))
    before, after = (prefill_tokens([500] * 8, queued(100), costs=costs) for costs in (COSTS, correction.costs))
    assert before / 2 < after <= before


@pytest.mark.parametrize("is_limited", [True, False])
def test_long_prompt_does_not_stall_decodes(is_limited: bool) -> None:
    rig = EngineRig(
        max_num_batched_tokens=512,
        num_blocks=400,
        max_model_len=1000,
        step_costs=(lambda: COSTS) if is_limited else unknown_costs,
        clock=lambda: 0.0,
    )
    for seq_id in range(4):
        rig.add(sequence_request(seq_id, range(10), max_tokens=200))
    rig.step()
    rig.add(sequence_request(9, range(20, 520), max_tokens=2))
    plans: list[StepPlan] = [rig.step() for _ in range(30)]
    prompts = [max(part.num_scheduled_tokens for part in plan.sequences) for plan in plans]
    assert (max(prompts) <= 60) == is_limited, "without a limit: 48 ms of prefill in a step of 5 ms of decode"
    assert sum(chunk for chunk in prompts if chunk > 1) >= 499, "the prompt was computed meanwhile"
    assert all(len(plan.sequences) >= 4 for plan in plans), "every sequence is in every step"


def test_only_step_budget_uses_the_stall_free_rule() -> None:
    """Step sizing has one owner in the engine: no other module imports the rule or its constants."""
    rule = {"stall_free_step_s", "STALL_FACTOR", "MIN_MIXED_FACTOR", "QUEUE_TARGET_S", "MAX_PREFILL_SHARE"}
    users = set()
    for path in Path(baton.engine.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and rule & {alias.name for alias in node.names}:
                users.add(path.name)
            if isinstance(node, ast.Attribute) and node.attr in rule:
                users.add(path.name)
    assert users == {"step_budget.py"}


def test_engine_computes_the_budget_once_per_step() -> None:
    num_budgets = 0

    def count_budget() -> StepCostModel:
        nonlocal num_budgets
        num_budgets += 1
        return COSTS

    rig = EngineRig(step_costs=count_budget, clock=lambda: 0.0)
    rig.add(sequence_request(1, range(60), max_tokens=3))
    counts = []
    for _ in range(3):
        rig.step()
        counts.append(num_budgets)
    assert counts == [1, 2, 2], "two chunks of prefill; a decode-only step needs no budget"
