"""Rejects requests that are predicted to miss their SLOs, before any prefill is spent.

Source: Mooncake (arXiv 2407.00079), section 7. Early rejection must predict the decode load at the moment
    when prefill ends. If it uses the current load, it rejects requests while prefill is idle and admits them
    while decode is filling up, so both loads oscillate in anti-phase.
"""

from enum import Enum
from math import log

from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.errors import QUEUE_FULL_RETRY_S, Reason
from baton.scheduler.policies.policy_types import Choice, Prediction

MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
HEADROOM = 1.05
"""Factor on predictions. Half of the requests that are predicted to meet an SLO exactly would miss it."""


class AdmissionMode(Enum):
    """Selects the predictions that are compared with a request's SLOs.

    OFF: none. EARLY: TTFT, and TPOT at the current decode load. PREDICTIVE: TTFT, and TPOT at the load
        predicted for the end of its prefill.
    """

    OFF = "off"
    EARLY = "early"
    PREDICTIVE = "predictive"


def check_slos(query: PlacementQuery, choice: Choice, *, mode: AdmissionMode, ahead_s: float = 0.0) -> Rejection | None:
    """Return a rejection if the request is predicted to miss one of its SLOs, else None.

    `ahead_s`: predicted time until the requests queued before it are placed.

    Only first attempts are checked: a request that was admitted is not rejected for load after a worker's
        failure. If the policy predicts nothing, all requests pass.
    """
    predicted = choice.predicted
    if query.attempt > 0 or mode is AdmissionMode.OFF or predicted is None:
        return None
    ttft_slo_s, tpot_slo_s = query.slo.ttft_s, query.slo.tpot_s
    ttft_s = query.waited_s + HEADROOM * (ahead_s + predicted.ttft_s)
    if ttft_slo_s is not None and ttft_s > ttft_slo_s:
        over_s = ttft_s - ttft_slo_s
        # True if the request would miss its SLO without any queue, too.
        is_hopeless = over_s > query.waited_s + HEADROOM * (ahead_s + predicted.queue_s)
        return _slo_rejection(Reason.TTFT_SLO, "ttft", ttft_s, ttft_slo_s, None if is_hopeless else over_s)
    tpot_s = predicted.tpot_now_s if mode is AdmissionMode.EARLY else predicted.tpot_s
    if tpot_slo_s is not None and tpot_s is not None and HEADROOM * tpot_s > tpot_slo_s:
        tpot_s *= HEADROOM
        return _slo_rejection(Reason.TPOT_SLO, "tpot", tpot_s, tpot_slo_s, _tpot_retry_s(predicted, tpot_s, tpot_slo_s))
    return None


def check_worker_queues(
    query: PlacementQuery, choice: Choice, *, max_waiting_seqs: int, max_worker_queue_s: float | None
) -> Rejection | None:
    """Return a rejection if the workers' queues are too long, else None.

    The caller lets the request wait at the scheduler instead if it can. The limits are `max_worker_queue_s`
    for the shortest predicted queue of all candidates, and `max_waiting_seqs` for the sequences waiting at a
    chosen worker.
    """
    if query.attempt > 0:
        return None
    predicted = choice.predicted
    if max_worker_queue_s is not None and predicted is not None and predicted.least_queue_s > max_worker_queue_s:
        over_s = predicted.least_queue_s - max_worker_queue_s
        return Rejection(
            reason=Reason.QUEUE_FULL,
            message=(
                f"the shortest worker queue takes {predicted.least_queue_s:.2g} s, over the limit of "
                f"{max_worker_queue_s:.2g} s; retry after {over_s:.2g} s"
            ),
            retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, over_s)),
            term="queue_s",
            predicted_s=predicted.least_queue_s,
            limit_s=max_worker_queue_s,
        )
    return _check_waiting_seqs(choice, max_waiting_seqs)


def _check_waiting_seqs(choice: Choice, max_waiting_seqs: int) -> Rejection | None:
    for side, chosen in (("prefill", choice.prefill), ("decode", choice.decode)):
        if chosen is None:
            continue
        waiting = chosen.report.waiting_seqs + chosen.reserved_seqs
        if waiting >= max_waiting_seqs:
            return Rejection(
                reason=Reason.QUEUE_FULL,
                message=(
                    f"the {side} worker has {waiting} requests waiting, limit {max_waiting_seqs}; "
                    f"retry after {QUEUE_FULL_RETRY_S:g} s"
                ),
                retry_after_s=QUEUE_FULL_RETRY_S,
                term=f"{side}_queue",
            )
    return None


def _slo_rejection(reason: Reason, term: str, predicted_s: float, limit_s: float, retry_s: float | None) -> Rejection:
    """Build the rejection.

    `retry_s` None: waiting does not help, because an idle cluster would miss the SLO, too.
    """
    retry_after_s = MAX_RETRY_S if retry_s is None else min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s))
    advice = "an idle cluster would miss it, too" if retry_s is None else f"retry after {retry_after_s:.2g} s"
    return Rejection(
        reason=reason,
        message=(
            f"predicted {term} of {predicted_s * 1000:,.0f} ms is over the limit of {limit_s * 1000:,.0f} ms; {advice}"
        ),
        retry_after_s=retry_after_s,
        term=f"{term}_s",
        predicted_s=predicted_s,
        limit_s=limit_s,
    )


def _tpot_retry_s(predicted: Prediction, tpot_s: float, limit_s: float) -> float | None:
    """Predict when enough of the other sequences have ended.

    None if a step takes too long even without them.
    """
    allowed_s = limit_s - predicted.idle_tpot_s
    return predicted.decode_drain_s * log((tpot_s - predicted.idle_tpot_s) / allowed_s) if allowed_s > 0 else None
