"""Any worker that can: the baseline that needs to know nothing."""

from random import Random

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.decision_record import Candidate
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.policy_result import (
    Choice,
    PolicyContext,
    candidates_for,
    computes_alone,
    needs_no_decode,
)


def random(query: PlacementQuery, cluster: ClusterSnapshot, turn: PolicyContext) -> Choice | Rejection:
    """A decode worker and a prefill worker drawn at random, each with the same chance. A hybrid worker that
    is drawn to decode prefills too."""
    field = candidates_for(query, cluster, turn)
    if isinstance(field, Rejection):
        return field
    rng = Random(turn.seed)
    if needs_no_decode(query):
        chosen = rng.choice(field.prefill)
        considered = [Candidate(worker=w.worker, side="prefill") for w in field.prefill]
        return Choice(prefill=chosen, decode=None, candidates=(*considered, *field.excluded))
    decode = rng.choice(field.decode)
    sources = [] if computes_alone(decode) else field.readable_by(decode)
    prefill = rng.choice(sources) if sources else None
    considered = [Candidate(worker=w.worker, side="decode") for w in field.decode]
    considered += [Candidate(worker=w.worker, side="prefill") for w in sources]
    return Choice(prefill=prefill, decode=decode, candidates=(*considered, *field.excluded))
