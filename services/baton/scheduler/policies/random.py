"""Chooses workers at random: a baseline that uses no state."""

from random import Random

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.pairing import pick_pair
from baton.scheduler.policies.policy_types import Choice, PolicyContext


def random(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Choose a decode worker and a prefill worker at random, all with the same probability.

    A hybrid worker that is drawn to decode also prefills.
    """
    rng = Random(context.seed)
    return pick_pair(query, cluster, context, lambda workers, side: rng.choice(workers))
