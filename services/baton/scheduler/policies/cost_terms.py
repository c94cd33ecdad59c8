"""Holds the predicted terms of all candidates, and turns them into the candidates of a decision record."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.decision_record import Candidate
from baton.core.cluster.placement import PlacementQuery
from baton.scheduler.policies.eligibility import Exclusion, Side, ineligible
from baton.scheduler.prediction.predict import Prompt
from baton.scheduler.state.worker_data import MEASURED_COSTS, Floats
from baton.scheduler.state.worker_table import WorkerTable

SHOWN_PER_SIDE = 4
"""Candidates of each side whose terms are recorded."""
NO_SOURCE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOption:
    """A prefix that other workers can pull.

    holder: position of the worker that has it
    num_disk_blocks: those of its blocks that the holder must reload from its disk before
    reload_s: time of that reload, with what it has in host memory; 0 if all is in memory
    """

    holder: int
    num_blocks: float
    num_disk_blocks: float = 0.0
    reload_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeTerms:
    """Terms of the decode side, one number per worker.

    tpot_s: predicted TPOT once the prompt is computed.
    wait_s: time until the worker has capacity for the request; 0 if it has.
    pull_s: time to pull the KV that the worker lacks.
    displaced_s: charge for what the worker evicts for it.
    cost_s: what is minimised; infinite for workers that are no candidates.
    horizon_s: predicted time until the prompt is computed, by the fastest prefill worker.
    fastest_prefill: position of that worker.
    target_s: TPOT target of the request.
    """

    tpot_s: Floats
    wait_s: Floats
    pull_s: Floats
    displaced_s: Floats
    cost_s: Floats
    horizon_s: float
    fastest_prefill: int
    target_s: Floats


@dataclass(slots=True)
class PrefillTerms:
    """Terms of the prefill side, one number per worker.

    reload_s: wait for blocks that the worker reloads from a slower tier, after the queue.
    pull_s: pull of a cached prefix.
    pull_fixed_s, dial_s: the parts of it that do not depend on its bytes, the second for connecting the pair.
    transfer_s: KV transfer that goes on after the prompt is computed.
    redundant_s: charge for computing what another candidate has cached.
    displaced_s: charge for what the worker evicts for the prompt; 0 at the chosen decode worker, which evicts
        as much anyway.
    cost_s: what is minimised; infinite for workers that are no candidates.
    source: which of the options is pulled, or NO_SOURCE.
    holders: positions of the workers that were considered as sources.
    options: the prefixes of these workers.
    target_s: TTFT target of the request, less what it has waited before.
    local_margin_s: charge of the decode worker if it is a candidate to prefill (`LocalPrefill`).
    """

    queue_s: Floats
    pull_s: Floats
    prefill_s: Floats
    transfer_s: Floats
    redundant_s: Floats
    displaced_s: Floats
    cost_s: Floats
    source: npt.NDArray[np.intp]
    cached_tokens: Floats
    holders: list[int]
    target_s: Floats
    reload_s: Floats
    pull_fixed_s: Floats
    dial_s: Floats
    options: list[PrefixOption] = field(default_factory=list)
    local_margin_s: float = 0.0

    def ttft_s(self) -> Floats:
        """Return the predicted TTFT. Charges are no part of it."""
        return self.queue_s + self.reload_s + self.pull_s + self.prefill_s


def explain_candidates(
    query: PlacementQuery,
    cluster: ClusterSnapshot,
    w: WorkerTable,
    prompt: Prompt,
    terms: PrefillTerms,
    decode_terms: DecodeTerms | None,
    decode: int | None,
) -> tuple[Candidate, ...]:
    """Return the best candidates of each side with their terms, then all other workers with their exclusions.

    The best come first, decode and prefill in turn. `decode`: position of the chosen decode worker.
    """
    prefills = _best_first(terms.cost_s)
    decodes = _best_first(decode_terms.cost_s) if decode_terms is not None else []
    shown: list[Candidate] = []
    for rank in range(SHOWN_PER_SIDE):
        if rank < len(decodes) and decode_terms is not None:
            shown.append(_decode_candidate(w, prompt, decode_terms, decodes[rank]))
        if rank < len(prefills):
            shown.append(_prefill_candidate(w, prompt, terms, prefills[rank], decode))
    sides: tuple[tuple[Side, list[int]], ...] = (("decode", decodes), ("prefill", prefills))
    for side, ranked in sides:
        shown += [
            Candidate(worker=w.views[i].worker, side=side, excluded=Exclusion.SLOWER.value)
            for i in ranked[SHOWN_PER_SIDE:]
        ]
        if side == "prefill" or decode_terms is not None:
            shown += _not_ranked(query, cluster, w, side, set(ranked))
    return tuple(shown)


def _decode_candidate(w: WorkerTable, prompt: Prompt, terms: DecodeTerms, i: int) -> Candidate:
    values = {
        "tpot_s": terms.tpot_s[i],
        "capacity_wait_s": terms.wait_s[i],
        "kv_pull_s": terms.pull_s[i],
        "cost_s": terms.cost_s[i],
        "overlap_blocks": prompt.overlap_blocks[i],
        "tpot_target_s": terms.target_s[i],
    }
    if terms.displaced_s[i] > 0:
        values["displaced_s"] = terms.displaced_s[i]
    prefill_share = w.reported.recent_prefill_share.item(i)
    if prefill_share > 0:
        values["recent_prefill_share"] = round(prefill_share, 3)
    tokens_per_step = w.reported.tokens_per_step.item(i)
    if tokens_per_step > 1:
        values["tokens_per_step"] = round(tokens_per_step, 2)
    return _candidate(w, i, "decode", values)


def _prefill_candidate(w: WorkerTable, prompt: Prompt, terms: PrefillTerms, i: int, decode: int | None) -> Candidate:
    values = {
        "queue_s": terms.queue_s[i],
        "prefix_pull_s": terms.pull_s[i],
        "prefill_s": terms.prefill_s[i],
        "transfer_s": terms.transfer_s[i],
        "redundant_s": terms.redundant_s[i],
        "cost_s": terms.cost_s[i],
        "overlap_blocks": prompt.overlap_blocks[i],
        "ttft_target_s": terms.target_s[i],
    }
    if terms.displaced_s[i] > 0:
        values["displaced_s"] = terms.displaced_s[i]
    if i == decode and terms.local_margin_s > 0:
        values["margin_s"] = terms.local_margin_s
    if prompt.reloaded_blocks[i] > 0:
        values["reload_s"], values["reloaded_blocks"] = terms.reload_s[i], prompt.reloaded_blocks[i]
    if prompt.disk_blocks[i] > 0:
        values["disk_blocks"] = prompt.disk_blocks[i]
    if terms.source[i] != NO_SOURCE:
        values["pull_fixed_s"], values["dial_s"] = terms.pull_fixed_s[i], terms.dial_s[i]
        option = terms.options[int(terms.source[i])]
        values["pulled_blocks"] = option.num_blocks - prompt.memory_blocks[i]
        if option.reload_s > 0:
            values["source_reload_s"] = option.reload_s
    return _candidate(w, i, "prefill", values)


def _candidate(w: WorkerTable, i: int, side: Side, values: dict[str, np.float64 | float]) -> Candidate:
    terms = {name: float(value) for name, value in values.items()}
    if w.reported.cost_source[i] < MEASURED_COSTS:
        terms["peer_costs"] = 1.0  # its seconds are estimated from the costs of other workers
    return Candidate(worker=w.views[i].worker, side=side, terms=terms)


def _best_first(cost_s: Floats) -> list[int]:
    order = np.argsort(cost_s, kind="stable")
    return [int(i) for i in order[: int(np.isfinite(cost_s).sum())]]


def _not_ranked(
    query: PlacementQuery, cluster: ClusterSnapshot, w: WorkerTable, side: Side, ranked: set[int]
) -> list[Candidate]:
    """Return the workers of the side's role that were no candidates, with their exclusions."""
    candidates: list[Candidate] = []
    for i, worker in enumerate(cluster.workers):
        why = ineligible(worker, query, side)
        if i in ranked or why is Exclusion.OTHER_ROLE:
            continue
        if why is None:
            why = Exclusion.NOT_READABLE
        candidates.append(Candidate(worker=worker.worker, side=side, excluded=why.value))
    return candidates
