"""Measures the share of recent step time that prompts took from the decoding sequences of a worker."""

from collections.abc import Callable
from dataclasses import replace
from math import exp, inf

from baton.core.step_cost import StepCostModel, StepWork

WINDOW_S = 20.0
"""Time in which the weight of a step falls to 1/e."""
MIN_DECODING_S = 1.0
"""Weighted time of decoding steps below which the share is lower in proportion. So the first mixed steps
are no trend yet, and an idle worker forgets the last load within about a minute."""


class RecentPrefillShare:
    """The share of the time of steps with decoding sequences that went to prompts, with exponential weights.

    A step that decodes only counts as no prefill. Of a mixed step, the time beyond the same decodes without
    prompts counts as prefill. Steps that only compute prompts are left out, because no token waits for them:
    the share of a client that sends one request after the other is 0. Used from the worker's event loop only.
    """

    def __init__(self, costs: Callable[[], StepCostModel | None], clock: Callable[[], float]) -> None:
        """`costs`: what a step costs now. While it returns None, no time counts as prefill."""
        self._costs = costs
        self._clock = clock
        self._weighted_at_s = clock()
        self._decoding_s = 0.0
        self._prefill_s = 0.0

    @property
    def share(self) -> float:
        """The share now, from 0 to 1."""
        self._lower_weights()
        return self._prefill_s / max(self._decoding_s, MIN_DECODING_S)

    def observe(self, work: StepWork, step_s: float) -> None:
        """Record a step that took `step_s` seconds and ends now.

        Durations that are not finite and positive are ignored.
        """
        if not work.num_decode_seqs or not 0 < step_s < inf:
            return
        self._lower_weights()
        self._decoding_s += step_s
        costs = self._costs() if work.num_prefill_tokens else None
        if costs is not None:
            decodes = replace(work, num_prefill_tokens=0, prefill_attended_tokens=0)
            decode_s = costs.step_seconds(decodes)
            self._prefill_s += max(0.0, step_s - decode_s)

    def _lower_weights(self) -> None:
        now_s = self._clock()
        weight = exp((self._weighted_at_s - now_s) / WINDOW_S)
        self._weighted_at_s = now_s
        self._decoding_s *= weight
        self._prefill_s *= weight
