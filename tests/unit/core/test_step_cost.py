"""The step cost model: predictions, fit to measurements, and correction by live steps."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import COSTS_VERSION, CostCorrection, StepCostModel, StepKind, StepWork, fit_costs

TRUE = StepCostModel(
    step_s=2e-3, prefill_token_s=8e-5, prefill_attended_s=3e-9, decode_seq_s=2e-4, decode_context_s=4e-8
)

WORKS = [
    *(StepWork.of([(tokens, before)]) for tokens in (16, 128, 512) for before in (0, 512, 4096)),
    *(StepWork.of([], [context] * seqs) for seqs in (1, 4, 16) for context in (64, 1024, 8192)),
    *(StepWork.of([(256, before)], [512] * seqs) for seqs in (2, 8) for before in (0, 1024)),
]


def close(model: StepCostModel, other: StepCostModel, relative: float) -> bool:
    return all(math.isclose(model.step_seconds(work), other.step_seconds(work), rel_tol=relative) for work in WORKS)


def test_prompt_cost_equals_sum_of_its_chunks() -> None:
    chunks = [(512, 100), (512, 612), (76, 1124)]
    assert TRUE.prefill_s(1100, 100, 512) == pytest.approx(
        sum(TRUE.step_seconds(StepWork.of([chunk])) for chunk in chunks)
    )
    assert TRUE.prefill_s(0, 100, 512) == 0


def test_decode_step_cost_grows_with_sequences_and_contexts() -> None:
    assert TRUE.decode_step_s(3, 600) == pytest.approx(TRUE.step_seconds(StepWork.of([], [100, 200, 300])))
    assert TRUE.decode_step_s(3, 600) == pytest.approx(2e-3 + 6e-4 + 2.4e-5)


def test_drafts_cost_more_after_a_long_context() -> None:
    """Three drafts after n tokens attend to n + 1, n + 2 and n + 3 of them."""
    short, long = (StepWork.of([], [n], [(3, n)]) for n in (100, 10_100))
    assert short.draft_attended_tokens == 101 + 102 + 103
    grown_s = TRUE.uncorrected_step_s(long) - TRUE.uncorrected_step_s(short)
    assert grown_s == pytest.approx(10_000 * (TRUE.decode_context_s + 3 * TRUE.prefill_attended_s))
    assert long.without_drafts == StepWork.of([], [10_100])


def test_each_kind_of_step_has_its_own_factor() -> None:
    assert [work.kind for work in (WORKS[0], WORKS[9], WORKS[-1])] == [
        StepKind.PREFILL,
        StepKind.DECODE,
        StepKind.MIXED,
    ]
    slow = StepCostModel.from_plain(TRUE.to_plain() | {"mixed_factor": 2.0})
    assert slow.step_seconds(WORKS[-1]) == pytest.approx(2 * TRUE.step_seconds(WORKS[-1]))
    assert slow.step_seconds(WORKS[0]) == TRUE.step_seconds(WORKS[0])


def test_fit_recovers_the_true_costs() -> None:
    fitted = fit_costs([(work, TRUE.step_seconds(work)) for work in WORKS])
    assert fitted.coefficients == pytest.approx(TRUE.coefficients, rel=1e-6)
    assert fitted.num_measured == len(WORKS)


@given(seed=st.integers(0, 10_000))
def test_fit_of_noisy_steps_is_close_despite_two_stalls(seed: int) -> None:
    random = Random(seed)
    measured = [(work, TRUE.step_seconds(work) * random.uniform(0.95, 1.05)) for work in WORKS * 3]
    for held_up in random.sample(range(len(measured)), 2):
        measured[held_up] = (measured[held_up][0], measured[held_up][1] * 20)
    fitted = fit_costs(measured)
    assert min(fitted.coefficients) >= 0
    assert close(fitted, TRUE, 0.15)


@given(seed=st.integers(0, 10_000))
def test_fit_is_never_negative(seed: int) -> None:
    random = Random(seed)
    measured = [(work, random.uniform(1e-6, 10.0)) for work in random.choices(WORKS, k=random.randrange(1, 8))]
    measured += [(StepWork.of([(8, 0)]), 1e-3), (StepWork.of([], [8]), 1e-3)]
    assert fit_costs(measured).is_usable


def test_fit_needs_prefill_and_decode_steps_and_finite_durations() -> None:
    with pytest.raises(ValueError, match="no step with prefill or no step with decode"):
        fit_costs([(WORKS[0], 1.0)])
    with pytest.raises(ValueError, match="no step with prefill or no step with decode"):
        fit_costs([])
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="not finite and above 0"):
            fit_costs([(WORKS[0], 1.0), (WORKS[9], wrong)])


def corrected(slowdown: float, num_steps: int, num_stalls: int = 0) -> StepCostModel:
    correction = CostCorrection(TRUE)
    for i in range(num_steps):
        work = WORKS[9 + i % 9]
        wrong = 1000.0 if i % 10 < num_stalls else 1.0
        correction.observe(work, TRUE.step_seconds(work) * slowdown * wrong)
    return correction.costs


def test_live_steps_correct_the_factor_of_their_kind() -> None:
    assert corrected(1.5, 200).decode_factor == pytest.approx(1.5, rel=0.02)
    assert corrected(0.5, 200).decode_factor == pytest.approx(0.5, rel=0.02)


def test_correction_of_one_kind_moves_unseen_kinds_too() -> None:
    assert 1.2 < corrected(1.5, 200).prefill_factor < 1.5
    correction = CostCorrection(TRUE)
    slowdowns = {StepKind.PREFILL: 1.0, StepKind.DECODE: 0.6, StepKind.MIXED: 1.2}
    for i in range(6_000):
        work = WORKS[-1 - i % len(WORKS)] if i % 4 else WORKS[9]
        correction.observe(work, TRUE.step_seconds(work) * slowdowns[work.kind])
    assert [correction.costs.factor(kind) for kind in slowdowns] == pytest.approx(list(slowdowns.values()), rel=0.02)


DECODE, VERIFY = StepWork.of([], [500] * 4), StepWork.of([], [500] * 4, [(3, 501)] * 4)


def observe_steps(correction: CostCorrection, work: StepWork, slowdown: float, num_steps: int) -> None:
    for _ in range(num_steps):
        correction.observe(work, TRUE.step_seconds(work) * slowdown)


def test_factor_of_steps_with_drafts_recovers_although_none_is_run() -> None:
    """It was high when all steps were slow, and no draft pays while it is."""
    correction = CostCorrection(TRUE)
    observe_steps(correction, VERIFY, 3.0, 300)
    observe_steps(correction, DECODE, 1.0, 200)
    assert correction.costs.verify_factor > 1.2 * correction.costs.decode_factor
    observe_steps(correction, DECODE, 1.0, 4_000)
    assert correction.costs.verify_factor == pytest.approx(correction.costs.decode_factor, rel=0.02)
    observe_steps(correction, VERIFY, 0.8, 300)
    lower = correction.costs
    observe_steps(correction, DECODE, lower.decode_factor, 4_000)
    assert correction.costs.verify_factor == pytest.approx(lower.verify_factor, rel=0.05), "it is not raised"


def test_factor_of_steps_with_drafts_stays_while_some_are_run() -> None:
    correction = CostCorrection(TRUE)
    for _ in range(1_000):
        observe_steps(correction, DECODE, 1.0, 20)
        observe_steps(correction, VERIFY, 1.3, 1)
    assert correction.costs.verify_factor == pytest.approx(1.3, rel=0.02)


def test_one_stall_in_ten_steps_has_little_effect() -> None:
    assert corrected(1.0, 500, num_stalls=1).decode_factor < 1.08


def test_correction_starts_from_the_factors_of_its_model() -> None:
    again = CostCorrection(corrected(1.5, 200))
    assert again.costs.decode_factor == pytest.approx(1.5, rel=0.02)


@given(seconds=st.floats(), repeats=st.integers(1, 50))
def test_no_measurement_makes_the_model_unusable(seconds: float, repeats: int) -> None:
    correction = CostCorrection(TRUE)
    for _ in range(repeats):
        correction.observe(WORKS[0], seconds)
    assert correction.costs.is_usable


def test_plain_form_round_trips_and_invalid_values_are_refused() -> None:
    assert StepCostModel.from_plain(TRUE.to_plain() | {"new_field_s": 3}) == TRUE
    for change in (
        {"version": COSTS_VERSION + 1},
        {"step_s": "nan"},
        {"decode_seq_s": -1},
        {"prefill_factor": 0},
        {"step_s": None},
    ):
        with pytest.raises(ValueError, match=r"StepCostModel|cannot be used"):
            StepCostModel.from_plain(TRUE.to_plain() | change)
