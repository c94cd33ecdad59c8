"""The default: the earliest first token for this request, without taking from others what they were
promised."""

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.policy_result import Choice, PolicyContext
from baton.scheduler.policies.ranking import RankingRules, choose

RULES = RankingRules(pulls=True, conditional=True)


def kv_centric(query: PlacementQuery, cluster: ClusterSnapshot, turn: PolicyContext) -> Choice | Rejection:
    """Decode worker: the least predicted seconds a token, once the prompt is computed. Prefill worker: the
    least predicted queue + pull of a cached prefix from whoever holds it + prefill of the rest + KV not
    hidden behind it; the decode worker itself is a candidate, charged with the delay of its sequences. Ties
    break by id."""
    return choose(query, cluster, turn, RULES)
