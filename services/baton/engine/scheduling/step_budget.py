"""How much of a prompt goes into a step beside sequences that decode: so much that none of them waits long
for its next token.

Source: Sarathi-Serve (OSDI'24), section 4. There the budget is one number, found offline; here it follows
from what this worker's steps cost now, so that it fits the batch of the moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from baton.core.step_cost import StepCostModel, StepWork, attended_tokens, stall_free_step_s

Part = tuple[int, int]
"""(tokens to compute, tokens before them)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """`costs`: of this worker's steps, as they are now; None: not known. `now_s`: the clock by which promises
    are kept."""

    costs: Callable[[], StepCostModel | None]
    now_s: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStep:
    """The next step, in which `num_decoding` sequences decode, and what prompts may have of it. `decode_s`:
    it takes without any; `beside_s`: those that decode take in one with a prompt. `queued_s` of computing, of
    `num_prompts`, wait."""

    costs: StepCostModel
    decode_s: float
    beside_s: float
    queued_s: float
    num_prompts: int
    num_decoding: int

    @classmethod
    def of(cls, costs: StepCostModel, decode_contexts: Sequence[int], prompts: Sequence[Part]) -> "MixedStep":
        """`prompts`: what is left of each."""
        decode = StepWork.of((), decode_contexts)
        return cls(
            costs=costs,
            decode_s=costs.step_seconds(decode),
            beside_s=costs.uncorrected_step_s(decode) * costs.mixed_factor,
            queued_s=(costs.uncorrected_step_s(StepWork.of(prompts)) - costs.step_s) * costs.mixed_factor
            if prompts
            else 0.0,
            num_prompts=len(prompts),
            num_decoding=len(decode_contexts),
        )

    @property
    def least_s(self) -> float:
        """How long it may take with a part of a prompt, whatever was promised and however few wait."""
        return stall_free_step_s(self.decode_s, self.beside_s, 0.0, 0.0, 1, self.num_decoding)

    def most_s(self, promised_s: float) -> float:
        """And as the promises to those that decode allow, 0 for nothing (`promises.limit_s`), beside the
        prompts that wait now."""
        return stall_free_step_s(
            self.decode_s, self.beside_s, promised_s, self.queued_s, self.num_prompts, self.num_decoding
        )

    def most_tokens(self, promised_s: float, num_before: int, *, at_most: int, at_least: int) -> int:
        """Prompt tokens for it, between `at_least` (a prompt goes on, whatever its step takes) and `at_most`.
        `num_before`: tokens of the prompt that are computed already."""
        costs = self.costs
        room_s = (self.most_s(promised_s) - self.beside_s) / costs.mixed_factor

        def fits(num_tokens: int) -> bool:
            return (
                costs.prefill_token_s * num_tokens + costs.prefill_attended_s * attended_tokens(num_tokens, num_before)
                <= room_s
            )

        if at_most <= at_least or fits(at_most):
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
