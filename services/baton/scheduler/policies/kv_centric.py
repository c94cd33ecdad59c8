"""Chooses the workers with the earliest first token, without breaking the SLOs of other requests.

The default.

Source: Mooncake (FAST '25), section 4, Algorithm 1. docs/design/scheduling.md says what was added to it.
"""

from dataclasses import replace
from math import inf

import numpy as np

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.candidate_costs import (
    LocalPrefill,
    add_local_prefill,
    can_spare_steps,
    cheapest_decode,
    decode_terms,
    local_prefill,
    own_prefix_terms,
    pair_choice,
    prefill_only_choice,
    rank,
    transfer_terms_s,
)
from baton.scheduler.policies.cost_terms import PrefillTerms
from baton.scheduler.policies.displaced_kv import displaced_terms_s
from baton.scheduler.policies.eligibility import any_worker, needs_no_decode, readable_mask
from baton.scheduler.policies.placement_inputs import PlacementInputs, placement_inputs
from baton.scheduler.policies.policy_types import Choice, PolicyContext
from baton.scheduler.policies.pulled_prefixes import use_pulled_prefixes, with_pulled_prefix
from baton.scheduler.prediction.predict import Prompt, prefill_compute_s
from baton.scheduler.state.worker_data import Floats, Mask

LOCAL_PREFILL_GAIN = 0.1
LOCAL_PREFILL_GAIN_S = 0.01
"""A decode worker prefills only if it is predicted to be faster by both this fraction and this time.

Predictions are no more exact. The time by which the prompt delays each answer there counts if it is longer.
A sequence that joins meanwhile cannot be charged yet.
"""


def kv_centric(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Minimise the predicted time to the first token within the latency targets of running requests.

    Decode worker: the least predicted seconds per output token once the prompt is computed, with the KV pull
        and the wait for capacity spread over the answer.
    Prefill worker: the least predicted queue + pull of a cached prefix + prefill of the rest + exposed KV
        transfer.
    Both are charged for the KV that they evict for the prompt.

    The decode worker is a candidate to prefill, too, in the time that its sequences can spare.
    Ties break by id.
    """
    inputs = placement_inputs(query, cluster, context)
    if not isinstance(inputs, PlacementInputs):
        return inputs
    terms, displaced_s = own_prefix_terms(inputs), displaced_terms_s(inputs)
    if needs_no_decode(query):
        use_pulled_prefixes(inputs, terms, inputs.prefill, None)
        terms.redundant_s, terms.displaced_s = _redundant_s(inputs.prompt, inputs.prefill, terms), displaced_s
        rank(terms, inputs.prefill)
        return prefill_only_choice(inputs, terms)

    by_decode = decode_terms(inputs, displaced_s)
    decode = cheapest_decode(inputs, by_decode)
    prefills = readable_mask(inputs.workers, inputs.prefill, decode)
    has_prefills = any_worker(prefills)

    use_pulled_prefixes(inputs, terms, prefills, decode)
    terms.redundant_s, terms.displaced_s = _redundant_s(inputs.prompt, prefills, terms), displaced_s.copy()
    terms.transfer_s = transfer_terms_s(inputs, terms, decode)
    rank(terms, prefills)

    local = with_pulled_prefix(inputs, terms.options, decode, local_prefill(inputs, decode))
    if has_prefills:
        if not inputs.workers.reported.can_prefill[decode]:
            least_s = max(LOCAL_PREFILL_GAIN_S, LOCAL_PREFILL_GAIN * float(terms.cost_s.min()))
            local.margin_s = max(least_s, _delay_of_answers_s(inputs, decode, local))
        local.redundant_s = _local_redundant_s(inputs.prompt, terms, local)
    if not has_prefills or can_spare_steps(inputs, decode):
        add_local_prefill(terms, decode, local)

    choice = pair_choice(inputs, terms, by_decode, decode)
    # Without a readable prefill worker the state of all of them is the reason for the choice.
    return choice if has_prefills else replace(choice, basis=None)


def _redundant_s(prompt: Prompt, candidates: Mask, terms: PrefillTerms) -> Floats:
    """Charge each candidate once more for computing tokens that another one has cached or soon will.

    These seconds are lost to the requests that come next.
    """
    most_cached = _most_cached_tokens(prompt, candidates)
    if not most_cached:
        return terms.redundant_s
    num_new = prompt.num_tokens - terms.cached_tokens
    return terms.prefill_s * np.maximum(0, most_cached - terms.cached_tokens) / num_new


def _local_redundant_s(prompt: Prompt, terms: PrefillTerms, local: LocalPrefill) -> float:
    """Charge a local prefill for computing tokens that a prefill candidate has cached."""
    most_cached = _most_cached_tokens(prompt, terms.cost_s < inf)
    num_new = prompt.num_tokens - local.cached_tokens
    return local.prefill_s * max(0.0, most_cached - local.cached_tokens) / num_new


def _delay_of_answers_s(inputs: PlacementInputs, decode: int, local: LocalPrefill) -> float:
    """Return the time by which a local prefill delays each sequence that decodes on the worker."""
    row = inputs.workers.row(decode)
    if not row.derived.joined_step_s:
        return 0.0
    return prefill_compute_s(row, inputs.prompt.num_tokens, local.cached_tokens)


def _most_cached_tokens(prompt: Prompt, candidates: Mask) -> float:
    return float(np.where(candidates, prompt.overlap_tokens, 0.0).max(initial=0.0))
