"""Finds the candidates of both sides of a placement, and what their own caches save them."""

from dataclasses import dataclass, replace

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.eligibility import (
    EligibilityMasks,
    any_worker,
    eligibility_masks,
    needs_no_decode,
    no_capacity,
    no_workers,
    rejects_when_full,
)
from baton.scheduler.policies.least_loaded import least_loaded
from baton.scheduler.policies.policy_types import Choice, PolicyContext
from baton.scheduler.prediction.predict import (
    FirstTokenTerms,
    Prompt,
    first_token,
    prompt_of,
    time_to_fit_s,
)
from baton.scheduler.state.worker_data import NO_COSTS, Floats, Mask
from baton.scheduler.state.worker_table import WorkerTable, worker_table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementInputs:
    """The candidates of both sides and what their own caches save them. Workers are positions in the table.

    prefill, decode: candidates of each side by eligibility.
    usable_prefill: prefill candidates, busy or avoided ones included.
    first: queue in front of the prompt, and the share of step time that it gets, at each worker.
    own_prefill_s: time to compute what each worker has not cached itself.
    """

    query: PlacementQuery
    context: PolicyContext
    cluster: ClusterSnapshot
    workers: WorkerTable
    prompt: Prompt
    prefill: Mask
    decode: Mask
    usable_prefill: Mask
    first: FirstTokenTerms[Floats]
    own_prefill_s: Floats


def placement_inputs(
    query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext
) -> PlacementInputs | Choice | Rejection:
    """Find the candidates of both sides and what their own caches save them.

    Returns a Rejection if a side that the request needs has no candidate. Returns the choice of
    `least_loaded` while a usable worker has no step costs, not even those of its peers.
    """
    workers = worker_table_of(cluster)
    no_decode = needs_no_decode(query)
    prefill = eligibility_masks(query, workers, "prefill")
    decode = eligibility_masks(query, workers, "decode")
    if not any_worker(prefill.usable if no_decode else decode.usable):
        return no_workers(query, "prefill" if no_decode else "decode")
    if not workers.all_measured:
        workers = workers.with_peer_costs()
        needed = prefill.usable if no_decode else prefill.usable | decode.usable
        if not (workers.reported.cost_source[needed] > NO_COSTS).all():
            by_load = least_loaded(query, cluster, context)
            return replace(by_load, basis=None) if isinstance(by_load, Choice) else by_load
    prompt = prompt_of(query, cluster.overlaps, workers)
    first = first_token(workers, query, prompt.overlap_tokens)
    inputs = PlacementInputs(
        query=query,
        context=context,
        cluster=cluster,
        workers=workers,
        prompt=prompt,
        prefill=_best_available(query, workers, prompt, prefill, context),
        decode=_best_available(query, workers, prompt, decode, context),
        usable_prefill=prefill.usable,
        first=first,
        own_prefill_s=first.prefill_s(workers, prompt.num_tokens, prompt.overlap_tokens),
    )
    if not any_worker(inputs.prefill if no_decode else inputs.decode):
        return no_capacity("prefill" if no_decode else "decode")
    return inputs


def _best_available(
    query: PlacementQuery, w: WorkerTable, prompt: Prompt, masks: EligibilityMasks, context: PolicyContext
) -> Mask:
    """Return the eligible workers, else those that are only full, else those that failed the request.

    If the request may wait at the scheduler, full workers count only if it is predicted to fit soon enough.
    """
    if any_worker(masks.eligible):
        return masks.eligible
    if any_worker(masks.not_avoided):
        if context.max_capacity_wait_s is None or not rejects_when_full(query, context):
            return masks.not_avoided
        fits_soon: Mask = masks.not_avoided & (time_to_fit_s(w, prompt) <= context.max_capacity_wait_s)
        return fits_soon
    return masks.usable
