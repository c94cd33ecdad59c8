"""Each worker in its turn: the baseline that knows nothing."""

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


def round_robin(query: PlacementQuery, cluster: ClusterSnapshot, turn: PolicyContext) -> Choice | Rejection:
    """Decode and prefill workers in turn, in order of id. A hybrid worker whose turn it is to decode prefills
    too."""
    field = candidates_for(query, cluster, turn)
    if isinstance(field, Rejection):
        return field
    if needs_no_decode(query):
        chosen = field.prefill[turn.number % len(field.prefill)]
        return Choice(
            prefill=chosen, decode=None, candidates=(Candidate(worker=chosen.worker, side="prefill"), *field.excluded)
        )
    decode = field.decode[turn.number % len(field.decode)]
    sources = [] if computes_alone(decode) else field.readable_by(decode)
    prefill = sources[turn.number % len(sources)] if sources else None
    considered = [Candidate(worker=w.worker, side="decode") for w in field.decode]
    considered += [Candidate(worker=w.worker, side="prefill") for w in sources]
    return Choice(prefill=prefill, decode=decode, candidates=(*considered, *field.excluded))
