"""What `kv_centric` and `prefix_aware` share: every candidate's terms in seconds, and the choice of the
least.

Source: Mooncake (FAST'25), section 4, Algorithm 1; what it leaves open is settled in docs/architecture.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.messages.jobs import PrefixSource
from baton.scheduler.policies.cost_terms import DecodeTerms, PrefillTerms, explained
from baton.scheduler.policies.least_loaded import least_loaded
from baton.scheduler.policies.policy_result import (
    Choice,
    LazyCandidates,
    PolicyContext,
    Prediction,
    needs_no_decode,
    no_room,
    no_workers,
    refuses_full,
)
from baton.scheduler.prediction.predict import (
    Prompt,
    added_s,
    expected_outputs,
    exposed_s,
    idle_tpot_s,
    mixed_step_s,
    prefill_s,
    prompt_of,
    room_s,
    tpot_now_s,
    tpot_s,
)
from baton.scheduler.state.worker_table import Floats, Mask, Row, WorkerTable, worker_table_of

MAX_HOLDERS = 4
"""Of a prefix: so many of those that hold most of it are considered to pull it from."""
ALONE_GAIN = 0.1
ALONE_GAIN_S = 0.01
"""A decode worker computes a prompt itself only if that is predicted faster by so much of the other's seconds
and by so many: predictions are no more exact, and a sequence that joins meanwhile would wait for the prompt,
which nobody can charge for yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingRules:
    """`pulls`: a prefix may be pulled from another worker, and the seconds in which a worker computes what
    another candidate has, or will have soon, are charged once more: they are lost to the requests that come
    next. `conditional`: the decode worker is a candidate to prefill, whatever its role. `charges_busy`: then
    it is charged with the seconds by which its sequences are delayed, and barred where they would miss their
    TPOT."""

    pulls: bool
    conditional: bool
    charges_busy: bool = True


def choose(
    query: PlacementQuery, cluster: ClusterSnapshot, turn: PolicyContext, rules: RankingRules
) -> Choice | Rejection:
    """Decode worker first, then who prefills for it. By load alone (`least_loaded`) while no candidate has
    measured itself."""
    c = worker_table_of(cluster)
    all_prefills, all_decodes = _able(query, c)
    if needs_no_decode(query):
        all_decodes = np.zeros_like(all_decodes)
    if not _any(all_prefills if needs_no_decode(query) else all_decodes):
        return no_workers(query, "prefill" if needs_no_decode(query) else "decode")
    if not c.all_measured:
        c = c.with_costs_borrowed()
        if not c.has_costs[all_prefills | all_decodes].all():
            by_load = least_loaded(query, cluster, turn)
            return replace(by_load, basis=None) if isinstance(by_load, Choice) else by_load
    prompt = prompt_of(query, cluster.overlaps, c)
    fits = c.free_tokens >= query.num_prompt_tokens + query.sample_count
    prefills = _preferred(query, c, prompt, all_prefills, fits, turn)
    own_s = prefill_s(c, prompt.num_tokens, prompt.own_tokens)
    ttft_left_s = None if query.slo.ttft_s is None else query.slo.ttft_s - query.waited_s
    if needs_no_decode(query):
        if not _any(prefills):
            return no_room("prefill")
        costs = _prefill_terms(c, prompt, prefills, None, rules, own_s)
        best = _best(costs.cost_s, costs.ttft_s, ttft_left_s)
        return _choice(query, cluster, c, prompt, costs, best, best, None, None)
    decodes = _preferred(query, c, prompt, all_decodes, fits & (c.free_seqs >= query.sample_count), turn)
    if not _any(decodes):
        return no_room("decode")
    computed_s = c.queue_s + own_s
    soonest = int(np.where(prefills if _any(prefills) else decodes, computed_s, inf).argmin())
    decode_terms = _decode_terms(c, prompt, decodes, computed_s.item(soonest))
    decode = _best(decode_terms.cost_s, lambda: decode_terms.tpot_s, query.slo.tpot_s)
    sources = _readable(c, prefills, decode)
    has_sources = _any(sources)
    alone = rules.conditional or bool(c.can_prefill[decode]) or not _any(all_prefills)
    if not has_sources and not alone:
        alone = not refuses_full(query, turn) or not _any(_readable(c, all_prefills, decode))
        if not alone:
            return no_room("prefill")
    terms = _prefill_terms(c, prompt, sources, decode, rules, own_s)
    if alone:
        _add_alone(query, c, prompt, terms, decode, rules, is_only=not has_sources)
    best = _best(terms.cost_s, terms.ttft_s, ttft_left_s)
    choice = _choice(query, cluster, c, prompt, terms, best, soonest, decode_terms, decode)
    return (
        choice if has_sources else replace(choice, basis=None)
    )  # nobody could be read from: that is everybody's doing


def _any(mask: Mask) -> bool:
    """Much faster than `mask.any()`."""
    return bool(np.count_nonzero(mask))


def _best(cost_s: Floats, predicted_s: Callable[[], Floats], slo_s: float | None) -> int:
    """The least cost, of those that keep the promise where any does."""
    best = int(cost_s.argmin())
    if slo_s is None or (seconds := predicted_s()).item(best) <= slo_s:
        return best
    keeping = np.where(seconds <= slo_s, cost_s, inf)
    kept = int(keeping.argmin())
    return kept if keeping.item(kept) < inf else best


def _able(query: PlacementQuery, c: WorkerTable) -> tuple[Mask, Mask]:
    """Who can prefill and who can decode by its role, and is not `unusable`."""
    kinds = [
        i
        for i, kind in enumerate(c.kinds)
        if kind.model == query.model
        and query.hash_scheme in ("", kind.layout.hash_scheme)
        and query.model_fingerprint in ("", kind.layout.model_fingerprint)
    ]
    prefills: Mask = c.max_prefill_tokens > query.num_prompt_tokens
    decodes: Mask = c.max_decode_tokens > query.num_prompt_tokens
    if len(kinds) == len(c.kinds):
        return prefills, decodes
    serves = np.isin(c.kind, kinds)
    return prefills & serves, decodes & serves


def _preferred(
    query: PlacementQuery, c: WorkerTable, prompt: Prompt, able: Mask, fits: Mask, turn: PolicyContext
) -> Mask:
    """Who has room and is not to be avoided; else who has none; else the avoided. Where full workers are to
    be refused, of those only who is predicted to have room soon enough."""
    wanted = able
    if query.avoid:
        wanted = able.copy()
        for worker in query.avoid:
            i = c.index.get(worker.worker_id)
            if i is not None and c.views[i].worker.is_same_incarnation(worker):
                wanted[i] = False
    best = wanted & fits
    if _any(best):
        return best
    if _any(wanted):
        if turn.max_full_s is None or not refuses_full(query, turn):
            return wanted
        soon: Mask = wanted & (room_s(c, prompt) <= turn.max_full_s)
        return soon
    return able


def _readable(c: WorkerTable, prefills: Mask, decode: int) -> Mask:
    """Of these, whose KV this decode worker can pull; warm pairs where there are any. See
    `Field.readable_by`."""
    links = c.links
    able = prefills & ~links.is_broken[decode] & _same_kind(c, decode)
    able[decode] = False
    warm: Mask = able & links.is_warm[decode]
    return warm if _any(warm) else able


def _same_kind(c: WorkerTable, i: int) -> Mask | bool:
    return True if len(c.kinds) == 1 else c.kind == c.kind[i]


def _decode_terms(c: WorkerTable, prompt: Prompt, decodes: Mask, horizon_s: float) -> DecodeTerms:
    """The least predicted seconds a token: the step's, once the prompt is computed (at the soonest in
    `horizon_s`), and the pull of what the worker lacks, spread over the answer."""
    step_s = tpot_s(c, prompt, horizon_s)
    pull_s = (prompt.num_blocks - prompt.own_blocks) * c.block_bytes * c.link_s_per_byte
    cost_s = step_s + pull_s / expected_outputs(c, prompt)
    return DecodeTerms(step_s, pull_s, np.where(decodes, cost_s, inf))


def _prefill_terms(
    c: WorkerTable, prompt: Prompt, candidates: Mask, decode: int | None, rules: RankingRules, own_s: Floats
) -> PrefillTerms:
    """`own_s`: to compute what each has not cached itself."""
    size = len(c.views)
    terms = PrefillTerms(
        queue_s=c.queue_s,
        pull_s=np.zeros(size),
        prefill_s=own_s.copy(),
        transfer_s=np.zeros(size),
        redundant_s=np.zeros(size),
        cost_s=own_s,
        source=np.full(size, -1),
        cached_tokens=prompt.own_tokens.copy(),
        holders=_holders(c, prompt) if rules.pulls else [],
    )
    if rules.pulls:
        for holder in terms.holders:
            _consider_pull(c, prompt, candidates, holder, terms)
        most = _most_cached(prompt, candidates)
        if most:
            terms.redundant_s = (
                terms.prefill_s * np.maximum(0, most - terms.cached_tokens) / (prompt.num_tokens - terms.cached_tokens)
            )
    if decode is not None:
        terms.transfer_s = _transfer_s(c, prompt, terms, decode)
    seconds = c.queue_s + terms.pull_s + terms.prefill_s + terms.transfer_s + terms.redundant_s
    terms.cost_s = np.where(candidates, seconds, inf)
    return terms


def _most_cached(prompt: Prompt, candidates: Mask) -> float:
    """Tokens of the prompt that some candidate has, or soon will."""
    return float(np.where(candidates, prompt.own_tokens, 0.0).max(initial=0.0))


def _holders(c: WorkerTable, prompt: Prompt) -> list[int]:
    """Of a prefix; of many those that hold most, and of these those with the least to send."""
    holders = sorted(i for i in prompt.held_blocks if c.is_ready[i])
    if len(holders) > MAX_HOLDERS:
        busy_s = c.links.queued_s[:, holders].sum(axis=0)
        holders = sorted(
            i
            for _, _, i in sorted(zip((-prompt.held_blocks[i] for i in holders), busy_s, holders, strict=True))[
                :MAX_HOLDERS
            ]
        )
    return holders


def _consider_pull(c: WorkerTable, prompt: Prompt, candidates: Mask, holder: int, terms: PrefillTerms) -> None:
    """Of those that hold less than this one: who is faster if it pulls what it lacks, than by what is in
    `terms` so far?"""
    links, held_blocks = c.links, prompt.held_blocks[holder]
    can_pull = candidates & (prompt.own_blocks < held_blocks) & ~links.is_broken[:, holder] & _same_kind(c, holder)
    if not _any(can_pull):
        return
    cached_tokens = held_blocks * c.block_tokens.item(holder)
    compute_s = prefill_s(c, prompt.num_tokens, cached_tokens)
    num_bytes = (held_blocks - prompt.own_blocks) * c.block_bytes.item(holder)
    pull_s = num_bytes * links.s_per_byte[:, holder] + links.queued_s[:, holder]
    faster = can_pull & (compute_s + pull_s < terms.prefill_s + terms.pull_s)
    np.copyto(terms.prefill_s, compute_s, where=faster)
    np.copyto(terms.pull_s, pull_s, where=faster)
    np.copyto(terms.cached_tokens, cached_tokens, where=faster)
    np.copyto(terms.source, holder, where=faster)


def _transfer_s(c: WorkerTable, prompt: Prompt, terms: PrefillTerms, decode: int) -> Floats:
    """Not hidden behind the computing. Only for workers of the decode worker's kind."""
    links, block_bytes = c.links, c.block_bytes.item(decode)
    missing = prompt.num_blocks.item(decode) - prompt.own_blocks.item(decode)
    num_new = prompt.num_tokens - terms.cached_tokens
    last_tokens = np.minimum(c.chunk_tokens, num_new)
    last_blocks = np.minimum(missing, np.ceil(last_tokens / c.block_tokens))
    return exposed_s(
        missing * block_bytes,
        last_blocks * block_bytes,
        links.s_per_byte[decode],
        links.queued_s[decode],
        terms.prefill_s,
        last_tokens / num_new,
    )


def _add_alone(
    query: PlacementQuery,
    c: WorkerTable,
    prompt: Prompt,
    terms: PrefillTerms,
    decode: int,
    rules: RankingRules,
    *,
    is_only: bool,
) -> None:
    """The decode worker computes the prompt itself: nothing is transferred, but its sequences wait. Written
    into its place in `terms`."""
    row = c.row(decode)
    # What a decode worker is expected to hold comes from who computes it: nothing to begin with now.
    cached_tokens = (
        prompt.own_tokens.item(decode) if row.can_prefill else prompt.held_blocks.get(decode, 0) * row.block_tokens
    )
    compute_s, pull_s, source = prefill_s(row, prompt.num_tokens, cached_tokens), 0.0, -1
    for holder in terms.holders:
        if prompt.held_blocks[holder] * row.block_tokens > cached_tokens and _can_read(c, decode, holder):
            with_it_s, needs_s = _with_prefix_of(c, prompt, row, decode, holder, cached_tokens)
            if with_it_s + needs_s < compute_s + pull_s:
                compute_s, pull_s, source = with_it_s, needs_s, holder
    if source >= 0:
        cached_tokens = prompt.held_blocks[source] * row.block_tokens
    is_barred = False
    delayed = row.decoding_seqs + row.joining_seqs
    if rules.charges_busy and delayed:
        terms.busy_s = added_s(row, prompt.num_tokens, cached_tokens) * delayed
        promises = [slo_s for slo_s in (query.slo.tpot_s, c.views[decode].tpot_slo_s) if slo_s is not None]
        is_barred = bool(promises) and mixed_step_s(row, prompt.num_tokens, cached_tokens) > min(promises)
    if is_barred and not is_only:
        return
    if not is_only and not row.can_prefill:
        terms.margin_s = max(ALONE_GAIN_S, ALONE_GAIN * float(terms.cost_s.min()))
    redundant_s = 0.0
    if rules.pulls and not is_only:
        most = _most_cached(prompt, terms.cost_s < inf)
        redundant_s = compute_s * max(0.0, most - cached_tokens) / (prompt.num_tokens - cached_tokens)
    terms.pull_s[decode], terms.prefill_s[decode], terms.transfer_s[decode] = pull_s, compute_s, 0.0
    terms.source[decode], terms.cached_tokens[decode], terms.redundant_s[decode] = source, cached_tokens, redundant_s
    terms.cost_s[decode] = row.queue_s + pull_s + compute_s + terms.busy_s + terms.margin_s + redundant_s


def _can_read(c: WorkerTable, reader: int, holder: int) -> bool:
    return reader != holder and bool(c.kind[reader] == c.kind[holder]) and not c.links.is_broken[reader, holder]


def _with_prefix_of(
    c: WorkerTable, prompt: Prompt, row: Row, reader: int, holder: int, cached_tokens: float
) -> tuple[float, float]:
    """(seconds to compute the rest, seconds to pull) for one worker."""
    held_tokens = prompt.held_blocks[holder] * row.block_tokens
    num_bytes = (held_tokens - cached_tokens) / row.block_tokens * row.block_bytes
    links = c.links
    pull_s = num_bytes * links.s_per_byte.item(reader, holder) + links.queued_s.item(reader, holder)
    return prefill_s(row, prompt.num_tokens, held_tokens), pull_s


def _choice(
    query: PlacementQuery,
    cluster: ClusterSnapshot,
    c: WorkerTable,
    prompt: Prompt,
    terms: PrefillTerms,
    best: int,
    soonest: int,
    decode_terms: DecodeTerms | None,
    decode: int | None,
) -> Choice:
    queue_s, pull_s, compute_s = terms.queue_s.item(best), terms.pull_s.item(best), terms.prefill_s.item(best)
    ttft_s = queue_s + pull_s + compute_s
    prefills = terms.cost_s < inf
    if decode is not None and best != decode and not c.can_prefill[decode]:
        prefills[decode] = False  # it has no queue, but it is not what requests wait for
    least_queued = int(np.where(prefills, terms.queue_s, inf).argmin())
    source = terms.source.item(best)
    pulled = None
    if source >= 0:
        pulled = PrefixSource(worker=c.views[source].worker, num_blocks=int(prompt.held_blocks[source]))
    of_decode: dict[str, float] = {}
    if decode is not None:
        row = c.row(decode)
        of_decode = {
            "tpot_s": tpot_s(row, prompt, ttft_s),
            "tpot_now_s": tpot_now_s(row, prompt),
            "idle_tpot_s": idle_tpot_s(row, prompt),
            "leave_s": row.leave_s,
        }
    return Choice(
        prefill=None if best == decode else c.views[best],
        decode=None if decode is None else c.views[decode],
        candidates=LazyCandidates(partial(explained, query, cluster, c, prompt, terms, decode_terms, decode)),
        predicted=Prediction(
            queue_s=queue_s,
            prefix_pull_s=pull_s,
            prefill_s=compute_s,
            transfer_s=terms.transfer_s.item(best),
            busy_s=terms.busy_s if best == decode else 0.0,
            ttft_s=ttft_s,
            least_queue_s=terms.queue_s.item(least_queued),
            **of_decode,
        ),
        prefix_source=pulled,
        prefill_overlap_blocks=int(prompt.own_blocks[best]),
        decode_overlap_blocks=0 if decode is None else _overlap_at(c, prompt, decode, computes=best == decode),
        basis=_basis(c, {best, least_queued, soonest, *terms.holders} | ({decode} if decode is not None else set())),
    )


def _overlap_at(c: WorkerTable, prompt: Prompt, decode: int, *, computes: bool) -> int:
    """Blocks that the decode worker need not read, or compute: see `_add_alone`."""
    if computes and not c.can_prefill[decode]:
        return int(prompt.held_blocks.get(decode, 0))
    return int(prompt.own_blocks[decode])


def _basis(c: WorkerTable, columns: set[int]) -> tuple[str, ...] | None:
    """Costs that are borrowed are everybody's."""
    return tuple(c.views[i].worker_id for i in sorted(columns)) if c.all_measured else None
