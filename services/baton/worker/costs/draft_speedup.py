"""Measures how many tokens drafts give a decoding sequence in the time of a step without drafts."""

from collections.abc import Callable
from math import exp, inf

from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.scheduling.step_budget import DraftSpeedup

WINDOW_S = 20.0
"""Time in which the weight of a step falls to 1/e."""
MIN_DECODING_S = 1.0
"""Weighted time of decoding steps that counts as without drafts beside what was measured. So the first steps
are no trend yet, and an idle worker forgets its last answers."""


class RecentDraftSpeedup:
    """Tokens of a decoding sequence in the time of a step without drafts, with exponential weights.

    That is the tokens per step times the predicted duration of the same steps without drafts, over the time
    that they took, with that of the draft model. Steps without drafts count with their predicted duration, so
    errors of the prediction cancel out while there are none. Used from the worker's event loop only.
    """

    def __init__(self, costs: Callable[[], StepCostModel | None], clock: Callable[[], float]) -> None:
        """`costs`: what a step costs now. While it returns None, nothing is measured."""
        self._costs = costs
        self._clock = clock
        self._weighted_at_s = clock()
        self._num_accepted = 0
        self._last: tuple[float, float, int] | None = None
        self._plain_s = 0.0  # duration without drafts
        self._tokens_s = 0.0  # the same, times the tokens of a sequence
        self._took_s = 0.0

    @property
    def now(self) -> DraftSpeedup:
        """The present speed-up; 1 token and length 1 without drafts."""
        self._lower_weights()
        took_s = self._took_s + MIN_DECODING_S
        return DraftSpeedup((self._tokens_s + MIN_DECODING_S) / took_s, took_s / (self._plain_s + MIN_DECODING_S))

    def observe(self, work: StepWork, step_s: float, draft_model_s: float, num_accepted: int) -> None:
        """Record a step that took `step_s` seconds, after `draft_model_s` of the draft model.

        num_accepted: draft tokens that the steps before it have accepted, in all. Durations that are not
            finite and positive are ignored, and so are steps in which nothing decodes.
        """
        self._count_last(num_accepted - self._num_accepted)
        self._num_accepted = num_accepted
        costs = self._costs()
        if costs is None or not work.num_decode_seqs or not 0 < step_s < inf:
            return
        plain_s = costs.step_seconds(work.without_drafts)
        took_s = step_s if work.num_draft_tokens else plain_s
        self._last = plain_s, took_s + draft_model_s, work.num_decode_seqs

    def _count_last(self, num_accepted: int) -> None:
        """Add the step before, of which it is known now how many draft tokens it has accepted."""
        if self._last is not None:
            plain_s, took_s, num_seqs = self._last
            self._last = None
            self._lower_weights()
            self._plain_s += plain_s
            self._tokens_s += plain_s * (1 + num_accepted / num_seqs)
            self._took_s += took_s

    def _lower_weights(self) -> None:
        now_s = self._clock()
        weight = exp((self._weighted_at_s - now_s) / WINDOW_S)
        self._weighted_at_s = now_s
        self._plain_s *= weight
        self._tokens_s *= weight
        self._took_s *= weight
