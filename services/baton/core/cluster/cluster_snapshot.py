"""The cluster as a policy sees it, and the updates that gateways and tools receive."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.core.ids import WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as a policy sees it: its last report plus what this scheduler has placed on it since.
    `reserved_context_tokens`: prompts that will be decoded there. `reserved_link_bytes`: KV that it is still
    to read, by the worker that holds it. `tpot_slo_s`: the strictest promise to a request that this scheduler
    has placed there and that has not ended, counted by the worker or not."""

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
        """Blocks that a new sequence could be given: free ones and cached ones that nobody uses, less own
        reservations."""
        return self.report.blocks.free + self.report.blocks.cached - self.reserved_blocks

    @property
    def queued_prefill_tokens(self) -> int:
        return self.report.waiting_prefill_tokens + self.reserved_prefill_tokens

    @property
    def num_seqs(self) -> int:
        return self.report.running_seqs + self.report.waiting_seqs + self.reserved_seqs


class Overlap(Protocol):
    """How much of one prompt a worker has. `num_blocks`: leading blocks that it holds or soon will;
    `num_held_blocks` of them, from the front, are there now (only those can be pulled)."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_held_blocks(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """All workers with a living report stream, sorted by id, so that equal reports give equal decisions.
    `overlaps`: what the prefix index says for the query at hand, by worker id; who holds nothing of it is not
    in there. `derived`: what readers have worked out from `workers`, which never change."""

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
    """What a Watch stream tells gateways and tools: all workers the scheduler knows. Sent on change, at most
    once an interval. `pid` and `host` of the scheduler are for people."""

    scheduler_id: str
    reports: tuple[WorkerReport, ...]
    pid: int = 0
    host: str = ""
