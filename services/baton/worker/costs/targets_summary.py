"""Describes the latency targets of requests without an SLO."""

from baton.core.step_cost import StepCostModel
from baton.core.step_targets import LatencyTargets, TargetFactors
from baton.runtime.config.durations import format_duration

EXAMPLE_TOKENS = 512
"""Prompt length of the example."""


def targets_summary(factors: TargetFactors, costs: StepCostModel | None, chunk_tokens: int) -> str:
    """Return the targets in words, with those of a prompt of `EXAMPLE_TOKENS` tokens if costs are known.

    chunk_tokens: largest prefill chunk of the worker.
    """
    text = f"targets without SLO TTFT {factors.ttft:g}x, TPOT {factors.tpot:g}x"
    if costs is None:
        return f"{text} of unknown costs: none"
    targets = LatencyTargets.of(costs, factors, num_tokens=EXAMPLE_TOKENS, chunk_tokens=chunk_tokens)
    ttft, tpot = (format_duration(float(f"{term.target_s:.2g}")) for term in (targets.ttft, targets.tpot))
    return f"{text} ({EXAMPLE_TOKENS} tokens: {ttft}, {tpot})"
