"""Latency targets of requests, and the balance between prompts and decodes that follows from them.

A request without an SLO gets derived targets: a multiple of its unloaded latency, by the worker's own
`StepCostModel`. The engine's step budget balances with these targets, and the scheduler predicts with them.

A request's *slowdown* is its latency over the unloaded one. A TTFT of twice the unloaded one and a TPOT of
twice the unloaded one are the same slowdown, so one number compares prompts with decodes. Both are slowed
down equally, each at most to its target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from baton.core.step_cost import StepCostModel

PLANNED_SHARE = 0.9
"""Steps are planned to use at most this share of a target. The rest covers the path to the client and steps
that take longer than predicted."""
BISECTION_STEPS = 7
"""Steps of `balanced_share`. For a TTFT target of 10 times the unloaded TTFT, the result is exact to 2 %."""
_TINY_S = 1e-9
"""Shorter than any step. Avoids a division by zero for a worker whose costs are 0."""

N = TypeVar("N")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFactors:
    """Factors of the targets of requests without an SLO: times the unloaded latency.

    ttft: times the TTFT of a prompt of its length on the idle worker, with nothing cached.
    tpot: times the TPOT of a single answer on the idle worker.
    """

    ttft: float = 10.0
    tpot: float = 3.0

    def __post_init__(self) -> None:
        for name, factor in (("ttft", self.ttft), ("tpot", self.tpot)):
            if not 1 < factor < inf:
                raise ValueError(f"the {name} target factor is {factor:g}; must be above 1 and finite")


DEFAULT_FACTORS = TargetFactors()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTerm:
    """One latency of a request. All times in seconds.

    target_s: the target.
    planned_s: the part of it that steps may use.
    unloaded_s: the latency on the idle worker.
    is_slo: the target is the request's SLO, not a derived one.
    """

    target_s: float
    planned_s: float
    unloaded_s: float
    is_slo: bool = False

    @staticmethod
    def of(unloaded_s: float, target_s: float, *, is_slo: bool = False) -> "LatencyTerm":
        """Return the term of an unloaded latency and a target."""
        target_s, unloaded_s = max(target_s, _TINY_S), max(unloaded_s, _TINY_S)
        return LatencyTerm(target_s=target_s, planned_s=PLANNED_SHARE * target_s, unloaded_s=unloaded_s, is_slo=is_slo)

    def at_slowdown(self, slowdown: float) -> float:
        """Return the latency at this slowdown, at most the planned one, in seconds."""
        return min(self.unloaded_s * slowdown, self.planned_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """The targets of one request. They are fixed when it arrives at a worker.

    ttft: from its arrival at the gateway to its first token. Its unloaded time is that of the tokens that
        were not cached at its arrival.
    tpot: mean gap between its tokens.
    """

    ttft: LatencyTerm
    tpot: LatencyTerm

    @staticmethod
    def of(
        costs: StepCostModel,
        factors: TargetFactors,
        *,
        num_tokens: int,
        num_cached_tokens: int,
        chunk_tokens: int,
        ttft_slo_s: float = 0.0,
        tpot_slo_s: float = 0.0,
    ) -> "LatencyTargets":
        """Return the targets of a prompt of `num_tokens` tokens. An SLO of 0 means none.

        chunk_tokens: largest prefill chunk of the worker.
        """
        own_s = costs.prefill_s(num_tokens - num_cached_tokens, num_cached_tokens, chunk_tokens)
        gap_s = costs.decode_step_s(1, num_tokens)
        derived_s = factors.ttft * costs.prefill_s(num_tokens, 0, chunk_tokens)
        return LatencyTargets(
            ttft=LatencyTerm.of(own_s, ttft_slo_s or derived_s, is_slo=ttft_slo_s > 0),
            tpot=LatencyTerm.of(gap_s, tpot_slo_s or factors.tpot * gap_s, is_slo=tpot_slo_s > 0),
        )


def balanced_share(needed: Callable[[N], N], allowed: Callable[[N], N], most: N, minimum: Callable[[N, N], N]) -> N:
    """Return the share of the step time that goes to prompts, so that both sides are slowed down equally.

    needed: the share that prompts need to have a slowdown; does not grow with it.
    allowed: the share that decodes leave if they have a slowdown; does not fall with it.
    most: highest slowdown that any target allows, at least 1; one number, or an array of one per worker if
        all functions take and return arrays.
    minimum: smaller of two values, per worker.

    If the targets of both sides cannot be met, it is the share that decodes leave at their targets.
    """
    low: Any = most / most  # type: ignore[operator]
    high: Any = most
    for _ in range(BISECTION_STEPS):
        middle = (low * high) ** 0.5
        is_met: Any = needed(middle) <= allowed(middle)  # type: ignore[operator]
        low, high = low + (1 - is_met) * (middle - low), high - is_met * (high - middle)
    return minimum(needed(low), allowed(high))
