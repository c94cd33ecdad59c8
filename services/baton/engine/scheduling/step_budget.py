"""Decides how many tokens the next step may carry.

Decoding sequences wait for the whole step, so prompt tokens delay their next token. Every request has latency
targets: its SLO, or targets derived from its unloaded latency (`core.step_targets`). The budget keeps them:

- A TPOT target is a mean over the answer. An answer can spare the time by which it would be faster if all its
  later steps only decoded. Prompts get what every answer on time can spare, at once: the order of prompts and
  decodes within the life of an answer does not change its mean, and the sooner a prompt is computed, the
  sooner its first token comes and the more answers share each step.
- Beside an answer that can spare nothing more, steps carry one prompt token, until more tokens are expected
  of it, or it ends. Prompts that become late meanwhile count as overload.
- An answer with an SLO spreads the time that it can spare over its remaining steps, because sequences that
  join may make them longer.
- A TTFT SLO has precedence over derived TPOT targets, a TPOT SLO over everything.
- A request that can no longer meet its target is *late*. A late answer limits no step.
- If most requests are late, the worker is overloaded, and targets cannot help. Steps are then as full as
  possible, which gives the highest throughput. Only SLOs of decodes are still kept. Between one third and two
  thirds of late requests, steps become gradually fuller. A late prompt counts once for each time of its
  target that it has waited, so a few late prompts do not wait for ever.

The order of prompts does not change: by priority, then by arrival. `plan` is the only entry point that sizes
a step. It is a pure function.

Sources: Sarathi-Serve (OSDI'24), section 4, for steps of decodes and prefill chunks; its budget is one
constant, found offline. Niyama (arXiv 2503.22562), for chunks sized by the slack of decodes; it needs a
deadline from each client.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from baton.core.step_cost import StepCostModel, StepWork, attended_tokens
from baton.core.step_targets import LatencyTerm
from baton.engine.scheduling.batcher import admission_key
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.sequence import EngineSequence

EXPECTED_OUTPUT_SHARE = 0.25
"""A sequence that may end with an end-of-text token is expected to produce this share of a mean response.
Slack is recovered in later tokens, so tokens that may not come are not counted. The value is an estimate."""

FULLER_FROM, FULL_FROM = 0.35, 0.65
"""Share of late requests from which steps become fuller than targets allow, and from which they are as
full as possible. With a single limit, a worker near it alternates between both kinds of steps."""

PrefillPart = tuple[int, int]
"""(tokens to compute, tokens before them) of one prompt."""
QueuedPrompt = tuple[EngineSequence, PrefillPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """The size limit of one step.

    num_tokens: most tokens that the step may carry, one per decoding sequence included.
    num_late: requests that can no longer meet their target.
    target_step_s: longest mean step with which all decoding sequences on time meet their TPOT targets, in
        seconds. 0 if none limits the step.
    """

    num_tokens: int
    num_late: int = 0
    target_step_s: float = 0.0


class DraftSpeedup(NamedTuple):
    """The effect of drafts on recent decoding steps, in the mean over sequences.

    tokens_per_step: tokens of a sequence in the time of a step without drafts.
    step_length: duration of a step, as a multiple of that of the same step without drafts.
    """

    tokens_per_step: float = 1.0
    step_length: float = 1.0


def one_token(seq: EngineSequence) -> float:
    """Return 1: the tokens that a step without drafts gives each sequence."""
    return 1.0


def plan(
    running: Iterable[EngineSequence],
    prompts: Sequence[QueuedPrompt],
    costs: StepCostModel | None,
    now_s: float,
    *,
    config: EngineConfig,
    mean_output_tokens: float,
    tokens_per_step: Callable[[EngineSequence], float] = one_token,
) -> StepBudget:
    """Return the budget of the next step.

    running: sequences that have their blocks.
    prompts: all sequences whose prompt is not complete, running or queued, and what is left of each.
    costs: what a step costs on this worker. None if unknown: then the budget is `max_num_batched_tokens`.
    now_s: current time, by the clock that `record_token` gets.
    mean_output_tokens: mean length of recent responses, 0 if unknown.
    tokens_per_step: returns the tokens that a decoding sequence gets in the time of a step without drafts. It
        is below 1 for a sequence without drafts in steps that drafts of others make longer.
    """
    seqs = list(running)
    if costs is None or not (seqs or prompts):
        return StepBudget(num_tokens=config.max_num_batched_tokens)
    decoding = [seq for seq in seqs if seq.num_uncomputed_tokens == 1]
    step = MixedStep.of(costs, [seq.num_computed_tokens for seq in decoding])
    queue = PromptQueue.of(prompts, step, now_s)
    answers, num_late = answers_on_time(
        decoding, step, now_s, mean_output_tokens, config.max_model_len, tokens_per_step
    )
    full_part = full_part_of(queue.late_weight + num_late, queue.num_on_time + len(decoding) - num_late)
    slos = [answer for answer in answers if answer.gap.is_slo]
    most_tokens = config.max_num_batched_tokens - len(decoding)
    num_before = max((seq.num_computed_tokens for seq in seqs if seq.num_uncomputed_tokens > 1), default=0)

    def prefill_tokens(prefill_s: float) -> int:
        return step.max_prefill_tokens(prefill_s, num_before, at_most=most_tokens)

    on_target = full = most_tokens
    if decoding and full_part < 1:
        for_slos_s = min(queue.slo_needed_s(step), spare_now_s(slos, step))
        on_target = prefill_tokens(max(spare_now_s(answers, step), for_slos_s))
    if decoding and full_part > 0:
        full = prefill_tokens(spare_now_s(slos, step))
    limiting = answers if full_part < 1 else slos
    return StepBudget(
        num_tokens=len(decoding) + round(on_target + full_part * (full - on_target)),
        num_late=queue.num_late + num_late,
        target_step_s=min((answer.longest_step_s(step) for answer in limiting), default=0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStep:
    """A step in which sequences decode, and what prompt tokens add to it. All times in seconds.

    It has no drafts. What they give counts as more tokens in the same time.

    costs: cost model of this worker's steps.
    factor: correction of steps with prefill: of mixed ones, or of prefill alone if nothing decodes.
    decode_s: duration of the step without prefill.
    mixed_s: the decoding sequences' part of a step with prefill.
    """

    costs: StepCostModel
    factor: float
    decode_s: float
    mixed_s: float

    @classmethod
    def of(cls, costs: StepCostModel, decode_contexts: Sequence[int]) -> "MixedStep":
        """Predict a step in which sequences with these context lengths decode."""
        decode = StepWork.of((), decode_contexts)
        factor = costs.mixed_factor if decode_contexts else costs.prefill_factor
        return cls(
            costs=costs,
            factor=factor,
            decode_s=costs.step_seconds(decode),
            mixed_s=costs.uncorrected_step_s(decode) * factor,
        )

    def compute_s(self, num_tokens: int, num_before: int) -> float:
        """Return the time that `num_tokens` prompt tokens after `num_before` add to steps that run anyway."""
        attended_s = self.costs.prefill_attended_s * attended_tokens(num_tokens, num_before)
        return self.factor * (self.costs.prefill_token_s * num_tokens + attended_s)

    def max_prefill_tokens(self, prefill_s: float, num_before: int, *, at_most: int) -> int:
        """Return the most prompt tokens that make the step at most `prefill_s` longer, at most `at_most`.

        At least one, so that a prompt always makes progress. They take at least as long as a chunk of any
        size makes the step longer; smaller chunks would only make more of such steps.

        num_before: tokens of the prompt that are computed already; a chunk after them attends to them.
        """
        prefill_s = max(prefill_s, self.mixed_s - self.decode_s)
        if self.compute_s(at_most, num_before) <= prefill_s:
            return at_most
        found = min(at_most, max(1, int(_tokens_in(self.costs, num_before, prefill_s / self.factor))))
        while found < at_most and self.compute_s(found + 1, num_before) <= prefill_s:  # at most one step
            found += 1
        while found > 1 and self.compute_s(found, num_before) > prefill_s:
            found -= 1
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQueue:
    """The prompts that are not complete.

    num_on_time: prompts that are not late.
    num_late: prompts whose first token comes too late even if nothing else was computed from now on.
    late_weight: sum of waiting time over target, over the late prompts.
    slo_share: share of the step time with which all TTFT SLOs are met that still can be, behind the prompts
        that are queued before them.
    """

    num_on_time: int
    num_late: int
    late_weight: float
    slo_share: float

    @classmethod
    def of(cls, prompts: Sequence[QueuedPrompt], step: MixedStep, now_s: float) -> "PromptQueue":
        """Go through the prompts in queue order, and find those that are late."""
        until_s, num_late, late_weight, slo_share = 0.0, 0, 0.0, 0.0
        for seq, part in sorted(prompts, key=lambda prompt: admission_key(prompt[0])):
            compute_s = step.compute_s(*part)
            until_s += compute_s
            if seq.targets is None or seq.first_token_s is not None:  # a preempted sequence has its first token
                continue
            ttft, waited_s = seq.targets.ttft, now_s - seq.arrived_s
            if waited_s + compute_s > ttft.target_s:
                num_late += 1
                late_weight += waited_s / ttft.target_s
            elif ttft.is_slo and 0 < until_s <= ttft.planned_s - waited_s:
                slo_share = max(slo_share, until_s / (ttft.planned_s - waited_s))
        return cls(num_on_time=len(prompts) - num_late, num_late=num_late, late_weight=late_weight, slo_share=slo_share)

    def slo_needed_s(self, step: MixedStep) -> float:
        """Return how much longer each step must be so that TTFT SLOs are met."""
        return inf if self.slo_share >= 1 else step.mixed_s * self.slo_share / (1 - self.slo_share)


class Answer(NamedTuple):
    """A decoding sequence that can meet its TPOT target.

    elapsed_s: time since its first token.
    num_gaps: gaps between its tokens in all, those to come included.
    num_steps: steps without drafts in whose time the tokens that are expected to come are made.
    tokens_per_step: its tokens in the time of a step without drafts.
    """

    gap: LatencyTerm
    elapsed_s: float
    num_gaps: float
    num_steps: float
    tokens_per_step: float

    def spare_s(self, step: MixedStep) -> float:
        """Return how much longer this step may be, at least 0. With an SLO, all remaining steps may."""
        left_s = self.num_gaps * self.gap.planned_s - self.elapsed_s
        if self.gap.is_slo:
            return max(0.0, left_s / self.num_steps - step.mixed_s)
        return max(0.0, left_s - step.mixed_s - (self.num_steps - 1) * step.decode_s)

    def longest_step_s(self, step: MixedStep) -> float:
        """Return the longest mean step with which answers like it meet their target.

        With an SLO it is that of its own remaining steps.
        """
        if self.gap.is_slo:
            return step.mixed_s + self.spare_s(step)
        return max(step.mixed_s, self.gap.planned_s * self.tokens_per_step)


def spare_now_s(answers: Iterable[Answer], step: MixedStep) -> float:
    """Return how much longer this step may be so that all answers meet their targets; infinite if none."""
    return min((answer.spare_s(step) for answer in answers), default=inf)


def full_part_of(late: float, on_time: float) -> float:
    """Return how far the step goes from one within targets, 0, to one that is as full as possible, 1.

    late: weight of the late requests. on_time: number of the others.
    """
    late_share = late / (late + on_time) if late else 0.0
    return min(1.0, max(0.0, (late_share - FULLER_FROM) / (FULL_FROM - FULLER_FROM)))


def record_token(seq: EngineSequence, now_s: float) -> None:
    """Start the clock of the TPOT target with the first token of `seq`.

    Call it for each token, before it is appended. If another worker made the first token, the clock starts
    when its KV has arrived here.
    """
    if seq.first_token_s is None:
        seq.first_token_s = now_s
        seq.num_earlier_tokens = seq.num_output_tokens


def answers_on_time(
    decoding: Iterable[EngineSequence],
    step: MixedStep,
    now_s: float,
    mean_output_tokens: float,
    max_model_len: int,
    tokens_per_step: Callable[[EngineSequence], float],
) -> tuple[list[Answer], int]:
    """Return the decoding sequences that can meet their TPOT target, and the number of those that cannot.

    A sequence is late if it cannot meet its target even with decode-only steps. The last token of a prompt,
    which has no output yet, is neither.
    """
    found, num_late = [], 0
    for seq in decoding:
        if seq.first_token_s is None or seq.targets is None:
            continue
        gap, elapsed_s = seq.targets.tpot, now_s - seq.first_token_s
        num_past = seq.num_timed_tokens - 1
        most = max(1, min(seq.request.sampling.max_tokens - seq.num_output_tokens, max_model_len - len(seq.token_ids)))
        speed = tokens_per_step(seq)
        if elapsed_s + max(1.0, most / speed) * step.decode_s > (num_past + most) * gap.target_s:
            num_late += 1
            continue
        num_left = _expected_tokens(seq, most, mean_output_tokens)
        found.append(Answer(gap, elapsed_s, num_past + num_left, max(1.0, num_left / speed), speed))
    return found, num_late


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
