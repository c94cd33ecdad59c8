"""`baton gateway`: one gateway as a process, joined from its leaves: HTTP, gRPC to clients and cluster,
Redis, the admin port."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random, SystemRandom

from prometheus_client import CollectorRegistry

from baton.core.client_api import ProcessInfo
from baton.core.errors import ConfigError
from baton.core.interfaces import Member, MemberKind, Membership
from baton.gateway.auth.api_keys import KeyRing
from baton.gateway.auth.key_file import follow, followed_keys
from baton.gateway.gateway_service import GatewayRules, GatewayService
from baton.gateway.grpc.inference_service import Admin, Inference
from baton.gateway.http.http_app import App
from baton.gateway.http.http_server import HttpServer
from baton.gateway.text.tokenizer import HfTokenizer
from baton.model.loading.model_source import resolve_model
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import Tls, between_services
from baton.runtime.config.settings import GatewayConfig
from baton.runtime.logging import get_logger
from baton.runtime.network.addresses import advertised_host, join_address, listen
from baton.runtime.network.announcements import Announcements
from baton.runtime.observability.admin_http import AdminServer
from baton.runtime.observability.metrics import GatewayMetrics, ProcessMetrics, expose, process_registry
from baton.runtime.observability.open_tracing import open_tracing
from baton.runtime.process.process import Background, Stop, frozen_heap, watch_loop_lag
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_membership import RedisMembership

log = get_logger(__name__)

CLOSE_S = 1.0
"""Time for answers whose calls have ended to reach their clients, when the process stops."""


async def serve(config: GatewayConfig, stop: Stop, on_ready: Callable[[str], None]) -> None:
    """Serve until `stop` is asked for; `on_ready` gets the URL of the OpenAI API.

    A drain makes `/ready` say 503 at once and refuses new calls; those that run may end within `drain_s`, and
    `/health` says 200 meanwhile. Raises ConfigError when a port is taken or there is no way to find a
    scheduler, ModelError when the model has no usable tokenizer.
    """
    if config.redis_url is None and not config.schedulers:
        raise ConfigError(
            "no way to find a scheduler: give --schedulers HOST:PORT,... or the --redis-url that they announce themselves in"
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: handing it to a pool only costs
    followed = None if config.api_keys is None else followed_keys(config.api_keys)
    keys = KeyRing(None if followed is None else followed.value)
    rng = SystemRandom()
    registry, rules = process_registry("gateway"), rules_of(config, rng)
    process_metrics = ProcessMetrics(registry)
    async with AsyncExitStack() as stack:
        tracing = open_tracing(config, process_metrics, "gateway", rules.gateway_id)
        stack.push_async_callback(tracing.aclose)
        http_socket = listen(config.host, config.http_port, flag="--http-port")
        stack.callback(http_socket.close)
        tokenizer = await asyncio.to_thread(lambda: HfTokenizer(resolve_model(config.model, weights=False)))
        stack.callback(tokenizer.close)
        tls = between_services(config)
        network = GrpcNetwork(
            heartbeat_s=config.heartbeat_s, dial_s=config.detection_s, call_s=config.detection_s, tls=tls
        )
        stack.push_async_callback(network.aclose)
        membership = _membership(config, stack)
        service = GatewayService(
            rules,
            network=network,
            tokenizer=tokenizer,
            metrics=GatewayMetrics(registry),
            rng=rng,
            schedulers=config.schedulers,
            membership=membership,
            keys=keys,
            tracing=tracing,
        )
        await stack.enter_async_context(service)
        http_address = join_address(advertised_host(config.host, config.advertise_host), http_socket.getsockname()[1])
        process = ProcessInfo(
            process_id=service.rules.gateway_id, pid=os.getpid(), host=socket.gethostname(), address=http_address
        )
        admin = Admin(service, process)
        await stack.enter_async_context(_grpc(config, service, admin))
        app = App(
            service,
            admin,
            max_body_bytes=config.max_body_bytes,
            stream_buffer_bytes=config.stream_buffer_bytes,
            unread_s=config.receive_deadline_s,
            metrics=lambda: expose(registry),
            created=int(time.time()),
        )
        http_server = HttpServer(
            app, http_socket, receive_deadline_s=config.receive_deadline_s, grace_s=CLOSE_S, tls=config.front_tls_pair
        )
        await stack.enter_async_context(http_server)
        await _admin_port(config, service, registry, stack)
        log.info("gateway_started", address=http_address, model=config.model_name, gateway=service.rules.gateway_id)
        member = Member(
            kind=MemberKind.GATEWAY,
            member_id=service.rules.gateway_id,
            epoch=rng.getrandbits(64),
            address=http_address,
            info=(("pid", str(process.pid)), ("host", process.host)),
        )
        announcements = (
            None if membership is None else Announcements(membership, member, heartbeat_s=config.heartbeat_s)
        )
        work = [watch_loop_lag(process_metrics.observe_loop)]
        if announcements is not None:
            work.append(announcements.announce_forever())  # for people who look at what is there: nobody waits for it
        if config.front_tls_pair is not None:
            work.append(http_server.follow_certificate())
        if followed is not None:
            work.append(follow(followed, keys))
        async with Background(*work):
            stack.enter_context(frozen_heap())
            on_ready(f"{'https' if config.front_tls_pair else 'http'}://{http_address}")
            await stop.drain.wait()
            await service.drain(config.drain_s)
        if announcements is not None:
            await announcements.withdraw()


def rules_of(config: GatewayConfig, rng: Random) -> GatewayRules:
    return GatewayRules(
        gateway_id=f"gateway-{rng.getrandbits(32):08x}",
        model=config.model_name,
        heartbeat_s=config.heartbeat_s,
        detection_s=config.detection_s,
        scheduler_wait_s=config.scheduler_wait_s,
        request_timeout_s=config.request_timeout_s,
        default_slo=config.default_slo,
        max_open_requests=config.max_open_requests,
        max_attempts=config.max_attempts,
    )


def _membership(config: GatewayConfig, stack: AsyncExitStack) -> Membership | None:
    """Where schedulers announce themselves; without Redis their addresses are given."""
    if config.redis_url is None:
        return None
    connection = RedisConnection(config.redis_url)
    stack.push_async_callback(connection.aclose)
    return RedisMembership(connection, Keys(cluster=config.cluster))


@asynccontextmanager
async def _grpc(config: GatewayConfig, service: GatewayService, admin: Admin) -> AsyncIterator[None]:
    """The gRPC front door; a message may be as large as an HTTP body."""
    front = None if config.front_tls_pair is None else Tls(pair=config.front_tls_pair)
    server = GrpcServer(heartbeat_s=config.heartbeat_s, max_message_bytes=config.max_body_bytes, tls=front)
    server.add_inference(Inference(service, stream_buffer_bytes=config.stream_buffer_bytes))
    server.add_admin(admin)
    server.follow(service.health)
    port = await server.start(config.host, config.grpc_port, flag="--grpc-port")
    log.info("grpc_started", address=join_address(config.host, port))
    try:
        yield
    finally:
        await server.stop(CLOSE_S)


async def _admin_port(
    config: GatewayConfig, service: GatewayService, registry: CollectorRegistry, stack: AsyncExitStack
) -> None:
    if config.admin_port is not None:
        server = AdminServer(service.health, registry)
        port = server.start(config.host, config.admin_port)
        stack.push_async_callback(server.stop)
        log.info("admin_started", address=join_address(config.host, port))
