"""Predicts the share of step time that a worker gives to prompts, by the rule of the engine's step budget.

The engine knows each of its requests. Here one answer of mean length, undisturbed so far, stands for the
worker's decodes, and one prompt behind the queue for its prompts.
"""

from math import inf
from typing import Any

from baton.core.step_targets import PLANNED_SHARE
from baton.scheduler.state.elementwise import maximum, minimum, where
from baton.scheduler.state.worker_data import N, ReportedState

_TINY_S = 1e-9
"""Shorter than any step. Avoids a division by zero for a worker whose costs are 0."""


def longest_step_s(reported: ReportedState[float], joined_step_s: float, gap_s: float, tpot_slo_s: float) -> float:
    """Return the longest mean step with which the decodes of one worker meet their targets, in seconds.

    Infinite if they limit nothing: none decodes, or decode-only steps exceed the targets already, so that
    all answers are late.

    joined_step_s: decode part of a mixed step once the joining sequences decode; 0 if there are none.
    gap_s: unloaded TPOT, without drafts. With drafts, a step may take as long as the gaps of its tokens.
    tpot_slo_s: strictest SLO of the requests placed there; 0 without any. It takes the place of the derived
        target of those that join. The report covers those that run.
    """
    if not joined_step_s:
        return inf
    joining_s = PLANNED_SHARE * (tpot_slo_s or gap_s * reported.tpot_factor) * reported.tokens_per_step
    targets_s = (joining_s, reported.target_step_s)
    return min((target_s for target_s in targets_s if target_s > joined_step_s), default=inf)


def prefill_share(reported: ReportedState[N], joined_step_s: N, longest_s: N, tpot_slo_s: N, *, work_s: N) -> N:
    """Return the share of the step time that goes to a prompt and those queued before it.

    Prompts get what the decodes can spare at once, and then the part of each step that they leave. An SLO is
    spread over all steps.

    joined_step_s, longest_s, tpot_slo_s: as in `longest_step_s`.
    work_s: time to compute the queued prompts and this one.
    """
    is_limited: Any = longest_s < inf
    if is_limited is False or (is_limited is not True and not is_limited.any()):
        return work_s * 0.0 + 1.0
    step_s = where(is_limited, longest_s, joined_step_s)
    spare_s = maximum(step_s - joined_step_s, 0.0)
    num_steps = reported.mean_output_tokens / reported.tokens_per_step
    at_once_s = where(tpot_slo_s > 0, 0.0, minimum(spare_s * num_steps, work_s))
    later_s = (work_s - at_once_s) * step_s / maximum(spare_s, _TINY_S)
    needs_more = is_limited & (work_s > at_once_s)
    share = where(needs_more, work_s / maximum(at_once_s + later_s, _TINY_S), work_s * 0.0 + 1.0)
    least_s = reported.prefill_token_s  # a step has one prompt token at least
    return maximum(share, least_s / maximum(joined_step_s + least_s, _TINY_S))


def ttft_slo_share(reported: ReportedState[N], joined_step_s: N, tpot_slo_s: N, *, work_s: N, left_s: N) -> N:
    """Return the share of the step time that a TTFT SLO demands, even if answers then miss derived targets.

    Only TPOT SLOs limit it. 0 if the SLO cannot be met.

    joined_step_s, tpot_slo_s, work_s: as above. left_s: time until the planned part of the SLO is over.
    """
    needed = work_s / maximum(left_s, _TINY_S)
    step_s = PLANNED_SHARE * tpot_slo_s * reported.tokens_per_step
    spare = maximum(step_s - joined_step_s, 0.0) / maximum(step_s, _TINY_S)
    return where(needed > 1, 0.0, minimum(needed, where(tpot_slo_s > 0, spare, spare * 0.0 + 1.0)))
