"""Reads and validates the slices of one pull. The pull decides what follows from the result of a slice."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from baton.core.ids import ReadId, TransferId, WorkerRef
from baton.runtime.failpoints import FailpointError, hit
from baton.transfer.backend import KvDescriptor, ReadState
from baton.transfer.integrity.validate_read import mismatch
from baton.transfer.reader.peer_reads import PeerReads, ReadLost
from baton.transfer.reader.pull_blocks import PullBlocks, Slice

FAILED = "read"
LOST = "lost"
LATE = "late"
LEASE = "lease"
TIMED_OUT = "timed_out"
IN_DOUBT = "in_doubt"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceEnd:
    """The result of one slice. `problem` is None if the slice is valid. Otherwise it is one of these:

    FAILED: a read failed, or the pull has ended meanwhile
    LOST: the owner has not served the read; it can be repeated
    LATE: the read of the generation-table entries passed its deadline
    LEASE: the lease ended before the validation
    TIMED_OUT: the read of the blocks passed its deadline, and its destination is quarantined
    IN_DOUBT: the read of the blocks failed and may still write, so its destination is quarantined
    any other text: the field that `mismatch` returned
    """

    part: Slice
    reads: PeerReads
    problem: str | None


class SliceReader:
    """Reads the slices of one pull.

    spawn: runs a read as a task; on_end: called with the result of each slice
    is_wanted: returns True while the pull has not ended
    lease_ends_s: returns the end of the lease, by the event loop's clock
    reading_since_s: when a read last began while no other was running
    transfer_s: total time in which at least one read was running
    """

    def __init__(
        self,
        transfer_id: TransferId,
        owner: WorkerRef,
        blocks: PullBlocks,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        is_wanted: Callable[[], bool],
        lease_ends_s: Callable[[], float],
        on_end: Callable[[SliceEnd], None],
    ) -> None:
        self.transfer_s = 0.0
        self._transfer_id = transfer_id
        self._owner = owner
        self._blocks = blocks
        self._spawn = spawn
        self._is_wanted = is_wanted
        self._lease_ends_s = lease_ends_s
        self._on_end = on_end
        self._num_done = 0
        self._clock = asyncio.get_running_loop().time
        self.reading_since_s = self._clock()

    def start(self, reads: PeerReads, max_blocks: int) -> int:
        """Start to read at most `max_blocks` waiting blocks. Returns how many."""
        if not self._blocks.num_reading:
            self.reading_since_s = self._clock()
        part = self._blocks.begin_read(max_blocks, reads.regions.region_of)
        self._spawn(self._read(reads, part))
        return len(part.own)

    async def _read(self, reads: PeerReads, part: Slice) -> None:
        source = reads.regions.describe([block.block_id for block in part.blocks])
        read_id, state = await reads.read(self._transfer_id, source, part.own)
        problem: str | None = FAILED
        if state is None or state is ReadState.IN_DOUBT:
            # The read cannot be stopped, so its destination is quarantined until it is terminal.
            problem = TIMED_OUT if state is None else IN_DOUBT
            reads.quarantine(read_id, part.own, problem, in_doubt=state is ReadState.IN_DOUBT)
            self._blocks.lose_memory(part)
        else:
            reads.end_read(len(part.own))
            self._num_done += 1
            try:
                if state is ReadState.LOST:
                    problem = LOST
                elif state is ReadState.DONE and self._is_wanted():
                    problem = await self._validate(reads, read_id, source, part)
            finally:
                reads.release(read_id)  # not before: a two-sided read has its entries until then
        self._blocks.end_read(part)
        if not self._blocks.num_reading:
            self.transfer_s += self._clock() - self.reading_since_s
        self._on_end(SliceEnd(part=part, reads=reads, problem=problem))

    async def _validate(self, reads: PeerReads, read_id: ReadId, source: KvDescriptor, part: Slice) -> str | None:
        """Return None if the slice is valid, or else the problem (see `SliceEnd`)."""
        try:
            hit("transfer.slice_done", owner=self._owner.worker_id, slices=self._num_done)
            hit("transfer.before_generation_read", owner=self._owner.worker_id)
        except FailpointError:
            return FAILED
        try:
            entries = await reads.read_generations(read_id, source)
        except TimeoutError:
            return LATE
        except ReadLost:
            return LOST
        if entries is None:
            return FAILED
        what = mismatch(part.blocks, entries, self._owner.worker_epoch)
        if what is None and self._clock() >= self._lease_ends_s():
            return LEASE
        return what
