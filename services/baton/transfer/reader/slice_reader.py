"""The reads of one pull: each a slice of its blocks, which is then proven. What comes of a slice is the
pull's to decide."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from baton.core.ids import TransferId, WorkerRef
from baton.runtime.failpoints import FailpointError, hit
from baton.transfer.backend import KvDescriptor, ReadState
from baton.transfer.integrity.validate_read import mismatch
from baton.transfer.reader.peer_reads import PeerReads
from baton.transfer.reader.pull_blocks import PullBlocks, Slice

FAILED = "read"
LATE = "late"
LEASE = "lease"
GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceEnd:
    """A slice that is no longer being read. `problem`: None if it is proven; FAILED, or not wanted any more;
    LATE: its generation-table entries passed their deadline; LEASE: the lease ended before the proof;
    GIVEN_UP: the read itself passed its deadline, and what it lands in is quarantined; else what `mismatch`
    says."""

    part: Slice
    reads: PeerReads
    problem: str | None


class SliceReader:
    """`spawn` runs a read, `on_end` is told of each that ended. `is_wanted`: whether the pull goes on;
    `lease_ends_s`: until when its lease runs, by the event loop's clock. `reading_since_s`: when a read last
    began with no other running; `transfer_s`: while any was."""

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
        """Begin to read at most `max_blocks` of the waiting blocks; returns how many."""
        if not self._blocks.num_reading:
            self.reading_since_s = self._clock()
        part = self._blocks.begin_read(max_blocks)
        self._spawn(self._read(reads, part))
        return len(part.own)

    async def _read(self, reads: PeerReads, part: Slice) -> None:
        source = KvDescriptor(memory=reads.memory, block_ids=tuple(block.block_id for block in part.blocks))
        read_id, state = await reads.read(self._transfer_id, source, part.own)
        problem: str | None = FAILED
        if state is None:  # nothing can stop it, so what it lands in stays out of use until it is terminal
            problem = GIVEN_UP
            reads.quarantine(read_id, part.own)
            self._blocks.lose_memory(part)
        else:
            reads.end_read(read_id, len(part.own))
            self._num_done += 1
            if state is ReadState.DONE and self._is_wanted():
                problem = await self._disproof(reads, source, part)
        self._blocks.end_read(part)
        if not self._blocks.num_reading:
            self.transfer_s += self._clock() - self.reading_since_s
        self._on_end(SliceEnd(part=part, reads=reads, problem=problem))

    async def _disproof(self, reads: PeerReads, source: KvDescriptor, part: Slice) -> str | None:
        """Why what was read may not be believed, or None."""
        try:
            hit("transfer.slice_done", owner=self._owner.worker_id, slices=self._num_done)
            hit("transfer.before_life_read", owner=self._owner.worker_id)
        except FailpointError:
            return FAILED
        try:
            entries = await reads.read_generations(source)
        except TimeoutError:
            return LATE
        if entries is None:
            return FAILED
        what = mismatch(part.blocks, entries, self._owner.worker_epoch)
        if what is None and self._clock() >= self._lease_ends_s():
            return LEASE
        return what
