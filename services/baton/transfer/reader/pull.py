"""One pull: follow, read what is ready slice by slice, prove each slice, land it. Everything in doubt is
dropped or quarantined."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import JobId, TransferId, WorkerRef
from baton.core.interfaces import ReceivingPool
from baton.core.kv.block_hash import BlockHash
from baton.core.messages.peer_messages import Abandon, FirstToken, Follow, HashRange, KvReady, ReaderMessage, Release
from baton.core.state_machines import PULL_TRANSITIONS, Lifecycle
from baton.core.state_machines import PullState as State
from baton.runtime.failpoints import hit
from baton.runtime.logging import get_logger
from baton.runtime.observability.tracing import NO_SPAN, Span
from baton.transfer.reader import slice_reader
from baton.transfer.reader.peer_reads import PeerReads
from baton.transfer.reader.pull_blocks import PullBlocks, Slice
from baton.transfer.reader.slice_reader import SliceEnd, SliceReader
from baton.transfer.reader.transfer_observer import TransferObserver

log = get_logger(__name__)

LEASE_MARGIN = 0.95
"""Of the owner's lease the reader uses this part: two clocks may run at different speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """What a pull brought. `num_blocks` landed; `num_computed_tokens` have their KV at the owner, and what it
    sampled are `first_tokens`. `kv_wait_s`: from the start to the first KvReady; `kv_transfer_s`: while a
    read was running; `kv_exposed_s`: from the final KvReady to the last block landed, of which
    `kv_exposed_wait_s` until the last read began. `early_bytes` of `transfer_bytes` had been read at the
    final KvReady."""

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


class PullLink(Protocol):
    """The standing stream to the life of an owner that a pull reads from. `PeerLink` implements it."""

    owner: WorkerRef
    observer: TransferObserver
    lease_s: float
    next_renewal: int
    reads: PeerReads | None
    """None until the owner has said hello."""

    def send(self, message: ReaderMessage) -> None:
        """Send, or lose it with the stream."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that ends with the link."""
        ...

    def pump(self) -> None:
        """Start slices (`Pull.start_slice`) while there is room."""
        ...

    def ended(self, pull: "Pull") -> None: ...


class Pull:
    """The reader's side of one transfer. Made by `KvReader.pull`; used from one event loop.

    From `receive_into` on the receiving blocks belong to the pull until each has landed: those that never
    will are dropped, and those that a read may still write are quarantined, also after a failure or `cancel`.
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
        self._blocks = PullBlocks(subject.hashes if isinstance(subject, HashRange) else tuple(expected), have_blocks)
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
        """The owner's last announcement, once it has come."""
        self._has_retried = False
        self._bytes = self._early_bytes = 0
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._started_s = self._clock()
        self._first_ready_s = self._final_s = self._ended_s = self._started_s
        self.lease_start_s = self._started_s
        """Of the lease that the owner has confirmed; at first of the one it is being asked for."""
        self.renewal_floor = 0
        self._follow_sent_s: float | None = None
        self._deadline = None if deadline_s is None else loop.call_later(deadline_s, self._out_of_time)

    # What the caller does.

    async def first_ready(self) -> None:
        """Returns when the owner has announced its first blocks: the moment to ask for memory. Raises Refused
        when the pull has failed."""
        while not self._blocks.any_announced and self.final is None:
            await self._change()

    def receive_into(self, receiving: Mapping[int, int], have_blocks: int) -> None:
        """Read into these own blocks, by index in the prompt's blocks; `have_blocks` are here already
        (perhaps fewer than was said at first). Called once. On a pull that has failed the blocks are given
        back at once."""
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
        """What the owner sampled at the prompt's end; None while it has not announced that."""
        return self.final.first_tokens if self.final is not None else None

    async def announced(self) -> tuple[FirstToken, ...]:
        """Returns the owner's first tokens when it has announced its last block, landed or not. Raises
        Refused when the pull has failed."""
        while self.final is None:
            await self._change()
        return self.final.first_tokens

    async def done(self) -> PullResult:
        """Returns when every receiving block has landed and the owner has announced its last. Raises Refused
        when the pull has failed."""
        while self._lifecycle.state is not State.RECEIVED:
            await self._change()
        final = self.final
        return PullResult(
            first_tokens=final.first_tokens if final else (),
            num_computed_tokens=final.num_computed_tokens if final else 0,
            num_blocks=self._blocks.num_received,
            transfer_bytes=self._bytes,
            early_bytes=self._early_bytes,
            kv_wait_s=self._first_ready_s - self._started_s,
            kv_transfer_s=self._slices.transfer_s,
            kv_exposed_s=self._ended_s - self._final_s,
            kv_exposed_wait_s=max(0.0, self._slices.reading_since_s - self._final_s),
            transport=self._link.reads.transport if self._link.reads else "",
        )

    def cancel(self) -> None:
        """Give the pull up: nobody wants it any more. Nothing if it has ended."""
        self.fail(Reason.CANCELLED, "the request was cancelled", code=Code.CANCELLED, retriable=False)

    # What the link tells.

    @property
    def has_ended(self) -> bool:
        return self._lifecycle.has_ended

    def follow(self) -> None:
        """Ask the owner, on the link's present stream, to go on from the first block that it has not
        announced yet."""
        self._follow_sent_s = self._clock()
        self._send_follow(self._blocks.first_unannounced())

    def on_ready(self, message: KvReady) -> None:
        """Blocks are computed at the owner. Repeated announcements change nothing for what is being read or
        has landed."""
        if self.has_ended:
            return
        problem = self._blocks.problem(message, self._link.reads.memory.num_blocks if self._link.reads else 0)
        if problem:
            self._link.observer.validation_failed(self._link.owner, "shape")
            self.fail(Reason.VALIDATION_FAILED, f"announcement refused: {problem}")
            return
        if self._follow_sent_s is not None:  # the first answer on this stream: the Follow was the first renewal
            self.lease_start_s = max(self.lease_start_s, self._follow_sent_s)
            self._follow_sent_s = None
        now_s = self._clock()
        if not self._blocks.any_announced and self.final is None:
            self._first_ready_s = now_s
            if not self._blocks.has_memory:
                self._lifecycle.move(State.WAITING_FOR_MEMORY)
        self._blocks.announce(message)
        if message.final and self.final is None:
            self.final, self._final_s, self._early_bytes = message, now_s, self._bytes
        self._wake()
        self._proceed()

    def renewed(self, renewal: int, sent_s: float) -> None:
        """The owner has answered a renewal that was sent at `sent_s`, after this transfer's Follow."""
        if renewal >= self.renewal_floor:
            self.lease_start_s = max(self.lease_start_s, sent_s)

    def lease_ends_s(self, lease_s: float) -> float:
        return self.lease_start_s + LEASE_MARGIN * lease_s

    def fail(self, reason: Reason, message: str, *, code: Code = Code.UNAVAILABLE, retriable: bool = True) -> None:
        """End the pull. Blocks that a read is still receiving in stay out of use until it is terminal.
        Nothing if it has ended."""
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
        self._pool.drop_receiving(self._blocks.stop())
        if self._blocks.num_reading:
            self._link.send(Abandon(transfer_id=self.transfer_id, blocks_in_doubt=self._blocks.num_reading))
        else:
            self._link.send(self._farewell(reason.value))
        self._end(State.FAILED, reason)

    # Slices.

    @property
    def has_work(self) -> bool:
        """Whether blocks wait to be read."""
        return self._blocks.any_waiting

    def start_slice(self, reads: PeerReads, max_blocks: int) -> int:
        """Begin to read at most `max_blocks` of the waiting blocks; returns how many."""
        return self._slices.start(reads, max_blocks)

    def _slice_ended(self, end: SliceEnd) -> None:
        """Land what is proven. Of the rest nothing may be used, and more than that is in doubt."""
        part, problem = end.part, end.problem
        if problem == slice_reader.GIVEN_UP:
            self.fail(Reason.TRANSFER_TIMEOUT, "a read passed its deadline")
            end.reads.break_pair(Reason.TRANSFER_TIMEOUT)
        elif self.has_ended:
            self._pool.drop_receiving(part.own)
        elif problem is None:
            for block, block_id in zip(part.blocks, part.own, strict=True):
                self._blocks.received(block)
                self._pool.mark_received(block_id, block.block_hash)
            self._bytes += len(part.own) * end.reads.block_bytes
            self._wake()
            self._proceed()
        elif problem == slice_reader.FAILED:
            self.fail(Reason.TRANSFER_FAILED, "a read failed")
            end.reads.break_pair(Reason.TRANSFER_FAILED)
        elif problem == slice_reader.LATE:
            self.fail(Reason.TRANSFER_TIMEOUT, "a read of generation-table entries passed its deadline")
            end.reads.break_pair(Reason.TRANSFER_TIMEOUT)
        elif problem == slice_reader.LEASE:
            self._link.observer.validation_failed(self._link.owner, problem)
            self.fail(Reason.LEASE_LOST, "the lease ended while blocks were read")
        else:
            self._disproved(part, problem)

    def _disproved(self, part: Slice, what: str) -> None:
        """What was read is not what was announced: it is discarded, and once asked for again."""
        self._link.observer.validation_failed(self._link.owner, what)
        log.warning(
            "kv_validation_failed",
            owner=str(self._link.owner),
            transfer_id=self.transfer_id,
            what=what,
            retry=not self._has_retried,
        )
        if self._has_retried:
            self.fail(Reason.VALIDATION_FAILED, f"{what} is not what was announced, twice")
            return
        self._has_retried = True
        self._blocks.forget(part)
        self._send_follow(part.blocks[0].index)

    # The rest.

    def _proceed(self) -> None:
        """Start reads if there is something to read; end the pull if there is nothing more to come."""
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
                    f"the owner has {total} blocks of the prompt, {max(missing) + 1} were expected",
                )
                return
        self._link.pump()

    def _finish(self, unfilled: list[int]) -> None:
        """Everything has landed. `unfilled`: own blocks for those of a prefix that the owner no longer
        has."""
        self._pool.drop_receiving(unfilled)
        hit("transfer.before_release", owner=self._link.owner.worker_id)
        self._link.send(self._farewell("received"))
        self._end(State.RECEIVED, None)

    def _end(self, state: State, reason: Reason | None) -> None:
        self._ended_s = self._clock()
        self._lifecycle.move(state)
        if self._deadline is not None:
            self._deadline.cancel()
        self._link.ended(self)
        self._link.observer.pull_ended(
            self._link.owner,
            reason=reason,
            transfer_bytes=self._bytes,
            duration_s=self._ended_s - self._started_s,
            read_s=self._slices.transfer_s,
        )
        if self._span.is_recorded:
            self._end_span(reason)
        self._wake()

    def _end_span(self, reason: Reason | None) -> None:
        if self._blocks.any_announced:
            self._span.event("first ready", self._first_ready_s)
        if self.final is not None:
            self._span.event("final ready", self._final_s)
        self._span.end(
            {
                "baton.outcome": "received" if reason is None else reason.value,
                "baton.source": self._link.owner.worker_id,
                "baton.transport": self._link.reads.transport if self._link.reads else None,
                "baton.pulls": "prefix" if isinstance(self.subject, HashRange) else "prompt",
                "baton.blocks": self._blocks.num_received,
                "baton.blocks_here_before": self._blocks.have_blocks,
                "baton.bytes": self._bytes,
                "baton.early_bytes": self._early_bytes,
                "baton.read_s": self._slices.transfer_s,
            },
            problem="" if reason is None or reason is Reason.CANCELLED else reason.value,
            at_s=self._ended_s,
        )

    def _farewell(self, outcome: str) -> Release:
        return Release(
            transfer_id=self.transfer_id,
            outcome=outcome,
            transfer_bytes=self._bytes,
            duration_s=self._clock() - self._started_s,
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

    def _out_of_time(self) -> None:
        self.fail(Reason.DEADLINE, "the request's deadline passed", code=Code.DEADLINE_EXCEEDED, retriable=False)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        """Wait until something happened. Raises Refused when the pull has failed."""
        if self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise Refused(self._failure)
