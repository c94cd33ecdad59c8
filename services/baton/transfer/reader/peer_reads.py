"""Reads from the memory of one owner: limited in flight, with deadlines, and probed while the link is broken.

NIXL cannot cancel a read and does not report a stall, so every read has a deadline here. Blocks of a read
that passes its deadline, or that fails without having ended, are quarantined until the read is terminal.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.errors import Reason
from baton.core.ids import ReadId, TransferId, WorkerRef
from baton.core.interfaces import Network, ReceivingPool
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.peer_messages import ReaderMessage, WillRead
from baton.runtime.logging import get_logger
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.backend import MAX_READ_BYTES, GenerationEntry, KvDescriptor, ReadState, TransferBackend
from baton.transfer.integrity.validate_read import foreign_entries
from baton.transfer.reader.bandwidth import SLOW_BYTES_PER_S, Bandwidth
from baton.transfer.reader.owner_regions import OwnerRegions
from baton.transfer.reader.pull_costs import PullCosts
from baton.transfer.reader.quarantine import Quarantine
from baton.transfer.reader.speed_requirement import SpeedRequirement
from baton.transfer.reader.transfer_observer import TransferObserver
from baton.transfer.reader.validation_record import ValidationRecord

log = get_logger(__name__)

PROBE_TRANSFER = TransferId(0)
MAX_INFLIGHT_SHARE = 0.02
"""Share of the pool, at least one block, that may be in flight from one owner with one transfer backend. A
silent owner can cause at most so many blocks to be quarantined."""
MAX_INFLIGHT_BYTES = 256 * 2**20
"""Most bytes in flight from one owner with one transfer backend, if a block is not larger."""
MAX_OPEN_PROBES = 4
BLOCKED_DEADLINES = 3
"""A link is blocked for good if nothing can start on it, because reads are in doubt, for this many times the
longest deadline of a read. A read in doubt may never end. Then only another worker can use the link."""
_SELF_TEST_S = 0.02
"""The first measurement reads growing sizes until a read takes this long."""
_MIN_DURATION_S = 1e-6
_MIN_MEASURED_BYTES = 2**20
"""The duration of a smaller read is mostly latency and does not show the bandwidth."""


class ReadLost(Exception):
    """The owner has not served a read, which can be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderTimes:
    """Time limits of the reader, in seconds.

    `lease_s` is used until the owner has sent its own lease length.
    """

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
    """State and services that all links of one reader share.

    min_link_gbps: links measured below this speed, in gigabits per second, are not used; 0 uses any
    not_available: backends that this worker could not open, and why, by name
    """

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
    min_link_gbps: float = 0.0
    tracing: Tracing = OFF
    not_available: Mapping[str, str] = field(default_factory=dict)


class PeerReads:
    """All reads from one owner incarnation.

    regions: the owner's memory. memory: its first region, which probes read
    on_change: called when the link breaks, works again, or may start another read
    is_idle: returns True if no pull wants to read, so that there is time to measure
    broken_by: TRANSFER_TIMEOUT after a read that timed out, TRANSFER_FAILED after one that failed,
        VALIDATION_FAILED if what was read is not the owner's, else None
    is_tried: True once a read has succeeded, since the last `restart`
    measured_bytes_per_s: speed of the fastest read of the last measurement; 0 before its first
    is_used: False while another backend reads from this owner; then nothing is reported
    longest_read_s: a limit of reads beside their deadlines
    """

    def __init__(
        self,
        owner: WorkerRef,
        regions: OwnerRegions,
        shared: Reading,
        *,
        send: Callable[[ReaderMessage], None],
        on_change: Callable[[], None],
        is_idle: Callable[[], bool],
        dialed_s: float,
    ) -> None:
        """`dialed_s`: when the attempt to connect began that the owner has answered. Costs are measured from
        then."""
        self.owner, self.regions = owner, regions
        self.memory = regions.memories[0]
        self.broken_by: Reason | None = None
        self.is_tried = False
        self.is_used = True
        self.measured_bytes_per_s = 0.0
        self.longest_read_s = float("inf")
        self.inflight_blocks = 0
        self.block_bytes = shared.layout.block_bytes
        self.max_slice_blocks = max(1, MAX_READ_BYTES // self.block_bytes)
        self.bandwidth = Bandwidth(
            deadline_min_s=shared.times.deadline_min_s, deadline_max_s=shared.times.deadline_max_s
        )
        self.costs = PullCosts()
        self.dialed_s = dialed_s
        self._shared, self._backend = shared, shared.backend
        self._send, self._on_change, self._is_idle = send, on_change, is_idle
        most = min(int(MAX_INFLIGHT_SHARE * shared.backend.num_blocks), MAX_INFLIGHT_BYTES // self.block_bytes)
        self._max_inflight = max(1, most)
        self._open_probes = 0
        self._doubted_blocks = 0
        self._doubted_probes = 0
        self._blocked_since_s: float | None = None
        self._blocked_limit_s = BLOCKED_DEADLINES * shared.times.deadline_max_s
        self._required = SpeedRequirement(shared.min_link_gbps)
        self._validation = ValidationRecord()
        self._clock = asyncio.get_running_loop().time

    @property
    def broken(self) -> bool:
        """True while no blocks are read, because a read timed out or failed."""
        return self.broken_by is not None

    @property
    def is_refused(self) -> bool:
        """True if the link was measured and is slower than `min_link_gbps`. It is broken, too."""
        return self._required.is_refused

    @property
    def is_invalid(self) -> bool:
        """True if reads have brought what is not the owner's. The link is broken, too."""
        return bool(self._validation.failure)

    @property
    def problem(self) -> str:
        """Reason why the link is not used, as text; empty if it is, or was not tried yet."""
        if self.is_invalid:
            return f"{Reason.VALIDATION_FAILED.value}: {self._validation.failure}"
        if self.is_refused:
            return f"refused: {self._required.refusal}"
        return self.broken_by.value if self.broken_by is not None else ""

    @property
    def num_startable_blocks(self) -> int:
        """Number of blocks whose read may start now."""
        is_usable = self.is_tried and self._required.is_met and not self.broken
        return self._max_inflight - self.inflight_blocks if is_usable else 0

    @property
    def may_probe(self) -> bool:
        """True if another probe may start. Their number is limited, because probes can get stuck, too.

        A refused link is only probed to measure it again, after a pause; an invalid one, to validate it.
        """
        now_s = self._clock()
        may_try = self._required.may_measure(now_s) and self._validation.may_try(now_s)
        return may_try and self._open_probes < MAX_OPEN_PROBES

    @property
    def is_blocked(self) -> bool:
        """True if reads in doubt have kept the link from working for `BLOCKED_DEADLINES`."""
        since_s = self._blocked_since_s
        return since_s is not None and self._clock() >= since_s + self._blocked_limit_s

    @property
    def transport(self) -> str:
        """Name of the transport; empty until it is known."""
        return self._backend.transport_to(self.memory)

    async def read(
        self, transfer_id: TransferId, source: KvDescriptor, own: Sequence[int]
    ) -> tuple[ReadId, ReadState | None]:
        """Read the source's blocks into own blocks.

        Returns the read's id and its state: terminal, IN_DOUBT, or None if the deadline passed while it still
        runs. The caller must then call `end_read` and `release` if it is terminal, else `quarantine`.
        """
        read_id = self._shared.next_read_id()
        started_s = self._clock()
        self._backend.start_read(read_id, source, own)
        self._notify_owner(read_id, transfer_id, source)
        state = await self._wait(read_id, self.inflight_blocks * self.block_bytes)
        if state is ReadState.DONE:
            self.bandwidth.ended(len(own) * self.block_bytes, started_s, self._clock())
        return read_id, state

    def release(self, read_id: ReadId) -> None:
        """Drop a terminal read, after its blocks were validated."""
        self._backend.release(read_id)

    def end_read(self, num_blocks: int) -> None:
        """Give back a terminal read's share of the in-flight limit."""
        self.inflight_blocks -= num_blocks
        asyncio.get_running_loop().call_soon(self._on_change)

    def quarantine(self, read_id: ReadId, own: Sequence[int], reason: str, *, in_doubt: bool) -> None:
        """Quarantine the blocks of a read that timed out or is in doubt until it is terminal.

        They count as in flight until then. `reason` is for the log.
        """
        num_doubted = len(own) if in_doubt else 0
        self._doubt(blocks=num_doubted)
        self._shared.observer.blocks_quarantined(self.owner, len(own))
        log.warning(
            "kv_read_quarantined",
            owner=str(self.owner),
            read_id=read_id,
            num_blocks=len(own),
            transport=self.transport,
            reason=reason,
        )

        def on_terminal(_state: ReadState) -> None:
            self.inflight_blocks -= len(own)
            self._doubt(blocks=-num_doubted)
            self._on_change()

        self._shared.quarantine.watch(read_id, own, on_terminal)

    async def read_generations(self, payload: ReadId, source: KvDescriptor) -> tuple[GenerationEntry, ...] | None:
        """Read the generation-table entries of the source's blocks. `payload`: the read of these blocks.

        Returns None if the read failed. Raises TimeoutError if its deadline passed, ReadLost if the owner has
        not served it.
        """
        read_id = self._shared.next_read_id()
        self._backend.start_read_generations(read_id, source, payload)
        state = await self._wait(read_id, self.inflight_blocks * self.block_bytes)
        if state is None or state is ReadState.IN_DOUBT:
            self._shared.quarantine.watch(read_id, (), lambda _state: None)
            if state is None:
                raise TimeoutError
            return None
        entries = self._backend.generations(read_id) if state is ReadState.DONE else None
        self._backend.release(read_id)
        if state is ReadState.LOST:
            raise ReadLost
        return entries

    def break_link(self, reason: Reason) -> None:
        """Mark the link as broken: nothing is read from this owner until a probe succeeds. Pulls fail with
        `reason`.

        A link that is broken already keeps its first reason.
        """
        if not self.broken:
            self.broken_by = reason
            self._required.reset()
            log.warning(
                "kv_link_broken",
                owner=str(self.owner),
                reason=reason.value,
                transport=self.transport,
                problem=self.problem,
            )
            self.publish()

    def blocks_valid(self) -> None:
        """Record that blocks of a pull were valid."""
        self._validation.blocks_valid()

    def pull_invalid(self, what: str) -> None:
        """Record a pull that has failed validation. After several in a row the link breaks.

        `what`: the field that was different
        """
        if self._validation.pull_invalid(what, self._clock()):
            self.break_link(Reason.VALIDATION_FAILED)

    async def _wait(self, read_id: ReadId, num_bytes: int) -> ReadState | None:
        """Wait for a read; None if its deadline passes.

        `num_bytes`: all bytes in flight, including this read.
        """
        try:
            async with asyncio.timeout(min(self.longest_read_s, self.bandwidth.deadline_s(num_bytes))):
                return await self._backend.wait(read_id)
        except TimeoutError:
            return None

    def _notify_owner(self, read_id: ReadId, transfer_id: TransferId, source: KvDescriptor) -> None:
        if self._backend.is_two_sided(source.memory):
            block_ids = self.regions.announced_ids(source)
            self._send(WillRead(transfer_id=transfer_id, read_id=read_id, block_ids=block_ids))

    # -- probes ------------------------------------------------------------------------------------

    async def probe(self, num_blocks: int = 1) -> ReadState | None:
        """Read blocks into scratch memory. A probe that succeeds repairs a broken link, unless it is refused
        or invalid.

        Returns the state: terminal, IN_DOUBT, or None if the deadline passed.
        """
        read_id, _source, state = await self._read_probe(num_blocks)
        if state is not None and state is not ReadState.IN_DOUBT:
            self._backend.release(read_id)
            self._probe_ended(state)
        return state

    async def _read_probe(self, num_blocks: int) -> tuple[ReadId, KvDescriptor, ReadState | None]:
        """Read blocks into scratch memory.

        The caller releases the read and records its end if it is terminal.
        """
        read_id = self._shared.next_read_id()
        source = KvDescriptor(memory=self.memory, block_ids=tuple(range(num_blocks)))
        started_s = self._clock()
        self._open_probes += 1
        self._backend.start_probe(read_id, source)
        self._notify_owner(read_id, PROBE_TRANSFER, source)
        state = await self._wait(read_id, (self.inflight_blocks + num_blocks) * self.block_bytes)
        if state is None or state is ReadState.IN_DOUBT:
            num_doubted = 1 if state is ReadState.IN_DOUBT else 0
            self._doubt(probes=num_doubted)

            def on_terminal(ended: ReadState) -> None:
                self._doubt(probes=-num_doubted)
                self._probe_ended(ended)

            self._shared.quarantine.watch(read_id, (), on_terminal)
        elif state is ReadState.DONE and self.is_tried:  # the first read includes connecting, so it is not measured
            self.bandwidth.ended(num_blocks * self.block_bytes, started_s, self._clock())
        return read_id, source, state

    def _probe_ended(self, state: ReadState) -> None:
        self._open_probes -= 1
        # While every block that may be in flight is quarantined, no read can start, so the link stays broken.
        may_read = self.inflight_blocks < self._max_inflight
        is_usable = may_read and not self.is_refused and not self.is_invalid
        if state is ReadState.DONE and is_usable and (self.broken or not self.is_tried):
            if self.broken:
                log.info("kv_link_repaired", owner=str(self.owner))
            self.is_tried, self.broken_by = True, None
            self.publish()

    def _doubt(self, *, blocks: int = 0, probes: int = 0) -> None:
        """Count blocks and probes in doubt, and note since when they leave no way to use the link."""
        self._doubted_blocks += blocks
        self._doubted_probes += probes
        if self._doubted_blocks < self._max_inflight and self._doubted_probes < MAX_OPEN_PROBES:
            self._blocked_since_s = None
        elif self._blocked_since_s is None:
            self._blocked_since_s = self._clock()

    async def repair(self) -> None:
        """Try to make a broken link usable: with one block, or by a measurement if a speed is required.

        An invalid link is validated before.
        """
        if not await self.revalidate():
            return
        if not self._required.is_met:
            await self.warm()
        else:
            await self.probe()

    async def revalidate(self) -> bool:
        """Validate an invalid link again. Returns True if it is not invalid any more.

        It is broken until a probe succeeds after this.
        """
        return not self.is_invalid or await self.validate()

    async def validate(self) -> bool:
        """Read a block and its entry, and break the link if they are not the owner's.

        Returns True if the link is valid.
        """
        read_id, source, state = await self._read_probe(1)
        if state is None or state is ReadState.IN_DOUBT:
            self.break_link(Reason.TRANSFER_TIMEOUT)
            return False
        reason, entries = Reason.TRANSFER_FAILED, None
        try:
            if state is ReadState.DONE:
                entries = await self.read_generations(read_id, source)
        except TimeoutError:
            reason = Reason.TRANSFER_TIMEOUT
        except ReadLost:
            log.warning("kv_entries_lost", owner=str(self.owner), transport=self.transport)
        finally:
            self._backend.release(read_id)
            self._probe_ended(state)
        if entries is None:
            self.break_link(reason)
            return False
        what = foreign_entries(entries, len(source.block_ids), self.owner.worker_epoch)
        if what is None:
            self._validation.entries_valid()
            return True
        self._validation.entries_invalid(what, self._clock())
        self.break_link(Reason.VALIDATION_FAILED)
        return False

    def restart(self) -> None:
        """Forget earlier measurements, because the link is connected and measured anew."""
        self.is_tried, self.measured_bytes_per_s, self.dialed_s = False, 0.0, self._clock()
        self.bandwidth.restart()

    async def warm(self) -> None:
        """Connect with a small read, then measure with larger reads while no pull wants to read.

        If a speed is required, pulls wait for the measurement.
        """
        self._required.postpone(self._clock())
        is_first = not self.is_tried
        if not await self._probe_or_break(1):
            return
        if is_first:
            self.costs.dial_s = self._clock() - self.dialed_s
        size, most = 1, min(self._backend.max_probe_blocks, self.memory.num_blocks)
        self.measured_bytes_per_s = 0.0
        while self._is_idle() or not self._required.is_met:
            started_s = self._clock()
            if not await self._probe_or_break(size):
                return
            duration_s = self._clock() - started_s
            rate = size * self.block_bytes / max(duration_s, _MIN_DURATION_S)
            self.measured_bytes_per_s = max(self.measured_bytes_per_s, rate)
            if size == most or duration_s > _SELF_TEST_S:
                break
            size = min(most, 4 * size)
        if not self._required.is_met:
            self._judge(self.measured_bytes_per_s)
        self.publish()
        if self.is_refused:
            return
        rate, transport = self.bandwidth.bytes_per_s or 0.0, self.transport
        fields = {"owner": str(self.owner), "transport": transport, "gigabytes_per_s": round(rate / 1e9, 3)}
        is_slow = size * self.block_bytes >= _MIN_MEASURED_BYTES and rate < SLOW_BYTES_PER_S
        if transport.startswith("tcp") or is_slow:
            log.warning("slow_kv_link_measured", **fields)
        else:
            log.info("kv_link_measured", **fields)

    def _judge(self, bytes_per_s: float) -> None:
        """Refuse the link if this is slower than what is required, or accept it."""
        was_refused = self.is_refused
        fields = {"owner": str(self.owner), "transport": self.transport}
        if self._required.judge(bytes_per_s, self._clock()):
            if was_refused:
                self.broken_by = None
                log.info("kv_link_accepted", **fields)
            return
        self.broken_by = Reason.TRANSFER_FAILED
        log.warning(
            "kv_link_refused", **fields, refusal=self._required.refusal, measured_again_after_s=self._required.retry_s
        )

    async def _probe_or_break(self, num_blocks: int) -> bool:
        """Return True if a probe succeeds; otherwise break the link."""
        state = await self.probe(num_blocks)
        if state is not ReadState.DONE:
            self.break_link(Reason.TRANSFER_TIMEOUT if state is None else Reason.TRANSFER_FAILED)
        return state is ReadState.DONE

    def publish(self) -> None:
        """Report the state of the link to the observer, and to the link itself."""
        if not self.is_used:
            return
        rate = self.bandwidth.bytes_per_s or 0.0
        self._shared.observer.link_changed(
            self.owner, transport=self.transport, bytes_per_s=rate, broken=self.broken, refused=self.is_refused
        )
        self._on_change()
