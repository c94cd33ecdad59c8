"""The default: the earliest first token for this request, without taking from others what they were promised."""

from baton.core.cluster import ClusterSnapshot, PlacementQuery, Rejection
from baton.scheduler.policies.choice import Choice, Turn
from baton.scheduler.policies.ranking import Rules, choose

RULES = Rules(pulls=True, conditional=True)


def kv_centric(query: PlacementQuery, cluster: ClusterSnapshot, turn: Turn) -> Choice | Rejection:
    """Decode worker: the least predicted seconds a token, once the prompt is computed. Prefill worker: the least predicted queue + pull of
    a cached prefix from whoever holds it + prefill of the rest + KV not hidden behind it; the decode worker itself is a candidate,
    charged with the delay of its sequences. Ties break by id."""
    return choose(query, cluster, turn, RULES)
