"""Serves peers that read KV from this worker: one stream a reader's life, and the clock that `KvOwner` does
not have."""

import asyncio
from collections.abc import Sequence

from baton.core.errors import Reason, StreamBroken
from baton.core.ids import Incarnation, JobId, WorkerRef
from baton.core.interfaces import Duplex, PinPool
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import PROTOCOL_VERSION
from baton.core.messages.peer_messages import (
    Abandon,
    FirstToken,
    Follow,
    KvReady,
    Lost,
    OwnerMessage,
    PeerHello,
    PeerHelloReply,
    ReaderMessage,
    Release,
    Renew,
    WillRead,
)
from baton.core.request import LegTimeline
from baton.runtime.failpoints import hit
from baton.runtime.logging import get_logger
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.backend import TransferBackend
from baton.transfer.owner.kv_owner import KvOwner, OwnerCounts, PrefixLookup

log = get_logger(__name__)

PeerStream = Duplex[OwnerMessage, ReaderMessage]


class OwnerService:
    """The owner's side of every transfer of one worker. `born`, `allocated`, `announce` and `lost` are the
    worker's own words about its jobs (see `KvOwner`); `serve` answers one reader's stream. Used from one
    event loop; nothing blocks."""

    def __init__(
        self,
        *,
        worker: WorkerRef,
        layout: KvLayout,
        backend: TransferBackend,
        pins: PinPool,
        lookup: PrefixLookup,
        lease_s: float,
        claim_s: float,
        early_s: float,
        hello_s: float = 5.0,
        tracing: Tracing = OFF,
    ) -> None:
        self._worker, self._layout, self._backend = worker, layout, backend
        self._lease_s, self._hello_s = lease_s, hello_s
        self._streams: dict[Incarnation, PeerStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        """When `_timer` is due: uvloop's handle of a time that has passed cannot say."""
        self.owner = KvOwner(
            layout=layout,
            num_blocks=backend.memory[0].num_blocks,
            pins=pins,
            send=self._send,
            lookup=lookup,
            lease_s=lease_s,
            claim_s=claim_s,
            early_s=early_s,
            tracing=tracing,
        )

    @property
    def open_leases(self) -> int:
        return self.owner.open_leases

    @property
    def counts(self) -> OwnerCounts:
        return self.owner.counts

    def born(self, job: JobId, reader: WorkerRef) -> None:
        self.owner.born(job, reader, self._now_s())
        self._arm()

    def allocated(self, job: JobId, block_table: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        self.owner.allocated(job, block_table, hashes, self._now_s())

    def announce(
        self,
        job: JobId,
        num_computed_tokens: int,
        *,
        final: bool = False,
        first_tokens: Sequence[FirstToken] = (),
        timeline: LegTimeline | None = None,
    ) -> None:
        self.owner.announce(
            job, num_computed_tokens, self._now_s(), final=final, first_tokens=first_tokens, timeline=timeline
        )
        self._arm()
        hit("transfer.announced", job=job, num_computed_tokens=num_computed_tokens, final=final)

    def lost(self, job: JobId, reason: Reason) -> None:
        self.owner.lost(job, reason, self._now_s())
        self._arm()

    async def serve(self, stream: PeerStream) -> None:
        """Answer one reader until its stream breaks. Ends no lease."""
        try:
            async with asyncio.timeout(self._hello_s):
                hello = await stream.receive()
            refusal = self._refusal(hello)
            if refusal or not isinstance(hello, PeerHello):
                log.warning("peer_refused", refusal=refusal)
                self._reply(stream, refusal)
                return
            await self._serve_reader(stream, hello.reader)
        except (StreamBroken, TimeoutError):
            pass
        finally:
            await stream.aclose()

    async def aclose(self) -> None:
        """End every transfer and stream: the worker leaves."""
        self.owner.close(Reason.WORKER_LOST, self._now_s())
        if self._timer is not None:
            self._timer.cancel()
        for stream in list(self._streams.values()):
            await stream.aclose()

    def _refusal(self, hello: ReaderMessage) -> str:
        """What does not fit, beginning with the word of a `Reason`; empty if everything does."""
        if not isinstance(hello, PeerHello):
            return f"{Reason.PROTOCOL_VERSION.value}: the first message must be a hello, not {type(hello).__name__}"
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"{Reason.PROTOCOL_VERSION.value}: {PROTOCOL_VERSION} here, {hello.protocol_version} there; run one release of Baton"
        if not hello.owner.is_same_incarnation(self._worker):
            return f"{Reason.WRONG_EPOCH.value}: this is {self._worker}, not {hello.owner}"
        mismatch = self._layout.mismatch(hello.layout)
        if mismatch is not None:
            return f"{Reason.LAYOUT_MISMATCH.value}: {mismatch}; start both workers with the same model and settings"
        return ""

    def _reply(self, stream: PeerStream, refusal: str = "") -> None:
        memory = () if refusal else self._backend.memory
        lease_s = 0.0 if refusal else self._lease_s
        stream.send(
            PeerHelloReply(owner=self._worker, layout=self._layout, memory=memory, lease_s=lease_s, refusal=refusal)
        )

    async def _serve_reader(self, stream: PeerStream, reader: WorkerRef) -> None:
        incarnation = reader.incarnation
        before = self._streams.get(incarnation)
        self._streams[incarnation] = stream
        generation = self.owner.stream_opened()
        if before is not None:
            await before.aclose()  # the reader has dialled again: what still waits in the old stream must not overtake
        try:
            self._reply(stream)
            while True:
                message = await stream.receive()
                if self._streams.get(incarnation) is not stream:
                    return
                self._take(reader, message, generation)
                self._arm()
        finally:
            if self._streams.get(incarnation) is stream:
                del self._streams[incarnation]

    def _take(self, reader: WorkerRef, message: ReaderMessage, generation: int) -> None:
        now_s = self._now_s()
        match message:
            case Follow():
                self.owner.follow(reader, message, generation, now_s)
            case Renew():
                self.owner.renew(reader, message, generation, now_s)
            case WillRead():
                if self.owner.may_read(reader, message.transfer_id, message.block_ids):
                    self._backend.expect_read(message.read_id, reader, message.block_ids)
                else:
                    self._send(reader, Lost(transfer_id=message.transfer_id, reason=Reason.LEASE_LOST))
            case Release() | Abandon():
                self.owner.release(reader, message, now_s)
            case PeerHello():
                log.warning("peer_hello_twice", reader=str(reader))

    def _send(self, reader: WorkerRef, message: OwnerMessage) -> None:
        stream = self._streams.get(reader.incarnation)
        if stream is None:
            return  # the reader's next Follow brings it
        if isinstance(message, KvReady):
            self._backend.offer(message.block_ids)
        try:
            stream.send(message)
        except StreamBroken:
            self._streams.pop(reader.incarnation, None)

    def _arm(self) -> None:
        """Have `_reap` called at the next deadline."""
        next_s = self.owner.next_deadline_s
        if self._timer is not None and next_s is not None and self._timer_s <= next_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_s is not None:
            self._timer, self._timer_s = asyncio.get_running_loop().call_at(next_s, self._reap), next_s

    def _reap(self) -> None:
        self._timer = None
        self.owner.expire(self._now_s())
        self._arm()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
