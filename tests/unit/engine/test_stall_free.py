"""A prompt beside sequences that decode: their gaps stay short, and the prompt goes on."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import LEAST_TIMES, STALL_TIMES, CostCorrection, StepCostModel, StepWork
from baton.engine.scheduling.step_budget import MixedStep, Part, StepTiming
from baton.engine.state.step import StepPlan
from tests.builders import sequence_request
from tests.engine_rig import EngineRig

COSTS = StepCostModel(
    step_s=4e-3, prefill_token_s=1e-4, prefill_attended_s=1e-8, decode_seq_s=2e-4, decode_context_s=1e-7
)


def beside(
    contexts: Sequence[int],
    prompts: Sequence[Part],
    *,
    costs: StepCostModel = COSTS,
    limit_s: float = 0.0,
    num_before: int = 0,
) -> int:
    return MixedStep.of(costs, contexts, prompts).most_tokens(limit_s, num_before, at_most=512, at_least=16)


def queued(num_tokens: int, num_prompts: int = 1) -> list[Part]:
    return [(num_tokens // num_prompts, 0)] * num_prompts


@given(
    contexts=st.lists(st.integers(1, 5_000), min_size=1, max_size=64),
    num_before=st.integers(0, 20_000),
    promised_s=st.just(0.0) | st.floats(0.001, 0.2),
)
def test_the_most_that_keeps_the_limit_is_taken(contexts: list[int], num_before: int, promised_s: float) -> None:
    def takes_s(num_tokens: int) -> float:
        return COSTS.step_seconds(StepWork.of([(num_tokens, num_before)], contexts))

    limit_s = max(promised_s, STALL_TIMES * COSTS.step_seconds(StepWork.of((), contexts)))
    taken = beside(contexts, queued(100), limit_s=promised_s, num_before=num_before)
    assert 16 <= taken <= 512
    assert taken == 16 or takes_s(taken) <= limit_s
    assert taken == 512 or takes_s(taken + 1) > limit_s


def test_where_any_part_of_a_prompt_makes_a_step_long_it_is_not_cut_small() -> None:
    """In a quarter of what the others take beside it anyway, it is done in fewer such steps."""
    slow_beside = replace(COSTS, mixed_factor=2.5)
    contexts = [500] * 32
    assert slow_beside.step_seconds(StepWork.of([(1, 0)], contexts)) > STALL_TIMES * slow_beside.step_seconds(
        StepWork.of((), contexts)
    )
    taken = beside(contexts, queued(1024), costs=slow_beside)
    with_s = slow_beside.step_seconds(StepWork.of([(taken, 0)], contexts))
    assert taken > 16
    assert with_s / slow_beside.step_seconds(StepWork.of([(1, 0)], contexts)) == pytest.approx(LEAST_TIMES, rel=0.05)


@pytest.mark.parametrize(("costs", "has_decoding"), [(None, True), (COSTS, False)])
def test_without_costs_or_sequences_that_decode_a_step_takes_what_fits(
    costs: StepCostModel | None, has_decoding: bool
) -> None:
    rig = EngineRig(max_num_batched_tokens=512, num_blocks=400, max_model_len=1000)
    rig.engine.pace = StepTiming(costs=lambda: costs, now_s=lambda: 0.0)
    if has_decoding:
        rig.add(sequence_request(1, range(10), max_tokens=200))
        rig.step()
    rig.add(sequence_request(9, range(20, 520), max_tokens=2))
    assert max(part.num_scheduled_tokens for part in rig.step().sequences) == 500


def test_prompts_that_have_waited_for_long_get_more() -> None:
    def taken(num_queued: int) -> int:
        return beside([500] * 8, queued(num_queued))

    assert taken(100) == taken(9_000) < taken(14_000) < taken(16_000) <= taken(300_000)


def test_prompts_that_are_many_beside_those_that_decode_get_more() -> None:
    def taken(num_prompts: int) -> int:
        return beside([500] * 8, queued(1600, num_prompts))

    assert taken(1) == taken(6) < taken(8) < taken(16) < taken(100) <= 512


def test_steps_with_a_prompt_that_take_longer_than_was_measured_carry_less_of_it() -> None:
    mine, its = (beside([500] * 8, queued(100), costs=costs) for costs in (COSTS, replace(COSTS, mixed_factor=1.3)))
    assert 16 < its < mine


def test_a_machine_that_has_become_slow_does_not_starve_prompts() -> None:
    """While prompts keep coming, how slow steps without them are is not seen."""
    correction, work = CostCorrection(COSTS), StepWork.of([(64, 0)], [500] * 8)
    for _ in range(500):
        correction.observe(work, 3 * COSTS.step_seconds(work))
    mine, its = (beside([500] * 8, queued(100), costs=costs) for costs in (COSTS, correction.costs))
    assert mine / 2 < its <= mine


@pytest.mark.parametrize("is_emulated", [True, False])
def test_decode_is_not_stalled_by_a_prompt(is_emulated: bool) -> None:
    rig = EngineRig(max_num_batched_tokens=512, num_blocks=400, max_model_len=1000)
    for seq_id in range(4):
        rig.add(sequence_request(seq_id, range(10), max_tokens=200))
    rig.step()
    rig.engine.pace = StepTiming(costs=lambda: COSTS, now_s=lambda: 0.0) if is_emulated else None
    rig.add(sequence_request(9, range(20, 520), max_tokens=2))
    plans: list[StepPlan] = [rig.step() for _ in range(30)]
    prompts = [max(part.num_scheduled_tokens for part in plan.sequences) for plan in plans]
    assert (max(prompts) <= 60) == is_emulated, "48 ms of prefill beside 5 ms of decode"
    assert sum(chunk for chunk in prompts if chunk > 1) >= 499, "the prompt was computed meanwhile"
    assert all(len(plan.sequences) >= 4 for plan in plans), "and nobody was left out"
