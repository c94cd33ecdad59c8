"""Chooses the workers with the most free KV blocks."""

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.pairing import pick_pair
from baton.scheduler.policies.policy_types import Choice, PolicyContext


def most_free(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Choose the workers with the most free KV blocks. Ties break by id."""
    return pick_pair(query, cluster, context, lambda workers, side: max(workers, key=_free_blocks), _terms)


def _free_blocks(worker: WorkerView) -> int:
    return worker.num_free_blocks


def _terms(worker: WorkerView) -> dict[str, float]:
    return {"free_blocks": worker.num_free_blocks}
