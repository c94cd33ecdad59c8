"""The status that a worker publishes to every scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.core.ids import DecisionId, WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.core.step_cost import StepCostModel
from baton.core.step_targets import DEFAULT_FACTORS, TargetFactors


class WorkerRole(Enum):
    """The intended use of a worker. Schedulers place by it. Every worker can prefill and decode."""

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
    """The lifecycle state of a worker. Only READY workers get new requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """The KV blocks of a pool by state. Each block is in exactly one state.

    used: referenced by sequences or transfers. held_for_others: the part of them that only transfers
        reference.
    receiving: reserved for a pull under way.
    quarantined: a late read may still write to them.
    """

    total: int
    free: int
    cached: int
    used: int
    receiving: int
    quarantined: int
    held_for_others: int = 0

    @property
    def is_balanced(self) -> bool:
        """True if the states add up to the total."""
        return self.free + self.cached + self.used + self.receiving + self.quarantined == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """The measured speed and state of this worker's reads from `peer`.

    inflight_bytes: bytes of the reads under way.
    pull_s: what a pull of a cached prefix took beyond its bytes; 0 if not measured.
    exposed_s: what the pull of a prompt's KV took beyond its bytes once the prompt was computed; 0 if not
        measured.
    dial_s: what connecting and the first read took; 0 if not measured.
    broken: a read was given up and no probe has succeeded since, or the link is refused as too slow.
    problem: why the link is not used, for operators; empty if it is.
    choice: the measured speeds of all transfer backends of the pair, and those that were left out with the
        reason, for operators; empty if there was nothing to choose.
    """

    peer: WorkerRef
    bytes_per_s: float
    inflight_bytes: int = 0
    broken: bool = False
    transport: str = ""
    problem: str = ""
    pull_s: float = 0.0
    exposed_s: float = 0.0
    dial_s: float = 0.0
    choice: str = ""


def present_links(links: Sequence[LinkReport], workers: Mapping[str, WorkerRef]) -> dict[str, LinkReport]:
    """Return a reader's links to these workers, by id.

    A reader may still report its link to an earlier incarnation of a worker. That counts only if it has none
    to the present one.
    """
    found: dict[str, LinkReport] = {}
    for link in links:
        worker = workers.get(link.peer.worker_id)
        if worker is not None and (worker.worker_id not in found or link.peer.is_same_incarnation(worker)):
            found[worker.worker_id] = link
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """The blocks that a worker keeps in a slower tier.

    tier: a value of `core.kv.kv_events.Tier`, or a tier of a later release.
    total, held: slots, and those with content.
    load_bytes_per_s: measured speed of reloads, beyond `load_overhead_s`; 0 if not known yet.
    load_overhead_s: measured time of a reload that does not depend on its bytes.
    loading_bytes: bytes of the reloads under way, which one that begins now waits for.
    """

    tier: str
    total: int
    held: int = 0
    load_bytes_per_s: float = 0.0
    load_overhead_s: float = 0.0
    loading_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadCounts:
    """Reloads from slower tiers since the start of a worker.

    incomplete: did not load all blocks.
    late: jobs, here or at peers, that have not waited for the end of a reload, because it took too long.
    """

    complete: int = 0
    incomplete: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker's state as it publishes it.

    waiting_prefill_attended_tokens: (query, context) pairs of the waiting prompt tokens
        (`core.step_cost.attended_tokens`); 0 if not known.
    event_seq: number of the worker's last KV event.
    announce_every: KV events name one of so many successive blocks of a chain. They name its last full block,
        too.
    counted_decision_ids: placements that these loads already contain.
    needs_replacement: too many blocks are quarantined, and only a new process gets them back.
    costs: None if the worker has not measured itself yet.
    max_num_batched_tokens: 0 if not known.
    mean_output_tokens: mean length of the answers that ended here recently; 0 if not known.
    target_step_s: longest mean step that the TPOT targets of the decoding requests allow; 0 for any.
    recent_prefill_share: share of the time of recent steps with decoding sequences that went to prompts.
    tokens_per_step: tokens that a decoding sequence recently got in the time of a step without drafts; 0 if
        not known.
    ttft_target_factor, tpot_target_factor: factors of the targets of requests without an SLO
        (`core.step_targets`); 0 if not known.
    evicted_reuse: evicted blocks that are computed again, per block that the worker stores; 0 if not known.
    tiers, reloads: its slower tiers, and the reloads from them.
    """

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
    target_step_s: float = 0.0
    recent_prefill_share: float = 0.0
    tokens_per_step: float = 0.0
    ttft_target_factor: float = 0.0
    tpot_target_factor: float = 0.0
    announce_every: int = 1
    evicted_reuse: float = 0.0
    tiers: tuple[TierReport, ...] = ()
    reloads: ReloadCounts = field(default_factory=ReloadCounts)

    @property
    def largest_tier_blocks(self) -> int:
        """The most blocks that the worker holds in one tier, device memory included."""
        return max(self.blocks.total, *(tier.total for tier in self.tiers), 0)

    @property
    def target_factors(self) -> TargetFactors:
        """The worker's target factors, or the defaults if it reports none that are valid."""
        try:
            return TargetFactors(ttft=self.ttft_target_factor, tpot=self.tpot_target_factor)
        except ValueError:
            return DEFAULT_FACTORS
