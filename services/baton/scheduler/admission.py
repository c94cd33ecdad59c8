"""When the scheduler says no before any prefill is spent."""

from baton.core.cluster import PlacementQuery, Rejection
from baton.core.errors import Reason
from baton.scheduler.policies.choice import Choice

QUEUE_FULL_RETRY_S = 1.0


def admit(query: PlacementQuery, choice: Choice, *, max_waiting_seqs: int) -> Rejection | None:
    """Refuse what would only wait: the chosen worker, the best of its side, already has `max_waiting_seqs` sequences waiting.

    A first attempt only: a request that was admitted once is never turned away for load by a worker's death.
    """
    if query.attempt > 0:
        return None
    for side, chosen in (("prefill", choice.prefill), ("decode", choice.decode)):
        if chosen is None:
            continue
        waiting = chosen.report.waiting_seqs + chosen.reserved_seqs
        if waiting >= max_waiting_seqs:
            return Rejection(
                reason=Reason.QUEUE_FULL,
                message=f"every {side} worker has {max_waiting_seqs} requests waiting; retry after {QUEUE_FULL_RETRY_S:g} s",
                retry_after_s=QUEUE_FULL_RETRY_S,
                term=f"{side}_queue",
            )
    return None
