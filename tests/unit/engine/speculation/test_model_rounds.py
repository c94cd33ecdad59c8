"""When a draft model runs, and for how many tokens: compared with all possible choices, and with costs."""

from itertools import product
from random import Random

import pytest

from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.speculation.draft_lengths import MIN_GAIN, NO_DRAFTS, DraftChoice, StepTimes
from baton.engine.speculation.draft_model import DraftJob
from baton.engine.speculation.model_rounds import (
    MAX_MISSING_TOKENS,
    MAX_PIECE_TOKENS,
    PROBE_SHARE,
    PROBE_TOKENS,
    DraftStepTimes,
    ModelCandidate,
    ModelRounds,
    choose_model_lengths,
)
from baton.engine.state.sequence import EngineSequence
from tests.builders import sequence_request

COSTS = StepCostModel(
    step_s=0.03, prefill_token_s=1e-3, prefill_attended_s=0, decode_seq_s=1e-3, decode_context_s=0, draft_token_s=1e-3
)
SMALL = StepCostModel(
    step_s=0.003, prefill_token_s=1e-4, prefill_attended_s=0, decode_seq_s=1e-4, decode_context_s=0
)  # fmt: skip


def candidate(
    rate: float, *, key: int = 1, max_tokens: int = 15, num_missing: int = 2, num_left: float = 100
) -> ModelCandidate:
    seq = EngineSequence(sequence_request(key, range(2000), max_tokens=500), key=key, arrival=key)
    return ModelCandidate(seq, rate, max_tokens, num_missing, num_left)


def times_of(num_seqs: int, costs: StepCostModel = COSTS) -> StepTimes:
    return StepTimes.of(StepWork.of((), [2000] * num_seqs), costs)


def tokens_per_s(
    rates: list[float], lengths: tuple[int, ...], base: DraftChoice, times: StepTimes, draft: DraftStepTimes
) -> float:
    tokens = (
        len(rates) + base.num_right + sum(r ** (n + 1) for r, k in zip(rates, lengths, strict=True) for n in range(k))
    )
    if not any(lengths):
        return tokens / base.step_s(times)
    step_s = max(base.step_s(times), times.verifying_s) + max(lengths) * draft.step_s
    return tokens / (step_s + sum(lengths) * (draft.seq_s + times.draft_s))


@pytest.mark.parametrize("seed", range(30))
def test_choice_is_close_to_the_most_tokens_per_second(seed: int) -> None:
    rng = Random(seed)
    rates = [rng.choice((0.05, 0.3, 0.6, 0.8, 0.95)) for _ in range(rng.randint(1, 3))]
    candidates = [candidate(rate, max_tokens=rng.randint(1, 4)) for rate in rates]
    times = StepTimes(0.01, 0.01 * rng.choice((1.0, 1.2)), 0.01 * rng.choice((0.01, 0.1)))
    draft = DraftStepTimes(0.01 * rng.choice((0.02, 0.1, 0.5)), 0.01 * rng.choice((0.0, 0.02)))
    base = rng.choice((NO_DRAFTS, DraftChoice((2,), 0.001, 2, 1.4)))
    most = rng.choice((2, 20))
    choice = choose_model_lengths(candidates, base, len(rates), times, draft, most)
    every = [k for k in product(*(range(one.max_tokens + 1) for one in candidates)) if sum(k) <= most]
    plain = tokens_per_s(rates, (0,) * len(rates), base, times, draft)
    best = max(tokens_per_s(rates, k, base, times, draft) for k in every)
    found = tokens_per_s(rates, choice.lengths, base, times, draft)
    assert sum(choice.lengths) <= most
    assert found >= (0.95 * best if best >= 1.06 * plain else plain)
    assert found == plain or found >= MIN_GAIN * plain
    assert choice.saved_s >= 0


@pytest.mark.parametrize(
    ("rate", "step_share", "least", "most"), [(0.9, 0.1, 3, 15), (0.9, 0.9, 0, 1), (0.2, 0.3, 0, 0)]
)
def test_expensive_or_bad_models_do_not_run(rate: float, step_share: float, least: int, most: int) -> None:
    times = times_of(1)
    draft = DraftStepTimes(step_share * times.plain_s, 0.0)
    (length,) = choose_model_lengths([candidate(rate)], NO_DRAFTS, 1, times, draft, 64).lengths
    assert least <= length <= most


def plan(rounds: ModelRounds, *candidates: ModelCandidate, num_decoding: int = 1) -> tuple[DraftJob, ...]:
    return rounds.plan(candidates, NO_DRAFTS, num_decoding, times_of(num_decoding), SMALL, 64)


def test_sequence_that_is_behind_catches_up_in_pieces_while_others_draft() -> None:
    ready, behind = candidate(0.8, key=1), candidate(0.8, key=2, num_missing=1500, num_left=400)
    jobs = plan(ModelRounds(), ready, behind, num_decoding=2)
    assert [job.seq.key for job in jobs] == [1, 2]
    assert (jobs[0].num_tokens, jobs[1].num_drafts) == (2, 0)
    assert jobs[0].num_drafts > 0
    assert 16 <= jobs[1].num_tokens <= MAX_PIECE_TOKENS
    assert jobs[1].num_tokens * SMALL.prefill_token_s < 0.3 * times_of(2).plain_s


def test_only_one_sequence_catches_up_at_a_time_the_one_that_needs_least() -> None:
    jobs = plan(ModelRounds(), *(candidate(0.8, key=key, num_missing=1500 - key) for key in (1, 2, 3)), num_decoding=3)
    assert [(job.seq.key, job.num_drafts) for job in jobs] == [(3, 0)]


def test_nothing_is_computed_for_an_answer_that_ends_soon() -> None:
    assert plan(ModelRounds(), candidate(0.8, num_missing=1500, num_left=400))
    assert not plan(ModelRounds(), candidate(0.8, num_missing=1500, num_left=3))


def test_model_that_does_not_pay_is_tried_from_a_small_share_of_the_time() -> None:
    rounds, one, times = ModelRounds(), candidate(0.01), times_of(1)
    assert not plan(rounds, one)
    num_steps, num_trials = 2_000, 0
    for _ in range(num_steps):
        jobs = rounds.trial([one], times, SMALL)
        if jobs:
            assert jobs == (DraftJob(one.seq, 2, PROBE_TOKENS),)
            rounds.has_run()
            num_trials += 1
    spent_s = num_trials * PROBE_TOKENS * (SMALL.step_s + SMALL.decode_seq_s)
    assert 0 < spent_s <= PROBE_SHARE * num_steps * times.plain_s


def test_trial_of_a_sequence_that_is_behind_computes_a_piece() -> None:
    rounds, one = ModelRounds(), candidate(0.01, num_missing=MAX_MISSING_TOKENS + 100)
    jobs: tuple[DraftJob, ...] = ()
    while not jobs:
        jobs = rounds.trial([one], times_of(1), SMALL)
    assert jobs[0].num_drafts == 0
    assert 0 < jobs[0].num_tokens <= one.num_missing
    assert rounds.trial([], times_of(1), SMALL) == ()
