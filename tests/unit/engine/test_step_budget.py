"""The step budget gives prompts the time that answers can spare within their targets."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.core.kv.block_hash import BlockHash
from baton.core.request import Sampling
from baton.core.step_cost import StepCostModel, StepWork
from baton.core.step_targets import PLANNED_SHARE, LatencyTargets, TargetFactors
from baton.engine.scheduling.step_budget import EXPECTED_OUTPUT_SHARE, StepBudget, plan, record_token
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.sequence import EngineSequence, SequenceRequest

COSTS = StepCostModel(
    step_s=4e-3, prefill_token_s=1e-4, prefill_attended_s=1e-8, decode_seq_s=2e-4, decode_context_s=1e-7
)
CONFIG = EngineConfig(max_num_batched_tokens=512, max_num_seqs=64, max_model_len=10_000, block_size_tokens=16)
FACTORS = TargetFactors(ttft=10.0, tpot=3.0)
UNLOADED_GAP_S = COSTS.decode_step_s(1, 500)
NOW_S = 100.0
NEAR = {"num_tokens": 60, "num_left": 4}
"""An answer that is nearly complete: it can spare little if its mean gap is near its target."""


def sequence(key: int, num_tokens: int, *, costs: StepCostModel = COSTS, **fields: Any) -> EngineSequence:
    """Return a sequence with `num_tokens` prompt tokens that arrived at `arrived_s`, default `NOW_S`."""
    arrived_s = fields.pop("arrived_s", NOW_S)
    slos = {name: fields.get(name, 0.0) for name in ("ttft_slo_s", "tpot_slo_s")}
    sampling = Sampling(**{"seed": 0, "max_tokens": fields.pop("max_tokens", 64), **fields.pop("sampling", {})})
    request = SequenceRequest(
        seq_id=key,
        token_ids=array("I", range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=sampling,
        root_hash=BlockHash(bytes(16)),
        **fields,
    )
    targets = LatencyTargets.of(costs, FACTORS, num_tokens=num_tokens, chunk_tokens=512, **slos)
    return EngineSequence(request, key=key, arrival=key, arrived_s=arrived_s, targets=targets)


def prompt(key: int, num_tokens: int = 1000, *, waited_s: float = 0.0, **fields: Any) -> EngineSequence:
    """Return a queued prompt."""
    return sequence(key, num_tokens, arrived_s=NOW_S - waited_s, **{"max_tokens": 64, **fields})


def answer(
    key: int, num_tokens: int = 20, *, num_left: int = 44, gap: float = 1.0, ignore_eos: bool = True, **fields: Any
) -> EngineSequence:
    """Return a decoding sequence with `num_tokens` output tokens, `gap` unloaded gaps apart."""
    seq = sequence(key, 500, max_tokens=num_tokens + num_left, sampling={"ignore_eos": ignore_eos}, **fields)
    record_token(seq, NOW_S - gap * UNLOADED_GAP_S * (num_tokens - 1))
    for token in range(num_tokens):
        seq.append(token)
    seq.num_computed_tokens = len(seq.token_ids) - 1
    return seq


def budget_of(
    answers: Sequence[EngineSequence],
    prompts: Sequence[EngineSequence],
    *,
    costs: StepCostModel | None = COSTS,
    mean_output_tokens: float = 0.0,
    now_s: float = NOW_S,
    tokens_per_step: float | dict[int, float] = 1.0,
) -> StepBudget:
    """tokens_per_step: of all answers, or by key."""
    parts = [(seq, (len(seq.token_ids) - seq.num_computed_tokens, seq.num_computed_tokens)) for seq in prompts]
    return plan(
        answers,
        parts,
        costs,
        now_s,
        config=CONFIG,
        mean_output_tokens=mean_output_tokens,
        tokens_per_step=lambda seq: tokens_per_step[seq.key] if isinstance(tokens_per_step, dict) else tokens_per_step,
    )


def prompt_tokens(answers: Sequence[EngineSequence], prompts: Sequence[EngineSequence], **more: Any) -> int:
    """Return how many prompt tokens the next step may carry."""
    return budget_of(answers, prompts, **more).num_tokens - len(answers)


def step_s(answers: Sequence[EngineSequence], num_prompt_tokens: int, costs: StepCostModel = COSTS) -> float:
    chunks = [(num_prompt_tokens, 0)] if num_prompt_tokens else []
    return costs.step_seconds(StepWork.of(chunks, [seq.num_computed_tokens for seq in answers]))


# what answers can spare


@pytest.mark.parametrize("num_left", [2, 4, 6])
def test_prompt_gets_what_the_answer_can_spare_at_once(num_left: int) -> None:
    """Each remaining token may take as long as its target, and takes a decode step."""
    answers = [answer(1, num_tokens=1, num_left=num_left)]
    decode_s = step_s(answers, 0)
    spare_s = num_left * (PLANNED_SHARE * FACTORS.tpot * UNLOADED_GAP_S - decode_s)
    assert step_s(answers, prompt_tokens(answers, [prompt(9)])) - decode_s == pytest.approx(spare_s, rel=0.02)


def test_answer_that_can_spare_nothing_more_gets_steps_of_one_prompt_token() -> None:
    assert prompt_tokens([answer(1, gap=2.85, **NEAR), answer(2)], [prompt(9)]) == 1


@pytest.mark.parametrize("mixed_factor", [0.8, 1.0, 1.2])
def test_answer_spares_what_later_decode_only_steps_leave(mixed_factor: float) -> None:
    """Steps with prefill may be slower than those without, or faster."""
    costs = replace(COSTS, mixed_factor=mixed_factor)
    answers = [answer(1, num_tokens=1, num_left=4)]
    took_s = step_s(answers, prompt_tokens(answers, [prompt(9)], costs=costs), costs)
    planned_s = 4 * PLANNED_SHARE * FACTORS.tpot * UNLOADED_GAP_S
    assert took_s + 3 * step_s(answers, 0) == pytest.approx(planned_s, rel=0.02)


def test_prompt_that_answers_can_wait_for_is_computed_at_once() -> None:
    """Together, 2,000 tokens lose hardly anything to a prompt of 100 tokens."""
    assert prompt_tokens([answer(1, num_tokens=1, num_left=2_000)], [prompt(9, 100)]) >= 100


@settings(max_examples=40)
@given(gaps=st.lists(st.sampled_from([2.5, 2.6, 2.65, 2.7, 2.75, 2.8]), min_size=2, max_size=2))
def test_answer_that_is_ahead_gives_more(gaps: list[float]) -> None:
    ahead, behind = (prompt_tokens([answer(1, gap=gap, **NEAR)], [prompt(9)]) for gap in sorted(gaps))
    assert ahead >= behind
    assert behind < ahead or gaps[0] == gaps[1] or behind in (1, CONFIG.max_num_batched_tokens - 1)


@settings(max_examples=40)
@given(
    gaps=st.lists(st.floats(2.4, 2.75), min_size=1, max_size=8),
    waited_s=st.lists(st.floats(0.0, 0.45), min_size=1, max_size=4),
    tokens_per_step=st.sampled_from([1.0, 2.75]),
)
def test_answers_on_time_are_not_slowed_down_beyond_their_target(
    gaps: list[float], waited_s: list[float], tokens_per_step: float
) -> None:
    """If all later steps only decode, each answer meets the planned part of its target."""
    answers = [answer(key, gap=gap, **NEAR) for key, gap in enumerate(gaps)]
    prompts = [prompt(100 + key, 600, waited_s=each) for key, each in enumerate(waited_s)]
    budget = budget_of(answers, prompts, tokens_per_step=tokens_per_step)
    assert budget.num_late == 0
    num_tokens = budget.num_tokens - len(answers)
    assume(num_tokens > 1)  # each step carries one token, if no answer can spare it, too
    took_s = step_s(answers, num_tokens)
    later_s = (4 / tokens_per_step - 1) * step_s(answers, 0)
    for seq in answers:
        assert seq.targets is not None
        assert seq.first_token_s is not None
        assert NOW_S - seq.first_token_s + took_s + later_s <= 63 * seq.targets.tpot.planned_s


@settings(max_examples=40)
@given(
    num_answers=st.integers(1, 40),
    gap=st.floats(0.5, 20.0),
    waited_s=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=20),
    mixed_factor=st.sampled_from([0.8, 1.0, 2.5]),
)
def test_neither_side_starves(num_answers: int, gap: float, waited_s: list[float], mixed_factor: float) -> None:
    """Prompts get a token at least. Decodes are in every step, and steps are bounded."""
    costs = replace(COSTS, mixed_factor=mixed_factor)
    answers = [answer(key, gap=gap, costs=costs) for key in range(num_answers)]
    budget = budget_of(answers, [prompt(100 + i, waited_s=each) for i, each in enumerate(waited_s)], costs=costs)
    assert num_answers < budget.num_tokens <= CONFIG.max_num_batched_tokens


def test_slow_mixed_steps_carry_useful_chunks() -> None:
    """If a chunk of any size makes a step 2.5 times as long, tiny chunks would only make more such steps."""
    costs = replace(COSTS, mixed_factor=2.5)
    answers = [answer(key, costs=costs) for key in range(8)]
    overhead_s = step_s(answers, 1, costs) - step_s(answers, 0, costs)
    num_tokens = prompt_tokens(answers, [prompt(100)], costs=costs)
    assert step_s(answers, num_tokens, costs) - step_s(answers, 1, costs) >= 0.9 * overhead_s


@pytest.mark.parametrize(("costs", "num_answers"), [(None, 3), (COSTS, 0)])
def test_step_is_full_without_costs_or_without_decodes(costs: StepCostModel | None, num_answers: int) -> None:
    answers = [answer(key) for key in range(num_answers)]
    assert budget_of(answers, [prompt(9)], costs=costs).num_tokens == CONFIG.max_num_batched_tokens


# late requests and overload


def test_a_single_late_prompt_changes_nothing() -> None:
    answers = [answer(key, gap=2.65, **NEAR) for key in range(4)]
    fresh, with_late = (budget_of(answers, prompts) for prompts in ([prompt(9)], [prompt(9), prompt(10, waited_s=2.0)]))
    assert (fresh.num_late, with_late.num_late) == (0, 1)
    assert with_late.num_tokens == fresh.num_tokens < CONFIG.max_num_batched_tokens


def test_late_answer_holds_up_no_prompt() -> None:
    """It could not meet its target even if nothing else was computed."""
    answers = [answer(1, gap=1.0, num_left=300), answer(2, gap=9.0, num_left=3)]
    budget = budget_of(answers, [prompt(9)])
    assert budget.num_late == 1
    alone = budget_of([answers[0], answer(2, gap=1.0, num_left=300)], [prompt(9)])
    assert budget.num_tokens >= alone.num_tokens


def test_answer_that_drafts_speed_up_is_not_late_and_leaves_more_to_prompts() -> None:
    """Its 44 tokens need 16 steps if it gets 2.75 in each."""
    late = [answer(1, gap=9.0, num_left=44)]
    assert budget_of(late, [prompt(9)]).num_late == 1
    assert budget_of(late, [prompt(9)], tokens_per_step=2.75).num_late == 0
    on_time = [answer(1, gap=2.68, **NEAR)]
    one_each, drafted = (budget_of(on_time, [prompt(9)], tokens_per_step=tokens) for tokens in (1.0, 2.75))
    assert one_each.num_tokens < drafted.num_tokens < CONFIG.max_num_batched_tokens
    assert drafted.target_step_s > 2 * one_each.target_step_s


def test_answer_without_drafts_keeps_its_slo_while_drafts_speed_up_another() -> None:
    """In their mean they get 4.5 tokens a step, with which the plain one would leave too much to prompts."""
    slo_s = 2.0 * UNLOADED_GAP_S / PLANNED_SHARE
    plain = {"num_tokens": 40, "num_left": 24, "gap": 2.5}
    answers = [answer(1, tpot_slo_s=slo_s, **plain), answer(2, gap=0.5, tpot_slo_s=slo_s)]
    queue = [prompt(9, 4_000, waited_s=1.0)]

    def is_kept(tokens_per_step: float | dict[int, float]) -> bool:
        budget = budget_of(answers, queue, tokens_per_step=tokens_per_step)
        assert budget.num_late == 0
        elapsed_s = NOW_S - (answers[0].first_token_s or 0.0)
        later_s = 23 * step_s(answers, 0)
        return elapsed_s + step_s(answers, budget.num_tokens - 2) + later_s <= 63 * PLANNED_SHARE * slo_s

    assert is_kept({1: 1.0, 2: 8.0})
    assert not is_kept(4.5)


def test_last_token_of_an_answer_takes_a_whole_step() -> None:
    last = [answer(1, gap=3.15, num_left=1)]
    assert budget_of(last, [prompt(9)], tokens_per_step=1.0).num_late == 1
    assert budget_of(last, [prompt(9)], tokens_per_step=8.0).num_late == 1


def test_steps_are_full_if_most_requests_are_late() -> None:
    answers = [answer(key, gap=2.65, **NEAR) for key in range(3)]
    late = [prompt(key, 4_000, waited_s=6.0) for key in range(9, 14)]
    assert budget_of(answers, late[:1]).num_tokens < CONFIG.max_num_batched_tokens
    assert budget_of(answers, late).num_tokens == CONFIG.max_num_batched_tokens


def test_steps_become_fuller_with_the_share_of_late_requests() -> None:
    """A worker near a single limit would alternate between two kinds of steps."""
    answers = [answer(key, gap=2.65, **NEAR) for key in range(8)]
    sizes = [
        budget_of(answers, [prompt(9 + key, 4_000, waited_s=5.5) for key in range(num_late)]).num_tokens
        for num_late in range(1, 20)
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1] == CONFIG.max_num_batched_tokens
    assert len({size for size in sizes if sizes[0] < size < sizes[-1]}) >= 3


def test_few_late_prompts_do_not_wait_for_ever() -> None:
    """Each counts once for each time of its target that it has waited."""
    answers = [answer(key, gap=2.65, **NEAR) for key in range(3)]
    some, longer, longest = (budget_of(answers, [prompt(9, 4_000, waited_s=s)]).num_tokens for s in (6.0, 20.0, 40.0))
    assert some < longer < longest == CONFIG.max_num_batched_tokens


# SLOs


def test_answer_with_an_slo_keeps_it_while_others_are_late() -> None:
    tight_s = 1.5 * UNLOADED_GAP_S / PLANNED_SHARE
    answers = [answer(1, tpot_slo_s=tight_s, gap=1.45, **NEAR), answer(2, gap=9.0), answer(3, gap=9.0)]
    late = [prompt(key, waited_s=9.0) for key in range(9, 14)]
    budget = budget_of(answers, late)
    assert budget.num_late == 7
    elapsed_s = NOW_S - (answers[0].first_token_s or 0.0)
    took_s = step_s(answers, budget.num_tokens - len(answers))
    assert elapsed_s + 4 * took_s == pytest.approx(63 * PLANNED_SHARE * tight_s, rel=0.01)
    assert budget.target_step_s == pytest.approx(took_s, rel=0.05)


def test_prompt_with_an_slo_has_precedence_over_derived_targets_but_not_over_an_slo() -> None:
    """The answers can spare nothing more, and the prompt needs most of the step time for its SLO."""
    asking = prompt(9, 4_000, ttft_slo_s=0.7 / PLANNED_SHARE)
    gap = {"gap": 2.8, **NEAR}
    slo_s = FACTORS.tpot * UNLOADED_GAP_S
    over_derived, over_slo, most = (
        budget_of([answer(1, **gap, **slo), answer(2, **gap, **slo)], [asked])
        for slo, asked in (({}, asking), ({"tpot_slo_s": slo_s}, asking), ({}, prompt(9, 4_000, waited_s=4.2)))
    )
    share = 1 - step_s([answer(1)], 0) / step_s([answer(1)], over_derived.num_tokens - 2)
    assert share == pytest.approx(COSTS.prefill_s(4_000, 0, 10_000) / 0.7, abs=0.1)
    assert over_slo.num_tokens <= most.num_tokens < over_derived.num_tokens - 20


@pytest.mark.parametrize("num_answers", [1, 8])
def test_loose_slo_gives_more_to_prompts_and_a_tight_one_less(num_answers: int) -> None:
    gap_s = UNLOADED_GAP_S
    queue = [prompt(key, 2_000, waited_s=1.0) for key in range(20, 24)]
    tight, derived, loose = (
        prompt_tokens([answer(key, tpot_slo_s=slo_s, gap=2.0, **NEAR) for key in range(num_answers)], queue)
        for slo_s in (2.2 * gap_s, 0.0, 20 * gap_s)
    )
    assert tight <= derived <= loose
    assert tight < loose


# expected lengths


def test_only_a_share_of_the_mean_length_is_expected_of_a_response_that_may_end_early() -> None:
    """An answer behind its target may have to recover within its next tokens."""
    slow = {"gap": 2.65, "num_left": 1000, "tpot_slo_s": FACTORS.tpot * UNLOADED_GAP_S}
    known = budget_of([answer(1, **slow)], [prompt(9)]).target_step_s
    early, later = (
        budget_of([answer(1, ignore_eos=False, **slow)], [prompt(9)], mean_output_tokens=mean).target_step_s
        for mean in (4 / EXPECTED_OUTPUT_SHARE, 400 / EXPECTED_OUTPUT_SHARE)
    )
    assert early > later > known, "20 tokens were a little ahead, which few tokens can use up"


def test_forked_samples_share_the_time_of_their_first_token() -> None:
    seq = sequence(1, 8)
    record_token(seq, 5.0)
    child = seq.fork(key=2, sample_index=1)
    record_token(seq, 6.0)
    record_token(child, 7.0)
    assert seq.first_token_s == child.first_token_s == 5.0
    assert seq.targets is child.targets
