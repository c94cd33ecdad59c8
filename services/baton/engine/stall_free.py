"""How much of a prompt goes into a step beside sequences that decode: so much that none of them waits long for its next token.

Source: Sarathi-Serve (OSDI'24), section 4. There the budget is one number, found offline; here it follows from what this worker's steps
cost now, so that it fits the batch of the moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from baton.core.costs import StepCostModel, StepWork, attended_tokens, stall_free_step_s

Part = tuple[int, int]
"""(tokens to compute, tokens before them)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`costs`: of this worker's steps, as they are now; None: not known. `now_s`: the clock by which promises are kept."""

    costs: Callable[[], StepCostModel | None]
    now_s: Callable[[], float]


def tokens_beside(
    costs: StepCostModel | None,
    decode_contexts: Sequence[int],
    promised_s: float,
    num_before: int,
    queued: Callable[[], Sequence[Part]],
    *,
    at_most: int,
    at_least: int,
) -> int:
    """Prompt tokens for a step in which sequences with these contexts decode, between `at_least` (a prompt goes on, whatever its step
    takes) and `at_most`. `promised_s`: how long the promises to them allow the step to take, 0 for nothing (`promises.limit_s`).
    `num_before`: tokens of the prompt that are computed already. `queued`: works out what is left of each prompt."""
    if costs is None or not decode_contexts or at_most <= at_least:
        return at_most
    prompts = queued()
    queued_s = (costs.uncorrected_step_s(StepWork.of(prompts)) - costs.step_s) * costs.mixed_factor if prompts else 0.0
    decode = StepWork.of((), decode_contexts)
    beside_s = costs.uncorrected_step_s(decode) * costs.mixed_factor
    limit_s = stall_free_step_s(costs.step_seconds(decode), beside_s, promised_s, queued_s, len(prompts), len(decode_contexts))
    room_s = (limit_s - beside_s) / costs.mixed_factor

    def fits(num_tokens: int) -> bool:
        return costs.prefill_token_s * num_tokens + costs.prefill_attended_s * attended_tokens(num_tokens, num_before) <= room_s

    if fits(at_most):
        return at_most
    found = min(at_most, max(at_least, int(_root(costs, num_before, room_s))))
    while found < at_most and fits(found + 1):  # rounding: once, if at all
        found += 1
    while found > at_least and not fits(found):
        found -= 1
    return found


def _root(costs: StepCostModel, num_before: int, room_s: float) -> float:
    """Of prefill_token_s n + prefill_attended_s (n num_before + n (n + 1) / 2) = room_s."""
    if room_s <= 0:
        return 0.0
    half = costs.prefill_attended_s / 2
    linear = costs.prefill_token_s + costs.prefill_attended_s * (num_before + 0.5)
    return 2 * room_s / (linear + sqrt(linear * linear + 4 * half * room_s))
