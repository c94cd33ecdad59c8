"""Latency targets of requests.

A request without an SLO gets derived targets: a multiple of its unloaded latency, by the worker's own
`StepCostModel`. The engine's step budget keeps these targets, and the scheduler predicts with them.
"""

from dataclasses import dataclass
from math import inf

from baton.core.step_cost import StepCostModel

PLANNED_SHARE = 0.9
"""Steps are planned to use at most this share of a target. The rest covers the path to the client and steps
that take longer than predicted."""
_TINY_S = 1e-9
"""Shorter than any step. Avoids a division by zero for a worker whose costs are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFactors:
    """Factors of the targets of requests without an SLO: times the unloaded latency.

    ttft: times the TTFT of a prompt of its length on the idle worker, with nothing cached.
    tpot: times the TPOT of a single answer on the idle worker.
    """

    ttft: float = 10.0
    tpot: float = 4.0

    def __post_init__(self) -> None:
        for name, factor in (("ttft", self.ttft), ("tpot", self.tpot)):
            if not 1 < factor < inf:
                raise ValueError(f"the {name} target factor is {factor:g}; must be above 1 and finite")


DEFAULT_FACTORS = TargetFactors()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTerm:
    """One latency of a request. All times in seconds.

    target_s: the target.
    is_slo: the target is the request's SLO, not a derived one.
    """

    target_s: float
    is_slo: bool = False

    @staticmethod
    def of(target_s: float, *, is_slo: bool = False) -> "LatencyTerm":
        """Return the term of a target."""
        return LatencyTerm(target_s=max(target_s, _TINY_S), is_slo=is_slo)

    @property
    def planned_s(self) -> float:
        """The part of the target that steps may use."""
        return PLANNED_SHARE * self.target_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """The targets of one request. They are fixed when it arrives at a worker.

    ttft: from its arrival at the gateway to its first token.
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
        chunk_tokens: int,
        ttft_slo_s: float = 0.0,
        tpot_slo_s: float = 0.0,
    ) -> "LatencyTargets":
        """Return the targets of a prompt of `num_tokens` tokens. An SLO of 0 means none.

        chunk_tokens: largest prefill chunk of the worker.
        """
        ttft_s = ttft_slo_s or factors.ttft * costs.prefill_s(num_tokens, 0, chunk_tokens)
        tpot_s = tpot_slo_s or factors.tpot * costs.decode_step_s(1, num_tokens)
        return LatencyTargets(
            ttft=LatencyTerm.of(ttft_s, is_slo=ttft_slo_s > 0), tpot=LatencyTerm.of(tpot_s, is_slo=tpot_slo_s > 0)
        )
