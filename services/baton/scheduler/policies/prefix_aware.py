"""Cached prefixes are used where they lie, and never moved: the baseline for what moving them brings."""

from baton.core.cluster import ClusterSnapshot, PlacementQuery, Rejection
from baton.scheduler.policies.choice import Choice, Turn
from baton.scheduler.policies.ranking import Rules, choose

RULES = Rules(pulls=False, conditional=False)


def prefix_aware(query: PlacementQuery, cluster: ClusterSnapshot, turn: Turn) -> Choice | Rejection:
    """Decode worker: the least predicted seconds a token, once the prompt is computed. Prefill worker: the least predicted queue + prefill
    of what it has not cached + KV not hidden behind it; a decode worker prefills only when nobody else can. Ties break by id."""
    return choose(query, cluster, turn, RULES)
