"""The cluster as a policy sees it, and the updates that gateways and tools receive."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.cluster.worker_report import WorkerReport
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import num_blocks_for


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as a policy sees it: its last report, plus later placements of this scheduler.

    reserved_*: what these placements will take on the worker.
    reserved_context_tokens: prompt tokens of those that will decode there.
    reserved_link_bytes: KV that the worker is still going to read, by the id of the worker that holds it.
    tpot_slo_s: strictest TPOT SLO of the unfinished requests that this scheduler has placed there, whether
        the report contains them or not. None without any.
    """

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
        """Blocks for new sequences: free ones and unreferenced cached ones, less the reserved ones."""
        return self.report.blocks.free + self.report.blocks.cached - self.reserved_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of this length needs at once."""
        return self.report.layout.windows.num_blocks_at_once(num_tokens, self._chunk_tokens(num_tokens))

    def longest_sequence_blocks(self, num_blocks: int) -> int:
        """Return how many blocks of tokens the longest sequence has that needs at most `num_blocks` KV
        blocks.

        If all layers have a window, it is as long as the model allows, or more.
        """
        layout = self.report.layout
        size = layout.block_size_tokens
        return layout.windows.longest_sequence_blocks(
            num_blocks,
            self._chunk_tokens(num_blocks * size),
            at_most=max(num_blocks, num_blocks_for(self.report.max_model_len, size)),
        )

    def _chunk_tokens(self, most_tokens: int) -> int:
        """Return the most tokens of a prompt that the worker computes at once. It pulls others' in one.

        most_tokens: of the prompt; the result if the worker does not report its chunks.
        """
        return (self.report.max_num_batched_tokens or most_tokens) if self.report.role.can_prefill else 1

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that are not computed yet, including reserved ones."""
        return self.report.waiting_prefill_tokens + self.reserved_prefill_tokens

    @property
    def num_seqs(self) -> int:
        """Running and waiting sequences, including reserved ones."""
        return self.report.running_seqs + self.report.waiting_seqs + self.reserved_seqs


class Overlap(Protocol):
    """The part of one prompt that a worker has cached."""

    @property
    def num_blocks(self) -> int:
        """Leading blocks that the worker holds or soon will."""
        ...

    @property
    def num_held_blocks(self) -> int:
        """Leading blocks that it holds now. Only these can be pulled."""
        ...

    @property
    def num_reloaded_blocks(self) -> int:
        """Leading blocks that the worker must reload from a slower tier."""
        ...

    @property
    def num_disk_blocks(self) -> int:
        """Leading blocks that the worker must reload from its disk, also before others can pull them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """The input of a policy: all workers with an open report stream, sorted by id.

    The order makes equal reports give equal decisions.

    overlaps: what the prefix index knows about the query's prompt, by worker id. Workers without overlap are
        absent.
    derived: cache for values that readers compute from `workers`, which never change.
    """

    workers: tuple[WorkerView, ...]
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)
    derived: dict[str, object] = field(init=False, repr=False, compare=False, default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUpdate:
    """A message of a Watch stream: all workers that the scheduler knows.

    Sent on change, at most once per interval. `pid` and `host` of the scheduler are for display only.
    """

    scheduler_id: str
    reports: tuple[WorkerReport, ...]
    pid: int = 0
    host: str = ""
