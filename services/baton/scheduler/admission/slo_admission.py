"""When the scheduler says no before any prefill is spent.

Source: Mooncake (arXiv 2407.00079), section 7: early rejection, and why it must look at the moment at which
prefill will end. Judged by the decode load of now, requests are refused while prefill is idle and admitted
while decode is about to be full: both swing in anti-phase.
"""

from enum import Enum
from math import log

from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.errors import Reason
from baton.scheduler.policies.policy_result import Choice, Prediction

QUEUE_FULL_RETRY_S = 1.0
MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
HEADROOM = 1.05
"""Of what is predicted: of promises that are predicted to be kept just so, half would be broken."""


class AdmissionMode(Enum):
    """OFF: promises are not looked at. EARLY: TTFT as predicted, TPOT as if the request decoded now.
    PREDICTIVE: TPOT of the moment at which its prompt is computed."""

    OFF = "off"
    EARLY = "early"
    PREDICTIVE = "predictive"


def admit(query: PlacementQuery, choice: Choice, *, mode: AdmissionMode, ahead_s: float = 0.0) -> Rejection | None:
    """Refuse what is predicted to miss its SLO. `ahead_s`: until those that wait at the scheduler before it
    have had their turns.

    A first attempt only: a request that was admitted once is never turned away for load by a worker's death.
    A policy that predicts nothing lets all SLOs pass.
    """
    predicted = choice.predicted
    if query.attempt > 0 or mode is AdmissionMode.OFF or predicted is None:
        return None
    ttft_slo_s, tpot_slo_s = query.slo.ttft_s, query.slo.tpot_s
    ttft_s = query.waited_s + HEADROOM * (ahead_s + predicted.ttft_s)
    if ttft_slo_s is not None and ttft_s > ttft_slo_s:
        over_s = ttft_s - ttft_slo_s
        is_hopeless = over_s > query.waited_s + HEADROOM * (
            ahead_s + predicted.queue_s
        )  # even without any queue it takes too long
        return _refusal(Reason.TTFT_SLO, "ttft", ttft_s, ttft_slo_s, None if is_hopeless else over_s)
    tpot_s = predicted.tpot_now_s if mode is AdmissionMode.EARLY else predicted.tpot_s
    if tpot_slo_s is not None and tpot_s is not None and HEADROOM * tpot_s > tpot_slo_s:
        tpot_s *= HEADROOM
        return _refusal(Reason.TPOT_SLO, "tpot", tpot_s, tpot_slo_s, _tpot_retry_s(predicted, tpot_s, tpot_slo_s))
    return None


def no_turn_yet(
    query: PlacementQuery, choice: Choice, *, max_waiting_seqs: int, max_worker_queue_s: float | None
) -> Rejection | None:
    """Why the request should rather wait at the scheduler, in words for the case that it cannot: every
    candidate's predicted queue is over `max_worker_queue_s`, or the chosen worker, the best of its side, has
    `max_waiting_seqs` sequences waiting."""
    if query.attempt > 0:
        return None
    predicted = choice.predicted
    if max_worker_queue_s is not None and predicted is not None and predicted.least_queue_s > max_worker_queue_s:
        over_s = predicted.least_queue_s - max_worker_queue_s
        return Rejection(
            reason=Reason.QUEUE_FULL,
            message=f"every worker's queue takes {predicted.least_queue_s:.2g} s; retry after {over_s:.2g} s",
            retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, over_s)),
            term="queue_s",
            predicted_s=predicted.least_queue_s,
            limit_s=max_worker_queue_s,
        )
    return _refused_by_queue(choice, max_waiting_seqs)


def _refused_by_queue(choice: Choice, max_waiting_seqs: int) -> Rejection | None:
    for side, chosen in (("prefill", choice.prefill), ("decode", choice.decode)):
        if chosen is None:
            continue
        waiting = chosen.report.waiting_seqs + chosen.reserved_seqs
        if waiting >= max_waiting_seqs:
            return Rejection(
                reason=Reason.QUEUE_FULL,
                message=f"the {side} worker for it has {max_waiting_seqs} requests waiting; retry after {QUEUE_FULL_RETRY_S:g} s",
                retry_after_s=QUEUE_FULL_RETRY_S,
                term=f"{side}_queue",
            )
    return None


def _refusal(reason: Reason, term: str, predicted_s: float, limit_s: float, retry_s: float | None) -> Rejection:
    retry_after_s = MAX_RETRY_S if retry_s is None else min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s))
    when = "an idle cluster would miss it, too" if retry_s is None else f"retry after {retry_after_s:.2g} s"
    return Rejection(
        reason=reason,
        message=f"predicted {term} of {predicted_s * 1000:,.0f} ms is over the limit of {limit_s * 1000:,.0f} ms; {when}",
        retry_after_s=retry_after_s,
        term=f"{term}_s",
        predicted_s=predicted_s,
        limit_s=limit_s,
    )


def _tpot_retry_s(predicted: Prediction, tpot_s: float, limit_s: float) -> float | None:
    """What the others add to a step fades as they end. None: a step takes too long even without them."""
    room_s = limit_s - predicted.idle_tpot_s
    return predicted.leave_s * log((tpot_s - predicted.idle_tpot_s) / room_s) if room_s > 0 else None
