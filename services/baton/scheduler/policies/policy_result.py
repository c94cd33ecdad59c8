"""What a policy answers with, and the rules of pairing that no policy may break."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.decision_record import Candidate
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.cluster.worker_report import WorkerRole, WorkerState
from baton.core.errors import Reason
from baton.core.ids import DecisionId
from baton.core.kv.block_hash import num_blocks_for
from baton.core.messages.jobs import PrefixSource

NO_WORKERS_RETRY_S = 1.0
NO_ROOM_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What a policy may use beside query and snapshot: how many placements came before, and a seed.
    `max_full_s`: a first attempt for which no worker is predicted to have room in so many seconds is refused
    (and waits at the scheduler); None: it is placed where it will wait."""

    number: int
    seed: int
    max_full_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of one choice. `busy_s`: the sum of the delays of sequences that decode where the prompt is
    computed. `transfer_s`: by how much the KV comes after the first token. `tpot_s`: once the prompt is
    computed; `tpot_now_s`: if it already were. What admission needs to say when it would say yes:
    `least_queue_s` of any candidate, `idle_tpot_s` without other sequences, and `leave_s` in which all but
    1/e of the others will have ended."""

    queue_s: float
    prefix_pull_s: float
    prefill_s: float
    transfer_s: float
    busy_s: float
    ttft_s: float
    least_queue_s: float
    tpot_s: float | None = None
    tpot_now_s: float | None = None
    idle_tpot_s: float = 0.0
    leave_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The workers chosen (see `Placement` for what None means on either side), what is predicted where the
    policy predicts, and what was considered. `basis`: ids of the workers without which the choice would have
    been another; None: all of them."""

    prefill: WorkerView | None
    decode: WorkerView | None
    candidates: Sequence[Candidate] = ()
    predicted: Prediction | None = None
    prefix_source: PrefixSource | None = None
    prefill_overlap_blocks: int = 0
    decode_overlap_blocks: int = 0
    basis: tuple[str, ...] | None = None

    def placement(self, decision_id: DecisionId, scheduler_id: str, policy: str) -> Placement:
        p = self.predicted
        return Placement(
            decision_id=decision_id,
            scheduler_id=scheduler_id,
            policy=policy,
            prefill=self.prefill.worker if self.prefill else None,
            decode=self.decode.worker if self.decode else None,
            prefix_source=self.prefix_source,
            queue_s=p.queue_s if p else None,
            prefix_pull_s=p.prefix_pull_s if p else None,
            prefill_s=p.prefill_s if p else None,
            transfer_s=p.transfer_s if p else None,
            ttft_s=p.ttft_s if p else None,
            tpot_s=p.tpot_s if p else None,
            prefill_overlap_blocks=self.prefill_overlap_blocks,
            decode_overlap_blocks=self.decode_overlap_blocks,
        )


Policy = Callable[[PlacementQuery, ClusterSnapshot, PolicyContext], Choice | Rejection]


class LazyCandidates(Sequence[Candidate]):
    """Candidates that are made when somebody looks: telling why takes longer than deciding."""

    def __init__(self, make: Callable[[], tuple[Candidate, ...]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> tuple[Candidate, ...]:
        return self._make()

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Who may be chosen for one query, each list sorted by id, and why the others may not."""

    prefill: list[WorkerView]
    decode: list[WorkerView]
    excluded: tuple[Candidate, ...] = field(default=())

    def readable_by(self, decode: WorkerView) -> list[WorkerView]:
        """Prefill candidates whose KV this decode worker can pull: another worker, the same layout, no broken
        link. Warm pairs where there are any: the first use of a pair pays for its set-up."""
        links = {link.peer.worker_id: link for link in decode.report.links if not link.broken}
        broken = {link.peer.worker_id for link in decode.report.links if link.broken}
        able = [
            w
            for w in self.prefill
            if w.worker_id != decode.worker_id
            and w.worker_id not in broken
            and w.report.layout.mismatch(decode.report.layout) is None
        ]
        warm = [w for w in able if w.worker_id in links and links[w.worker_id].peer.is_same_incarnation(w.worker)]
        return warm or able


def candidates_for(query: PlacementQuery, cluster: ClusterSnapshot, turn: PolicyContext) -> Field | Rejection:
    """Workers that serve the model, are ready, have room, are not to be avoided (unless nobody else is left)
    and could ever hold the prompt. Where nobody has room: all of them, or with `max_full_s` a Rejection
    (nothing is predicted here)."""
    excluded: list[Candidate] = []

    def usable(side: str, can_prefill: bool, can_decode: bool) -> tuple[list[WorkerView], bool]:
        kept: list[WorkerView] = []
        avoided: list[WorkerView] = []
        full: list[WorkerView] = []
        for w in cluster.workers:
            if (can_prefill and not w.report.role.can_prefill) or (can_decode and not w.report.role.can_decode):
                continue
            why = unusable(w, query)
            if why:
                excluded.append(Candidate(worker=w.worker, side=side, excluded=why))
            elif any(w.worker.is_same_incarnation(a) for a in query.avoid):
                avoided.append(w)
            elif not has_room(w, query, decodes=can_decode):
                full.append(w)
            else:
                kept.append(w)
        if kept:
            excluded.extend(Candidate(worker=w.worker, side=side, excluded=FAILED_BEFORE) for w in avoided)
            excluded.extend(Candidate(worker=w.worker, side=side, excluded=FULL) for w in full)
        elif full and refuses_full(query, turn):
            return [], True
        return kept or full or avoided, False

    prefill, prefill_is_full = usable("prefill", can_prefill=True, can_decode=False)
    decode, decode_is_full = usable("decode", can_prefill=False, can_decode=True)
    if needs_no_decode(query):
        decode, decode_is_full = [], False
    if decode_is_full or prefill_is_full:
        return no_room("decode" if decode_is_full else "prefill")
    if not (prefill if needs_no_decode(query) else decode):
        return no_workers(query, "prefill" if needs_no_decode(query) else "decode")
    return Field(prefill=prefill, decode=decode, excluded=tuple(excluded))


FAILED_BEFORE = "failed this request before"
FULL = "full"
SLOWER = "predicted slower"


def no_workers(query: PlacementQuery, role: str) -> Rejection:
    return Rejection(
        reason=Reason.NO_WORKERS,
        message=f"no ready {role} worker serves {query.model!r}; retry, or see `baton status`",
        retry_after_s=NO_WORKERS_RETRY_S,
        term=role,
    )


def no_room(role: str) -> Rejection:
    return Rejection(
        reason=Reason.NO_CAPACITY,
        message=f"no {role} worker has room for this prompt now; retry after {NO_ROOM_RETRY_S:g} s",
        retry_after_s=NO_ROOM_RETRY_S,
        term=f"{role}_room",
    )


def refuses_full(query: PlacementQuery, turn: PolicyContext) -> bool:
    """A later attempt is never turned away for load."""
    return turn.max_full_s is not None and query.attempt == 0


def has_room(w: WorkerView, query: PlacementQuery, *, decodes: bool) -> bool:
    """Blocks for the prompt and each sample's first token; where it decodes, a place in the batch for each
    sample."""
    num_blocks = num_blocks_for(query.num_prompt_tokens + query.sample_count, w.report.layout.block_size_tokens)
    has_places = not decodes or w.num_seqs + query.sample_count <= w.report.max_num_seqs
    return num_blocks <= w.num_free_blocks and has_places


def needs_no_decode(query: PlacementQuery) -> bool:
    """One token is all that is left to make: the prefill worker samples it, and nobody has to pull the KV."""
    return query.max_tokens - query.num_output_tokens <= 1


def computes_alone(decode: WorkerView) -> bool:
    """A hybrid worker prefills its own prompts; a decode worker only when nobody else can."""
    return decode.report.role is WorkerRole.HYBRID


def unusable(w: WorkerView, query: PlacementQuery) -> str:
    """Why this worker cannot serve that query at all, in words; empty if it can."""
    report = w.report
    if report.state is not WorkerState.READY:
        state: str = report.state.value
        return state
    if report.model != query.model:
        return f"serves {report.model}"
    if query.model_fingerprint not in ("", report.layout.model_fingerprint):
        return "has other weights than those that began the answer"
    if num_blocks_for(query.num_prompt_tokens + 1, report.layout.block_size_tokens) > report.blocks.total:
        return "too small for the prompt"
    if query.hash_scheme and query.hash_scheme != report.layout.hash_scheme:
        return f"hashes blocks by {report.layout.hash_scheme}"
    return ""
