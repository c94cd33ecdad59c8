"""How many draft tokens a step verifies: compared with all possible choices, and with costs."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.speculation.draft_lengths import MIN_GAIN, DraftCandidate, StepTimes, choose_lengths

COSTS = StepCostModel(
    step_s=0.01, prefill_token_s=1e-4, prefill_attended_s=1e-8, decode_seq_s=4e-4, decode_context_s=1e-7,
    draft_token_s=5e-4,
)  # fmt: skip


def tokens_per_s(
    candidates: list[DraftCandidate], lengths: tuple[int, ...], num_decoding: int, times: StepTimes
) -> float:
    num_tokens = num_decoding + sum(
        rate ** (n + 1) for (rate, _, _), length in zip(candidates, lengths, strict=True) for n in range(length)
    )
    return num_tokens / step_s(candidates, lengths, times)


def step_s(candidates: list[DraftCandidate], lengths: tuple[int, ...], times: StepTimes) -> float:
    costs_s = (
        length * times.draft_after_s(context) for (_, _, context), length in zip(candidates, lengths, strict=True)
    )
    return times.verifying_s + sum(costs_s) if any(lengths) else times.plain_s


@pytest.mark.parametrize("seed", range(40))
def test_choice_gives_most_tokens_per_second(seed: int) -> None:
    rng = Random(seed)
    candidates = [
        (rng.choice((0.0, 0.2, 0.5, 0.8, 0.95, 1.0)), rng.randint(0, 3), rng.choice((10, 500, 4_000)))
        for _ in range(rng.randint(1, 4))
    ]
    num_decoding, max_drafts = len(candidates) + rng.randint(0, 2), rng.randint(0, 8)
    plain_s, attended_s = 0.01, rng.choice((0.0, 1e-6))
    times = StepTimes(
        plain_s, plain_s * rng.choice((1.0, 1.3)), plain_s * rng.choice((0.0, 0.02, 0.1, 0.5)), attended_s
    )
    if attended_s:
        max_drafts = 12  # with unlike costs the choice is best only if the number is not limited
    choice = choose_lengths(candidates, num_decoding, times, max_drafts)
    every = product(*(range(max_tokens + 1) for _, max_tokens, _ in candidates))
    best = max(tokens_per_s(candidates, each, num_decoding, times) for each in every if sum(each) <= max_drafts)
    found = tokens_per_s(candidates, choice.lengths, num_decoding, times)
    plain = num_decoding / plain_s
    assert sum(choice.lengths) <= max_drafts
    assert found == pytest.approx(best if best >= MIN_GAIN * plain else plain)
    took_s = step_s(candidates, choice.lengths, times)
    assert choice.saved_s == pytest.approx(took_s * (found / plain - 1))
    assert choice.step_s(times) == pytest.approx(took_s)


@pytest.mark.parametrize(("rate", "least", "most"), [(0.98, 15, 15), (0.7, 3, 9), (0.03, 0, 0)])
def test_more_drafts_are_verified_the_more_are_right(rate: float, least: int, most: int) -> None:
    times = StepTimes.of(StepWork.of((), [500]), COSTS)
    (length,) = choose_lengths([(rate, 15, 500)], 1, times, 64).lengths
    assert least <= length <= most


def test_expensive_drafts_and_slow_verification_are_not_verified() -> None:
    work, candidate = StepWork.of((), [500]), (0.6, 15, 500)
    expensive = replace(COSTS, draft_token_s=0.02)
    assert choose_lengths([candidate], 1, StepTimes.of(work, expensive), 64).lengths == (0,)
    slow = replace(COSTS, verify_factor=3.0)
    assert choose_lengths([candidate], 1, StepTimes.of(work, slow), 64).lengths == (0,)
    assert choose_lengths([candidate], 1, StepTimes.of(work, COSTS), 64).lengths > (2,)


def test_draft_tokens_that_were_not_measured_cost_as_much_as_sequences() -> None:
    unmeasured = StepTimes.of(StepWork.of((), [500]), replace(COSTS, draft_token_s=0.0))
    assert unmeasured.draft_s == pytest.approx(COSTS.decode_seq_s)


def test_drafts_go_to_the_sequences_that_use_them_best() -> None:
    times = StepTimes.of(StepWork.of((), [500] * 3), COSTS)
    candidates = [(rate, 15, 500) for rate in (0.3, 0.95, 0.6)]
    assert choose_lengths(candidates, 3, times, 4).lengths == (0, 4, 0)


def test_fewer_drafts_are_verified_the_longer_the_context_is() -> None:
    """Each draft attends to all of it: with 50,000 tokens its attention costs as much as its products."""
    lengths = [
        choose_lengths([(0.8, 15, context)], 1, StepTimes.of(StepWork.of((), [context]), COSTS), 64).lengths
        for context in (500, 50_000, 500_000)
    ]
    assert lengths[0] > lengths[1] > lengths[2]


def test_short_contexts_are_preferred() -> None:
    times = StepTimes.of(StepWork.of((), [500, 100_000]), COSTS)
    assert choose_lengths([(0.9, 15, 100_000), (0.9, 15, 500)], 2, times, 4).lengths == (0, 4)


def test_mixed_steps_count_their_prompts() -> None:
    mixed = StepTimes.of(StepWork.of([(256, 0)], [500]), replace(COSTS, mixed_factor=1.5))
    assert mixed.plain_s == mixed.verifying_s > 0.035
    assert mixed.draft_s == pytest.approx(1.5 * COSTS.draft_token_s)
