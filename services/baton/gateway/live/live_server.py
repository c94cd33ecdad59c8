"""Runs the admin port of a gateway: the live view, metrics and probes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from baton.core.client_api import ClusterStatus
from baton.core.interfaces import MemberKind, Membership
from baton.gateway.gateway_service import GatewayService
from baton.gateway.http.http_server import HttpServer
from baton.gateway.live.activity import Activity
from baton.gateway.live.cluster_metrics import ClusterMetrics, KnownTargets, MetricsTarget
from baton.gateway.live.live_app import LiveApp
from baton.gateway.live.live_source import LiveSource
from baton.gateway.live.view_auth import AllowedHosts
from baton.runtime.config.settings import GatewayConfig
from baton.runtime.logging import get_logger
from baton.runtime.network.addresses import advertised_host, join_address, listen
from baton.runtime.observability.admin_http import probe_routes
from baton.runtime.observability.metrics import expose
from baton.runtime.process.byte_budget import Account
from baton.runtime.process.process import Background
from baton.runtime.process.shared_account import SharedAccount

log = get_logger(__name__)

UNREAD_S = 10.0
"""Time after which a viewer that reads nothing loses its connection."""
MAX_CONNECTIONS = 512
"""Connections to the admin port: viewers, their other requests, and probes."""


@asynccontextmanager
async def live_server(
    config: GatewayConfig,
    service: GatewayService,
    status: Callable[[], ClusterStatus],
    activity: Activity,
    membership: Membership | None,
    registry: CollectorRegistry,
) -> AsyncIterator[int | None]:
    """Serve the admin port, and return it; None if none is configured. Raises ConfigError if it is in use."""
    if config.admin_port is None:
        yield None
        return
    activity.follow(service.view)
    source = LiveSource(service, status, activity)
    sock = listen(config.host, config.admin_port, flag="--admin-port")
    port: int = sock.getsockname()[1]
    address = join_address(advertised_host(config.host, config.advertise_host), port)
    metrics = ClusterMetrics(
        KnownTargets(membership, asyncio.get_running_loop().time),
        MetricsTarget(MemberKind.GATEWAY.value, service.rules.gateway_id, address),
        lambda: expose(registry).decode(),
    )
    app = LiveApp(
        source,
        metrics,
        Starlette(routes=probe_routes(service.health, registry)),
        keys=service.keys,
        hosts=AllowedHosts(config.host, (*config.view_hosts, config.advertise_host or config.host)),
        port=port,
        is_tls=config.admin_tls,
    )
    server = HttpServer(
        app,
        sock,
        receive_deadline_s=config.receive_deadline_s,
        unread_s=UNREAD_S,
        max_connections=MAX_CONNECTIONS,
        heads=SharedAccount(service.budget, Account.HEADS, "the request head"),
        tls=config.front_tls_pair if config.admin_tls else None,
    )
    reloading = [server.reload_certificate()] if config.admin_tls else []
    async with server, Background(*reloading):
        log.info("admin_started", address=join_address(config.host, port))
        try:
            yield port
        finally:
            await source.feed.aclose()
            await metrics.aclose()
