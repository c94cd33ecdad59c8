"""Records the times and sizes of one pull, for its result and its trace span."""

from dataclasses import dataclass

from baton.core.errors import Reason
from baton.core.ids import JobId, WorkerRef
from baton.core.messages.peer_messages import FirstToken, HashRange, KvReady
from baton.runtime.observability.tracing import Span
from baton.transfer.reader.bandwidth import Bandwidth
from baton.transfer.reader.pull_blocks import PullBlocks
from baton.transfer.reader.pull_costs import PullCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """The result of a successful pull.

    first_tokens: tokens that the owner sampled at the end of the prompt
    num_computed_tokens: tokens whose KV the owner has computed
    num_blocks: blocks that were received
    transfer_bytes: bytes read; early_bytes: those that were read before the final KvReady
    kv_wait_s: from the start to the first KvReady
    kv_transfer_s: total time in which at least one read was running
    kv_exposed_s: from the final KvReady to the last received block
    kv_exposed_wait_s: the part of kv_exposed_s before the last read began
    """

    first_tokens: tuple[FirstToken, ...]
    num_computed_tokens: int
    num_blocks: int
    transfer_bytes: int
    early_bytes: int
    kv_wait_s: float
    kv_transfer_s: float
    kv_exposed_s: float
    kv_exposed_wait_s: float
    transport: str


class PullRecord:
    """The times of one pull by the event loop's clock, and the bytes that it has read.

    first_ready_s, final_s: arrival of the first and of the final KvReady; `started_s` before
    ended_s: end of the pull; `started_s` before
    transfer_bytes: bytes read and validated
    early_bytes: the part of `transfer_bytes` that was read before the final KvReady
    """

    def __init__(self, started_s: float, link_bytes: int | None) -> None:
        """`link_bytes`: bytes that the link has read so far; None if it is not connected yet."""
        self.started_s = started_s
        self._bytes_at_start = link_bytes
        self._bytes_at_final: int | None = None
        self.first_ready_s = self.final_s = self.ended_s = started_s
        self.transfer_bytes = self.early_bytes = 0

    @property
    def duration_s(self) -> float:
        """Time from the start to the end; 0 before the end."""
        return self.ended_s - self.started_s

    def on_first_ready(self, now_s: float) -> None:
        """Record the arrival of the first KvReady."""
        self.first_ready_s = now_s

    def on_received(self, num_bytes: int) -> None:
        """Add bytes that were read and validated."""
        self.transfer_bytes += num_bytes

    def on_end(self, now_s: float) -> None:
        """Record the end of the pull."""
        self.ended_s = now_s

    def on_final_ready(self, now_s: float, link_bytes: int | None) -> None:
        """Record the arrival of the final KvReady.

        link_bytes: bytes that the link has read so far; None if the pull has no memory yet
        """
        self.final_s, self.early_bytes = now_s, self.transfer_bytes
        self._bytes_at_final = link_bytes

    def add_costs_to(self, costs: PullCosts, bandwidth: Bandwidth, *, is_prefix: bool) -> None:
        """Add what this pull, which has received all its blocks, took beyond the bytes on its link.

        A pull that had to wait for the connection or for memory shows no such cost.
        """
        since = self._bytes_at_start if is_prefix else self._bytes_at_final
        if since is None or bandwidth.total_bytes <= since or not self.transfer_bytes:
            return  # fewer bytes: another backend reads now
        bytes_s = bandwidth.bytes_s(bandwidth.total_bytes - since)
        if is_prefix:
            costs.pulled_prefix(self.duration_s, bytes_s)
        else:
            costs.pulled_prompt(self.ended_s - self.final_s, bytes_s)

    def result(
        self, final: KvReady | None, *, num_blocks: int, read_s: float, reading_since_s: float, transport: str
    ) -> PullResult:
        """Return the result of a pull that has received all its blocks.

        read_s: total time in which at least one read was running
        reading_since_s: when a read last began while no other was running
        """
        return PullResult(
            first_tokens=final.first_tokens if final else (),
            num_computed_tokens=final.num_computed_tokens if final else 0,
            num_blocks=num_blocks,
            transfer_bytes=self.transfer_bytes,
            early_bytes=self.early_bytes,
            kv_wait_s=self.first_ready_s - self.started_s,
            kv_transfer_s=read_s,
            kv_exposed_s=self.ended_s - self.final_s,
            kv_exposed_wait_s=max(0.0, reading_since_s - self.final_s),
            transport=transport,
        )

    def end_span(
        self,
        span: Span,
        reason: Reason | None,
        *,
        owner: WorkerRef,
        transport: str | None,
        subject: JobId | HashRange,
        blocks: PullBlocks,
        is_final: bool,
        read_s: float,
    ) -> None:
        """End the span of a pull that has ended.

        reason: why it has failed; None if it has received all its blocks
        is_final: the final KvReady has arrived
        """
        if blocks.any_announced:
            span.event("first ready", self.first_ready_s)
        if is_final:
            span.event("final ready", self.final_s)
        span.end(
            {
                "baton.outcome": "received" if reason is None else reason.value,
                "baton.source": owner.worker_id,
                "baton.transport": transport,
                "baton.pulls": "prefix" if isinstance(subject, HashRange) else "prompt",
                "baton.blocks": blocks.num_received,
                "baton.blocks_here_before": blocks.have_blocks,
                "baton.bytes": self.transfer_bytes,
                "baton.early_bytes": self.early_bytes,
                "baton.read_s": read_s,
            },
            problem="" if reason is None or reason is Reason.CANCELLED else reason.value,
            at_s=self.ended_s,
        )
