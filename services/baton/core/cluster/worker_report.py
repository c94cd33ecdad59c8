"""The status that a worker publishes to every scheduler."""

from dataclasses import dataclass
from enum import Enum

from baton.core.ids import DecisionId, WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.core.step_cost import StepCostModel


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
    """Each block of a pool is in exactly one state; `held_for_others` is the part of `used` that only
    transfers pin."""

    total: int
    free: int
    cached: int
    used: int
    receiving: int
    quarantined: int
    held_for_others: int = 0

    @property
    def is_balanced(self) -> bool:
        return self.free + self.cached + self.used + self.receiving + self.quarantined == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """How fast this worker reads from `peer`, as measured; `broken`: a read was given up and no probe has
    succeeded since."""

    peer: WorkerRef
    bytes_per_s: float
    inflight_bytes: int = 0
    broken: bool = False
    transport: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker's state as it publishes it. `counted_decision_ids`: placements that these loads already
    contain. `needs_replacement`: so much of its memory is quarantined that it asks to be let go, since only a
    new process has it back. `costs` None: it has not measured itself. `waiting_prefill_attended_tokens`: what
    the waiting tokens attend to (`core.step_cost.attended_tokens`). Of that, of `max_num_batched_tokens` and
    of `mean_output_tokens` (of the sequences that ended here lately) 0 means not known. `slo_step_s`: its
    next step may take so long, for the promises to whoever decodes there; 0 where they allow nothing."""

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
    needs_replacement: bool = False
    costs: StepCostModel | None = None
    max_num_batched_tokens: int = 0
    waiting_prefill_attended_tokens: int = 0
    mean_output_tokens: float = 0.0
    slo_step_s: float = 0.0
