"""Connects the administration commands to a gateway of a running cluster."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from baton.core.client_api import ClusterStatus
from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.errors import BatonError, StreamBroken
from baton.runtime.network.addresses import own_addresses
from baton.runtime.network.tls_files import machine_authorities
from baton.runtime.process.run_file import RunningCluster, run_directories, running_clusters

T = TypeVar("T")

CALL_S = 5.0
SYSTEM = "system"
"""Value of --gateway-ca that selects the certificate authorities that this machine trusts."""


class Gateway(Protocol):
    """Client side of `AdminApi`. Every method raises Refused or StreamBroken."""

    async def status(self) -> ClusterStatus: ...

    async def explain(self, request_id: str | None = None) -> tuple[DecisionRecord, ...]: ...

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> None: ...

    async def clear_tenant(self, tenant: str) -> tuple[str, ...]: ...

    async def cache_stats(self) -> CacheStats: ...

    async def export_cache(
        self, tenant: str, prompt_json: str, write: Callable[[ExportedPrefix | bytes], Awaitable[None]]
    ) -> None: ...

    async def import_cache(self, tenant: str, worker_id: str, parts: AsyncIterator[bytes]) -> ImportedPrefix: ...


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Address of a gateway and how to authenticate.

    address: HOST:PORT of its gRPC port.
    api_key: API key of an admin, if the gateway requires one.
    ca: file of the authority that signs its certificate, or `SYSTEM`; empty for plain text.
    name: host name in its certificate; empty if it is the host of `address`.
    """

    address: str
    api_key: str = ""
    ca: str = ""
    name: str = ""


@asynccontextmanager
async def connect(gateway: GatewayAddress) -> AsyncIterator[Gateway]:
    """Create a client of a gateway, which connects at its first call.

    Raises ConfigError if the file of certificate authorities cannot be read.
    """
    from baton.rpc.admin_rpc import AdminClient
    from baton.rpc.channel import channel_options, open_channel
    from baton.rpc.grpc_tls import Tls

    ca = machine_authorities() if gateway.ca == SYSTEM else Path(gateway.ca)
    channel = open_channel(
        gateway.address, channel_options(CALL_S), Tls(ca=ca, name=gateway.name) if gateway.ca else None
    )
    authorization = f"Bearer {gateway.api_key}" if gateway.api_key else ""
    try:
        yield AdminClient(channel, gateway.address, authorization=authorization, call_s=CALL_S)
    finally:
        await channel.close(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Intervals and timeouts of the administration commands, in seconds.

    watch_s: refresh interval of `status --watch`.
    poll_s: interval at which a waiting drain asks for the status.
    retry_s: interval between attempts to request a drain.
    find_s: time to wait for workers that the gateway does not know; its scheduler may have just started.
    silence_s: time without an answer of a gateway, which may restart, after which a waiting drain fails.
    """

    watch_s: float = 1.0
    poll_s: float = 0.25
    retry_s: float = 1.0
    find_s: float = 5.0
    silence_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """Dependencies of the administration commands; tests replace them through click's context object."""

    connect: Callable[[GatewayAddress], AbstractAsyncContextManager[Gateway]] = connect
    own_addresses: Callable[[], frozenset[str]] = own_addresses
    running_clusters: Callable[[], Sequence[RunningCluster]] = lambda: running_clusters(run_directories(os.environ))
    intervals: Intervals = field(default_factory=Intervals)


class ReconnectingGateway:
    """Gateway client that reconnects, and resolves the name again, after a call that did not reach it."""

    def __init__(self, gateway: GatewayAddress, context: AdminContext) -> None:
        self._address = gateway
        self._context = context
        self._connection = AsyncExitStack()
        self._gateway: Gateway | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._connection.aclose()

    async def status(self) -> ClusterStatus:
        return await self._call(lambda gateway: gateway.status())

    async def explain(self, request_id: str | None = None) -> tuple[DecisionRecord, ...]:
        return await self._call(lambda gateway: gateway.explain(request_id))

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> None:
        await self._call(lambda gateway: gateway.drain(worker_id, node_shutting_down=node_shutting_down))

    async def clear_tenant(self, tenant: str) -> tuple[str, ...]:
        return await self._call(lambda gateway: gateway.clear_tenant(tenant))

    async def cache_stats(self) -> CacheStats:
        return await self._call(lambda gateway: gateway.cache_stats())

    async def export_cache(
        self, tenant: str, prompt_json: str, write: Callable[[ExportedPrefix | bytes], Awaitable[None]]
    ) -> None:
        await self._call(lambda gateway: gateway.export_cache(tenant, prompt_json, write))

    async def import_cache(self, tenant: str, worker_id: str, parts: AsyncIterator[bytes]) -> ImportedPrefix:
        return await self._call(lambda gateway: gateway.import_cache(tenant, worker_id, parts))

    async def _call(self, call: Callable[[Gateway], Coroutine[Any, Any, T]]) -> T:
        if self._gateway is None:
            self._gateway = await self._connection.enter_async_context(self._context.connect(self._address))
        try:
            return await call(self._gateway)
        except StreamBroken:
            self._gateway = None
            await self._connection.aclose()
            raise


def unreachable(broken: StreamBroken, running: Sequence[RunningCluster]) -> BatonError:
    """Return the error for a gateway that does not answer, with the remedy.

    running: the clusters of this user on this machine.
    """
    here = f"running here: {', '.join(cluster.gateway for cluster in running)}" if running else "none runs here"
    return BatonError(
        f"no gateway answers at {broken}; {here}. Start a cluster with `baton up`, or name a gateway with --gateway "
        "HOST:PORT, and the CA of its certificate with --gateway-ca FILE if it has one"
    )
