"""Names and meanings of the numbers of a placement decision, for `baton explain`, the live view and the
docs."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """One number of a decision: its label, and what it means in half a sentence.

    is_detail: shown without -v only if it is not 0 for some candidate.
    """

    label: str
    meaning: str
    is_detail: bool = False


PREDICTIONS = {
    "queue_s": "queue",
    "prefix_pull_s": "prefix pull",
    "prefill_s": "prefill",
    "transfer_s": "exposed KV",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
}
"""Labels of the fields of a `Placement` that are predicted seconds."""

TERMS = {
    "cost_s": Term(
        "cost",
        "what the policy compares: for prefill the sum of the terms, for decode TPOT plus wait and KV pull per token",
    ),
    "queue_s": Term("queue", "time until the worker has finished the prompts that are queued before this one"),
    "prefix_pull_s": Term(
        "prefix pull", "time to read the cached beginning of the prompt from another worker", is_detail=True
    ),
    "reload_s": Term(
        "reload",
        "wait for cached blocks that the worker reloads from host memory or its disk, after the queue",
        is_detail=True,
    ),
    "pull_fixed_s": Term("pull fixed", "part of the prefix pull that does not depend on its bytes", is_detail=True),
    "source_reload_s": Term(
        "source reload",
        "part of the prefix pull: the other worker reloads what it has on its disk only",
        is_detail=True,
    ),
    "dial_s": Term("dial", "part of the prefix pull: connecting two workers for the first time", is_detail=True),
    "prefill_s": Term("prefill", "time to compute the part of the prompt that is not cached"),
    "transfer_s": Term(
        "exposed KV", "time that the KV transfer to the decode worker takes after prefill has ended", is_detail=True
    ),
    "redundant_s": Term("redundant", "charge for computing what another worker has cached", is_detail=True),
    "displaced_s": Term(
        "displaced", "charge for evicted KV that later requests are expected to compute again", is_detail=True
    ),
    "margin_s": Term("margin", "advantage that a decode worker must have to compute the prompt itself", is_detail=True),
    "ttft_target_s": Term(
        "TTFT target", "TTFT SLO, or the target that is derived from this worker's costs; less the wait so far"
    ),
    "tpot_s": Term("TPOT", "predicted mean gap between the tokens of this answer"),
    "tpot_target_s": Term("TPOT target", "TPOT SLO, or the target that is derived from this worker's costs"),
    "recent_prefill_share": Term(
        "prefill share", "share of the step time of decoding sequences that recently went to prompts"
    ),
    "tokens_per_step": Term(
        "tokens a step", "tokens that a decoding sequence recently got in the time of a step without drafts"
    ),
    "capacity_wait_s": Term(
        "capacity wait", "time until sequences placed earlier free batch slots and blocks", is_detail=True
    ),
    "kv_pull_s": Term("KV pull", "time to read the KV of the whole prompt from the prefill worker"),
    "overlap_blocks": Term("blocks held", "KV blocks of this prompt that the worker has cached"),
    "reloaded_blocks": Term("reloaded", "of the blocks held, those in host memory or on disk only", is_detail=True),
    "disk_blocks": Term("on disk", "of the blocks held, those on disk only", is_detail=True),
    "pulled_blocks": Term("pulled", "KV blocks that would be read from another worker", is_detail=True),
    "peer_costs": Term("peer costs", "1 if this worker is new, and its costs are estimated from the others'"),
    "queued_prefill_tokens": Term("queued tokens", "prompt tokens that wait on the worker"),
    "seqs": Term("seqs", "sequences that run or wait on the worker"),
    "free_blocks": Term("free blocks", "KV blocks that are free or can be evicted"),
}
"""The candidates' terms by name, in display order; other terms follow under their own names."""


def label_of(term: str) -> str:
    """Return the label of a candidate's term. A term of another policy has none, so its name is used."""
    return TERMS[term].label if term in TERMS else term.removesuffix("_s").replace("_", " ")


def in_display_order(terms: Iterable[str]) -> list[str]:
    """Return the names of terms in the order in which they are shown."""
    names = set(terms)
    return [*(term for term in TERMS if term in names), *sorted(names - TERMS.keys())]
