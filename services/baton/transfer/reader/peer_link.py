"""The link to one owner incarnation: keeps the stream connected, follows pulls, and renews leases."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from baton.core.cluster.worker_report import LinkReport
from baton.core.errors import LayoutMismatch, Reason, StreamBroken
from baton.core.ids import TransferId, WorkerRef
from baton.core.interfaces import Duplex
from baton.core.messages.jobs import PROTOCOL_VERSION
from baton.core.messages.peer_messages import (
    GroupMessage,
    KvReady,
    Lost,
    OwnerMessage,
    PeerHello,
    PeerHelloReply,
    ReaderMessage,
    Renew,
    Renewed,
)
from baton.runtime.logging import get_logger
from baton.transfer.backend import SendGroup, drop_message
from baton.transfer.reader.backend_choice import BackendChoice
from baton.transfer.reader.owner_regions import MAX_REGIONS, OwnerRegions, regions_by_transfer
from baton.transfer.reader.peer_reads import PeerReads, Reading
from baton.transfer.reader.pull import Pull

log = get_logger(__name__)

_MAX_UNANSWERED_RENEWALS = 1024
_FINAL_REASONS = (Reason.INVALID_GRAMMAR, Reason.NO_TOKEN_LEFT)
"""Failures at the owner that another attempt would repeat."""


class PeerLink:
    """The stream to one owner incarnation and all pulls from it.

    The link ends (`has_ended`) if the owner refuses it or cannot be reached. `reads` is None until the owner
    has answered the hello, and a backend was chosen if both have several.
    """

    def __init__(self, owner: WorkerRef, reading: Reading, on_ended: Callable[["PeerLink"], None]) -> None:
        self.owner = owner
        self.observer = reading.observer
        self.lease_s = reading.times.lease_s
        self.next_renewal = 1
        self.has_ended = False
        self._choice: BackendChoice | None = None
        self._send_group: SendGroup = drop_message
        self._reading = reading
        self._on_ended = on_ended
        self._stream: Duplex[ReaderMessage, OwnerMessage] | None = None
        self._pulls: dict[TransferId, Pull] = {}
        self._sent_renewals: dict[int, float] = {}
        self._warmed = asyncio.Event()
        self._is_probing = False
        self._busy = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered, so that simulations are reproducible
        self._clock = asyncio.get_running_loop().time
        self._runner = asyncio.get_running_loop().create_task(self._run())
        self.spawn(self._tick())

    @property
    def reads(self) -> PeerReads | None:
        """The reads of the backend that is used; None if there is none yet."""
        return self._choice.reads if self._choice is not None else None

    @property
    def num_owner_blocks(self) -> int:
        """Number of blocks in all regions of the owner; 0 before the hello reply."""
        return self._choice.num_blocks if self._choice is not None else 0

    @property
    def is_broken(self) -> bool:
        """True after a KV read over this link timed out or failed, until a probe succeeds."""
        return self.broken_by is not None

    @property
    def is_blocked(self) -> bool:
        """True if reads in doubt have kept the link from working for a long time. They may never end."""
        return self.reads is not None and self.reads.is_blocked

    @property
    def broken_by(self) -> Reason | None:
        """The reason why the link is broken; None if it is not."""
        return self._choice.broken_by if self._choice is not None else None

    @property
    def problem(self) -> str:
        """Reason why the link is not used, as text; empty if it is."""
        if self.reads is None or self.broken_by is None:
            return ""
        return self.reads.problem or self.broken_by.value

    def report(self) -> LinkReport:
        """Return the state of the link for the worker report."""
        if self.reads is None:
            return LinkReport(peer=self.owner, bytes_per_s=0.0)
        return LinkReport(
            peer=self.owner,
            bytes_per_s=self.reads.bandwidth.bytes_per_s or 0.0,
            pull_s=self.reads.costs.pull_s,
            exposed_s=self.reads.costs.exposed_s,
            dial_s=self.reads.costs.dial_s,
            inflight_bytes=self.reads.inflight_blocks * self.reads.block_bytes,
            broken=self.is_broken,
            transport=self.reads.transport,
            problem=self.problem,
            choice=self._choice.reason if self._choice is not None else "",
        )

    async def warmed(self) -> bool:
        """Wait for the first measurement. Returns True if the link is usable."""
        await self._warmed.wait()
        return self.reads is not None and self.reads.is_tried and not self.reads.broken and not self.has_ended

    def probe(self) -> None:
        """Start a probe, unless enough probes are running."""
        if self._choice is not None and not self.has_ended:
            self._start_warming(self._choice)

    def follow(self, pull: Pull) -> None:
        """Add a pull and send its Follow, now or once the stream is connected."""
        self._pulls[pull.transfer_id] = pull
        self._busy.set()
        if self._stream is not None:
            pull.follow()

    def ended(self, pull: Pull) -> None:
        """Remove a pull that has ended."""
        self._pulls.pop(pull.transfer_id, None)

    def send(self, message: ReaderMessage) -> None:
        """Send a message.

        If the stream is broken, the message is lost. The owner then learns its content from the next Follow,
        or the lease ends.
        """
        if self._stream is None:
            return
        try:
            self._stream.send(message)
        except StreamBroken:
            self._stream = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that `aclose` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def close(self, reason: Reason, message: str) -> None:
        """End the link and fail its pulls. Running reads are watched until they are terminal."""
        if self.has_ended:
            return
        self.has_ended = True
        for pull in list(self._pulls.values()):
            pull.fail(reason, message)
        self._busy.set()
        self._warmed.set()
        if asyncio.current_task() is not self._runner:
            self._runner.cancel()
        if self._choice is not None:
            self._choice.forget()
        self._on_ended(self)

    async def aclose(self) -> None:
        """Wait, after `close`, until the stream is closed and all reads are terminal or past their
        deadline."""
        await asyncio.gather(self._runner, *self._tasks, return_exceptions=True)

    def start_reads(self) -> None:
        """Start slices while the in-flight limit allows it, in turn for all pulls, so that a long one delays
        no other."""
        reads = self.reads
        if reads is None or self.has_ended or self._is_choosing:
            return
        if self._stream is None and self._reading.backend.is_two_sided(reads.memory):
            return  # the owner would not learn of them
        while (num_blocks := reads.num_startable_blocks) > 0:
            pull = next((p for p in self._pulls.values() if p.has_work), None)
            if pull is None:
                return
            self._pulls[pull.transfer_id] = self._pulls.pop(pull.transfer_id)  # move to the end of the order
            reads.inflight_blocks += pull.start_slice(reads, min(num_blocks, reads.max_slice_blocks))

    def _reads_changed(self) -> None:
        """Handle that a read has ended, or that the link broke or works again."""
        if self.has_ended:
            return
        if self.broken_by is not None:
            self._busy.set()
            for pull in list(self._pulls.values()):
                pull.fail(self.broken_by, f"the link is not used ({self.problem}); it is tried again")
        self.start_reads()

    def _start_warming(self, choice: BackendChoice) -> None:
        """Start to measure the link, unless it is being probed, or enough probes are running."""
        if choice.may_start and not self._is_probing:
            self._is_probing = True
            self.spawn(self._warm(choice))

    async def _warm(self, choice: BackendChoice) -> None:
        try:
            await choice.measure()
        finally:
            self._is_probing = False
            self._warmed.set()

    def _start_repair(self, choice: BackendChoice) -> None:
        """Start to probe the broken link, unless it is being probed, or enough probes are running."""
        if self.is_broken and choice.may_start and self._stream is not None and not self._is_probing:
            self._is_probing = True
            self.spawn(self._repair(choice))

    async def _repair(self, choice: BackendChoice) -> None:
        try:
            await choice.repair()
        finally:
            self._is_probing = False

    # -- stream ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep the stream connected until the owner refuses it or cannot be reached."""
        times, delay_s, attempts = self._reading.times, self._reading.times.redial_min_s, 0
        try:
            while not self.has_ended:
                dialed_s = self._clock()
                try:
                    async with asyncio.timeout(times.hello_s):
                        stream = await self._reading.network.open_peer(self.owner.address)
                    try:
                        if await self._exchange_hellos(stream, dialed_s):
                            attempts, delay_s = 0, times.redial_min_s
                            await self._receive(stream)
                    finally:
                        self._stream = None
                        await stream.aclose()
                except (StreamBroken, TimeoutError):
                    pass
                attempts += 1
                if attempts > times.max_redials:
                    self.close(Reason.WORKER_LOST, "the owner cannot be reached")
                if self.has_ended:
                    return
                await asyncio.sleep(delay_s * (0.5 + self._reading.rng.random() / 2))
                delay_s = min(2 * delay_s, times.redial_max_s)
        except asyncio.CancelledError:
            if not self.has_ended:
                raise
        except Exception:
            log.exception("kv_link_failed", owner=str(self.owner))
            self.close(Reason.TRANSFER_FAILED, "the link has failed; the worker's log has the error")

    async def _exchange_hellos(self, stream: Duplex[ReaderMessage, OwnerMessage], dialed_s: float) -> bool:
        """Send the hello and check the reply.

        Returns False, and ends the link, if epoch or layout do not match.
        """
        reading = self._reading
        stream.send(
            PeerHello(
                reader=reading.worker,
                owner=self.owner,
                layout=reading.layout,
                max_regions=MAX_REGIONS,
                transfers=reading.backend.transfers,
            )
        )
        async with asyncio.timeout(reading.times.hello_s):
            reply = await stream.receive()
        if not isinstance(reply, PeerHelloReply):
            raise StreamBroken(f"the first message of {self.owner} is {type(reply).__name__}; it must be a hello reply")
        reason, text = self._refusal(reply)
        known = self._choice
        if reason is None:
            reason, text = self._connect_backends(reply, stream, dialed_s)
        if reason is not None:
            log.warning("kv_owner_refused", owner=str(self.owner), reason=reason.value, refusal=text)
            self.close(reason, text)
            return False
        self.lease_s = reply.lease_s
        self._stream = stream
        if known is None and self._choice is not None:
            self._start_warming(self._choice)
        for pull in list(self._pulls.values()):
            pull.follow()
        self.start_reads()
        return True

    def _refusal(self, reply: PeerHelloReply) -> tuple[Reason | None, str]:
        if reply.refusal:
            word = reply.refusal.split(":", 1)[0]
            known = {reason.value: reason for reason in Reason}
            return known.get(word, Reason.TRANSFER_FAILED), reply.refusal
        if not reply.owner.is_same_incarnation(self.owner):
            return Reason.WRONG_EPOCH, f"{Reason.WRONG_EPOCH.value}: {reply.owner} answered"
        if reply.protocol_version != PROTOCOL_VERSION:
            return (
                Reason.PROTOCOL_VERSION,
                f"{Reason.PROTOCOL_VERSION.value}: the owner supports {reply.protocol_version}, "
                f"the reader {PROTOCOL_VERSION}",
            )
        mismatch = self._reading.layout.mismatch(reply.layout)
        if mismatch is not None:
            return Reason.LAYOUT_MISMATCH, f"{Reason.LAYOUT_MISMATCH.value}: {mismatch}"
        return None, ""

    def _connect_backends(
        self, reply: PeerHelloReply, stream: Duplex[ReaderMessage, OwnerMessage], dialed_s: float
    ) -> tuple[Reason | None, str]:
        """Connect the backends to the owner's memory, on this stream. Returns why it is refused, if it is."""
        self._send_group = partial(_send_group, stream)
        try:
            self._choice = self._choice or self._backends_of(reply, dialed_s)
            self._choice.reconnect()
        except LayoutMismatch as mismatch:
            return Reason.LAYOUT_MISMATCH, str(mismatch)
        return None, ""

    def _backends_of(self, reply: PeerHelloReply, dialed_s: float) -> BackendChoice:
        """Return the backends that can read from the owner.

        Raises LayoutMismatch if there are none. If there are several, those are left out whose memory does
        not fit, such as shared memory of another host.
        """
        backend = self._reading.backend
        found: list[OwnerRegions] = []
        left_out = dict(self._reading.not_available)
        regions = regions_by_transfer(self.owner, reply.memory, backend.transfers)
        theirs = {each.transfer or backend.transfers[0] for each in regions}
        left_out |= {name: "the owner does not have it" for name in backend.transfers if name not in theirs}
        for number, each in enumerate(regions):
            try:
                self._connect(each)
            except LayoutMismatch as mismatch:
                for memory in each.memories:
                    backend.forget(memory)
                if number == len(regions) - 1 and not found:
                    raise
                log.info("kv_backend_left_out", owner=str(self.owner), transfer=each.transfer, problem=str(mismatch))
                left_out[each.transfer] = str(mismatch)
                continue
            found.append(each)
        return BackendChoice(
            [self._reads_of(each, dialed_s) for each in found],
            backend,
            connect=lambda reads: self._connect(reads.regions),
            observer=self.observer,
            left_out=left_out,
        )

    def _reads_of(self, regions: OwnerRegions, dialed_s: float) -> PeerReads:
        return PeerReads(
            self.owner,
            regions,
            self._reading,
            send=self.send,
            on_change=self._reads_changed,
            is_idle=lambda: not self.has_ended and (not self._pulls or self._is_choosing),
            dialed_s=dialed_s,
        )

    def _connect(self, regions: OwnerRegions) -> None:
        for memory in regions.memories:
            self._reading.backend.connect(memory, self._reading.layout, self._send_group)

    @property
    def _is_choosing(self) -> bool:
        return self._choice is not None and self._choice.is_choosing

    async def _receive(self, stream: Duplex[ReaderMessage, OwnerMessage]) -> None:
        while True:
            message = await stream.receive()
            match message:
                case KvReady() | Lost():
                    pull = self._pulls.get(message.transfer_id)
                    if pull is None:
                        continue  # it has ended here; Release or Abandon is under way
                    if isinstance(message, KvReady):
                        pull.on_ready(message)
                    else:
                        self._fail(pull, message.reason)
                case Renewed():
                    self._on_renewed(message)
                case GroupMessage():
                    if self._choice is not None:
                        self._choice.receive(message)
                case PeerHelloReply():
                    raise StreamBroken(f"{self.owner} sent a second hello reply")

    @staticmethod
    def _fail(pull: Pull, reason: Reason) -> None:
        """End a pull whose owner has ended it."""
        if reason in _FINAL_REASONS:
            message = f"the prefill worker refused the request ({reason.value})"
            pull.fail(reason, message, code=reason.codes[0], retriable=False)
        else:
            pull.fail(reason, f"the owner ended the transfer ({reason.value})")

    def _on_renewed(self, message: Renewed) -> None:
        sent_s = self._sent_renewals.pop(message.renewal, None)
        for number in [number for number in self._sent_renewals if number < message.renewal]:
            del self._sent_renewals[number]
        for transfer_id in message.lost:
            if transfer_id in self._pulls:
                self._pulls[transfer_id].fail(Reason.LEASE_LOST, "the owner no longer holds the lease")
        if sent_s is not None:
            for pull in self._pulls.values():
                pull.renewed(message.renewal, sent_s)

    async def _tick(self) -> None:
        """Renew leases, fail pulls whose lease has ended, and probe a broken link.

        Sleeps while there is nothing to do.
        """
        renew_s = self._reading.times.renew_s
        while not self.has_ended:
            if not self._pulls and not self.is_broken:
                self._busy.clear()
                await self._busy.wait()
                continue
            now_s = self._clock()
            for pull in list(self._pulls.values()):
                if now_s >= pull.lease_ends_s(self.lease_s):
                    pull.fail(Reason.LEASE_LOST, "the owner answered no renewal for the length of a lease")
            if self._pulls and self._stream is not None:
                self._renew(now_s)
            if self._choice is not None:
                self._start_repair(self._choice)
            await asyncio.sleep(renew_s)

    def _renew(self, now_s: float) -> None:
        self._sent_renewals[self.next_renewal] = now_s
        if len(self._sent_renewals) > _MAX_UNANSWERED_RENEWALS:
            del self._sent_renewals[next(iter(self._sent_renewals))]
        self.send(Renew(renewal=self.next_renewal))
        self.next_renewal += 1


def _send_group(stream: Duplex[ReaderMessage, OwnerMessage], message: GroupMessage) -> None:
    """Send a message of a process group on the stream that the group belongs to, not on a later one."""
    with suppress(StreamBroken):
        stream.send(message)
