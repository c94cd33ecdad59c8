"""Prefers workers that hold a cached prefix, and never pulls one: the baseline for the benefit of pulling."""

from dataclasses import replace

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.candidate_costs import (
    add_local_prefill,
    cheapest_decode,
    decode_terms,
    local_prefill,
    own_prefix_terms,
    pair_choice,
    prefill_only_choice,
    rank,
    transfer_terms_s,
)
from baton.scheduler.policies.eligibility import (
    any_worker,
    needs_no_decode,
    no_capacity,
    readable_mask,
    rejects_when_full,
)
from baton.scheduler.policies.placement_inputs import PlacementInputs, placement_inputs
from baton.scheduler.policies.policy_types import Choice, PolicyContext


def prefix_aware(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Minimise the predicted time to the first token, with cached prefixes used only where they are.

    Decode worker: the least predicted seconds per output token once the prompt is computed.
    Prefill worker: the least predicted queue + prefill of what it has not cached + exposed KV transfer.
    A decode worker prefills only if no other worker can.
    Ties break by id.
    """
    inputs = placement_inputs(query, cluster, context)
    if not isinstance(inputs, PlacementInputs):
        return inputs
    terms = own_prefix_terms(inputs)
    if needs_no_decode(query):
        rank(terms, inputs.prefill)
        return prefill_only_choice(inputs, terms)

    w = inputs.workers
    by_decode = decode_terms(inputs)
    decode = cheapest_decode(inputs, by_decode)
    prefills = readable_mask(w, inputs.prefill, decode)
    has_prefills = any_worker(prefills)
    is_hybrid = bool(w.reported.can_prefill[decode])
    must_wait = not has_prefills and not is_hybrid and rejects_when_full(query, context)
    if must_wait and any_worker(readable_mask(w, inputs.usable_prefill, decode)):
        return no_capacity("prefill")  # a readable prefill worker exists, but it is full

    terms.transfer_s = transfer_terms_s(inputs, terms, decode)
    rank(terms, prefills)
    if is_hybrid or not has_prefills:
        add_local_prefill(terms, decode, local_prefill(inputs, decode))
    choice = pair_choice(inputs, terms, by_decode, decode)
    # Without a readable prefill worker the state of all of them is the reason for the choice.
    return choice if has_prefills else replace(choice, basis=None)
