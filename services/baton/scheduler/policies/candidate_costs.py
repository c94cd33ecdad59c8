"""Predicts the cost of each candidate in seconds, for the policies `kv_centric` and `prefix_aware`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from baton.core.cluster.placement import PlacementQuery
from baton.core.messages.jobs import PrefixSource
from baton.scheduler.policies.cost_terms import NO_SOURCE, DecodeTerms, PrefillTerms, explain_candidates
from baton.scheduler.policies.eligibility import (
    any_worker,
)
from baton.scheduler.policies.placement_inputs import PlacementInputs
from baton.scheduler.policies.policy_types import Choice, LazyCandidates, Prediction
from baton.scheduler.policies.reload_costs import local_blocks, own_blocks_of, reload_of, reload_terms_s
from baton.scheduler.prediction.predict import (
    FirstTokenTerms,
    Prompt,
    capacity_wait_s,
    expected_output_tokens,
    exposed_reload_s,
    exposed_transfer_s,
    first_token,
    idle_tpot_s,
    tpot_now_s,
    tpot_s,
    tpot_target_s,
)
from baton.scheduler.state.worker_data import Floats, Mask
from baton.scheduler.state.worker_table import WorkerTable


def cheapest(cost_s: Floats, predicted_s: Callable[[], Floats], slo_s: float | None) -> int:
    """Return the position of the least cost, among the workers predicted to meet the SLO if there are any.

    `predicted_s` is called only if there is an SLO. Derived targets do not matter here: a slow worker has
    loose ones. Ties break by position, which is by id.
    """
    best = int(cost_s.argmin())
    if slo_s is None or (seconds := predicted_s()).item(best) <= slo_s:
        return best
    meeting = np.where(seconds <= slo_s, cost_s, inf)
    best_meeting = int(meeting.argmin())
    return best_meeting if meeting.item(best_meeting) < inf else best


def ttft_left_s(query: PlacementQuery) -> float | None:
    """Return what is left of the request's TTFT SLO, or None without an SLO."""
    return None if query.slo.ttft_s is None else query.slo.ttft_s - query.waited_s


# Decode side


def decode_terms(inputs: PlacementInputs, displaced_s: Floats | None = None) -> DecodeTerms:
    """Predict the seconds per output token: TPOT plus capacity wait and KV pull, spread over the answer.

    displaced_s: charge of each worker for what it evicts, spread like the other two; None: no charge
    """
    w, prompt = inputs.workers, inputs.prompt
    computed_s = inputs.first.queue_s + inputs.own_prefill_s
    candidates = inputs.prefill if any_worker(inputs.prefill) else inputs.decode
    fastest = int(np.where(candidates, computed_s, inf).argmin())
    horizon_s = computed_s.item(fastest)
    step_s = tpot_s(w, prompt, horizon_s)
    missing_blocks = prompt.num_blocks - prompt.overlap_blocks
    read_s = missing_blocks * prompt.block_bytes * w.reported.default_link_s_per_byte
    pull_s = np.where(missing_blocks > 0, read_s + w.reported.default_link_exposed_s, 0.0)
    wait_s = capacity_wait_s(w, prompt, step_s)
    if displaced_s is None:
        displaced_s = np.zeros(len(w.views))
    cost_s = step_s + (wait_s + pull_s + displaced_s) / expected_output_tokens(w, prompt)
    slo_s = inputs.query.slo.tpot_s
    target_s = tpot_target_s(w, prompt) if slo_s is None else np.full(len(w.views), slo_s)
    cost_s = np.where(inputs.decode, cost_s, inf)
    return DecodeTerms(step_s, wait_s, pull_s, displaced_s, cost_s, horizon_s, fastest, target_s)


def cheapest_decode(inputs: PlacementInputs, terms: DecodeTerms) -> int:
    """Return the position of the decode worker with the least predicted seconds per output token."""
    return cheapest(terms.cost_s, lambda: terms.tpot_s, inputs.query.slo.tpot_s)


# Prefill side


def own_prefix_terms(inputs: PlacementInputs) -> PrefillTerms:
    """Return the terms if each worker computes what it has not cached itself. Not ranked yet."""
    size = len(inputs.workers.views)
    return PrefillTerms(
        queue_s=inputs.first.queue_s.copy(),
        pull_s=np.zeros(size),
        prefill_s=inputs.own_prefill_s.copy(),
        transfer_s=np.zeros(size),
        target_s=inputs.first.target_s,
        redundant_s=np.zeros(size),
        displaced_s=np.zeros(size),
        cost_s=inputs.own_prefill_s,
        source=np.full(size, NO_SOURCE),
        cached_tokens=inputs.prompt.overlap_tokens.copy(),
        holders=[],
        reload_s=reload_terms_s(inputs),
        pull_fixed_s=np.zeros(size),
        dial_s=np.zeros(size),
    )


def rank(terms: PrefillTerms, candidates: Mask) -> None:
    """Sum the terms into `cost_s`; infinite for all but the candidates."""
    seconds = terms.queue_s + terms.reload_s + terms.pull_s + terms.prefill_s + terms.transfer_s
    terms.cost_s = np.where(candidates, seconds + terms.redundant_s + terms.displaced_s, inf)


def transfer_terms_s(inputs: PlacementInputs, terms: PrefillTerms, decode: int) -> Floats:
    """Predict the exposed KV transfer to the decode worker. Valid for workers of its KV group only."""
    w, prompt, links = inputs.workers, inputs.prompt, inputs.workers.links
    block_bytes = prompt.block_bytes.item(decode)
    missing_blocks = prompt.num_blocks.item(decode) - prompt.overlap_blocks.item(decode)
    num_new = prompt.num_tokens - terms.cached_tokens
    last_tokens = np.minimum(w.reported.max_chunk_tokens, num_new)
    last_blocks = np.minimum(missing_blocks, np.ceil(last_tokens / w.reported.block_size_tokens))
    return exposed_transfer_s(
        missing_blocks * block_bytes,
        last_blocks * block_bytes,
        links.s_per_byte[decode],
        links.queued_s[decode] + np.maximum(0.0, links.dial_s[decode] - terms.queue_s),
        terms.prefill_s,
        last_tokens / num_new,
    ) + (links.exposed_s[decode] if missing_blocks > 0 else 0.0)


# The decode worker prefills


@dataclass(slots=True)
class LocalPrefill:
    """The terms if the decode worker computes the prompt itself.

    No KV is transferred. The prompt gets the time that the worker's sequences can spare within their targets;
    its share of the step time accounts for it.

    first: queue and share of step time at the decode worker.
    memory_tokens, host_reload_s: cached tokens without those on its disk, and the wait for what is in host
        memory only
    margin_s: by how much it must be faster than the best prefill worker.
    """

    first: FirstTokenTerms[float]
    cached_tokens: float
    memory_tokens: float
    prefill_s: float
    host_reload_s: float
    reload_s: float
    pull_s: float = 0.0
    pull_fixed_s: float = 0.0
    dial_s: float = 0.0
    source: int = NO_SOURCE
    margin_s: float = 0.0
    redundant_s: float = 0.0


def local_prefill(inputs: PlacementInputs, decode: int) -> LocalPrefill:
    """Predict the local prefill from the prefix that the decode worker holds itself."""
    prompt, row = inputs.prompt, inputs.workers.row(decode)
    size, disk_blocks = row.reported.block_size_tokens, prompt.disk_blocks.item(decode)
    cached_tokens = local_blocks(inputs, decode) * size
    memory_tokens = cached_tokens - disk_blocks * size
    first = first_token(row, inputs.query, cached_tokens)
    prefill_s = first.prefill_s(row, prompt.num_tokens, cached_tokens)
    reload = reload_of(prompt, decode, row, first, cached_tokens, disk_blocks)
    reload_s = host_s = exposed_reload_s(row, reload, first.queue_s)
    if disk_blocks:
        of_host = reload_of(prompt, decode, row, first, memory_tokens, 0.0)
        host_s = exposed_reload_s(row, of_host, first.queue_s)
    return LocalPrefill(
        first=first,
        cached_tokens=cached_tokens,
        memory_tokens=memory_tokens,
        prefill_s=prefill_s,
        host_reload_s=host_s,
        reload_s=reload_s,
    )


def can_spare_steps(inputs: PlacementInputs, decode: int) -> bool:
    """False if the decode worker computes no prompts by role, and its answers already miss their targets."""
    row = inputs.workers.row(decode)
    return bool(row.reported.can_prefill) or not row.derived.joined_step_s or row.derived.longest_step_s < inf


def add_local_prefill(terms: PrefillTerms, decode: int, local: LocalPrefill) -> None:
    """Make the decode worker a candidate to prefill. `terms` must be ranked."""
    terms.pull_s[decode], terms.prefill_s[decode], terms.transfer_s[decode] = local.pull_s, local.prefill_s, 0.0
    terms.queue_s[decode], terms.reload_s[decode] = local.first.queue_s, local.reload_s
    terms.pull_fixed_s[decode], terms.dial_s[decode] = local.pull_fixed_s, local.dial_s
    terms.source[decode], terms.cached_tokens[decode] = local.source, local.cached_tokens
    terms.redundant_s[decode], terms.displaced_s[decode] = local.redundant_s, 0.0
    terms.local_margin_s = local.margin_s
    seconds = local.first.queue_s + local.reload_s + local.pull_s + local.prefill_s
    terms.cost_s[decode] = seconds + local.margin_s + local.redundant_s


# The choice


def prefill_only_choice(inputs: PlacementInputs, terms: PrefillTerms) -> Choice:
    """Choose the cheapest prefill worker for a request that needs no decode worker."""
    best = cheapest(terms.cost_s, terms.ttft_s, ttft_left_s(inputs.query))
    return _choice(inputs, terms, best, None, None)


def pair_choice(inputs: PlacementInputs, terms: PrefillTerms, decode_terms: DecodeTerms, decode: int) -> Choice:
    """Choose the cheapest worker to prefill for the chosen decode worker, or that worker itself."""
    best = cheapest(terms.cost_s, terms.ttft_s, ttft_left_s(inputs.query))
    return _choice(inputs, terms, best, decode_terms, decode)


def _choice(
    inputs: PlacementInputs, terms: PrefillTerms, best: int, decode_terms: DecodeTerms | None, decode: int | None
) -> Choice:
    query, w, prompt = inputs.query, inputs.workers, inputs.prompt
    source = terms.source.item(best)
    prefix_source = None
    if source != NO_SOURCE:
        option = terms.options[source]
        prefix_source = PrefixSource(
            worker=w.views[option.holder].worker,
            num_blocks=int(option.num_blocks),
            num_host_blocks=int(prompt.host_blocks[option.holder]),
            num_disk_blocks=int(option.num_disk_blocks),
        )
    own_blocks = own_blocks_of(inputs, best, is_local=best == decode, uses_disk=source == NO_SOURCE)
    decode_blocks = 0 if decode is None else int(prompt.overlap_blocks[decode])
    least_queued = _least_queued(w, terms, best, decode)
    holders = {*terms.holders} if decode is None else {*terms.holders, decode}
    considered = {best, least_queued, _most_cached(prompt, terms, decode), *holders}
    if decode_terms is not None:
        considered.add(decode_terms.fastest_prefill)
    return Choice(
        prefill=None if best == decode else w.views[best],
        decode=None if decode is None else w.views[decode],
        candidates=LazyCandidates(
            partial(explain_candidates, query, inputs.cluster, w, prompt, terms, decode_terms, decode)
        ),
        predicted=_prediction(w, prompt, terms, best, least_queued, decode),
        prefix_source=prefix_source,
        prefill_overlap_blocks=own_blocks,
        decode_overlap_blocks=own_blocks if best == decode else decode_blocks,
        # The costs of unmeasured workers are estimated from all others.
        basis=tuple(w.views[i].worker_id for i in sorted(considered)) if w.all_measured else None,
        holders=tuple(w.views[i].worker_id for i in sorted(holders)),
    )


def _prediction(
    w: WorkerTable, prompt: Prompt, terms: PrefillTerms, best: int, least_queued: int, decode: int | None
) -> Prediction:
    queue_s, compute_s = terms.queue_s.item(best), terms.prefill_s.item(best)
    pull_s = terms.reload_s.item(best) + terms.pull_s.item(best)
    ttft_s = queue_s + pull_s + compute_s
    of_decode: dict[str, float] = {}
    if decode is not None:
        row = w.row(decode)
        gap_s = tpot_s(row, prompt, ttft_s)
        of_decode = {
            "tpot_s": gap_s,
            "answer_s": gap_s * expected_output_tokens(row, prompt),
            "tpot_now_s": tpot_now_s(row, prompt),
            "idle_tpot_s": idle_tpot_s(row, prompt) / row.reported.tokens_per_step,
            "decode_drain_s": row.derived.decode_drain_s,
        }
    return Prediction(
        queue_s=queue_s,
        prefix_pull_s=pull_s,
        prefill_s=compute_s,
        transfer_s=terms.transfer_s.item(best),
        ttft_s=ttft_s,
        least_queue_s=terms.queue_s.item(least_queued),
        **of_decode,
    )


def _least_queued(w: WorkerTable, terms: PrefillTerms, best: int, decode: int | None) -> int:
    """Return the candidate with the shortest queue.

    A decode worker has no queue of prompts, so it counts only if it is the choice or a hybrid.
    """
    candidates = terms.cost_s < inf
    if decode is not None and best != decode and not w.reported.can_prefill[decode]:
        candidates[decode] = False
    return int(np.where(candidates, terms.queue_s, inf).argmin())


def _most_cached(prompt: Prompt, terms: PrefillTerms, decode: int | None) -> int:
    """Return the candidate with most of the prompt cached. The others are charged for computing it once more.

    The decode worker does not compete, because it is considered anyway.
    """
    candidates = terms.cost_s < inf
    if decode is not None:
        candidates[decode] = False
    return int(np.where(candidates, prompt.overlap_tokens, -inf).argmax())
