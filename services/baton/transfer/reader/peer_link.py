"""One standing stream to one life of an owner: dialled and re-dialled, its pulls followed, its leases
renewed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.core.cluster.worker_report import LinkReport
from baton.core.errors import LayoutMismatch, Reason, StreamBroken
from baton.core.ids import TransferId, WorkerRef
from baton.core.interfaces import Duplex
from baton.core.messages.jobs import PROTOCOL_VERSION
from baton.core.messages.peer_messages import (
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
from baton.transfer.reader.peer_reads import PeerReads, Reading
from baton.transfer.reader.pull import Pull

log = get_logger(__name__)

_MAX_UNANSWERED_RENEWALS = 1024


class PeerLink:
    """Any number of pulls from one life of an owner. Ends (`has_ended`) when that life refuses or cannot be
    reached any more."""

    def __init__(self, owner: WorkerRef, reading: Reading, on_ended: Callable[["PeerLink"], None]) -> None:
        self.owner = owner
        self.observer = reading.observer
        self.lease_s = reading.times.lease_s
        self.next_renewal = 1
        self.has_ended = False
        self.reads: PeerReads | None = None
        """None until the owner has said hello."""
        self._reading = reading
        self._on_ended = on_ended
        self._stream: Duplex[ReaderMessage, OwnerMessage] | None = None
        self._pulls: dict[TransferId, Pull] = {}
        self._sent_renewals: dict[int, float] = {}
        self._warmed = asyncio.Event()
        self._busy = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation repeats itself
        self._clock = asyncio.get_running_loop().time
        self._runner = asyncio.get_running_loop().create_task(self._run())
        self.spawn(self._tick())

    @property
    def is_broken(self) -> bool:
        return self.broken_by is not None

    @property
    def broken_by(self) -> Reason | None:
        """Why nothing can be read from this owner now; None when nothing is known against it."""
        return self.reads.broken_by if self.reads is not None else None

    def report(self) -> LinkReport:
        if self.reads is None:
            return LinkReport(peer=self.owner, bytes_per_s=0.0)
        return LinkReport(
            peer=self.owner,
            bytes_per_s=self.reads.bandwidth.bytes_per_s or 0.0,
            inflight_bytes=self.reads.inflight_blocks * self.reads.block_bytes,
            broken=self.reads.broken,
            transport=self.reads.transport,
        )

    async def warmed(self) -> bool:
        """Returns once the pair is known to work, or not to (False)."""
        await self._warmed.wait()
        return self.reads is not None and self.reads.is_tried and not self.reads.broken and not self.has_ended

    def probe(self) -> None:
        """Read a little once more, unless enough probes are under way."""
        if self.reads is not None and self.reads.may_probe and not self.has_ended:
            self.spawn(self._warm(self.reads))

    def follow(self, pull: Pull) -> None:
        self._pulls[pull.transfer_id] = pull
        self._busy.set()
        if self._stream is not None:
            pull.follow()

    def ended(self, pull: Pull) -> None:
        self._pulls.pop(pull.transfer_id, None)

    def send(self, message: ReaderMessage) -> None:
        """Send, or lose it with the stream: the next Follow, or the end of the lease, makes up for it."""
        if self._stream is None:
            return
        try:
            self._stream.send(message)
        except StreamBroken:
            self._stream = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that ends with the link."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def close(self, reason: Reason, message: str) -> None:
        """This life of the owner is over, or the reader leaves. Running reads stay watched until they are
        terminal."""
        if self.has_ended:
            return
        self.has_ended = True
        for pull in list(self._pulls.values()):
            pull.fail(reason, message)
        self._busy.set()
        self._warmed.set()
        if asyncio.current_task() is not self._runner:
            self._runner.cancel()
        if self.reads is not None:
            self._reading.backend.forget(self.reads.memory)
        self._on_ended(self)

    async def aclose(self) -> None:
        """After `close`: wait for the stream to be closed and for reads to be terminal or given up."""
        await asyncio.gather(self._runner, *self._tasks, return_exceptions=True)

    def pump(self) -> None:
        """Start slices while there is room: one pull after the other, so that a long one does not hold up a
        short one."""
        reads = self.reads
        if reads is None or self.has_ended:
            return
        while (room := reads.room) > 0:
            pull = next((p for p in self._pulls.values() if p.has_work), None)
            if pull is None:
                return
            self._pulls[pull.transfer_id] = self._pulls.pop(pull.transfer_id)  # to the end of the line
            reads.inflight_blocks += pull.start_slice(reads, min(room, reads.max_slice_blocks))

    def _reads_changed(self) -> None:
        """There is room, or the pair broke or works again."""
        if self.has_ended:
            return
        if self.broken_by is not None:
            self._busy.set()
            for pull in list(self._pulls.values()):
                pull.fail(self.broken_by, "another read of this worker got stuck or failed; probing it")
        self.pump()

    async def _warm(self, reads: PeerReads) -> None:
        await reads.warm()
        self._warmed.set()

    # The stream.

    async def _run(self) -> None:
        """Dial until this life of the owner refuses, or nobody answers any more."""
        times, delay_s, attempts = self._reading.times, self._reading.times.redial_min_s, 0
        try:
            while not self.has_ended:
                try:
                    async with asyncio.timeout(times.hello_s):
                        stream = await self._reading.network.open_peer(self.owner.address)
                    try:
                        if await self._say_hello(stream):
                            attempts, delay_s = 0, times.redial_min_s
                            await self._receive(stream)
                    finally:
                        self._stream = None
                        await stream.aclose()
                except (StreamBroken, TimeoutError):
                    pass
                attempts += 1
                if attempts > times.max_redials:
                    self.close(Reason.WORKER_LOST, "it cannot be reached")
                if self.has_ended:
                    return
                await asyncio.sleep(delay_s * (0.5 + self._reading.rng.random() / 2))
                delay_s = min(2 * delay_s, times.redial_max_s)
        except asyncio.CancelledError:
            if not self.has_ended:
                raise

    async def _say_hello(self, stream: Duplex[ReaderMessage, OwnerMessage]) -> bool:
        """Whether the owner is the life we mean and shares our layout; if not, the link ends."""
        reading = self._reading
        stream.send(PeerHello(reader=reading.worker, owner=self.owner, layout=reading.layout))
        async with asyncio.timeout(reading.times.hello_s):
            reply = await stream.receive()
        if not isinstance(reply, PeerHelloReply):
            raise StreamBroken(f"{self.owner} began with {type(reply).__name__} instead of a hello")
        reason, text = self._refusal(reply)
        if reason is None and self.reads is None:
            try:
                reading.backend.connect(reply.memory[0], reading.layout)
            except LayoutMismatch as mismatch:
                reason, text = Reason.LAYOUT_MISMATCH, str(mismatch)
        if reason is not None:
            log.warning("kv_peer_refused", owner=str(self.owner), reason=reason.value, refusal=text)
            self.close(reason, text)
            return False
        self.lease_s = reply.lease_s
        self._stream = stream
        if self.reads is None:
            self.reads = PeerReads(
                self.owner,
                reply.memory[0],
                reading,
                send=self.send,
                on_change=self._reads_changed,
                is_idle=lambda: not self._pulls and not self.has_ended,
            )
            self.spawn(self._warm(self.reads))
        for pull in list(self._pulls.values()):
            pull.follow()
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
                f"{Reason.PROTOCOL_VERSION.value}: {reply.protocol_version} there, {PROTOCOL_VERSION} here",
            )
        mismatch = self._reading.layout.mismatch(reply.layout)
        if mismatch is not None:
            return Reason.LAYOUT_MISMATCH, f"{Reason.LAYOUT_MISMATCH.value}: {mismatch}"
        if len(reply.memory) != 1:
            return Reason.LAYOUT_MISMATCH, f"shards: {len(reply.memory)} there, 1 here"
        return None, ""

    async def _receive(self, stream: Duplex[ReaderMessage, OwnerMessage]) -> None:
        while True:
            message = await stream.receive()
            match message:
                case KvReady() | Lost():
                    pull = self._pulls.get(message.transfer_id)
                    if pull is None:
                        continue  # it has ended here: the owner will know from our farewell
                    if isinstance(message, KvReady):
                        pull.on_ready(message)
                    else:
                        pull.fail(message.reason, f"its owner gave it up ({message.reason.value})")
                case Renewed():
                    self._on_renewed(message)
                case PeerHelloReply():
                    raise StreamBroken(f"{self.owner} said hello twice")

    def _on_renewed(self, message: Renewed) -> None:
        sent_s = self._sent_renewals.pop(message.renewal, None)
        for number in [number for number in self._sent_renewals if number < message.renewal]:
            del self._sent_renewals[number]
        for transfer_id in message.lost:
            if transfer_id in self._pulls:
                self._pulls[transfer_id].fail(Reason.LEASE_LOST, "its owner no longer holds the lease")
        if sent_s is not None:
            for pull in self._pulls.values():
                pull.renewed(message.renewal, sent_s)

    async def _tick(self) -> None:
        """While pulls are open or the pair is broken: renew, look for leases that have ended, probe."""
        renew_s = self._reading.times.renew_s
        while not self.has_ended:
            if not self._pulls and not self.is_broken:
                self._busy.clear()
                await self._busy.wait()
                continue
            now_s = self._clock()
            for pull in list(self._pulls.values()):
                if now_s >= pull.lease_ends_s(self.lease_s):
                    pull.fail(Reason.LEASE_LOST, "the owner has not answered for a lease's length")
            if self._pulls and self._stream is not None:
                self._renew(now_s)
            if self.reads is not None and self.reads.broken and self.reads.may_probe and self._stream is not None:
                await self.reads.probe()
            await asyncio.sleep(renew_s)

    def _renew(self, now_s: float) -> None:
        self._sent_renewals[self.next_renewal] = now_s
        if len(self._sent_renewals) > _MAX_UNANSWERED_RENEWALS:
            del self._sent_renewals[next(iter(self._sent_renewals))]
        self.send(Renew(renewal=self.next_renewal))
        self.next_renewal += 1
