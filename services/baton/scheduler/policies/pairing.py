"""Places a request with two simple picks, for policies that compare workers one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.decision_record import Candidate
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.eligibility import (
    Exclusion,
    Side,
    ineligible,
    needs_no_decode,
    no_capacity,
    no_workers,
    prefills_own_prompts,
    readable_workers,
    rejects_when_full,
)
from baton.scheduler.policies.policy_types import Choice, PolicyContext

Pick = Callable[[Sequence[WorkerView], Side], WorkerView]
"""Chooses one of at least one worker, sorted by id, to prefill or decode."""
Terms = Callable[[WorkerView], dict[str, float]]
"""Returns the numbers by which a worker was judged, for the decision record."""


def pick_pair(
    query: PlacementQuery,
    cluster: ClusterSnapshot,
    context: PolicyContext,
    pick: Pick,
    terms: Terms = lambda worker: {},
) -> Choice | Rejection:
    """Pick a decode worker, then a prefill worker that it can read from.

    A hybrid decode worker prefills the prompt itself, and so does a decode worker that can read from no
    prefill worker. A request that needs only one more token gets a prefill worker alone.
    """
    workers = eligible_workers(query, cluster, context)
    if isinstance(workers, Rejection):
        return workers
    if needs_no_decode(query):
        prefill = pick(workers.prefill, "prefill")
        return Choice(
            prefill=prefill,
            decode=None,
            candidates=(*_considered(workers.prefill, "prefill", terms), *workers.excluded),
        )
    decode = pick(workers.decode, "decode")
    sources = [] if prefills_own_prompts(decode) else readable_workers(workers.prefill, decode)
    considered = (*_considered(workers.decode, "decode", terms), *_considered(sources, "prefill", terms))
    return Choice(
        prefill=pick(sources, "prefill") if sources else None,
        decode=decode,
        candidates=(*considered, *workers.excluded),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EligibleWorkers:
    """The workers that may be chosen for one query, each list sorted by id, and why the others may not."""

    prefill: list[WorkerView]
    decode: list[WorkerView]
    excluded: tuple[Candidate, ...] = ()


def eligible_workers(
    query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext
) -> EligibleWorkers | Rejection:
    """Return the best available workers of each side.

    These are the eligible ones, else those that are only full, else those that have failed the request
    before. Rejects the request if a side that it needs is empty, or is full and the request may wait at the
    scheduler.
    """
    excluded: list[Candidate] = []
    sides: dict[Side, list[WorkerView]] = {"prefill": [], "decode": []}
    full: list[Side] = []
    for side in sides:
        eligible, soft = _by_exclusion(query, cluster, side, excluded)
        if not eligible and soft[Exclusion.NO_FREE_CAPACITY] and rejects_when_full(query, context):
            full.append(side)
        else:
            sides[side] = eligible or soft[Exclusion.NO_FREE_CAPACITY] or soft[Exclusion.FAILED_BEFORE]
    needed: Side = "decode"
    if needs_no_decode(query):
        needed, sides["decode"] = "prefill", []
        full = [side for side in full if side == "prefill"]
    if full:
        return no_capacity(full[-1])
    if not sides[needed]:
        return no_workers(query, needed)
    return EligibleWorkers(prefill=sides["prefill"], decode=sides["decode"], excluded=tuple(excluded))


def _by_exclusion(
    query: PlacementQuery, cluster: ClusterSnapshot, side: Side, excluded: list[Candidate]
) -> tuple[list[WorkerView], dict[Exclusion, list[WorkerView]]]:
    """Return the eligible workers and the softly excluded ones.

    Appends to `excluded` those that cannot be used.
    """
    eligible: list[WorkerView] = []
    soft: dict[Exclusion, list[WorkerView]] = {Exclusion.FAILED_BEFORE: [], Exclusion.NO_FREE_CAPACITY: []}
    for worker in cluster.workers:
        why = ineligible(worker, query, side)
        if why is None:
            eligible.append(worker)
        elif why.is_soft:
            soft[why].append(worker)
        elif why is not Exclusion.OTHER_ROLE:
            excluded.append(Candidate(worker=worker.worker, side=side, excluded=why.value))
    if eligible:
        excluded += [
            Candidate(worker=worker.worker, side=side, excluded=why.value) for why in soft for worker in soft[why]
        ]
    return eligible, soft


def _considered(workers: Sequence[WorkerView], side: Side, terms: Terms) -> list[Candidate]:
    return [Candidate(worker=worker.worker, side=side, terms=terms(worker)) for worker in workers]
