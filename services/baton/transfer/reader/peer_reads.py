"""Reads out of one peer's memory: rationed, timed, given up when they are late, and tried out before and
after (rules R1 and R3)."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.errors import Reason
from baton.core.ids import ReadId, TransferId, WorkerRef
from baton.core.interfaces import Network, ReceivingPool
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import ReaderMessage, WillRead
from baton.runtime.logging import get_logger
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState, TransferBackend
from baton.transfer.reader.bandwidth import SLOW_BYTES_PER_S, Bandwidth
from baton.transfer.reader.quarantine import Quarantine
from baton.transfer.reader.transfer_observer import TransferObserver

log = get_logger(__name__)

PROBE_TRANSFER = TransferId(0)
MAX_SLICE_BYTES = 8 * 2**20
MAX_INFLIGHT_SHARE = 0.02
"""Of the pool, one block at least: so much of it can be lost to one silent peer."""
MAX_OPEN_PROBES = 4
_SELF_TEST_S = 0.02
"""The self-test reads more and more until a read takes this long."""
_TELLING_BYTES = 2**20
"""The time of a smaller read is latency, and tells nothing about speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderTimes:
    """How long the reader waits for what. `lease_s` is only assumed until the owner has said its own."""

    lease_s: float
    renew_s: float
    deadline_min_s: float
    deadline_max_s: float
    hello_s: float = 5.0
    redial_min_s: float = 0.05
    redial_max_s: float = 1.0
    max_redials: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What all links of one reader share."""

    worker: WorkerRef
    layout: KvLayout
    backend: TransferBackend
    network: Network
    pool: ReceivingPool
    rng: random.Random
    observer: TransferObserver
    times: ReaderTimes
    quarantine: Quarantine
    next_read_id: Callable[[], ReadId]
    tracing: Tracing = OFF


class PeerReads:
    """Reads of one life of one peer. `on_change` is called when the pair breaks, works (again) or has room;
    `is_idle` says whether nobody wants to read, so that there is time to measure."""

    def __init__(
        self,
        owner: WorkerRef,
        memory: KvMemory,
        shared: Reading,
        *,
        send: Callable[[ReaderMessage], None],
        on_change: Callable[[], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self.owner, self.memory = owner, memory
        self.broken_by: Reason | None = None
        """Why nothing is read now: TRANSFER_TIMEOUT after a read that was given up, TRANSFER_FAILED after one
        that failed; else None."""
        self.is_tried = False
        """Whether a read has ever come through."""
        self.inflight_blocks = 0
        self.block_bytes = shared.layout.block_bytes
        self.max_slice_blocks = max(1, MAX_SLICE_BYTES // self.block_bytes)
        self.bandwidth = Bandwidth(
            deadline_min_s=shared.times.deadline_min_s, deadline_max_s=shared.times.deadline_max_s
        )
        self._shared, self._backend = shared, shared.backend
        self._send, self._on_change, self._is_idle = send, on_change, is_idle
        self._max_inflight = max(1, int(MAX_INFLIGHT_SHARE * shared.backend.memory[0].num_blocks))
        self._open_probes = 0
        self._clock = asyncio.get_running_loop().time

    @property
    def broken(self) -> bool:
        return self.broken_by is not None

    @property
    def room(self) -> int:
        """Blocks that may be read now."""
        return self._max_inflight - self.inflight_blocks if self.is_tried and not self.broken else 0

    @property
    def may_probe(self) -> bool:
        """Probes get stuck, too: there are never many."""
        return self._open_probes < MAX_OPEN_PROBES

    @property
    def transport(self) -> str:
        return self._backend.transport_to(self.memory)

    async def read(
        self, transfer_id: TransferId, source: KvDescriptor, own: Sequence[int]
    ) -> tuple[ReadId, ReadState | None]:
        """Read blocks that `room` allows; None when the deadline has passed and the read still runs.
        `end_read` or `quarantine` must follow."""
        read_id = self._shared.next_read_id()
        self._tell_owner(read_id, transfer_id, source)
        started_s = self._clock()
        self._backend.start_read(read_id, source, own)
        state = await self._terminal(read_id, self.inflight_blocks * self.block_bytes)
        if state is ReadState.DONE:
            self.bandwidth.ended(len(own) * self.block_bytes, started_s, self._clock())
        return read_id, state

    def end_read(self, read_id: ReadId, num_blocks: int) -> None:
        """A terminal read is over with."""
        self._backend.release(read_id)
        self.inflight_blocks -= num_blocks
        asyncio.get_running_loop().call_soon(self._on_change)

    def quarantine(self, read_id: ReadId, own: Sequence[int]) -> None:
        """Watch a given-up read until it is terminal; until then its blocks count as in flight, too."""
        self._shared.observer.read_given_up(self.owner, len(own))
        log.warning(
            "kv_read_given_up", owner=str(self.owner), read_id=read_id, num_blocks=len(own), transport=self.transport
        )

        def terminal(_state: ReadState) -> None:
            self.inflight_blocks -= len(own)
            self._on_change()

        self._shared.quarantine.watch(read_id, own, terminal)

    async def read_generations(self, source: KvDescriptor) -> tuple[GenerationEntry, ...] | None:
        """The source's generation-table entries; None when the read failed. Raises TimeoutError when it was
        given up."""
        read_id = self._shared.next_read_id()
        self._backend.start_read_generations(read_id, source)
        state = await self._terminal(read_id, self.inflight_blocks * self.block_bytes)
        if state is None:
            self._shared.quarantine.watch(read_id, (), lambda _state: None)
            raise TimeoutError
        entries = self._backend.generations(read_id) if state is ReadState.DONE else None
        self._backend.release(read_id)
        return entries

    def break_pair(self, reason: Reason) -> None:
        """A read was given up (TRANSFER_TIMEOUT) or failed (TRANSFER_FAILED): no further reads of this peer
        until a probe has come through. Whoever waited for one hears the same reason. The first reason
        stays."""
        if not self.broken:
            self.broken_by = reason
            log.warning("kv_pair_broken", owner=str(self.owner), reason=reason.value, transport=self.transport)
            self._publish()

    async def _terminal(self, read_id: ReadId, num_bytes: int) -> ReadState | None:
        try:
            async with asyncio.timeout(self.bandwidth.deadline_s(num_bytes)):
                return await self._backend.wait(read_id)
        except TimeoutError:
            return None

    def _tell_owner(self, read_id: ReadId, transfer_id: TransferId, source: KvDescriptor) -> None:
        if self._backend.two_sided:
            self._send(WillRead(transfer_id=transfer_id, read_id=read_id, block_ids=source.block_ids))

    # Probes.

    async def probe(self, num_blocks: int = 1) -> ReadState | None:
        """Read into memory that nobody looks at; None when that was given up. A probe that comes through
        mends the pair."""
        read_id = self._shared.next_read_id()
        source = KvDescriptor(memory=self.memory, block_ids=tuple(range(num_blocks)))
        self._tell_owner(read_id, PROBE_TRANSFER, source)
        started_s = self._clock()
        self._open_probes += 1
        self._backend.start_probe(read_id, source)
        state = await self._terminal(read_id, (self.inflight_blocks + num_blocks) * self.block_bytes)
        if state is None:
            self._shared.quarantine.watch(read_id, (), self._probe_ended)
            return None
        if (
            state is ReadState.DONE and self.is_tried
        ):  # the first read also makes the connection: it says nothing about speed
            self.bandwidth.ended(num_blocks * self.block_bytes, started_s, self._clock())
        self._backend.release(read_id)
        self._probe_ended(state)
        return state

    def _probe_ended(self, state: ReadState) -> None:
        self._open_probes -= 1
        if state is ReadState.DONE and (self.broken or not self.is_tried):
            if self.broken:
                log.info("kv_pair_mended", owner=str(self.owner))
            self.is_tried, self.broken_by = True, None
            self._publish()

    async def warm(self) -> None:
        """Make the connection with a first small read; then measure with larger ones, unless somebody has
        something to read."""
        if not await self._tried(1):
            return
        size, most = 1, min(self._backend.max_probe_blocks, self.memory.num_blocks)
        while self._is_idle():
            started_s = self._clock()
            if not await self._tried(size):
                return
            if size == most or self._clock() - started_s > _SELF_TEST_S:
                break
            size = min(most, 4 * size)
        self._publish()
        rate, transport = self.bandwidth.bytes_per_s or 0.0, self.transport
        fields = {"owner": str(self.owner), "transport": transport, "gigabytes_per_s": round(rate / 1e9, 3)}
        is_slow = size * self.block_bytes >= _TELLING_BYTES and rate < SLOW_BYTES_PER_S
        if transport.startswith("tcp") or is_slow:
            log.warning("kv_link_slow", **fields)
        else:
            log.info("kv_link_measured", **fields)

    async def _tried(self, num_blocks: int) -> bool:
        """Whether a probe came through; one that did not breaks the pair."""
        state = await self.probe(num_blocks)
        if state is not ReadState.DONE:
            self.break_pair(Reason.TRANSFER_TIMEOUT if state is None else Reason.TRANSFER_FAILED)
        return state is ReadState.DONE

    def _publish(self) -> None:
        rate = self.bandwidth.bytes_per_s or 0.0
        self._shared.observer.link_changed(self.owner, transport=self.transport, bytes_per_s=rate, broken=self.broken)
        self._on_change()
