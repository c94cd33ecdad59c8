"""Chooses workers in turn: a baseline that uses no state."""

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.pairing import pick_pair
from baton.scheduler.policies.policy_types import Choice, PolicyContext


def round_robin(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Choose decode workers and prefill workers in turn, in order of their ids.

    A hybrid worker that decodes also prefills.
    """
    return pick_pair(query, cluster, context, lambda workers, side: workers[context.number % len(workers)])
