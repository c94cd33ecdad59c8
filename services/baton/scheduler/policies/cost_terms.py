"""What `ranking` works out of each candidate, in seconds, and how a record tells of it, when somebody
asks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.decision_record import Candidate
from baton.core.cluster.placement import PlacementQuery
from baton.scheduler.policies.policy_result import FAILED_BEFORE, FULL, SLOWER, has_room, unusable
from baton.scheduler.prediction.predict import Prompt
from baton.scheduler.state.worker_table import Floats, WorkerTable

SHOWN_A_SIDE = 4
UNREADABLE = "barred, or its KV cannot be read (yet)"


@dataclass(frozen=True, slots=True)
class DecodeTerms:
    """Terms of the decode side, one number a worker; `cost_s` is infinite for who is none of the
    candidates."""

    tpot_s: Floats
    pull_s: Floats
    cost_s: Floats


@dataclass(slots=True)
class PrefillTerms:
    """Terms of the prefill side, one number a worker; `cost_s` is infinite for who is none of the candidates.
    `source`: the column whose prefix is pulled, -1 for none. `holders`: the columns that were considered to
    pull from. Of the decode worker alone, if it is a candidate: `busy_s`, and `margin_s` by which it must be
    faster."""

    queue_s: Floats
    pull_s: Floats
    prefill_s: Floats
    transfer_s: Floats
    redundant_s: Floats
    cost_s: Floats
    source: npt.NDArray[np.intp]
    cached_tokens: Floats
    holders: list[int]
    busy_s: float = 0.0
    margin_s: float = 0.0

    def ttft_s(self) -> Floats:
        return self.queue_s + self.pull_s + self.prefill_s


def explained(
    query: PlacementQuery,
    cluster: ClusterSnapshot,
    c: WorkerTable,
    prompt: Prompt,
    terms: PrefillTerms,
    decode_terms: DecodeTerms | None,
    decode: int | None,
) -> tuple[Candidate, ...]:
    """The best of each side with their terms, best first and the sides in turn, then why the others are not
    among them."""
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


def _explained_decode(c: WorkerTable, prompt: Prompt, terms: DecodeTerms, i: int) -> Candidate:
    values = {
        "tpot_s": terms.tpot_s[i],
        "pull_s": terms.pull_s[i],
        "cost_s": terms.cost_s[i],
        "overlap_blocks": prompt.own_blocks[i],
    }
    return Candidate(
        worker=c.views[i].worker,
        side="decode",
        terms={name: float(value) for name, value in (values | _lent(c, i)).items()},
    )


def _explained_prefill(c: WorkerTable, prompt: Prompt, terms: PrefillTerms, i: int, decode: int | None) -> Candidate:
    values = {
        "queue_s": terms.queue_s[i],
        "prefix_pull_s": terms.pull_s[i],
        "prefill_s": terms.prefill_s[i],
        "transfer_s": terms.transfer_s[i],
        "busy_s": terms.busy_s if i == decode else 0.0,
        "redundant_s": terms.redundant_s[i],
        "cost_s": terms.cost_s[i],
        "overlap_blocks": prompt.own_blocks[i],
    }
    if i == decode and terms.margin_s > 0:
        values["margin_s"] = terms.margin_s
    if terms.source[i] >= 0:
        values["pulled_blocks"] = prompt.held_blocks[int(terms.source[i])] - prompt.own_blocks[i]
    return Candidate(
        worker=c.views[i].worker,
        side="prefill",
        terms={name: float(value) for name, value in (values | _lent(c, i)).items()},
    )


def _lent(c: WorkerTable, i: int) -> dict[str, np.float64]:
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
        elif any(w.worker.is_same_incarnation(avoided) for avoided in query.avoid):
            why = FAILED_BEFORE
        elif not has_room(w, query, decodes=side == "decode"):
            why = FULL
        else:
            why = UNREADABLE
        left.append(Candidate(worker=w.worker, side=side, excluded=why))
    return left
