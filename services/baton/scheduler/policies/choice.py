"""What a policy answers with, and the rules of pairing that no policy may break."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from baton.core.blocks import num_blocks_for
from baton.core.cluster import Candidate, ClusterSnapshot, PlacementQuery, Rejection, WorkerRole, WorkerView
from baton.core.errors import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a policy may use beside query and snapshot: how many placements came before, and a seeded generator."""

    number: int
    rng: Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The workers chosen (see `Placement` for what None means on either side) and what was considered."""

    prefill: WorkerView | None
    decode: WorkerView | None
    candidates: tuple[Candidate, ...] = ()


Policy = Callable[[PlacementQuery, ClusterSnapshot, Turn], Choice | Rejection]

NO_WORKERS_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Who may be chosen for one query, each list sorted by id, and why the others may not."""

    prefill: list[WorkerView]
    decode: list[WorkerView]
    excluded: tuple[Candidate, ...] = field(default=())

    def readable_by(self, decode: WorkerView) -> list[WorkerView]:
        """Prefill candidates whose KV this decode worker can pull: another worker, the same layout, no broken link. Warm pairs
        where there are any: the first use of a pair pays for its set-up."""
        links = {link.peer.worker_id: link for link in decode.report.links if not link.broken}
        broken = {link.peer.worker_id for link in decode.report.links if link.broken}
        able = [
            w
            for w in self.prefill
            if w.worker_id != decode.worker_id and w.worker_id not in broken and w.report.layout.mismatch(decode.report.layout) is None
        ]
        warm = [w for w in able if w.worker_id in links and links[w.worker_id].peer.is_same_life(w.worker)]
        return warm or able


def candidates_for(query: PlacementQuery, cluster: ClusterSnapshot) -> Field | Rejection:
    """Workers that serve the model, are ready, are not to be avoided (unless nobody else is left) and could ever hold the prompt."""
    excluded: list[Candidate] = []

    def usable(side: str, can_prefill: bool, can_decode: bool) -> list[WorkerView]:
        kept: list[WorkerView] = []
        avoided: list[WorkerView] = []
        for w in cluster.workers:
            why = _unusable(w, query)
            if (can_prefill and not w.report.role.can_prefill) or (can_decode and not w.report.role.can_decode):
                continue
            if why:
                excluded.append(Candidate(worker=w.worker, side=side, excluded=why))
            elif any(w.worker.is_same_life(a) for a in query.avoid):
                avoided.append(w)
            else:
                kept.append(w)
        if kept:
            excluded.extend(Candidate(worker=w.worker, side=side, excluded="failed this request before") for w in avoided)
        return kept or avoided

    prefill = usable("prefill", can_prefill=True, can_decode=False)
    decode = usable("decode", can_prefill=False, can_decode=True)
    if not decode or (needs_no_decode(query) and not prefill):
        role = "decode" if not decode else "prefill"
        return Rejection(
            reason=Reason.NO_WORKERS,
            message=f"no ready {role} worker serves {query.model!r}; retry, or see `baton status`",
            retry_after_s=NO_WORKERS_RETRY_S,
            term=role,
        )
    return Field(prefill=prefill, decode=decode, excluded=tuple(excluded))


def needs_no_decode(query: PlacementQuery) -> bool:
    """One token is all that is left to make: the prefill worker samples it, and nobody has to pull the KV."""
    return query.max_tokens - query.num_output_tokens <= 1


def computes_alone(decode: WorkerView) -> bool:
    """A hybrid worker prefills its own prompts; a decode worker only when nobody else can."""
    return decode.report.role is WorkerRole.HYBRID


def _unusable(w: WorkerView, query: PlacementQuery) -> str:
    report = w.report
    if report.state.value != "ready":
        return report.state.value
    if report.model != query.model:
        return f"serves {report.model}"
    if num_blocks_for(query.num_prompt_tokens + 1, report.layout.block_size_tokens) > report.blocks.total:
        return "too small for the prompt"
    if query.hash_scheme and query.hash_scheme != report.layout.hash_scheme:
        return f"hashes blocks by {report.layout.hash_scheme}"
    return ""
