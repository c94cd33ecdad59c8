"""One pull: follow, read what is ready slice by slice, prove each slice, land it. Everything in doubt is dropped or quarantined."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.apis import LandingPool
from baton.core.blocks import NO_HASH, BlockHash
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import JobId, ReadId, TransferId
from baton.core.lifecycle import PULL_TRANSITIONS, Lifecycle
from baton.core.lifecycle import PullState as State
from baton.core.peer import Abandon, FirstToken, Follow, HashRange, KvReady, Release
from baton.runtime.failpoints import FailpointError, hit
from baton.runtime.logging import get_logger
from baton.transfer.backend import KvDescriptor, ReadState
from baton.transfer.proof import AnnouncedBlock, disproof

if TYPE_CHECKING:
    from baton.transfer.peer_link import PeerLink
    from baton.transfer.peer_reads import PeerReads

log = get_logger(__name__)

LEASE_MARGIN = 0.95
"""Of the owner's lease the reader uses this part: two clocks may run at different speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """What a pull brought. `num_blocks` landed; `num_computed_tokens` have their KV at the owner, and what it sampled are
    `first_tokens`. `kv_wait_s`: from the start to the first KvReady; `kv_transfer_s`: while a read was running; `kv_exposed_s`: from
    the final KvReady to the last block landed, of which `kv_exposed_wait_s` until the last read began. `early_bytes` of
    `transfer_bytes` had been read at the final KvReady."""

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


class Pull:
    """The reader's side of one transfer. Made by `KvReader.pull`; used from one event loop.

    From `land_into` on the landing blocks belong to the pull until each has landed: those that never will are dropped, and those that a
    read may still write are quarantined, also after a failure or `cancel`.
    """

    def __init__(
        self,
        link: "PeerLink",
        *,
        transfer_id: TransferId,
        subject: JobId | HashRange,
        have_blocks: int,
        expected: Sequence[BlockHash],
        pool: LandingPool,
        deadline_s: float | None,
    ) -> None:
        self._link = link
        self._pool = pool
        self.transfer_id = transfer_id
        self.subject = subject
        self._have_blocks = have_blocks
        self._expected = subject.hashes if isinstance(subject, HashRange) else tuple(expected)
        self._lifecycle = Lifecycle(PULL_TRANSITIONS, State.FOLLOWING)
        self._failure: Failure | None = None
        self._changed = asyncio.Event()
        self._announced: dict[int, AnnouncedBlock] = {}
        self._landing: dict[int, int] | None = None
        self._queue: deque[int] = deque()
        self._reading: set[int] = set()
        self._landed: set[int] = set()
        self.final: KvReady | None = None
        """The owner's last announcement, once it has come."""
        self._has_retried = False
        self._slices_done = 0
        self._bytes = self._early_bytes = 0
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._started_s = self._clock()
        self._first_ready_s = self._final_s = self._reading_since_s = self._ended_s = self._started_s
        self._transfer_s = 0.0
        self.lease_start_s = self._started_s
        """Of the lease that the owner has confirmed; at first of the one it is being asked for."""
        self.renewal_floor = 0
        self._follow_sent_s: float | None = None
        self._deadline = None if deadline_s is None else loop.call_later(deadline_s, self._out_of_time)

    # What the caller does.

    async def first_ready(self) -> None:
        """Returns when the owner has announced its first blocks: the moment to ask for memory. Raises Refused when the pull has failed."""
        while not self._announced and self.final is None:
            await self._change()

    def land_into(self, landing: Mapping[int, int], have_blocks: int) -> None:
        """Read into these own blocks, by index in the prompt's blocks; `have_blocks` are here already (perhaps fewer than was said at
        first). Called once. On a pull that has failed the blocks are given back at once."""
        if self._landing is not None:
            raise ValueError(f"transfer {self.transfer_id:x} has its landing blocks already")
        if self._failure is not None:
            self._pool.drop_landing(list(landing.values()))
            return
        self._landing = dict(landing)
        self._lifecycle.move(State.READING)
        fewer = have_blocks < self._have_blocks
        self._have_blocks = have_blocks
        if fewer:
            self._send_follow(have_blocks)
        self._queue.extend(index for index in sorted(self._announced) if index in self._landing)
        self._proceed()

    @property
    def first_tokens(self) -> tuple[FirstToken, ...] | None:
        """What the owner sampled at the prompt's end; None while it has not announced that."""
        return self.final.first_tokens if self.final is not None else None

    async def announced(self) -> tuple[FirstToken, ...]:
        """Returns the owner's first tokens when it has announced its last block, landed or not. Raises Refused when the pull has failed."""
        while self.final is None:
            await self._change()
        return self.final.first_tokens

    async def done(self) -> PullResult:
        """Returns when every landing block has landed and the owner has announced its last. Raises Refused when the pull has failed."""
        while self._lifecycle.state is not State.LANDED:
            await self._change()
        final = self.final
        return PullResult(
            first_tokens=final.first_tokens if final else (),
            num_computed_tokens=final.num_computed_tokens if final else 0,
            num_blocks=len(self._landed),
            transfer_bytes=self._bytes,
            early_bytes=self._early_bytes,
            kv_wait_s=self._first_ready_s - self._started_s,
            kv_transfer_s=self._transfer_s,
            kv_exposed_s=self._ended_s - self._final_s,
            kv_exposed_wait_s=max(0.0, self._reading_since_s - self._final_s),
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
        """Ask the owner, on the link's present stream, to go on from the first block that it has not announced yet."""
        self._follow_sent_s = self._clock()
        index = self._have_blocks
        while index in self._announced or index in self._landed:
            index += 1
        self._send_follow(index)

    def on_ready(self, message: KvReady) -> None:
        """Blocks are computed at the owner. Repeated announcements change nothing for what is being read or has landed."""
        if self.has_ended:
            return
        problem = self._problem(message)
        if problem:
            self._link.observer.proof_failed(self._link.owner, "shape")
            self.fail(Reason.PROOF_FAILED, f"announcement refused: {problem}")
            return
        if self._follow_sent_s is not None:  # the first answer on this stream: the Follow was the first renewal
            self.lease_start_s = max(self.lease_start_s, self._follow_sent_s)
            self._follow_sent_s = None
        now_s = self._clock()
        if not self._announced and self.final is None:
            self._first_ready_s = now_s
            if self._landing is None:
                self._lifecycle.move(State.WAITING_FOR_MEMORY)
        for offset, block_id in enumerate(message.block_ids):
            index = message.first_block_index + offset
            if index in self._landed or index in self._reading:
                continue
            is_new = index not in self._announced
            self._announced[index] = AnnouncedBlock(
                index=index, block_id=block_id, life=message.lives[offset], block_hash=message.hashes[offset]
            )
            if is_new and self._landing is not None and index in self._landing:
                self._queue.append(index)
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
        """End the pull. Blocks that a read is still landing in stay out of use until it is terminal. Nothing if it has ended."""
        if self.has_ended:
            return
        blamed = self._link.owner if retriable else None
        self._failure = Failure(
            code=code, reason=reason, message=f"pull from {self._link.owner}: {message}", retriable=retriable, blamed=blamed
        )
        idle = [block for index, block in (self._landing or {}).items() if index not in self._landed and index not in self._reading]
        self._pool.drop_landing(idle)
        self._queue.clear()
        if self._reading:
            self._link.send(Abandon(transfer_id=self.transfer_id, blocks_in_doubt=len(self._reading)))
        else:
            self._link.send(self._farewell(reason.value))
        self._end(State.FAILED, reason)

    # Slices.

    @property
    def has_work(self) -> bool:
        """Whether blocks wait to be read."""
        return bool(self._queue)

    def start_slice(self, reads: "PeerReads", max_blocks: int) -> int:
        """Begin to read at most `max_blocks` of the waiting blocks; returns how many."""
        count = min(max_blocks, len(self._queue))
        blocks = [self._announced[self._queue.popleft()] for _ in range(count)]
        if not self._reading:
            self._reading_since_s = self._clock()
        self._reading.update(block.index for block in blocks)
        self._link.spawn(self._read(reads, blocks))
        return count

    async def _read(self, reads: "PeerReads", blocks: list[AnnouncedBlock]) -> None:
        """Read one slice, prove it, land it."""
        landing = self._landing or {}
        own = [landing[block.index] for block in blocks]
        indices = {block.index for block in blocks}
        source = KvDescriptor(memory=reads.memory, block_ids=tuple(block.block_id for block in blocks))
        read_id, state = await reads.read(self.transfer_id, source, own)
        if state is None:
            self._given_up(reads, read_id, own, indices)
            return
        reads.end_read(read_id, len(own))
        self._slices_done += 1
        what: str | None = "read"
        if state is ReadState.DONE and not self.has_ended:
            what = await self._disproof(reads, source, blocks)
        self._finish_slice(reads, blocks, own, what)

    async def _disproof(self, reads: "PeerReads", source: KvDescriptor, blocks: list[AnnouncedBlock]) -> str | None:
        """Why the slice may not be believed, or None."""
        try:
            hit("transfer.slice_done", owner=self._link.owner.worker_id, slices=self._slices_done)
            hit("transfer.before_life_read", owner=self._link.owner.worker_id)
        except FailpointError:
            return "read"
        try:
            entries = await reads.read_lives(source)
        except TimeoutError:
            return "late"
        if entries is None:
            return "read"
        what = disproof(blocks, entries, self._link.owner.worker_epoch)
        if what is None and self._clock() >= self.lease_ends_s(self._link.lease_s):
            return "lease"
        return what

    def _finish_slice(self, reads: "PeerReads", blocks: list[AnnouncedBlock], own: list[int], what: str | None) -> None:
        self._read_ended({block.index for block in blocks})
        if self.has_ended:
            self._pool.drop_landing(own)
        elif what is None:
            for block, block_id in zip(blocks, own, strict=True):
                self._landed.add(block.index)
                self._pool.land(block_id, block.block_hash)
            self._bytes += len(own) * reads.block_bytes
            self._wake()
            self._proceed()
        elif what in ("read", "late"):
            reason = Reason.TRANSFER_FAILED if what == "read" else Reason.TRANSFER_TIMEOUT
            self.fail(reason, "a read failed" if what == "read" else "a read of life-table entries passed its deadline")
            reads.break_pair(reason)
        elif what == "lease":
            self._link.observer.proof_failed(self._link.owner, what)
            self.fail(Reason.LEASE_LOST, "the lease ended while blocks were read")
        else:
            self._disproved(blocks, what)

    def _disproved(self, blocks: list[AnnouncedBlock], what: str) -> None:
        """What was read is not what was announced: it is discarded, and once asked for again."""
        self._link.observer.proof_failed(self._link.owner, what)
        log.warning("kv_proof_failed", owner=str(self._link.owner), transfer_id=self.transfer_id, what=what, retry=not self._has_retried)
        if self._has_retried:
            self.fail(Reason.PROOF_FAILED, f"{what} is not what was announced, twice")
            return
        self._has_retried = True
        for block in blocks:
            del self._announced[block.index]
        self._send_follow(blocks[0].index)

    def _given_up(self, reads: "PeerReads", read_id: ReadId, own: list[int], indices: set[int]) -> None:
        """The read's deadline has passed: nothing can stop it, so what it lands in stays out of use until it is terminal."""
        reads.quarantine(read_id, own)
        for index in indices:
            if self._landing is not None:
                del self._landing[index]
        self._read_ended(indices)
        self.fail(Reason.TRANSFER_TIMEOUT, "a read passed its deadline")
        reads.break_pair(Reason.TRANSFER_TIMEOUT)

    def _read_ended(self, indices: set[int]) -> None:
        self._reading -= indices
        if not self._reading:
            self._transfer_s += self._clock() - self._reading_since_s

    # The rest.

    def _problem(self, message: KvReady) -> str:
        """What is wrong with an announcement, or empty. Nothing that a peer says is used as an index before this."""
        count, begin = len(message.block_ids), message.first_block_index
        if not count == len(message.lives) == len(message.hashes):
            return "block_ids, lives and hashes differ in number"
        num_blocks = self._link.reads.memory.num_blocks if self._link.reads else 0
        if any(not 0 <= block_id < num_blocks for block_id in message.block_ids):
            return "a block id is outside the owner's memory"
        expected = self._expected[begin : begin + count]
        if any(ours not in (theirs, NO_HASH) for ours, theirs in zip(expected, message.hashes, strict=False)):
            return "a hash is not that of the prompt's block"
        if self._landing is not None and any(
            index >= self._have_blocks and index not in self._landing for index in range(begin, begin + count)
        ):
            return "more blocks than the prompt has"
        return ""

    def _proceed(self) -> None:
        """Start reads if there is something to read; end the pull if there is nothing more to come."""
        if self.has_ended or self._landing is None:
            return
        if self.final is not None and not self._queue and not self._reading:
            total = self.final.first_block_index + len(self.final.block_ids)
            missing = [index for index in self._landing if index not in self._landed]
            if not missing or (min(missing) >= total and isinstance(self.subject, HashRange)):
                self._finish(missing)
                return
            if min(missing) >= total:
                self.fail(Reason.PROOF_FAILED, f"the owner has {total} blocks of the prompt, {max(self._landing) + 1} were expected")
                return
        self._link.pump()

    def _finish(self, missing: list[int]) -> None:
        """Everything has landed. `missing`: a prefix's blocks that the owner no longer has."""
        landing = self._landing or {}
        self._pool.drop_landing([landing[index] for index in missing])
        hit("transfer.before_release", owner=self._link.owner.worker_id)
        self._link.send(self._farewell("landed"))
        self._end(State.LANDED, None)

    def _end(self, state: State, reason: Reason | None) -> None:
        self._ended_s = self._clock()
        self._lifecycle.move(state)
        if self._deadline is not None:
            self._deadline.cancel()
        self._link.ended(self)
        self._link.observer.pull_ended(
            self._link.owner, reason=reason, transfer_bytes=self._bytes, duration_s=self._ended_s - self._started_s
        )
        self._wake()

    def _farewell(self, outcome: str) -> Release:
        return Release(
            transfer_id=self.transfer_id, outcome=outcome, transfer_bytes=self._bytes, duration_s=self._clock() - self._started_s
        )

    def _send_follow(self, resume_from_block: int) -> None:
        hit("transfer.before_follow", owner=self._link.owner.worker_id)
        self.renewal_floor = self._link.next_renewal
        have = min(self._have_blocks, resume_from_block)
        self._link.send(Follow(transfer_id=self.transfer_id, subject=self.subject, have_blocks=have, resume_from_block=resume_from_block))

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
