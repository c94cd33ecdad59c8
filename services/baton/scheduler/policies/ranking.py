"""What `kv_centric` and `prefix_aware` share: every candidate's terms in seconds, and the choice of the least.

Source: Mooncake (FAST'25), section 4, Algorithm 1; what it leaves open is settled in docs/architecture.md.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.core.cluster import Candidate, ClusterSnapshot, PlacementQuery, Rejection
from baton.core.jobs import PrefixSource
from baton.scheduler.columns import Columns, Floats, Mask, columns_of
from baton.scheduler.policies.choice import (
    FAILED_BEFORE,
    FULL,
    SLOWER,
    Choice,
    LazyCandidates,
    Prediction,
    Turn,
    has_room,
    needs_no_decode,
    no_room,
    no_workers,
    refuses_full,
    unusable,
)
from baton.scheduler.policies.least_loaded import least_loaded
from baton.scheduler.predict import (
    Prompt,
    added_s,
    expected_outputs,
    exposed_s,
    leave_s,
    mixed_step_s,
    own_prefill_s,
    prefill_s,
    prompt_of,
    queue_s,
    room_s,
    tpot_now_s,
    tpot_s,
)

MAX_HOLDERS = 4
"""Of a prefix: so many of those that hold most of it are considered to pull it from."""
_NOBODY: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)
SHOWN_A_SIDE = 4
ALONE_GAIN = 0.1
ALONE_GAIN_S = 0.01
"""A decode worker computes a prompt itself only if that is predicted faster by so much of the other's seconds and by so many: predictions
are no more exact, and a sequence that joins meanwhile would wait for the prompt, which nobody can charge for yet."""
UNREADABLE = "barred, or its KV cannot be read (yet)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`pulls`: a prefix may be pulled from another worker. `conditional`: the decode worker is a candidate to prefill, whatever its role.
    `charges_busy`: then it is charged with the seconds by which its sequences are delayed, and barred where they would miss their TPOT."""

    pulls: bool
    conditional: bool
    charges_busy: bool = True


@dataclass(frozen=True, slots=True)
class _Decode:
    """Terms of the decode side, one number a worker; `cost_s` is infinite for who is none of the candidates."""

    tpot_s: Floats
    pull_s: Floats
    cost_s: Floats


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Terms of the prefill side, one number a worker. `margin_s`: by which computing at the decode worker must be faster. `source`: the
    column whose prefix is pulled, -1 for none. `holders`: the columns that were considered to pull from."""

    queue_s: Floats
    pull_s: Floats
    prefill_s: Floats
    transfer_s: Floats
    busy_s: Floats
    margin_s: Floats
    cost_s: Floats
    source: npt.NDArray[np.intp]
    cached_blocks: Floats
    holders: npt.NDArray[np.intp]

    @property
    def ttft_s(self) -> Floats:
        return self.queue_s + self.pull_s + self.prefill_s


def choose(query: PlacementQuery, cluster: ClusterSnapshot, turn: Turn, rules: Rules) -> Choice | Rejection:
    """Decode worker first, then who prefills for it. By load alone (`least_loaded`) while no candidate has measured itself."""
    c = columns_of(cluster)
    able = _able(query, c)
    prompt = prompt_of(query, cluster.overlaps, c)
    prefills, decodes = able & (c.can_prefill > 0), able & (c.can_decode > 0)
    if needs_no_decode(query):
        decodes = np.zeros_like(able)
    if not (prefills if needs_no_decode(query) else decodes).any():
        return no_workers(query, "prefill" if needs_no_decode(query) else "decode")
    c = c.with_costs_borrowed()
    if not c.has_costs[prefills | decodes].all():
        by_load = least_loaded(query, cluster, turn)
        return replace(by_load, basis=None) if isinstance(by_load, Choice) else by_load
    fits = prompt.num_blocks <= c.free_blocks
    decodes = _preferred(query, c, prompt, decodes, fits & (c.num_seqs + query.sample_count <= c.max_num_seqs), turn)
    prefills = _preferred(query, c, prompt, prefills, fits, turn)
    if needs_no_decode(query):
        if not prefills.any():
            return no_room("prefill")
        costs = _prefill_terms(c, prompt, prefills, None, rules, queue_s(c), own_prefill_s(c, prompt))
        best = int(costs.cost_s.argmin())
        return _choice(query, cluster, c, prompt, costs, best, best, None, None)
    if not decodes.any():
        return no_room("decode")
    queued_s, own_s = queue_s(c), own_prefill_s(c, prompt)
    soonest = int(np.where(prefills if prefills.any() else decodes, queued_s + own_s, np.inf).argmin())
    decode_terms = _decode_terms(c, prompt, decodes, queued_s, float(queued_s[soonest] + own_s[soonest]))
    decode = int(decode_terms.cost_s.argmin())
    sources = _readable(c, prefills, decode)
    alone = rules.conditional or bool(c.can_prefill[decode]) or not (able & (c.can_prefill > 0)).any()
    if not sources.any() and not alone:
        alone = not refuses_full(query, turn) or not _readable(c, able & (c.can_prefill > 0), decode).any()
        if not alone:
            return no_room("prefill")
    terms = _prefill_terms(c, prompt, sources, decode, rules, queued_s, own_s)
    if alone:
        _add_alone(query, c, prompt, terms, decode, rules, is_only=not sources.any())
    choice = _choice(query, cluster, c, prompt, terms, int(terms.cost_s.argmin()), soonest, decode_terms, decode)
    return choice if sources.any() else replace(choice, basis=None)  # nobody could be read from: that is everybody's doing


def _able(query: PlacementQuery, c: Columns) -> Mask:
    """The same as not `unusable`, for all at once."""
    kinds = [
        i
        for i, kind in enumerate(c.kinds)
        if kind.model == query.model
        and query.hash_scheme in ("", kind.layout.hash_scheme)
        and query.model_fingerprint in ("", kind.layout.model_fingerprint)
    ]
    able: Mask = (c.is_ready > 0) & (np.ceil((query.num_prompt_tokens + 1) / c.block_tokens) <= c.total_blocks)
    if len(kinds) == len(c.kinds):
        return able
    return able & np.isin(c.kind, kinds)


def _preferred(query: PlacementQuery, c: Columns, prompt: Prompt, able: Mask, fits: Mask, turn: Turn) -> Mask:
    """Who has room and is not to be avoided; else who has none; else the avoided. Where full workers are to be refused, of those only who
    is predicted to have room soon enough."""
    wanted = able
    if query.avoid:
        wanted = able.copy()
        for worker in query.avoid:
            i = c.index.get(worker.worker_id)
            if i is not None and c.views[i].worker.is_same_life(worker):
                wanted[i] = False
    best = wanted & fits
    if best.any():
        return best
    if wanted.any():
        if turn.max_full_s is None or not refuses_full(query, turn):
            return wanted
        soon: Mask = wanted & (room_s(c, prompt) <= turn.max_full_s)
        return soon
    return able


def _readable(c: Columns, prefills: Mask, decode: int) -> Mask:
    """Of these, whose KV this decode worker can pull; warm pairs where there are any. See `Field.readable_by`."""
    links = c.links
    able = prefills & (c.kind == c.kind[decode]) & ~links.is_broken[decode]
    able[decode] = False
    warm: Mask = able & links.is_warm[decode]
    return warm if warm.any() else able


def _decode_terms(c: Columns, prompt: Prompt, decodes: Mask, queued_s: Floats, horizon_s: float) -> _Decode:
    """The least predicted seconds a token: the step's, once the prompt is computed (at the soonest in `horizon_s`), and the pull of what
    the worker lacks, spread over the answer."""
    step_s = tpot_s(c, prompt, horizon_s, queued_s)
    pull_s = (prompt.num_blocks - prompt.own_blocks) * c.block_bytes * c.link_s_per_byte
    cost_s = step_s + pull_s / expected_outputs(c, prompt)
    return _Decode(step_s, pull_s, np.where(decodes, cost_s, np.inf))


def _prefill_terms(
    c: Columns, prompt: Prompt, candidates: Mask, decode: int | None, rules: Rules, queued_s: Floats, own_s: Floats
) -> _Prefill:
    """`own_s`: to compute what each has not cached itself."""
    holders = _holders(c, prompt, candidates) if rules.pulls else _NOBODY
    if len(holders):
        compute_s, pull_s, source, cached = _pulls(c, prompt, candidates, own_s, holders)
    else:
        compute_s, pull_s, source, cached = own_s.copy(), np.zeros(len(c.views)), np.full(len(c.views), -1), prompt.own_blocks.copy()
    transfer_s = np.zeros(len(c.views)) if decode is None else _transfer_s(c, prompt, compute_s, cached, decode)
    cost_s = np.where(candidates, queued_s + pull_s + compute_s + transfer_s, np.inf)
    busy_s, margin_s = np.zeros((2, len(c.views)))
    return _Prefill(queued_s, pull_s, compute_s, transfer_s, busy_s, margin_s, cost_s, source, cached, holders)


def _holders(c: Columns, prompt: Prompt, candidates: Mask) -> npt.NDArray[np.intp]:
    """Who holds more of the prompt than some candidate does; of many those that hold most, and of these those with the least to send."""
    holders = np.flatnonzero((prompt.held_blocks > prompt.own_blocks[candidates].min(initial=np.inf)) & (c.is_ready > 0))
    if len(holders) > MAX_HOLDERS:
        busy_s = c.links.queued_s[:, holders].sum(axis=0)
        holders = np.sort(holders[np.lexsort((busy_s, -prompt.held_blocks[holders]))[:MAX_HOLDERS]])
    return holders


def _pulls(
    c: Columns, prompt: Prompt, candidates: Mask, own_s: Floats, holders: npt.NDArray[np.intp]
) -> tuple[Floats, Floats, npt.NDArray[np.intp], Floats]:
    """Seconds to prefill and to pull, from whom, and the cached blocks, where each candidate takes what is fastest for it. Arrays in here
    are [holder, worker]."""
    own, links = prompt.own_blocks, c.links
    held = prompt.held_blocks[holders][:, np.newaxis]
    can_pull = candidates & (held > own) & (c.kind == c.kind[holders][:, np.newaxis]) & ~links.is_broken[:, holders].T
    with_it_s = prefill_s(c, prompt.num_tokens, held * c.block_tokens)
    pulled_s = (held - own) * c.block_bytes * links.s_per_byte[:, holders].T + links.queued_s[:, holders].T
    total_s = np.where(can_pull, with_it_s + pulled_s, np.inf)
    best, workers = total_s.argmin(axis=0), np.arange(len(c.views))
    faster = total_s[best, workers] < own_s
    return (
        np.where(faster, with_it_s[best, workers], own_s),
        np.where(faster, pulled_s[best, workers], 0.0),
        np.where(faster, holders[best], -1),
        np.where(faster, held[best, 0], own),
    )


def _transfer_s(c: Columns, prompt: Prompt, compute_s: Floats, cached: Floats, decode: int) -> Floats:
    num_new = prompt.num_tokens - cached * c.block_tokens
    last_part = np.minimum(1.0, c.chunk_tokens / num_new)
    missing = prompt.num_blocks[decode] - prompt.own_blocks[decode]
    last_blocks = np.minimum(missing, np.ceil(last_part * num_new / c.block_tokens))
    links = c.links
    return exposed_s(
        missing * c.block_bytes,
        last_blocks * c.block_bytes,
        links.s_per_byte[decode],
        links.queued_s[decode],
        compute_s,
        last_part,
    )


def _add_alone(query: PlacementQuery, c: Columns, prompt: Prompt, terms: _Prefill, decode: int, rules: Rules, *, is_only: bool) -> None:
    """The decode worker computes the prompt itself: nothing is transferred, but its sequences wait. Written into its place in `terms`."""
    own = float(prompt.own_blocks[decode])
    cached_tokens = float(own * c.block_tokens[decode])
    compute_s = prefill_s(c, prompt.num_tokens, cached_tokens, decode)
    busy_s, is_barred = 0.0, False
    delayed = float(c.decoding_seqs[decode] + c.joining_seqs[decode])
    if rules.charges_busy and delayed:
        busy_s = float(added_s(c, prompt.num_tokens, cached_tokens, decode)) * delayed
        promises = [slo_s for slo_s in (query.slo.tpot_s, c.views[decode].tpot_slo_s) if slo_s is not None]
        is_barred = bool(promises) and mixed_step_s(c, prompt.num_tokens, cached_tokens, decode) > min(promises)
    terms.pull_s[decode], terms.prefill_s[decode], terms.transfer_s[decode] = 0.0, compute_s, 0.0
    terms.busy_s[decode], terms.source[decode], terms.cached_blocks[decode] = busy_s, -1, own
    if is_only:
        terms.cost_s[decode] = terms.queue_s[decode] + compute_s + busy_s
    elif not is_barred:
        margin_s = 0.0 if c.can_prefill[decode] else max(ALONE_GAIN_S, ALONE_GAIN * float(terms.cost_s.min()))
        terms.margin_s[decode] = margin_s
        terms.cost_s[decode] = terms.queue_s[decode] + compute_s + busy_s + margin_s


def _choice(
    query: PlacementQuery,
    cluster: ClusterSnapshot,
    c: Columns,
    prompt: Prompt,
    terms: _Prefill,
    best: int,
    soonest: int,
    decode_terms: _Decode | None,
    decode: int | None,
) -> Choice:
    ttft_s = float(terms.ttft_s[best])
    candidates = np.isfinite(terms.cost_s)
    least_queued = int(np.where(candidates, terms.queue_s, np.inf).argmin())
    source = int(terms.source[best])
    pulled = None
    if source >= 0:
        pulled = PrefixSource(worker=c.views[source].worker, num_blocks=int(terms.cached_blocks[best]))
    of_decode: dict[str, float] = {}
    if decode is not None:
        idle_s = c.decode_step_s[decode] + c.decode_seq_s[decode] + c.decode_context_s[decode] * prompt.num_tokens
        of_decode = {
            "tpot_s": float(tpot_s(c, prompt, ttft_s, terms.queue_s[decode], decode)),
            "tpot_now_s": float(tpot_now_s(c, prompt, decode)),
            "idle_tpot_s": float(idle_s),
            "leave_s": float(leave_s(c, decode)),
        }
    return Choice(
        prefill=None if best == decode else c.views[best],
        decode=None if decode is None else c.views[decode],
        candidates=LazyCandidates(lambda: _explained(query, cluster, c, prompt, terms, decode_terms, decode)),
        predicted=Prediction(
            queue_s=float(terms.queue_s[best]),
            prefix_pull_s=float(terms.pull_s[best]),
            prefill_s=float(terms.prefill_s[best]),
            transfer_s=float(terms.transfer_s[best]),
            busy_s=float(terms.busy_s[best]),
            ttft_s=ttft_s,
            least_queue_s=float(terms.queue_s[least_queued]),
            **of_decode,
        ),
        prefix_source=pulled,
        prefill_overlap_blocks=int(prompt.own_blocks[best]),
        decode_overlap_blocks=0 if decode is None else int(prompt.own_blocks[decode]),
        basis=_basis(c, {best, least_queued, soonest, *terms.holders.tolist()} | ({decode} if decode is not None else set())),
    )


def _basis(c: Columns, columns: set[int]) -> tuple[str, ...] | None:
    """Costs that are borrowed are everybody's."""
    return tuple(c.views[i].worker_id for i in sorted(columns)) if (c.has_costs == 1).all() else None


def _explained(
    query: PlacementQuery,
    cluster: ClusterSnapshot,
    c: Columns,
    prompt: Prompt,
    terms: _Prefill,
    decode_terms: _Decode | None,
    decode: int | None,
) -> tuple[Candidate, ...]:
    """The best of each side with their terms, best first and the sides in turn, then why the others are not among them."""
    prefill = _best_first(terms.cost_s)
    decodes = _best_first(decode_terms.cost_s) if decode_terms is not None else []
    shown: list[Candidate] = []
    for rank in range(SHOWN_A_SIDE):
        if rank < len(decodes) and decode_terms is not None:
            shown.append(_explained_decode(c, prompt, decode_terms, decodes[rank]))
        if rank < len(prefill):
            shown.append(_explained_prefill(c, prompt, terms, prefill[rank], decode))
    for side, ranked in (("decode", decodes), ("prefill", prefill)):
        shown += [Candidate(worker=c.views[i].worker, side=side, excluded=SLOWER) for i in ranked[SHOWN_A_SIDE:]]
        if side == "prefill" or decode_terms is not None:
            shown += _left_out(query, cluster, side, {c.views[i].worker_id for i in ranked})
    return tuple(shown)


def _explained_decode(c: Columns, prompt: Prompt, terms: _Decode, i: int) -> Candidate:
    values = {"tpot_s": terms.tpot_s[i], "pull_s": terms.pull_s[i], "cost_s": terms.cost_s[i], "overlap_blocks": prompt.own_blocks[i]}
    return Candidate(worker=c.views[i].worker, side="decode", terms={name: float(value) for name, value in (values | _lent(c, i)).items()})


def _explained_prefill(c: Columns, prompt: Prompt, terms: _Prefill, i: int, decode: int | None) -> Candidate:
    values = {
        "queue_s": terms.queue_s[i],
        "prefix_pull_s": terms.pull_s[i],
        "prefill_s": terms.prefill_s[i],
        "transfer_s": terms.transfer_s[i],
        "busy_s": terms.busy_s[i],
        "cost_s": terms.cost_s[i],
        "overlap_blocks": prompt.own_blocks[i],
    }
    if terms.margin_s[i] > 0:
        values["margin_s"] = terms.margin_s[i]
    if terms.source[i] >= 0:
        values["pulled_blocks"] = terms.cached_blocks[i] - prompt.own_blocks[i]
    return Candidate(worker=c.views[i].worker, side="prefill", terms={name: float(value) for name, value in (values | _lent(c, i)).items()})


def _lent(c: Columns, i: int) -> dict[str, np.float64]:
    """Told of a worker whose seconds are those of its peers."""
    return {"borrowed_costs": np.float64(1.0)} if c.has_costs[i] < 1 else {}


def _best_first(cost_s: Floats) -> list[int]:
    order = np.argsort(cost_s, kind="stable")
    return [int(i) for i in order[: int(np.isfinite(cost_s).sum())]]


def _left_out(query: PlacementQuery, cluster: ClusterSnapshot, side: str, ranked: set[str]) -> list[Candidate]:
    """Those of the side's role that were no candidates, and why."""
    left: list[Candidate] = []
    for w in cluster.workers:
        can = w.report.role.can_decode if side == "decode" else w.report.role.can_prefill
        if not can or w.worker_id in ranked:
            continue
        if why := unusable(w, query):
            pass
        elif any(w.worker.is_same_life(avoided) for avoided in query.avoid):
            why = FAILED_BEFORE
        elif not has_room(w, query, decodes=side == "decode"):
            why = FULL
        else:
            why = UNREADABLE
        left.append(Candidate(worker=w.worker, side=side, excluded=why))
    return left
