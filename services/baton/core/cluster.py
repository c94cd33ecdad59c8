"""What the scheduler sees, is asked and answers. Every prediction is in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from baton.core.blocks import BlockHash
from baton.core.costs import StepCostModel
from baton.core.errors import Reason
from baton.core.ids import DecisionId, WorkerRef
from baton.core.jobs import PrefixSource
from baton.core.kv_layout import KvLayout
from baton.core.request import NO_SLO, Slo


class WorkerRole(Enum):
    """A label that the scheduler reads; every worker can do both."""

    PREFILL = "prefill"
    DECODE = "decode"
    HYBRID = "hybrid"

    @property
    def can_prefill(self) -> bool:
        return self is not WorkerRole.DECODE

    @property
    def can_decode(self) -> bool:
        return self is not WorkerRole.PREFILL


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Each block of a pool is in exactly one state; `held_for_others` is the part of `used` that only transfers pin."""

    total: int
    free: int
    cached: int
    used: int
    landing: int
    quarantined: int
    held_for_others: int = 0

    @property
    def is_balanced(self) -> bool:
        return self.free + self.cached + self.used + self.landing + self.quarantined == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """How fast this worker reads from `peer`, as measured; `broken`: a read was given up and no probe has succeeded since."""

    peer: WorkerRef
    bytes_per_s: float
    inflight_bytes: int = 0
    broken: bool = False
    transport: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker's state as it publishes it. `counted_decision_ids`: placements that these loads already contain. `worn_out`: so much of
    its memory is quarantined that it asks to be let go, since only a new process has it back. `costs` None: it has not measured itself.
    `waiting_prefill_attended_tokens`: what the waiting tokens attend to (`core.costs.attended_tokens`). Of that, of
    `max_num_batched_tokens` and of `mean_output_tokens` (of the sequences that ended here lately) 0 means not known. `promised_step_s`:
    its next step may take so long, for the promises to whoever decodes there; 0 where they allow nothing."""

    worker: WorkerRef
    report_seq: int
    role: WorkerRole
    state: WorkerState
    model: str
    layout: KvLayout
    blocks: BlockCounts
    max_model_len: int
    max_num_seqs: int
    pid: int = 0
    host: str = ""
    waiting_prefill_tokens: int = 0
    waiting_seqs: int = 0
    running_seqs: int = 0
    running_context_tokens: int = 0
    open_leases: int = 0
    links: tuple[LinkReport, ...] = ()
    event_seq: int = 0
    counted_decision_ids: tuple[DecisionId, ...] = ()
    worn_out: bool = False
    costs: StepCostModel | None = None
    max_num_batched_tokens: int = 0
    waiting_prefill_attended_tokens: int = 0
    mean_output_tokens: float = 0.0
    promised_step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementQuery:
    """Where should this attempt run? `attempt` counts from 0. `num_prompt_tokens` is what must be prefilled, replayed outputs included;
    `num_output_tokens` of them are outputs. `avoid`: workers that failed it. `model_fingerprint`: of the weights that wrote what the client
    has; empty while it has nothing, and any that serve `model` will do. `waited_s`: since a gateway received the request.
    `answer_within_s`: who asks takes a scheduler that has said nothing for so long for lost. `trace_context`: W3C's traceparent, or
    empty."""

    request_id: bytes
    attempt: int
    model: str
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: tuple[BlockHash, ...] = ()
    hash_scheme: str = ""
    model_fingerprint: str = ""
    sample_count: int = 1
    num_output_tokens: int = 0
    adapter: str = ""
    tenant: str = "default"
    slo: Slo = NO_SLO
    priority: int = 0
    deadline_s: float = 600.0
    avoid: tuple[WorkerRef, ...] = ()
    session_key: str = ""
    waited_s: float = 0.0
    answer_within_s: float = 5.0
    trace_context: str = ""

    def later(self, by_s: float) -> "PlacementQuery":
        """The same, asked so much later."""
        return replace(self, waited_s=self.waited_s + by_s, deadline_s=max(0.0, self.deadline_s - by_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who prefills and who decodes. `decode` None: the first token is the last (`max_tokens` 1). `prefill` None: the decode worker
    computes the prompt itself. Never one worker on both sides. Seconds are predictions, None where the policy makes none, but for
    `waiting_s`: so long the request has waited at the scheduler."""

    decision_id: DecisionId
    scheduler_id: str
    policy: str
    prefill: WorkerRef | None
    decode: WorkerRef | None
    prefix_source: PrefixSource | None = None
    queue_s: float | None = None
    prefix_pull_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    prefill_overlap_blocks: int = 0
    decode_overlap_blocks: int = 0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Refused before any prefill is spent: the term that failed, what was predicted and the limit it broke."""

    reason: Reason
    message: str
    retry_after_s: float
    term: str = ""
    predicted_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StillWaiting:
    """Not decided yet: the request waits at the scheduler among `num_waiting`, and keeps its place if it is asked for again at once."""

    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as a policy sees it: its last report plus what this scheduler has placed on it since. `reserved_context_tokens`: prompts
    that will be decoded there. `reserved_link_bytes`: KV that it is still to read, by the worker that holds it. `tpot_slo_s`: the
    strictest promise to a request that this scheduler has placed there and that has not ended, counted by the worker or not."""

    report: WorkerReport
    reserved_seqs: int = 0
    reserved_prefill_tokens: int = 0
    reserved_blocks: int = 0
    reserved_attended_tokens: int = 0
    reserved_context_tokens: int = 0
    reserved_link_bytes: dict[str, int] = field(default_factory=dict)
    tpot_slo_s: float | None = None

    @property
    def worker(self) -> WorkerRef:
        return self.report.worker

    @property
    def worker_id(self) -> str:
        return self.report.worker.worker_id

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a new sequence could be given: free ones and cached ones that nobody uses, less own reservations."""
        return self.report.blocks.free + self.report.blocks.cached - self.reserved_blocks

    @property
    def queued_prefill_tokens(self) -> int:
        return self.report.waiting_prefill_tokens + self.reserved_prefill_tokens

    @property
    def num_seqs(self) -> int:
        return self.report.running_seqs + self.report.waiting_seqs + self.reserved_seqs


class Overlap(Protocol):
    """How much of one prompt a worker has. `num_blocks`: leading blocks that it holds or soon will; `num_held_blocks` of them, from the
    front, are there now (only those can be pulled)."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_held_blocks(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """All workers with a living report stream, sorted by id, so that equal reports give equal decisions. `overlaps`: what the prefix index
    says for the query at hand, by worker id; who holds nothing of it is not in there. `derived`: what readers have worked out from
    `workers`, which never change."""

    workers: tuple[WorkerView, ...]
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)
    derived: dict[str, object] = field(init=False, repr=False, compare=False, default_factory=dict)

    def ready(self, *, can_prefill: bool = False, can_decode: bool = False) -> list[WorkerView]:
        """Ready workers with the asked-for abilities, sorted by id."""
        return [
            w
            for w in self.workers
            if w.report.state is WorkerState.READY
            and (not can_prefill or w.report.role.can_prefill)
            and (not can_decode or w.report.role.can_decode)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUpdate:
    """What a Watch stream tells gateways and tools: all workers the scheduler knows. Sent on change, at most once an interval. `pid` and
    `host` of the scheduler are for people."""

    scheduler_id: str
    reports: tuple[WorkerReport, ...]
    pid: int = 0
    host: str = ""


class CommandKind(Enum):
    """What a scheduler can ask of a worker over its report stream. DRAIN: finish and leave, as an operator wishes. LEAVE: it is this
    worn-out worker's turn; it drains, and is replaced."""

    SNAPSHOT = "snapshot"
    DRAIN = "drain"
    PROBE_LINK = "probe_link"
    CONNECT = "connect"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`peer`: the other worker, for PROBE_LINK and CONNECT (warm the pair before it is used). `node_leaves`: of DRAIN, the worker's
    machine is about to end."""

    kind: CommandKind
    peer: WorkerRef | None = None
    node_leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One considered worker and why it lost; terms in seconds where the policy predicts them."""

    worker: WorkerRef
    side: str
    terms: dict[str, float] = field(default_factory=dict)
    excluded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What was decided and from what; afterwards, what happened. `inputs`: JSON text from which the decision can be repeated, empty where
    that is not possible (`scheduler.explain`)."""

    decision_id: DecisionId
    scheduler_id: str
    policy: str
    request_id: bytes
    attempt: int
    query: PlacementQuery
    placement: Placement | None
    rejection: Rejection | None
    candidates: tuple[Candidate, ...] = ()
    num_excluded: dict[str, int] = field(default_factory=dict)
    actuals: dict[str, object] = field(default_factory=dict)
    inputs: str = ""
