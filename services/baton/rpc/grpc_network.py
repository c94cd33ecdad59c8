"""The calls leaf over gRPC: dials services by address."""

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
from baton.rpc import peer_rpc, scheduler_rpc, worker_rpc
from baton.rpc.channel import Lines, channel_options, open_channel
from baton.rpc.grpc_streams import ClientDuplex, StreamLimits
from baton.rpc.grpc_tls import Tls

DEFAULT_LIMITS = StreamLimits()
LOOK_S = 1.0
"""How often certificates are looked at, at most: the loop waits for it, and calls come by the thousand."""

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")


class GrpcNetwork:
    """Implements `Network`. A stream has a connection of its own; the calls to one scheduler share one, until
    certificates are renewed.

    `heartbeat_s` sets the keepalive: a vanished host breaks its streams within two of them and half a second.
    A dial that nobody answers fails in `dial_s`, a call in `call_s`; a refused one at once. `tls`: see
    `rpc.grpc_tls`.
    """

    def __init__(
        self,
        *,
        heartbeat_s: float,
        dial_s: float = 2.0,
        call_s: float = 5.0,
        limits: StreamLimits = DEFAULT_LIMITS,
        tls: Tls | None = None,
    ) -> None:
        """Raises ConfigError for files of `tls` that cannot be used. Later the last ones that could be stay
        in use."""
        self._options = channel_options(heartbeat_s)
        self._dial_s = dial_s
        self._call_s = call_s
        self._limits = limits
        self._tls = tls
        self._certificates = tls.followed_credentials() if tls is not None else None
        self._look_s = float("-inf")
        self._schedulers: dict[str, scheduler_rpc.SchedulerClient] = {}
        self._streams: set[Any] = set()
        self._is_closed = False

    async def open_session(self, address: str) -> Duplex[GatewayMessage, WorkerMessage]:
        return await self._open(address, worker_rpc.open_session)

    async def open_peer(self, address: str) -> Duplex[ReaderMessage, OwnerMessage]:
        return await self._open(address, peer_rpc.open_peer)

    async def open_report(self, address: str) -> Duplex[WorkerReport, WorkerCommand]:
        return await self._open(address, scheduler_rpc.open_report)

    def scheduler(self, address: str) -> SchedulerApi:
        self._check_open()
        client = self._schedulers.get(address)
        if client is None:
            lines = Lines(self._credentials, partial(self._channel, address), scheduler_rpc.Stub)
            client = scheduler_rpc.SchedulerClient(lines, address, self._limits, self._call_s)
            self._schedulers[address] = client
        return client

    async def aclose(self) -> None:
        """Close every stream and channel that is still open."""
        self._is_closed = True
        await asyncio.gather(*[stream.aclose() for stream in list(self._streams)])
        await asyncio.gather(*[client.aclose() for client in self._schedulers.values()])
        self._schedulers.clear()

    async def _open(
        self,
        address: str,
        open_stream: Callable[[grpc.aio.Channel, str, StreamLimits, float], Awaitable[ClientDuplex[SendT, ReceiveT]]],
    ) -> ClientDuplex[SendT, ReceiveT]:
        stream = await open_stream(self._channel(address, self._credentials()), address, self._limits, self._dial_s)
        self._streams.add(stream)
        stream.on_closed(lambda: self._streams.discard(stream))
        return stream

    def _channel(self, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        self._check_open()
        return open_channel(address, self._options, self._tls, credentials)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        """Those to dial with now."""
        if self._certificates is None:
            return None
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self._certificates.reload_if_changed()
        return self._certificates.value

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamBroken("the network has been closed")
