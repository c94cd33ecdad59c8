"""Decides how many tokens the next step may carry.

Decoding sequences wait for the whole step, so a long prefill chunk delays their next token. Two rules limit
the length of a step that carries prefill and decode (a mixed step):

- The stall-free rule, `core.step_cost.stall_free_step_s`: a mixed step may take a fixed multiple of a
  decode-only step, or more if many prompts are queued. The scheduler predicts with the same function.
- The SLO slack: if every decoding sequence has a TPOT SLO, a step may use a share of the time that the
  sequences are ahead of it. A TPOT SLO limits the mean gap of a response, so a response that is ahead can
  wait while a prompt is computed in one large step. Every wait reduces the slack that is left
  (least-laxity-first).

`plan` is the only entry point that sizes a step. It is a pure function.

Source of the stall-free rule: Sarathi-Serve (OSDI'24), section 4. There the budget is one constant, found
offline. Here it follows from what this worker's steps cost now, so it fits the current batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt

from baton.core.step_cost import StepCostModel, StepWork, attended_tokens, stall_free_step_s
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.sequence import EngineSequence

SLO_TARGET_SHARE = 0.9
"""Sequences are kept within this share of their TPOT SLO. The rest covers the path to the client and steps
that take longer than predicted. A sequence that is beyond this share, but can still meet its SLO, gets no
delay."""
SLACK_SHARE_PER_STEP = 0.25
"""One step uses at most this share of the smallest slack. The rest is left for prompts that arrive later, and
for steps that get longer because more sequences decode."""
EXPECTED_OUTPUT_SHARE = 0.25
"""A sequence that may end with an end-of-text token is expected to produce this share of a mean response.
Slack is recovered in later tokens, so tokens that may not come are not counted. The value is an estimate."""

PrefillPart = tuple[int, int]
"""(tokens to compute, tokens before them) of one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """The size limit of one step.

    num_tokens: most tokens that the step may carry, one per decoding sequence included.
    slo_step_s: longest step that the TPOT SLOs of the decoding sequences allow, in seconds. 0 if they do not
        extend the stall-free limit: no sequence decodes, one of them has no SLO, or none has slack.
    """

    num_tokens: int
    slo_step_s: float


def plan(
    running: Iterable[EngineSequence],
    prefills: Sequence[PrefillPart],
    costs: StepCostModel | None,
    now_s: float,
    *,
    config: EngineConfig,
    mean_output_tokens: float,
) -> StepBudget:
    """Return the budget of the next step.

    running: sequences that have their blocks.
    prefills: what is left of every prompt, running or queued.
    costs: what a step costs on this worker. None if unknown: then the budget is `max_num_batched_tokens`.
    now_s: current time, by the clock that `record_token` gets.
    mean_output_tokens: mean length of recent responses, 0 if unknown.
    """
    seqs = list(running)
    decoding = [seq for seq in seqs if seq.num_uncomputed_tokens == 1]
    if costs is None or not decoding:
        return StepBudget(num_tokens=config.max_num_batched_tokens, slo_step_s=0.0)
    step = MixedStep.of(costs, [seq.num_computed_tokens for seq in decoding], prefills)
    slo_step_s = slo_limit_s(
        decoding,
        now_s,
        step.decode_s,
        baseline_s=step.baseline_s,
        mean_output_tokens=mean_output_tokens,
        max_model_len=config.max_model_len,
    )
    num_prefill_tokens = step.max_prefill_tokens(
        slo_step_s,
        max((seq.num_computed_tokens for seq in seqs if seq.num_uncomputed_tokens > 1), default=0),
        at_most=config.max_num_batched_tokens - len(decoding),
        at_least=config.block_size_tokens,
    )
    return StepBudget(num_tokens=len(decoding) + num_prefill_tokens, slo_step_s=slo_step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStep:
    """A step in which sequences decode, and the time that prefill may take in it. All times in seconds.

    costs: cost model of this worker's steps.
    decode_s: duration of the step without prefill.
    mixed_s: the decoding sequences' part of a step with prefill.
    queued_s: time to compute all queued prompt tokens.
    num_prompts: prompts that still need prefill.
    num_decoding: sequences that decode in the step.
    """

    costs: StepCostModel
    decode_s: float
    mixed_s: float
    queued_s: float
    num_prompts: int
    num_decoding: int

    @classmethod
    def of(cls, costs: StepCostModel, decode_contexts: Sequence[int], prefills: Sequence[PrefillPart]) -> "MixedStep":
        """Predict a step in which sequences with these context lengths decode while `prefills` are queued."""
        decode = StepWork.of((), decode_contexts)
        return cls(
            costs=costs,
            decode_s=costs.step_seconds(decode),
            mixed_s=costs.uncorrected_step_s(decode) * costs.mixed_factor,
            queued_s=(costs.uncorrected_step_s(StepWork.of(prefills)) - costs.step_s) * costs.mixed_factor
            if prefills
            else 0.0,
            num_prompts=len(prefills),
            num_decoding=len(decode_contexts),
        )

    @property
    def baseline_s(self) -> float:
        """Longest duration of a mixed step without any SLO slack and with only one queued prompt."""
        return stall_free_step_s(self.decode_s, self.mixed_s, 0.0, 0.0, 1, self.num_decoding)

    def max_s(self, slo_step_s: float) -> float:
        """Return the longest allowed duration of this step. `slo_step_s` as in `StepBudget`."""
        return stall_free_step_s(
            self.decode_s, self.mixed_s, slo_step_s, self.queued_s, self.num_prompts, self.num_decoding
        )

    def max_prefill_tokens(self, slo_step_s: float, num_before: int, *, at_most: int, at_least: int) -> int:
        """Return the most prompt tokens with which the step keeps within `max_s(slo_step_s)`.

        At least `at_least` tokens, so that a prompt always makes progress, and at most `at_most`.
        num_before: tokens of the prompt that are computed already; a chunk after them attends to them.
        """
        costs = self.costs
        prefill_s = (self.max_s(slo_step_s) - self.mixed_s) / costs.mixed_factor

        def fits(num_tokens: int) -> bool:
            return (
                costs.prefill_token_s * num_tokens + costs.prefill_attended_s * attended_tokens(num_tokens, num_before)
                <= prefill_s
            )

        if at_most <= at_least or fits(at_most):
            return at_most
        found = min(at_most, max(at_least, int(_tokens_in(costs, num_before, prefill_s))))
        while found < at_most and fits(found + 1):  # corrects rounding, at most one step
            found += 1
        while found > at_least and not fits(found):
            found -= 1
        return found


def record_token(seq: EngineSequence, now_s: float) -> None:
    """Move `seq.due_s`, the time at which its next token is due, forward by one target gap.

    Call it for each token that `seq` gets. The first call starts the clock; if another worker made the first
    token, that is when its KV has arrived here. Does nothing without a TPOT SLO.
    """
    target_s = SLO_TARGET_SHARE * seq.request.tpot_slo_s
    if target_s:
        seq.due_s = (seq.due_s or now_s) + target_s


def slo_limit_s(
    decoding: Iterable[EngineSequence],
    now_s: float,
    decode_s: float,
    *,
    baseline_s: float,
    mean_output_tokens: float,
    max_model_len: int,
) -> float:
    """Return how long the next step may take by the TPOT SLOs of the decoding sequences, in seconds.

    0 if a sequence has no SLO, or if none has slack to give. A sequence that can no longer meet its SLO, even
    with decode-only steps, is ignored: it does not hold up prompts.

    decode_s: duration of a decode-only step.
    baseline_s: duration of a mixed step (`MixedStep.baseline_s`). A delay must be recovered in steps of this
        length. The duration with the current queue is not used: the queue is temporary, and a longer queue
        would then make the step shorter.
    mean_output_tokens: mean length of recent responses, 0 if unknown.
    """
    least_s = inf
    for seq in decoding:
        slo_s = seq.request.tpot_slo_s
        if not slo_s:
            return 0.0
        if not seq.due_s:  # the last token of its prompt is due in this step; it has no output yet
            continue
        target_s = SLO_TARGET_SHARE * slo_s
        most = max(1, min(seq.request.sampling.max_tokens - seq.num_output_tokens, max_model_len - len(seq.token_ids)))
        ahead_s = seq.due_s - now_s - decode_s
        reserve_s = (1 - SLO_TARGET_SHARE) * slo_s * (seq.num_output_tokens + most - 1)
        if ahead_s + (most - 1) * (target_s - decode_s) + reserve_s <= 0:
            continue
        gain_s = min(target_s - decode_s, max(0.0, target_s - baseline_s))
        least_s = min(least_s, max(0.0, ahead_s + (_expected_tokens(seq, most, mean_output_tokens) - 1) * gain_s))
    return 0.0 if least_s in (0.0, inf) else decode_s + SLACK_SHARE_PER_STEP * least_s


def _expected_tokens(seq: EngineSequence, most: int, mean_output_tokens: float) -> float:
    """Return how many of its at most `most` remaining tokens `seq` is expected to produce."""
    sampling = seq.request.sampling
    if sampling.ignore_eos and not sampling.stop_token_ids:
        return most
    return min(most, max(1.0, EXPECTED_OUTPUT_SHARE * mean_output_tokens, sampling.min_tokens - seq.num_output_tokens))


def _tokens_in(costs: StepCostModel, num_before: int, prefill_s: float) -> float:
    """Solve prefill_token_s n + prefill_attended_s (n num_before + n (n + 1) / 2) = prefill_s for n >= 0."""
    if prefill_s <= 0:
        return 0.0
    half = costs.prefill_attended_s / 2
    linear = costs.prefill_token_s + costs.prefill_attended_s * (num_before + 0.5)
    return 2 * prefill_s / (linear + sqrt(linear * linear + 4 * half * prefill_s))
