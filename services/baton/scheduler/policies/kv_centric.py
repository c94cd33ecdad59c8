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
from baton.scheduler.policies.eligibility import any_worker, needs_no_decode, readable_mask, readers_of, sources_of
from baton.scheduler.policies.placement_inputs import PlacementInputs, placement_inputs
from baton.scheduler.policies.policy_types import Choice, PolicyContext
from baton.scheduler.policies.reload_costs import host_reload_s
from baton.scheduler.prediction.predict import Prompt
from baton.scheduler.state.worker_data import Floats, Mask

MAX_HOLDERS = 4
"""Number of workers, apart from the decode worker, considered to pull a prefix from: those that hold most of
it."""
LOCAL_PREFILL_GAIN = 0.1
LOCAL_PREFILL_GAIN_S = 0.01
"""A decode worker prefills only if it is predicted to be faster by both this fraction and this time.

Predictions are no more exact. A sequence that joins meanwhile would wait for the prompt, and cannot be
charged yet.
"""


def kv_centric(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Minimise the predicted time to the first token within the latency targets of running requests.

    Decode worker: the least predicted seconds per output token once the prompt is computed, with the KV pull
        and the wait for capacity spread over the answer.
    Prefill worker: the least predicted queue + pull of a cached prefix + prefill of the rest + exposed KV
        transfer.
    Both are charged for the KV that they evict for the prompt.

    The decode worker is a candidate to prefill, too, in the share of its steps that its sequences can spare.
    Ties break by id.
    """
    inputs = placement_inputs(query, cluster, context)
    if not isinstance(inputs, PlacementInputs):
        return inputs
    terms, displaced_s = own_prefix_terms(inputs), displaced_terms_s(inputs)
    if needs_no_decode(query):
        terms.holders = _prefix_holders(inputs, None)
        _use_pulled_prefixes(inputs, terms, inputs.prefill)
        terms.redundant_s, terms.displaced_s = _redundant_s(inputs.prompt, inputs.prefill, terms), displaced_s
        rank(terms, inputs.prefill)
        return prefill_only_choice(inputs, terms)

    by_decode = decode_terms(inputs, displaced_s)
    decode = cheapest_decode(inputs, by_decode)
    prefills = readable_mask(inputs.workers, inputs.prefill, decode)
    has_prefills = any_worker(prefills)

    terms.holders = _prefix_holders(inputs, decode)
    _use_pulled_prefixes(inputs, terms, prefills)
    terms.redundant_s, terms.displaced_s = _redundant_s(inputs.prompt, prefills, terms), displaced_s.copy()
    terms.transfer_s = transfer_terms_s(inputs, terms, decode)
    rank(terms, prefills)

    local = _with_pulled_prefix(inputs, terms.holders, decode, local_prefill(inputs, decode))
    if has_prefills:
        if not inputs.workers.reported.can_prefill[decode]:
            local.margin_s = max(LOCAL_PREFILL_GAIN_S, LOCAL_PREFILL_GAIN * float(terms.cost_s.min()))
        local.redundant_s = _local_redundant_s(inputs.prompt, terms, local)
    if not has_prefills or can_spare_steps(inputs, decode):
        add_local_prefill(terms, decode, local)

    choice = pair_choice(inputs, terms, by_decode, decode)
    # Without a readable prefill worker the state of all of them is the reason for the choice.
    return choice if has_prefills else replace(choice, basis=None)


def _prefix_holders(inputs: PlacementInputs, decode: int | None) -> list[int]:
    """Return the ready workers that hold most of the prefix, and the decode worker if it holds any of it.

    Ties break by the data they have to send. That sum needs the links of all workers, which a decision record
    does not keep. The decode worker is always in the record, so it does not compete with the others.
    """
    w, pullable_blocks = inputs.workers, inputs.prompt.pullable_blocks
    ready = sorted(i for i in pullable_blocks if w.reported.is_ready[i])
    others = [i for i in ready if i != decode]
    if len(others) <= MAX_HOLDERS:
        return ready
    queued_s = dict(zip(others, w.links.queued_s[:, others].sum(axis=0), strict=True))
    best = sorted(others, key=lambda i: (-pullable_blocks[i], queued_s[i], i))[:MAX_HOLDERS]
    return sorted({*best, *(i for i in ready if i == decode)})


def _use_pulled_prefixes(inputs: PlacementInputs, terms: PrefillTerms, candidates: Mask) -> None:
    """Let each candidate pull a prefix from the holder that makes it fastest, if any does."""
    reload_s = host_reload_s(inputs) if inputs.prompt.disk_blocks.any() else terms.reload_s.copy()
    for holder in terms.holders:
        _consider_holder(inputs, terms, candidates, holder, reload_s)


def _consider_holder(
    inputs: PlacementInputs, terms: PrefillTerms, candidates: Mask, holder: int, reload_s: Floats
) -> None:
    """Enter the pull from `holder` into the terms of the candidates that it makes faster.

    A worker that pulls leaves its disk alone. reload_s: its wait for what it has in host memory only
    """
    w, prompt = inputs.workers, inputs.prompt
    links, held_blocks, own_blocks = w.links, prompt.pullable_blocks[holder], prompt.memory_blocks
    can_pull = candidates & (own_blocks < held_blocks) & readers_of(w, holder)
    if not any_worker(can_pull):
        return
    cached_tokens = held_blocks * w.reported.block_size_tokens.item(holder)
    compute_s = inputs.first.prefill_s(w, prompt.num_tokens, cached_tokens)
    num_bytes = (held_blocks - own_blocks) * prompt.block_bytes.item(holder)
    fixed_s, dial_s = links.pull_s[:, holder], links.dial_s[:, holder]
    pull_s = num_bytes * links.s_per_byte[:, holder] + links.queued_s[:, holder] + fixed_s + dial_s
    is_faster = can_pull & (compute_s + pull_s + reload_s < terms.prefill_s + terms.pull_s + terms.reload_s)
    np.copyto(terms.prefill_s, compute_s, where=is_faster)
    np.copyto(terms.pull_s, pull_s, where=is_faster)
    np.copyto(terms.reload_s, reload_s, where=is_faster)
    np.copyto(terms.pull_fixed_s, fixed_s, where=is_faster)
    np.copyto(terms.dial_s, dial_s, where=is_faster)
    np.copyto(terms.cached_tokens, cached_tokens, where=is_faster)
    np.copyto(terms.source, holder, where=is_faster)


def _with_pulled_prefix(inputs: PlacementInputs, holders: list[int], decode: int, local: LocalPrefill) -> LocalPrefill:
    """Return the local prefill with the pull that makes it fastest, or unchanged if none does."""
    w, prompt, row, links = inputs.workers, inputs.prompt, inputs.workers.row(decode), inputs.workers.links
    if not holders:
        return local
    best, sources = local, sources_of(w, decode)
    for holder in holders:
        held_blocks = prompt.pullable_blocks[holder]
        held_tokens = held_blocks * row.reported.block_size_tokens
        if held_tokens <= local.memory_tokens or not sources[holder]:
            continue
        missing_blocks = (held_tokens - local.memory_tokens) / row.reported.block_size_tokens
        num_bytes = missing_blocks * prompt.block_bytes.item(decode)
        fixed_s, dial_s = links.pull_s.item(decode, holder), links.dial_s.item(decode, holder)
        pull_s = num_bytes * links.s_per_byte.item(decode, holder) + links.queued_s.item(decode, holder)
        pull_s += fixed_s + dial_s
        compute_s = local.first.prefill_s(row, prompt.num_tokens, held_tokens)
        if compute_s + pull_s + local.host_reload_s < best.prefill_s + best.pull_s + best.reload_s:
            best = replace(
                local,
                cached_tokens=held_tokens,
                prefill_s=compute_s,
                pull_s=pull_s,
                reload_s=local.host_reload_s,
                pull_fixed_s=fixed_s,
                dial_s=dial_s,
                source=holder,
            )
    return best


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


def _most_cached_tokens(prompt: Prompt, candidates: Mask) -> float:
    return float(np.where(candidates, prompt.overlap_tokens, 0.0).max(initial=0.0))
