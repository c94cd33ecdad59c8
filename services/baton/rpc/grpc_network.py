"""Implements `Network` over gRPC: connects to services by address."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import StreamBroken
from baton.core.interfaces import Duplex, SchedulerApi
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.rpc import peer_rpc, scheduler_rpc, worker_rpc
from baton.rpc.channel import ChannelPool, channel_options, open_channel
from baton.rpc.grpc_tls import Tls
from baton.rpc.streams.grpc_streams import ClientDuplex
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.process.awake_timeout import TimeLimit

DEFAULT_LIMITS = StreamLimits()
CERTIFICATE_CHECK_S = 1.0
"""Minimum interval between checks for renewed certificates, which block the event loop."""

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")


class GrpcNetwork:
    """Implements `Network`. Each stream has its own connection; the calls to one scheduler share one.

    heartbeat_s: keepalive interval. A vanished host breaks its streams within two of them and half a second.
    dial_s, call_s: timeouts for opening a stream and for a call.
    limits: buffer sizes of streams.
    tls: certificates, see `rpc.grpc_tls`; without it, plain text. New connections use renewed certificates.
    certificate_check_s: minimum interval between checks for renewed certificates.
    awake_clock: clock for the timeouts, see `AwakeClock`; None uses the event loop's.
    """

    def __init__(
        self,
        *,
        heartbeat_s: float,
        dial_s: float = 2.0,
        call_s: float = 5.0,
        limits: StreamLimits = DEFAULT_LIMITS,
        tls: Tls | None = None,
        certificate_check_s: float = CERTIFICATE_CHECK_S,
        awake_clock: Callable[[], float] | None = None,
    ) -> None:
        """Load the certificates. Raises ConfigError if they cannot be used.

        If a later renewal cannot be used, the last valid certificates stay in use.
        """
        self._options = channel_options(heartbeat_s)
        self._dial_limit = TimeLimit(dial_s, awake_clock)
        self._call_limit = TimeLimit(call_s, awake_clock)
        self._limits = limits
        self._tls = tls
        self._certificates = tls.followed_credentials() if tls is not None else None
        self._certificate_check_s = certificate_check_s
        self._next_check_s = float("-inf")
        self._schedulers: dict[str, scheduler_rpc.SchedulerClient] = {}
        self._retired: list[scheduler_rpc.SchedulerClient] = []
        """Forgotten clients that had running calls or channels to close."""
        self._streams: set[Any] = set()
        self._is_closed = False

    async def open_session(self, address: str) -> Duplex[GatewayMessage, WorkerMessage]:
        return await self._open(address, worker_rpc.open_session)

    async def open_peer(self, address: str) -> Duplex[ReaderMessage, OwnerMessage]:
        return await self._open(address, peer_rpc.open_peer)

    async def open_prefix_copy(self, address: str) -> Duplex[PrefixRequest, PrefixReply]:
        return await self._open(address, worker_rpc.open_prefix_copy)

    async def open_report(self, address: str) -> Duplex[WorkerReport, WorkerCommand]:
        return await self._open(address, scheduler_rpc.open_report)

    def scheduler(self, address: str) -> SchedulerApi:
        self._check_open()
        client = self._schedulers.get(address)
        if client is None:
            channels = ChannelPool(self._credentials, partial(self._channel, address), scheduler_rpc.Stub)
            client = scheduler_rpc.SchedulerClient(channels, address, self._limits, self._call_limit)
            self._schedulers[address] = client
        return client

    def forget_scheduler(self, address: str) -> None:
        client = self._schedulers.pop(address, None)
        if client is not None:
            client.retire()
            self._retired.append(client)
        self._retired = [client for client in self._retired if not client.is_closed]

    async def aclose(self) -> None:
        """Close every open stream and channel."""
        self._is_closed = True
        await asyncio.gather(*[stream.aclose() for stream in list(self._streams)])
        await asyncio.gather(*[client.aclose() for client in (*self._schedulers.values(), *self._retired)])
        self._schedulers.clear()
        self._retired.clear()

    async def _open(
        self,
        address: str,
        open_stream: Callable[
            [grpc.aio.Channel, str, StreamLimits, TimeLimit], Awaitable[ClientDuplex[SendT, ReceiveT]]
        ],
    ) -> ClientDuplex[SendT, ReceiveT]:
        stream = await open_stream(self._channel(address, self._credentials()), address, self._limits, self._dial_limit)
        self._streams.add(stream)
        stream.on_closed(lambda: self._streams.discard(stream))
        return stream

    def _channel(self, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        self._check_open()
        return open_channel(address, self._options, self._tls, credentials)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials for new connections, None for plain text."""
        if self._certificates is None:
            return None
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + self._certificate_check_s
            self._certificates.reload_if_changed()
        return self._certificates.value

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamBroken("the network has been closed")
