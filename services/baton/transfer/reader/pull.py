"""One pull: follows the owner, reads announced blocks in slices, and validates each slice.

Blocks become visible only after validation. Blocks of a failed read are dropped; blocks of a read that may
still write are quarantined.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import JobId, TransferId, WorkerRef
from baton.core.interfaces import ReceivingPool
from baton.core.kv.block_hash import BlockHash
from baton.core.messages.peer_messages import (
    RECEIVED,
    Abandon,
    FirstToken,
    Follow,
    HashRange,
    KvReady,
    ReaderMessage,
    Release,
)
from baton.core.state_machines import PULL_TRANSITIONS, Lifecycle
from baton.core.state_machines import PullState as State
from baton.runtime.failpoints import hit
from baton.runtime.logging import get_logger
from baton.runtime.observability.tracing import NO_SPAN, Span
from baton.transfer.reader import slice_reader
from baton.transfer.reader.peer_reads import PeerReads
from baton.transfer.reader.pull_blocks import PullBlocks, Slice
from baton.transfer.reader.pull_record import PullRecord, PullResult
from baton.transfer.reader.slice_reader import SliceEnd, SliceReader
from baton.transfer.reader.transfer_observer import TransferObserver

log = get_logger(__name__)

LEASE_MARGIN = 0.95
"""Share of the owner's lease that the reader uses, because two clocks may run at different speeds."""


MAX_LOST_SLICES = 64
"""Slices that a pull requests again because the owner has not served them. The end of one process group loses
all slices in flight, at most `MAX_INFLIGHT_BYTES` of them."""


class PullLink(Protocol):
    """The link to the owner, as a pull uses it.

    `PeerLink` implements it. `reads` is None until a backend is chosen. `num_owner_blocks`: of all regions of
    the owner; 0 before the hello reply.
    """

    owner: WorkerRef
    observer: TransferObserver
    lease_s: float
    next_renewal: int

    @property
    def reads(self) -> PeerReads | None: ...

    @property
    def num_owner_blocks(self) -> int: ...

    def send(self, message: ReaderMessage) -> None:
        """Send a message; it is lost if the stream is broken."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends before the link is closed."""
        ...

    def start_reads(self) -> None:
        """Start slices (`Pull.start_slice`) while the in-flight limit allows it."""
        ...

    def ended(self, pull: "Pull") -> None:
        """Remove a pull that has ended."""
        ...


class Pull:
    """The reader's side of one transfer. Created by `KvReader.pull`; used from one event loop.

    From `receive_into` on, the pull owns the receiving blocks until each has been received. After a failure
    or `cancel` it drops the others, and quarantines those that a read may still write.

    final: the owner's final KvReady, once it has arrived
    lease_start_s: start of the last confirmed lease; before the first confirmation, of the requested one
    """

    def __init__(
        self,
        link: PullLink,
        *,
        transfer_id: TransferId,
        subject: JobId | HashRange,
        have_blocks: int,
        expected: Sequence[BlockHash],
        pool: ReceivingPool,
        deadline_s: float | None,
        span: Span = NO_SPAN,
    ) -> None:
        """`span` ends with the pull."""
        self._link = link
        self._span = span
        self._pool = pool
        self.transfer_id = transfer_id
        self.subject = subject
        self._blocks = PullBlocks(tuple(expected), have_blocks)
        self._slices = SliceReader(
            transfer_id,
            link.owner,
            self._blocks,
            spawn=link.spawn,
            is_wanted=lambda: not self.has_ended,
            lease_ends_s=lambda: self.lease_ends_s(link.lease_s),
            on_end=self._slice_ended,
        )
        self._lifecycle = Lifecycle(PULL_TRANSITIONS, State.FOLLOWING)
        self._failure: Failure | None = None
        self._changed = asyncio.Event()
        self.final: KvReady | None = None
        self._has_retried = False
        self._num_lost = 0
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._record = PullRecord(self._clock(), self._link_bytes())
        self.lease_start_s = self._record.started_s
        self.renewal_floor = 0
        self._follow_sent_s: float | None = None
        self._deadline = None if deadline_s is None else loop.call_later(deadline_s, self._on_deadline)

    # -- called by the leg -------------------------------------------------------------------------

    async def first_ready(self) -> None:
        """Wait until the owner has announced its first blocks. This is the time to allocate memory.

        Raises Refused if the pull has failed.
        """
        while not self._blocks.any_announced and self.final is None:
            await self._wait_for_change()

    def receive_into(self, receiving: Mapping[int, int], have_blocks: int) -> None:
        """Set the own blocks to read into, and start reading. Called once.

        receiving: own block ids by index in the needed blocks
        have_blocks: number of leading blocks that are here; may be fewer than at the start

        If the pull has failed already, the blocks are dropped immediately.
        """
        if self._blocks.has_memory:
            raise ValueError(f"transfer {self.transfer_id:x} has its receiving blocks already")
        if self._failure is not None:
            self._pool.drop_receiving(list(receiving.values()))
            return
        self._lifecycle.move(State.READING)
        fewer = have_blocks < self._blocks.have_blocks
        self._blocks.receive_into(receiving, have_blocks)
        if fewer:
            self._send_follow(have_blocks)
        self._proceed()

    @property
    def first_tokens(self) -> tuple[FirstToken, ...] | None:
        """Tokens that the owner sampled at the end of the prompt; None before its final KvReady."""
        return self.final.first_tokens if self.final is not None else None

    async def announced(self) -> tuple[FirstToken, ...]:
        """Wait for the owner's final KvReady and return the first tokens.

        Raises Refused if the pull has failed.
        """
        while self.final is None:
            await self._wait_for_change()
        return self.final.first_tokens

    async def done(self) -> PullResult:
        """Wait until all blocks are announced and received. Raises Refused if the pull has failed."""
        while self._lifecycle.state is not State.RECEIVED:
            await self._wait_for_change()
        return self._record.result(
            self.final,
            num_blocks=self._blocks.num_received,
            read_s=self._slices.transfer_s,
            reading_since_s=self._slices.reading_since_s,
            transport=self._link.reads.transport if self._link.reads else "",
        )

    def cancel(self) -> None:
        """End the pull because its request was cancelled. Does nothing if it has ended."""
        self.fail(Reason.CANCELLED, "the request was cancelled", code=Code.CANCELLED, retriable=False)

    # -- called by the link ------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True after success, failure or `cancel`."""
        return self._lifecycle.has_ended

    def follow(self) -> None:
        """Send a Follow on the current stream, for the first block that was not announced and those after
        it."""
        self._follow_sent_s = self._clock()
        self._send_follow(self._blocks.first_unannounced())

    def on_ready(self, message: KvReady) -> None:
        """Handle an announcement. It changes nothing for blocks that are being read or were received."""
        if self.has_ended:
            return
        problem = self._blocks.problem(message, self._link.num_owner_blocks)
        if problem:
            self._link.observer.validation_failed(self._link.owner, "shape")
            self.fail(Reason.VALIDATION_FAILED, f"invalid announcement: {problem}")
            return
        if self._follow_sent_s is not None:  # first answer on this stream; the Follow counts as a renewal
            self.lease_start_s = max(self.lease_start_s, self._follow_sent_s)
            self._follow_sent_s = None
        now_s = self._clock()
        if not self._blocks.any_announced and self.final is None:
            self._record.on_first_ready(now_s)
            if not self._blocks.has_memory:
                self._lifecycle.move(State.WAITING_FOR_MEMORY)
        self._blocks.announce(message)
        if message.final and self.final is None:
            self.final = message
            self._record.on_final_ready(now_s, self._link_bytes() if self._blocks.has_memory else None)
        self._wake()
        self._proceed()

    def renewed(self, renewal: int, sent_s: float) -> None:
        """Extend the lease: the owner has answered a renewal that was sent at `sent_s`."""
        if renewal >= self.renewal_floor:
            self.lease_start_s = max(self.lease_start_s, sent_s)

    def lease_ends_s(self, lease_s: float) -> float:
        """Return when the lease ends, by the event loop's clock."""
        return self.lease_start_s + LEASE_MARGIN * lease_s

    def fail(self, reason: Reason, message: str, *, code: Code = Code.UNAVAILABLE, retriable: bool = True) -> None:
        """End the pull with a failure. Blocks that a running read writes stay reserved until it is terminal.

        Does nothing if the pull has ended.
        """
        if self.has_ended:
            return
        blamed = self._link.owner if retriable else None
        self._failure = Failure(
            code=code,
            reason=reason,
            message=f"pull from {self._link.owner}: {message}",
            retriable=retriable,
            blamed=blamed,
        )
        if reason is Reason.NUMERICAL_ERROR:
            # The owner announced earlier chunks before it knew that the prompt's KV is bad. Blocks that another
            # sequence uses already are kept, as the owner does.
            self._pool.unpublish(b for b in self._blocks.received_into() if self._pool.num_refs(b) == 1)
        self._pool.drop_receiving(self._blocks.stop())
        if self._blocks.num_reading:
            self._link.send(Abandon(transfer_id=self.transfer_id, blocks_in_doubt=self._blocks.num_reading))
        else:
            self._link.send(self._release_message(reason.value))
        self._end(State.FAILED, reason)

    # -- slices ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if announced blocks wait to be read."""
        return self._blocks.any_waiting

    def start_slice(self, reads: PeerReads, max_blocks: int) -> int:
        """Start to read at most `max_blocks` waiting blocks. Returns how many."""
        return self._slices.start(reads, max_blocks)

    def _slice_ended(self, end: SliceEnd) -> None:
        """Make validated blocks visible, or handle the problem of the slice."""
        part, problem = end.part, end.problem
        if problem == slice_reader.TIMED_OUT:
            self.fail(Reason.TRANSFER_TIMEOUT, "a read passed its deadline")
            end.reads.break_link(Reason.TRANSFER_TIMEOUT)
        elif problem == slice_reader.IN_DOUBT:
            self.fail(Reason.TRANSFER_FAILED, "a read failed and may still write, so its blocks are quarantined")
            end.reads.break_link(Reason.TRANSFER_FAILED)
        elif self.has_ended:
            self._pool.drop_receiving(part.own)
        elif problem is None:
            for block, block_id in zip(part.blocks, part.own, strict=True):
                self._blocks.received(block)
                self._pool.mark_received(block_id, block.block_hash)
            end.reads.blocks_valid()
            self._record.on_received(len(part.own) * end.reads.block_bytes)
            self._wake()
            self._proceed()
        elif problem == slice_reader.FAILED:
            self.fail(Reason.TRANSFER_FAILED, "a read failed")
            end.reads.break_link(Reason.TRANSFER_FAILED)
        elif problem == slice_reader.LOST:
            self._on_lost_read(part, end.reads)
        elif problem == slice_reader.LATE:
            self.fail(Reason.TRANSFER_TIMEOUT, "a read of generation-table entries passed its deadline")
            end.reads.break_link(Reason.TRANSFER_TIMEOUT)
        elif problem == slice_reader.LEASE:
            self._link.observer.validation_failed(self._link.owner, problem)
            self.fail(Reason.LEASE_LOST, "the lease ended while blocks were read")
        else:
            self._on_mismatch(part, problem, end.reads)

    def _on_lost_read(self, part: Slice, reads: PeerReads) -> None:
        """Request the blocks of a slice again that the owner has not served."""
        self._num_lost += 1
        if self._num_lost > MAX_LOST_SLICES:
            self.fail(Reason.TRANSFER_FAILED, "the owner does not serve reads")
            reads.break_link(Reason.TRANSFER_FAILED)
            return
        self._blocks.forget(part)
        self._send_follow(min(block.index for block in part.blocks))

    def _on_mismatch(self, part: Slice, what: str, reads: PeerReads) -> None:
        """Discard a slice that is not what was announced, and request it again, once."""
        self._link.observer.validation_failed(self._link.owner, what)
        log.warning(
            "kv_validation_failed",
            owner=str(self._link.owner),
            transfer_id=self.transfer_id,
            what=what,
            retry=not self._has_retried,
        )
        if self._has_retried:
            self.fail(Reason.VALIDATION_FAILED, f"the {what} differs from the announcement, also after a retry")
            reads.pull_invalid(what)
            return
        self._has_retried = True
        self._blocks.forget(part)
        self._send_follow(min(block.index for block in part.blocks))

    # -- internal ----------------------------------------------------------------------------------

    def _proceed(self) -> None:
        """Start reads of waiting blocks, or end the pull if everything was received."""
        if self.has_ended or not self._blocks.has_memory:
            return
        if self.final is not None and not self._blocks.any_waiting and not self._blocks.num_reading:
            total = self.final.first_block_index + len(self.final.block_ids)
            missing = self._blocks.missing()
            if not missing or (min(missing) >= total and isinstance(self.subject, HashRange)):
                self._finish(list(missing.values()))
                return
            if min(missing) >= total:
                self.fail(
                    Reason.VALIDATION_FAILED,
                    f"the owner has {total} blocks of the prompt; {max(missing) + 1} were expected",
                )
                return
        self._link.start_reads()

    def _finish(self, unfilled: list[int]) -> None:
        """End the pull successfully.

        `unfilled`: own blocks for prefix blocks that the owner no longer holds.
        """
        self._pool.drop_receiving(unfilled)
        hit("transfer.before_release", owner=self._link.owner.worker_id)
        self._link.send(self._release_message(RECEIVED))
        self._end(State.RECEIVED, None)

    def _end(self, state: State, reason: Reason | None) -> None:
        self._record.on_end(self._clock())
        self._lifecycle.move(state)
        if self._deadline is not None:
            self._deadline.cancel()
        reads, prefix = self._link.reads, self.subject if isinstance(self.subject, HashRange) else None
        may_reload = prefix is not None and prefix.reload_within_s > 0
        if reason is None and reads is not None and not may_reload:  # a reload is no cost of the link
            self._record.add_costs_to(reads.costs, reads.bandwidth, is_prefix=prefix is not None)
        self._link.ended(self)
        self._link.observer.pull_ended(
            self._link.owner,
            reason=reason,
            transfer_bytes=self._record.transfer_bytes,
            duration_s=self._record.duration_s,
            read_s=self._slices.transfer_s,
        )
        if self._span.is_recorded:
            self._record.end_span(
                self._span,
                reason,
                owner=self._link.owner,
                transport=self._link.reads.transport if self._link.reads else None,
                subject=self.subject,
                blocks=self._blocks,
                is_final=self.final is not None,
                read_s=self._slices.transfer_s,
            )
        self._wake()

    def _release_message(self, outcome: str) -> Release:
        return Release(
            transfer_id=self.transfer_id,
            outcome=outcome,
            transfer_bytes=self._record.transfer_bytes,
            duration_s=self._clock() - self._record.started_s,
        )

    def _send_follow(self, resume_from_block: int) -> None:
        hit("transfer.before_follow", owner=self._link.owner.worker_id)
        self.renewal_floor = self._link.next_renewal
        have = min(self._blocks.have_blocks, resume_from_block)
        self._link.send(
            Follow(
                transfer_id=self.transfer_id,
                subject=self.subject,
                have_blocks=have,
                resume_from_block=resume_from_block,
                trace_context=self._span.context,
            )
        )

    def _on_deadline(self) -> None:
        self.fail(Reason.DEADLINE, "the request's deadline passed", code=Code.DEADLINE_EXCEEDED, retriable=False)

    def _link_bytes(self) -> int | None:
        """Return the bytes of all reads that the link has finished; None before its first read."""
        reads = self._link.reads
        return reads.bandwidth.total_bytes if reads is not None and reads.is_tried else None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        """Wait for the next change of the pull. Raises Refused if the pull has failed."""
        if self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise Refused(self._failure)
