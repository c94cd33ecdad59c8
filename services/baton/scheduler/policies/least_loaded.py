"""Chooses the workers with the least load: a baseline without prefixes and predictions."""

from collections.abc import Sequence
from dataclasses import replace

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.eligibility import Side, prefills_own_prompts
from baton.scheduler.policies.pairing import pick_pair
from baton.scheduler.policies.policy_types import Choice, PolicyContext


def least_loaded(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Choose the workers with the least load: the fewest sequences, the fewest queued prompt tokens.

    Decode worker: one with free blocks for the prompt, then the fewest sequences, then the most free blocks.
    Prefill worker: the fewest queued prompt tokens, then the fewest sequences.
    Ties break by id.
    """

    def pick(workers: Sequence[WorkerView], side: Side) -> WorkerView:
        return min(workers, key=_prefill_load if side == "prefill" else lambda worker: _decode_load(worker, query))

    choice = pick_pair(query, cluster, context, pick, _terms)
    if isinstance(choice, Rejection):
        return choice
    if choice.prefill is None and choice.decode is not None and not prefills_own_prompts(choice.decode):
        return choice  # no prefill worker was readable, and the state of all of them is the reason
    return replace(choice, basis=tuple(w.worker_id for w in (choice.prefill, choice.decode) if w is not None))


def _decode_load(w: WorkerView, query: PlacementQuery) -> tuple[bool, int, int, str]:
    num_blocks = w.num_blocks_for(query.num_prompt_tokens + query.sample_count)
    return num_blocks > w.num_free_blocks, w.num_seqs, -w.num_free_blocks, w.worker_id


def _prefill_load(w: WorkerView) -> tuple[int, int, str]:
    return w.queued_prefill_tokens, w.num_seqs, w.worker_id


def _terms(w: WorkerView) -> dict[str, float]:
    return {
        "queued_prefill_tokens": w.queued_prefill_tokens,
        "seqs": w.num_seqs,
        "free_blocks": w.num_free_blocks,
    }
