"""Serves peers that read KV from this worker: one stream per reader incarnation, and the clock for
`KvOwner`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from baton.core.errors import Reason, StreamBroken
from baton.core.ids import Incarnation, JobId, WorkerRef
from baton.core.interfaces import Duplex, PinPool
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.jobs import PROTOCOL_VERSION
from baton.core.messages.peer_messages import (
    Abandon,
    FirstToken,
    Follow,
    GroupMessage,
    HashRange,
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
from baton.core.request import LegTimeline, SessionKey
from baton.runtime.failpoints import hit
from baton.runtime.logging import get_logger
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.backend import ReadServer, TransferBackend
from baton.transfer.owner.ended_transfers import PullKey
from baton.transfer.owner.kv_owner import KvOwner, OwnerCounts, PrefixLookup, SessionMoved

log = get_logger(__name__)

PeerStream = Duplex[OwnerMessage, ReaderMessage]
ReloadPrefix = Callable[[HashRange], Awaitable[object] | None]
"""Starts to reload what peers cannot read of a prefix, within `reload_within_s`. Returns what ends with the
reload; None if there is nothing to reload, or if it does not pay."""


class OwnerService:
    """The owner's side of every transfer of one worker.

    The worker calls `create`, `allocated`, `announce` and `lost` for its jobs; see `KvOwner`. `serve` handles
    the stream of one reader. Used from one event loop; no method blocks.
    """

    def __init__(
        self,
        *,
        worker: WorkerRef,
        layout: KvLayout,
        backend: TransferBackend,
        pins: PinPool,
        lookup: PrefixLookup,
        reload_prefix: ReloadPrefix = lambda _prefix: None,
        on_session_moved: SessionMoved = lambda _session, _num_blocks: None,
        lease_s: float,
        claim_timeout_s: float,
        reorder_window_s: float,
        hello_s: float = 5.0,
        tracing: Tracing = OFF,
    ) -> None:
        self._worker, self._layout, self._backend = worker, layout, backend
        self._lease_s, self._hello_s = lease_s, hello_s
        self._reload_prefix = reload_prefix
        self._reloading: dict[asyncio.Task[None], None] = {}
        self._streams: dict[Incarnation, PeerStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when `_timer` is due; uvloop's handles do not tell after that time
        self.owner = KvOwner(
            layout=layout,
            num_blocks=backend.num_blocks,
            pins=pins,
            send=self._send,
            lookup=lookup,
            start_reload=self._start_reload,
            on_session_moved=on_session_moved,
            lease_s=lease_s,
            claim_timeout_s=claim_timeout_s,
            reorder_window_s=reorder_window_s,
            tracing=tracing,
        )

    @property
    def open_leases(self) -> int:
        """Number of transfers that have not ended."""
        return self.owner.open_leases

    @property
    def counts(self) -> OwnerCounts:
        """Counters since the start."""
        return self.owner.counts

    def create(self, job: JobId, reader: WorkerRef, *, moving_session: SessionKey | None = None) -> None:
        """Create the transfer of an accepted job whose KV `reader` will pull, see `KvOwner.create`."""
        self.owner.create(job, reader, self._now_s(), moving_session=moving_session)
        self._schedule_expiry()

    def allocated(
        self,
        job: JobId,
        block_table: Sequence[int],
        hashes: Sequence[BlockHash],
        *,
        first_blocks: tuple[int, ...] = (0,),
    ) -> None:
        """Pin the blocks of a job's prompt, see `KvOwner.allocated`."""
        self.owner.allocated(job, block_table, hashes, self._now_s(), first_blocks=first_blocks)

    def announce(
        self,
        job: JobId,
        num_computed_tokens: int,
        *,
        final: bool = False,
        first_tokens: Sequence[FirstToken] = (),
        timeline: LegTimeline | None = None,
    ) -> None:
        """Announce computed KV to the reader; see `KvOwner.announce`."""
        self.owner.announce(
            job, num_computed_tokens, self._now_s(), final=final, first_tokens=first_tokens, timeline=timeline
        )
        self._schedule_expiry()
        hit("transfer.announced", job=job, num_computed_tokens=num_computed_tokens, final=final)

    def lost(self, job: JobId, reason: Reason) -> None:
        """Handle that the job's sequence ended before its prompt was computed."""
        self.owner.lost(job, reason, self._now_s())
        self._schedule_expiry()

    async def serve(self, stream: PeerStream) -> None:
        """Serve one reader until its stream breaks. A broken stream ends no lease."""
        try:
            async with asyncio.timeout(self._hello_s):
                hello = await stream.receive()
            refusal = self._refusal(hello)
            if refusal or not isinstance(hello, PeerHello):
                log.warning("peer_refused", refusal=refusal)
                self._reply(stream, refusal=refusal)
                return
            await self._serve_reader(stream, hello)
        except (StreamBroken, TimeoutError):
            pass
        finally:
            await stream.aclose()

    async def aclose(self) -> None:
        """End all transfers and streams, because the worker is shutting down."""
        self.owner.close(Reason.WORKER_LOST, self._now_s())
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._reloading):
            task.cancel()
        for stream in list(self._streams.values()):
            await stream.aclose()

    def _refusal(self, hello: ReaderMessage) -> str:
        """Return why the hello is refused, beginning with a `Reason` value, or an empty string."""
        if not isinstance(hello, PeerHello):
            return f"{Reason.PROTOCOL_VERSION.value}: the first message is {type(hello).__name__}; it must be a hello"
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"{Reason.PROTOCOL_VERSION.value}: the owner supports {PROTOCOL_VERSION}, the reader "
                f"{hello.protocol_version}; run the same release of Baton on both"
            )
        if not hello.owner.is_same_incarnation(self._worker):
            return f"{Reason.WRONG_EPOCH.value}: the hello is for {hello.owner}; this worker is {self._worker}"
        mismatch = self._layout.mismatch(hello.layout)
        if mismatch is not None:
            return f"{Reason.LAYOUT_MISMATCH.value}: {mismatch}; start both workers with the same model and settings"
        return ""

    def _reply(self, stream: PeerStream, hello: PeerHello | None = None, refusal: str = "") -> None:
        memory = () if hello is None else readable_regions(self._backend.memory, hello)
        lease_s = 0.0 if refusal else self._lease_s
        stream.send(
            PeerHelloReply(owner=self._worker, layout=self._layout, memory=memory, lease_s=lease_s, refusal=refusal)
        )

    async def _serve_reader(self, stream: PeerStream, hello: PeerHello) -> None:
        incarnation = hello.reader.incarnation
        # before `_send` finds the stream: the reader expects the reply first
        self._reply(stream, hello)
        previous = self._streams.get(incarnation)
        self._streams[incarnation] = stream
        stream_number = self.owner.stream_opened()
        server = self._backend.serve(hello.reader, partial(_send_group, stream))
        try:
            if previous is not None:
                await previous.aclose()  # the reader reconnected; messages of the old stream must not arrive later
            while True:
                message = await stream.receive()
                if self._streams.get(incarnation) is not stream:
                    return
                self._handle(hello, message, stream_number, server)
                self._schedule_expiry()
        finally:
            server.close()
            if self._streams.get(incarnation) is stream:
                del self._streams[incarnation]

    def _handle(self, hello: PeerHello, message: ReaderMessage, stream_number: int, server: ReadServer) -> None:
        reader, now_s = hello.reader, self._now_s()
        match message:
            case Follow():
                self.owner.follow(reader, message, stream_number, now_s, max_regions=hello.num_readable_regions)
            case Renew():
                self.owner.renew(reader, message, stream_number, now_s)
            case WillRead():
                if self.owner.may_read(reader, message.transfer_id, message.block_ids):
                    server.expect_read(message.read_id, message.block_ids)
                else:
                    # First the reason, so that the reader does not blame the link for the refused read.
                    self._send(reader, Lost(transfer_id=message.transfer_id, reason=Reason.LEASE_LOST))
                    server.refuse_read(message.read_id, len(message.block_ids))
            case GroupMessage():
                server.receive(message)
            case Release() | Abandon():
                self.owner.release(reader, message, now_s)
            case PeerHello():
                log.warning("second_peer_hello_received", reader=str(reader))

    def _start_reload(self, key: PullKey, prefix: HashRange) -> bool:
        reload = self._reload_prefix(prefix)
        if reload is None:
            return False
        task = asyncio.get_running_loop().create_task(self._announce_after(reload, key), name="kv-reload-for-peer")
        self._reloading[task] = None
        task.add_done_callback(self._reloading.pop)
        return True

    async def _announce_after(self, reload: Awaitable[object], key: PullKey) -> None:
        try:
            await reload
        except Exception:  # a bug in Baton costs the reader only the blocks that were not reloaded
            log.exception("prefix_reload_failed")
        self.owner.prefix_reloaded(key, self._now_s())
        self._schedule_expiry()

    def _send(self, reader: WorkerRef, message: OwnerMessage) -> None:
        stream = self._streams.get(reader.incarnation)
        if stream is None:
            return  # the reader's next Follow requests it again
        if isinstance(message, KvReady):
            self._backend.offer([block_id for block_id in message.block_ids if block_id < self._backend.num_blocks])
        try:
            stream.send(message)
        except StreamBroken:
            self._streams.pop(reader.incarnation, None)

    def _schedule_expiry(self) -> None:
        """Schedule `_expire` for the next deadline."""
        next_s = self.owner.next_deadline_s
        if self._timer is not None and next_s is not None and self._timer_s <= next_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_s is not None:
            self._timer, self._timer_s = asyncio.get_running_loop().call_at(next_s, self._expire), next_s

    def _expire(self) -> None:
        self._timer = None
        self.owner.expire(self._now_s())
        self._schedule_expiry()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def readable_regions(memory: Sequence[KvMemory], hello: PeerHello) -> tuple[KvMemory, ...]:
    """Return the regions of an owner's memory that a reader can read: of each backend that both have, as many
    as the reader asks for.

    A reader of an earlier release names no backends. It gets the regions of the owner's first one.
    """
    transfers = hello.transfers or (memory[0].transfer,)
    readable = [[region for region in memory if region.transfer == transfer] for transfer in dict.fromkeys(transfers)]
    return tuple(region for regions in readable for region in regions[: hello.num_readable_regions])


def _send_group(stream: PeerStream, message: GroupMessage) -> None:
    """Send a message of a process group on the stream that the group belongs to, not on a later one."""
    with suppress(StreamBroken):
        stream.send(message)
