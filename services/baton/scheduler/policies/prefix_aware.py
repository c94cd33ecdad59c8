"""Cached prefixes are used where they lie, and never moved: the baseline for what moving them brings."""

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.policy_result import Choice, PolicyContext
from baton.scheduler.policies.ranking import RankingRules, choose

RULES = RankingRules(pulls=False, conditional=False)


def prefix_aware(query: PlacementQuery, cluster: ClusterSnapshot, turn: PolicyContext) -> Choice | Rejection:
    """Decode worker: the least predicted seconds a token, once the prompt is computed. Prefill worker: the
    least predicted queue + prefill of what it has not cached + KV not hidden behind it; a decode worker
    prefills only when nobody else can. Ties break by id."""
    return choose(query, cluster, turn, RULES)
