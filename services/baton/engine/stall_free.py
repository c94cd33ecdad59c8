"""How much of a prompt goes into a step beside sequences that decode: so much that none of them waits long for its next token.

Source: Sarathi-Serve (OSDI'24), section 4. There the budget is one number, found offline; here it follows from what this worker's steps
cost now, so that it fits the batch of the moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.costs import StepCostModel, StepWork, stall_free_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`costs`: of this worker's steps, as they are now; None: not known. `tpot_slo_s`: promised to whoever decodes here, 0 for none."""

    costs: Callable[[], StepCostModel | None]
    tpot_slo_s: float = 0.0


def tokens_beside(pace: Pace, decode_contexts: Sequence[int], num_before: int, queued: StepWork, *, at_most: int, at_least: int) -> int:
    """Prompt tokens for a step in which sequences with these contexts decode, between `at_least` (a prompt goes on, whatever its step
    takes) and `at_most`. `num_before`: tokens of the prompt that are computed already. `queued`: all that is left of prompts."""
    costs = pace.costs()
    if costs is None or not decode_contexts or at_most <= at_least:
        return at_most

    def takes_s(num_tokens: int) -> float:
        return costs.step_seconds(StepWork.of([(num_tokens, num_before)], decode_contexts))

    queued_s = costs.step_seconds(queued) - costs.step_s * costs.prefill_factor
    limit_s = stall_free_step_s(costs.step_seconds(StepWork.of((), decode_contexts)), pace.tpot_slo_s, queued_s)
    if takes_s(at_most) <= limit_s:
        return at_most
    low, high = at_least, at_most  # `high` takes too long
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes_s(middle) <= limit_s else (low, middle)
    return low
