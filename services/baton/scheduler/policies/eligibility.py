"""Decides which workers may serve a request, and which pairs of workers may exchange KV.

`ineligible` is the only definition of a worker's eligibility. `eligibility_masks` is its vectorised form for
policies that rank all workers at once. `readable_workers` defines who can pull KV from whom; `readable_mask`,
`sources_of` and `readers_of` are its vectorised forms. Property tests compare them on random clusters.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

import numpy as np

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.cluster.worker_report import WorkerRole, WorkerState, present_links
from baton.core.errors import Reason
from baton.scheduler.policies.policy_types import PolicyContext
from baton.scheduler.state.worker_data import Mask
from baton.scheduler.state.worker_table import WorkerTable

Side: TypeAlias = Literal["prefill", "decode"]

NO_WORKERS_RETRY_S = 1.0
NO_CAPACITY_RETRY_S = 1.0


class Exclusion(Enum):
    """Reasons for which a worker is not chosen.

    The value is the text in decision records and in `baton explain`.
    """

    OTHER_ROLE = "other role"
    STARTING = "starting"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    OTHER_MODEL = "serves another model"
    OTHER_WEIGHTS = "has other weights than the answer began with"
    TOO_SMALL = "prompt exceeds its KV cache"
    OTHER_HASH_SCHEME = "uses another block hash scheme"
    FAILED_BEFORE = "failed this request before"
    NO_FREE_CAPACITY = "no free blocks or batch slots"

    # The policy did not choose an eligible worker:
    NOT_READABLE = "KV not readable by the decode worker"
    SLOWER = "predicted slower"

    @property
    def is_soft(self) -> bool:
        """True if the worker may still be chosen when all others are excluded, too."""
        return self in (Exclusion.FAILED_BEFORE, Exclusion.NO_FREE_CAPACITY)


_NOT_READY = {
    WorkerState.STARTING: Exclusion.STARTING,
    WorkerState.DRAINING: Exclusion.DRAINING,
    WorkerState.UNHEALTHY: Exclusion.UNHEALTHY,
}


def ineligible(worker: WorkerView, query: PlacementQuery, side: Side) -> Exclusion | None:
    """Return why `worker` should not prefill or decode `query`, or None if it is eligible.

    A soft exclusion is returned only if there is no other one.
    """
    report, layout = worker.report, worker.report.layout
    if not (report.role.can_prefill if side == "prefill" else report.role.can_decode):
        return Exclusion.OTHER_ROLE
    if report.state is not WorkerState.READY:
        return _NOT_READY[report.state]
    if report.model != query.model:
        return Exclusion.OTHER_MODEL
    if query.model_fingerprint not in ("", layout.model_fingerprint):
        return Exclusion.OTHER_WEIGHTS
    if worker.num_blocks_for(query.num_prompt_tokens + 1) > report.blocks.total:
        return Exclusion.TOO_SMALL
    if query.hash_scheme not in ("", layout.hash_scheme):
        return Exclusion.OTHER_HASH_SCHEME
    if any(worker.worker.is_same_incarnation(avoided) for avoided in query.avoid):
        return Exclusion.FAILED_BEFORE
    # Blocks for the prompt and each sample's first token; for decode also a batch slot for each sample.
    if worker.num_blocks_for(query.num_prompt_tokens + query.sample_count) > worker.num_free_blocks:
        return Exclusion.NO_FREE_CAPACITY
    if side == "decode" and worker.num_seqs + query.sample_count > report.max_num_seqs:
        return Exclusion.NO_FREE_CAPACITY
    return None


@dataclass(frozen=True, slots=True)
class EligibilityMasks:
    """The results of `ineligible` for all workers and one side, as three nested sets.

    eligible: no exclusion.
    not_avoided: no exclusion, or NO_FREE_CAPACITY.
    usable: no exclusion, or a soft one.
    """

    eligible: Mask
    not_avoided: Mask
    usable: Mask


def eligibility_masks(query: PlacementQuery, w: WorkerTable, side: Side) -> EligibilityMasks:
    """Evaluate `ineligible` for all workers at once."""
    reported, reserved = w.reported, w.reserved
    # 0 for workers that are not ready or have another role.
    max_tokens = reported.max_prefill_tokens if side == "prefill" else reported.max_decode_tokens
    usable: Mask = max_tokens > query.num_prompt_tokens
    serving = [
        i
        for i, group in enumerate(w.kv_groups)
        if group.model == query.model
        and query.model_fingerprint in ("", group.layout.model_fingerprint)
        and query.hash_scheme in ("", group.layout.hash_scheme)
    ]
    if len(serving) < len(w.kv_groups):
        usable &= np.isin(reported.kv_group, serving)
    not_avoided = usable
    if query.avoid:
        not_avoided = usable.copy()
        for worker in query.avoid:
            i = w.index.get(worker.worker_id)
            if i is not None and w.views[i].worker.is_same_incarnation(worker):
                not_avoided[i] = False
    eligible: Mask = not_avoided & (reserved.free_tokens >= query.num_prompt_tokens + query.sample_count)
    if side == "decode":
        eligible &= reserved.free_seqs >= query.sample_count
    return EligibilityMasks(eligible=eligible, not_avoided=not_avoided, usable=usable)


def readable_workers(prefill: list[WorkerView], decode: WorkerView) -> list[WorkerView]:
    """Return the prefill workers whose KV the decode worker can pull, in order.

    They are other workers with the same model and layout, and no broken link. If any pair is warm, only warm
    pairs are returned, because the first use of a pair pays for its setup.
    """
    links = present_links(decode.report.links, {w.worker_id: w.worker for w in prefill})
    readable = [
        w
        for w in prefill
        if w.worker_id != decode.worker_id
        and not (w.worker_id in links and links[w.worker_id].broken)
        and w.report.model == decode.report.model
        and w.report.layout.mismatch(decode.report.layout) is None
    ]
    warm = [w for w in readable if w.worker_id in links and links[w.worker_id].peer.is_same_incarnation(w.worker)]
    return warm or readable


def readable_mask(w: WorkerTable, prefill: Mask, decode: int) -> Mask:
    """Evaluate `readable_workers` for all of `prefill` at once. `decode`: position of the decode worker."""
    readable = prefill & sources_of(w, decode)
    warm: Mask = readable & w.links.is_warm[decode]
    return warm if any_worker(warm) else readable


def sources_of(w: WorkerTable, reader: int) -> Mask:
    """Return the workers whose KV the worker at position `reader` can pull, warm or not."""
    sources = _can_read(w, reader, _ALL)
    sources[reader] = False
    return sources


def readers_of(w: WorkerTable, source: int) -> Mask:
    """Return the workers that can pull KV from the worker at position `source` (see `sources_of`)."""
    readers = _can_read(w, _ALL, source)
    readers[source] = False
    return readers


_ALL = slice(None)


def _can_read(w: WorkerTable, reader: int | slice, source: int | slice) -> Mask:
    """Return for which of these pairs the reader can pull KV if both are different workers."""
    can_read: Mask = ~w.links.is_broken[reader, source]
    if len(w.kv_groups) > 1:
        can_read &= w.reported.kv_group[reader] == w.reported.kv_group[source]
    return can_read


def has_windows(w: WorkerTable, worker: int) -> bool:
    """True if a worker's model has sliding windows, so that a shorter prefix needs other blocks."""
    group = w.kv_groups[int(w.reported.kv_group.item(worker))]
    return group.layout.windows.has_windows


def any_worker(mask: Mask) -> bool:
    """Return `mask.any()`, several times faster for a hundred workers."""
    return bool(np.count_nonzero(mask))


def needs_no_decode(query: PlacementQuery) -> bool:
    """True if only one token is left to generate: the prefill worker samples it, and no KV is pulled."""
    return query.max_tokens - query.num_output_tokens <= 1


def rejects_when_full(query: PlacementQuery, context: PolicyContext) -> bool:
    """True if the request should wait at the scheduler rather than on a full worker.

    A later attempt is never rejected for load.
    """
    return context.max_capacity_wait_s is not None and query.attempt == 0


def prefills_own_prompts(decode: WorkerView) -> bool:
    """True for a hybrid worker. A decode worker prefills only if no other worker can."""
    return decode.report.role is WorkerRole.HYBRID


def no_workers(query: PlacementQuery, side: Side) -> Rejection:
    """Reject a request that no ready worker could ever serve on this side."""
    return Rejection(
        reason=Reason.NO_WORKERS,
        message=f"no ready {side} worker serves {query.model!r}; retry, or see `baton status`",
        retry_after_s=NO_WORKERS_RETRY_S,
        term=side,
    )


def no_capacity(side: Side) -> Rejection:
    """Reject a request because all workers of this side are full."""
    return Rejection(
        reason=Reason.NO_CAPACITY,
        message=f"no {side} worker has free KV blocks for this prompt now; retry after {NO_CAPACITY_RETRY_S:g} s",
        retry_after_s=NO_CAPACITY_RETRY_S,
        term=f"{side}_capacity",
    )
