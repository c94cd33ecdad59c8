"""The fewest tokens waiting to prefill, the fewest sequences to decode: load only, no prefix and no
seconds."""

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.decision_record import Candidate
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.kv.block_hash import num_blocks_for
from baton.scheduler.policies.policy_result import (
    Choice,
    PolicyContext,
    candidates_for,
    computes_alone,
    needs_no_decode,
)


def least_loaded(query: PlacementQuery, cluster: ClusterSnapshot, turn: PolicyContext) -> Choice | Rejection:
    """Decode worker first: room for the prompt now, then the fewest sequences, then the most room. Prefill
    worker: the fewest tokens queued, then the fewest sequences. Ties break by id."""
    field = candidates_for(query, cluster, turn)
    if isinstance(field, Rejection):
        return field
    if needs_no_decode(query):
        chosen = min(field.prefill, key=_prefill_load)
        considered = _explained(field.prefill, "prefill")
        return Choice(prefill=chosen, decode=None, candidates=(*considered, *field.excluded), basis=(chosen.worker_id,))
    decode = min(field.decode, key=lambda w: _decode_load(w, query))
    sources = [] if computes_alone(decode) else field.readable_by(decode)
    prefill = min(sources, key=_prefill_load, default=None)
    considered = (*_explained(field.decode, "decode"), *_explained(sources, "prefill"))
    basis: tuple[str, ...] | None = tuple(w.worker_id for w in (prefill, decode) if w is not None)
    if prefill is None and not computes_alone(decode):
        basis = None  # nobody could be read from: that is everybody's doing
    return Choice(prefill=prefill, decode=decode, candidates=(*considered, *field.excluded), basis=basis)


def _decode_load(w: WorkerView, query: PlacementQuery) -> tuple[bool, int, int, str]:
    num_blocks = num_blocks_for(query.num_prompt_tokens + query.sample_count, w.report.layout.block_size_tokens)
    return num_blocks > w.num_free_blocks, w.num_seqs, -w.num_free_blocks, w.worker_id


def _prefill_load(w: WorkerView) -> tuple[int, int, str]:
    return w.queued_prefill_tokens, w.num_seqs, w.worker_id


def _explained(workers: list[WorkerView], side: str) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            worker=w.worker,
            side=side,
            terms={
                "queued_prefill_tokens": w.queued_prefill_tokens,
                "seqs": w.num_seqs,
                "free_blocks": w.num_free_blocks,
            },
        )
        for w in workers
    )
