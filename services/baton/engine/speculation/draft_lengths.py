"""Decides how many draft tokens a step verifies, from what they cost and how likely they are right.

Pure functions. A draft token makes the step longer for all sequences in it, and gives one of them a token
with some probability. The numbers are chosen that give most tokens per second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TypeAlias

from baton.core.step_cost import StepCostModel, StepKind, StepWork

MIN_GAIN = 1.01
"""Least ratio of the rates with and without drafts for which there are any. Below, errors of the cost model
could make them a loss."""
ASSUMED_DRAFT_SHARE = 1 / 16
"""Share of a step that a draft token costs while costs are unknown."""


DraftCandidate: TypeAlias = tuple[float, int, int]
"""A draft that a step may verify in part: the probability that a token is right if all before it are, the
most tokens of it that may be verified, and the tokens of its context. A plain tuple, because a step of many
sequences makes many of them."""
_LEAST_DRAFT_S = 1e-12
"""Added to the cost of a draft token, so that it is never 0."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicted durations of a step, in seconds.

    plain_s: without drafts. verifying_s: with drafts, but without the cost of each.
    draft_s: of each draft, without its attention. attended_s: of its attention to one token.
    """

    plain_s: float
    verifying_s: float
    draft_s: float
    attended_s: float = 0.0

    @classmethod
    def of(cls, work: StepWork, costs: StepCostModel | None) -> "StepTimes":
        """Predict a step with this work, which has no drafts yet. `costs`: None if unknown."""
        if costs is None:
            return cls(1.0, 1.0, ASSUMED_DRAFT_SHARE)
        kind = StepKind.MIXED if work.num_prefill_tokens else StepKind.VERIFY
        step_s, factor = costs.uncorrected_step_s(work), costs.factor(kind)
        draft_s = costs.uncorrected_step_s(StepWork(num_draft_tokens=1)) - costs.step_s
        return cls(
            plain_s=step_s * costs.factor(work.kind),
            verifying_s=step_s * factor,
            draft_s=draft_s * factor,
            attended_s=costs.prefill_attended_s * factor,
        )

    def draft_after_s(self, num_context: int) -> float:
        """Return the cost of a draft token that attends to `num_context` tokens, in seconds."""
        return self.draft_s + self.attended_s * num_context


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Numbers of draft tokens to verify, of each candidate.

    saved_s: expected gain, in seconds of steps without drafts.
    num_drafts: sum of the numbers. num_right: how many of these are right on average.
    drafts_s: cost of all of them, in seconds.
    """

    lengths: tuple[int, ...]
    saved_s: float = 0.0
    num_drafts: int = 0
    num_right: float = 0.0
    drafts_s: float = 0.0

    def step_s(self, times: StepTimes) -> float:
        """Return the duration of a step that verifies these drafts."""
        return times.verifying_s + self.drafts_s if self.num_drafts else times.plain_s


NO_DRAFTS = DraftChoice(())


def choose_lengths(
    candidates: Sequence[DraftCandidate], num_decoding: int, times: StepTimes, max_drafts: int
) -> DraftChoice:
    """Return the numbers of draft tokens with the most expected tokens per second; all 0 if none pay.

    num_decoding: sequences that get a token in the step, at least one. max_drafts: most drafts of the step.

    The next token of a candidate of which n tokens are taken gives rate ** (n + 1) tokens. Its tokens cost
    the same and their gains fall, so it is best to take the largest ratios of gain and cost first, as long as
    each gives more tokens per second than the step has so far.
    """
    lengths = [0] * len(candidates)
    draft_s, attended_s = times.draft_s + _LEAST_DRAFT_S, times.attended_s
    costs_s = [draft_s + attended_s * num_context for _, _, num_context in candidates]
    heap = [
        (-rate / cost_s, index)
        for index, ((rate, max_tokens, _), cost_s) in enumerate(zip(candidates, costs_s, strict=True))
        if max_tokens and rate > 0
    ]
    heapify(heap)
    num_tokens, step_s, num_left = float(num_decoding), times.verifying_s, max_drafts
    while heap and num_left:
        negative_ratio, index = heap[0]
        if -negative_ratio * step_s <= num_tokens:
            break
        cost_s = costs_s[index]
        num_tokens -= negative_ratio * cost_s
        step_s += cost_s
        num_left -= 1
        length = lengths[index] = lengths[index] + 1
        rate, max_tokens, _ = candidates[index]
        if length < max_tokens:
            heapreplace(heap, (negative_ratio * rate, index))
        else:
            heappop(heap)
    if num_left == max_drafts or num_tokens * times.plain_s < MIN_GAIN * num_decoding * step_s:
        return DraftChoice((0,) * len(candidates))
    return DraftChoice(
        tuple(lengths),
        saved_s=times.plain_s * num_tokens / num_decoding - step_s,
        num_drafts=max_drafts - num_left,
        num_right=num_tokens - num_decoding,
        drafts_s=step_s - times.verifying_s,
    )
