"""Decides when a draft model runs, for which sequences, and how many tokens it drafts.

A round makes one draft token per step of the draft model, of all its sequences at once. It costs these steps
and the verification of the drafts, and gives each sequence a token with some probability. Prompts that the
draft model has not computed cost more, in pieces, so they are computed only if the rest of the answer is
expected to pay for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.step_cost import StepCostModel, attended_tokens
from baton.engine.speculation.draft_lengths import MIN_GAIN, DraftChoice, StepTimes
from baton.engine.speculation.draft_model import DraftJob
from baton.engine.speculation.drafter import MAX_DRAFT_TOKENS
from baton.engine.state.sequence import EngineSequence

MAX_MISSING_TOKENS = MAX_DRAFT_TOKENS + 1
"""Tokens without KV with which a sequence still drafts. One step adds as many at most."""
CATCH_UP_SHARE = 0.25
"""Time of one piece of a prompt in the draft model, as a share of a step of the model that verifies. It
delays the other answers by so much while a sequence catches up. Not tuned."""
MIN_PIECE_TOKENS, MAX_PIECE_TOKENS = 16, 256
"""Tokens of one piece."""
PROBE_SHARE = 0.005
"""Share of the time that is spent to find out whether a draft model that does not pay has become better."""
PROBE_TOKENS = 2
"""Draft tokens of such a trial."""


@dataclass(frozen=True, slots=True)
class ModelCandidate:
    """A sequence for which the draft model may draft.

    rate: probability that a token is right if all before it are.
    max_tokens: most tokens that may be drafted.
    num_missing: tokens of the sequence that the draft model has not computed.
    num_left: tokens that the sequence is expected to get.
    """

    seq: EngineSequence
    rate: float
    max_tokens: int
    num_missing: int
    num_left: float

    @property
    def is_ready(self) -> bool:
        """True if the draft model can draft in this round."""
        return self.num_missing <= MAX_MISSING_TOKENS


@dataclass(frozen=True, slots=True)
class DraftStepTimes:
    """Predicted seconds of a step of the draft model: of the step, and of each sequence in it."""

    step_s: float
    seq_s: float

    @classmethod
    def of(cls, costs: StepCostModel, mean_context_tokens: float) -> "DraftStepTimes":
        """Predict steps of sequences with this mean context."""
        seq_s = costs.decode_seq_s + costs.decode_context_s * mean_context_tokens
        return cls(costs.step_s * costs.decode_factor, seq_s * costs.decode_factor)


def choose_model_lengths(
    candidates: Sequence[ModelCandidate],
    base: DraftChoice,
    num_decoding: int,
    times: StepTimes,
    draft: DraftStepTimes,
    max_drafts: int,
) -> DraftChoice:
    """Return the numbers of draft tokens with the most expected tokens per second; all 0 if none pay.

    base: drafts of other kinds, which the step verifies in any case; of other sequences.
    max_drafts: most tokens that the model may draft.

    Each further token costs the round a step of the draft model, for those sequences that gain more from it
    than they cost. All depths are compared, because the first ones also pay for verification.
    """
    lengths = [0] * len(candidates)
    order = sorted(range(len(candidates)), key=lambda index: -candidates[index].rate)
    num_tokens, step_s = num_decoding + base.num_right, base.step_s(times)
    base_rate = num_tokens / step_s
    step_s = max(step_s, times.verifying_s)
    best_rate, best = MIN_GAIN * base_rate, DraftChoice((0,) * len(candidates))
    for depth in range(1, MAX_DRAFT_TOKENS + 1):
        step_s += draft.step_s
        num_drafts = sum(lengths)
        for index in order:
            gain, one = candidates[index].rate ** depth, candidates[index]
            if lengths[index] < depth - 1 or one.max_tokens < depth or num_drafts >= max_drafts:
                continue
            draft_s = draft.seq_s + times.draft_after_s(len(one.seq.token_ids))
            if gain * step_s <= num_tokens * draft_s:
                continue
            num_tokens += gain
            step_s += draft_s
            lengths[index] = depth
            num_drafts += 1
        if max(lengths, default=0) < depth:
            break
        if num_tokens / step_s > best_rate:
            best_rate = num_tokens / step_s
            saved_s, num_right = num_tokens / base_rate - step_s, num_tokens - num_decoding - base.num_right
            best = DraftChoice(tuple(lengths), saved_s, sum(lengths), num_right)
    return best


class ModelRounds:
    """Plans the rounds of a draft model, and pays trials from a small share of the time."""

    def __init__(self) -> None:
        self._probe_s = 0.0

    def plan(
        self,
        candidates: Sequence[ModelCandidate],
        base: DraftChoice,
        num_decoding: int,
        times: StepTimes,
        costs: StepCostModel,
        max_drafts: int,
    ) -> tuple[DraftJob, ...]:
        """Return the jobs of the next round; empty if it would not pay. Arguments as above.

        costs: of a step of the draft model.
        """
        if not candidates:
            return ()
        draft = DraftStepTimes.of(costs, sum(len(one.seq.token_ids) for one in candidates) / len(candidates))
        ready = [one for one in candidates if one.is_ready]
        choice = choose_model_lengths(ready, base, num_decoding, times, draft, max_drafts)
        jobs = [
            DraftJob(one.seq, one.num_missing, length)
            for one, length in zip(ready, choice.lengths, strict=True)
            if length
        ]
        behind = next_to_catch_up(candidates, base, num_decoding, times, draft, costs, max_drafts)
        if behind is not None:
            jobs.append(_piece(behind, times, costs))
        return tuple(jobs)

    def trial(
        self, candidates: Sequence[ModelCandidate], times: StepTimes, costs: StepCostModel
    ) -> tuple[DraftJob, ...]:
        """Return a job that finds out how good the draft model is, if it was not run for long enough.

        Call it once for each step in which no round pays.
        """
        self._probe_s += PROBE_SHARE * times.plain_s
        one = min(candidates, key=lambda one: one.num_missing, default=None)
        if one is None:
            return ()
        draft = DraftStepTimes.of(costs, len(one.seq.token_ids))
        num_drafts = min(PROBE_TOKENS, one.max_tokens)
        cost_s = num_drafts * (draft.step_s + draft.seq_s)
        job = DraftJob(one.seq, one.num_missing, num_drafts)
        if not one.is_ready:
            job = _piece(one, times, costs)
            cost_s = draft.step_s + _prefill_s(one, job.num_tokens, costs)
        return () if self._probe_s < cost_s else (job,)

    def has_run(self) -> None:
        """Record that a round was run. The next trial must be paid anew."""
        self._probe_s = 0.0


def next_to_catch_up(
    candidates: Sequence[ModelCandidate],
    base: DraftChoice,
    num_decoding: int,
    times: StepTimes,
    draft: DraftStepTimes,
    costs: StepCostModel,
    max_drafts: int,
) -> ModelCandidate | None:
    """Return the sequence that is behind and needs the least to catch up, if that pays; else None.

    Its drafts must be expected to save more until the answer's end than computing its tokens costs.
    """
    if all(one.is_ready for one in candidates):
        return None
    choice = choose_model_lengths(candidates, base, num_decoding, times, draft, max_drafts)
    num_new = sum(length > 0 for length in choice.lengths) + choice.num_right  # tokens of the drafting sequences
    worth = [
        one
        for one, length in zip(candidates, choice.lengths, strict=True)
        if length
        and not one.is_ready
        and choice.saved_s / num_new * one.num_left > _prefill_s(one, one.num_missing, costs)
    ]
    return min(worth, key=lambda one: one.num_missing, default=None)


def _piece(one: ModelCandidate, times: StepTimes, costs: StepCostModel) -> DraftJob:
    """Return the job that computes the next piece of a sequence that is behind."""
    token_s = _prefill_s(one, MIN_PIECE_TOKENS, costs) / MIN_PIECE_TOKENS
    fitting = int(CATCH_UP_SHARE * times.plain_s / token_s) if token_s > 0 else MAX_PIECE_TOKENS
    return DraftJob(one.seq, min(one.num_missing, max(MIN_PIECE_TOKENS, min(MAX_PIECE_TOKENS, fitting))))


def _prefill_s(one: ModelCandidate, num_tokens: int, costs: StepCostModel) -> float:
    """Return the draft model's seconds for the next `num_tokens` of a sequence, without the step itself."""
    before = len(one.seq.token_ids) - one.num_missing
    attended_s = costs.prefill_attended_s * attended_tokens(num_tokens, before)
    return (costs.prefill_token_s * num_tokens + attended_s) * costs.prefill_factor
