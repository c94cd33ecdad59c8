"""The process of `baton gateway`: builds the gateway service and connects it to HTTP, gRPC, Redis and
metrics."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from functools import partial
from random import Random, SystemRandom

from prometheus_client import CollectorRegistry

from baton.core.client_api import ProcessInfo
from baton.core.errors import ConfigError
from baton.core.interfaces import Member, MemberKind, Membership
from baton.gateway.auth.api_keys import KeyRing
from baton.gateway.auth.key_file import reload_keys, watch_key_file
from baton.gateway.gateway_budget import gateway_budget
from baton.gateway.gateway_rules import GatewayRules
from baton.gateway.gateway_service import GatewayService
from baton.gateway.grammar_checks.grammar_checker import COMPILER_MEMORY_BYTES, GrammarChecker
from baton.gateway.grpc.inference_service import AdminService, InferenceService
from baton.gateway.http.http_app import HttpApp
from baton.gateway.http.http_server import HttpServer
from baton.gateway.http.site.cors import Cors
from baton.gateway.input.client_call import Endpoint
from baton.gateway.live.activity import Activity
from baton.gateway.live.live_server import live_server
from baton.gateway.request.request_observer import NO_REQUEST_OBSERVER
from baton.gateway.text.tokenizer import HfTokenizer
from baton.gateway.vllm_metrics import VllmMetrics
from baton.model.loading.model_source import resolve_model
from baton.rpc.gates.keyless_gate import KeylessGate
from baton.rpc.gates.receive_gate import ReceiveGate
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import Tls, between_services
from baton.rpc.streams.stream_limits import stream_limits
from baton.runtime.config.settings import GatewayConfig
from baton.runtime.logging import get_logger
from baton.runtime.memory.freed_memory import limit_freed_memory, trim_heap_forever
from baton.runtime.memory.garbage_collection import collect_when_idle, frozen_heap
from baton.runtime.network.addresses import advertised_host, join_address, listen
from baton.runtime.network.announcements import Announcements, process_details
from baton.runtime.observability.metrics import (
    BudgetMetrics,
    GatewayMetrics,
    GrammarMetrics,
    ProcessMetrics,
    expose,
    process_registry,
)
from baton.runtime.observability.open_tracing import open_tracing
from baton.runtime.observability.tracing import Tracing
from baton.runtime.process.awake_clock import AwakeClock
from baton.runtime.process.byte_budget import Account, ByteBudget
from baton.runtime.process.process import Background, Stop
from baton.runtime.process.shared_account import SharedAccount
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_membership import RedisMembership

log = get_logger(__name__)

CLOSE_S = 1.0
"""Time for finished responses to reach their clients when the process stops."""
CLIENT_IDLE_S = 300.0
"""Time after which a connection of a gRPC client without calls is closed. Clients reconnect when needed."""
CLIENT_KEEPALIVE_S = 20.0
"""Keepalive interval of gRPC clients. It is longer than a heartbeat: a client may be paused for seconds."""


async def serve(config: GatewayConfig, stop: Stop, on_ready: Callable[[str], None]) -> None:
    """Run a gateway until `stop` requests a drain. Calls `on_ready` with the URL of the OpenAI API.

    While draining, `/ready` returns 503, `/health` 200, and open calls may finish within `drain_s`. Raises
    ConfigError if a port is in use or no scheduler is configured, and ModelError without a usable tokenizer.
    """
    if config.redis_url is None and not config.schedulers:
        raise ConfigError("no scheduler is configured; set --schedulers HOST:PORT,... or --redis-url")
    _set_up_libraries()
    key_file = None if config.api_keys is None else watch_key_file(config.api_keys)
    keys = KeyRing(None if key_file is None else key_file.value)
    rng = SystemRandom()
    rules = gateway_rules(config, rng)
    registry = process_registry("gateway")
    awake = AwakeClock(asyncio.get_running_loop().time)
    process_metrics = ProcessMetrics(registry)
    async with AsyncExitStack() as stack:
        tracing = await _open_tracing(config, process_metrics, rules, stack)
        http_socket = stack.enter_context(closing(listen(config.host, config.http_port, flag="--http-port")))
        budget = _exported_budget(config.memory_budget, registry)
        membership = _membership(config, stack)
        activity = Activity(asyncio.get_running_loop().time)
        tokenizer, grammar_check = await _text_tools(config, registry, stack)
        service = GatewayService(
            rules,
            network=_network(config, budget, awake, stack),
            tokenizer=tokenizer,
            grammar_check=grammar_check,
            metrics=GatewayMetrics(registry),
            rng=rng,
            schedulers=config.schedulers,
            membership=membership,
            keys=keys,
            tracing=tracing,
            awake_clock=awake,
            budget=budget,
            observer=NO_REQUEST_OBSERVER if config.admin_port is None else activity,
        )
        _export_vllm_names(config, service, registry)
        await stack.enter_async_context(service)
        process = _process_info(config, rules, http_socket)
        admin = AdminService(service, process)
        grpc_port = await stack.enter_async_context(_grpc_server(config, service, admin))
        http = await stack.enter_async_context(_http_server(config, service, admin, registry, http_socket, grpc_port))
        live = live_server(config, service, admin.cluster_status, activity, membership, registry)
        admin_port = await stack.enter_async_context(live)
        background = [awake.run(process_metrics.observe_loop), *_upkeep(service)]
        log.info("gateway_started", address=process.address, model=config.model_name, gateway=rules.gateway_id)
        announcements = None if membership is None else _announcements(config, membership, process, admin_port, rng)
        background += [] if announcements is None else [announcements.announce_forever()]
        background += [] if config.front_tls_pair is None else [http.reload_certificate()]
        if key_file is not None:
            background.append(reload_keys(key_file, keys))
        async with Background(*background):
            stack.enter_context(frozen_heap())
            on_ready(f"{'https' if config.front_tls_pair else 'http'}://{process.address}")
            await stop.drain.wait()
            await service.drain(config.drain_s)
        if announcements is not None:
            await announcements.withdraw()


def _upkeep(service: GatewayService) -> tuple[Coroutine[object, object, None], ...]:
    """Return what keeps the memory of the process small."""
    return trim_heap_forever(), collect_when_idle(lambda: service.num_open == 0)


async def _open_tracing(
    config: GatewayConfig, metrics: ProcessMetrics, rules: GatewayRules, stack: AsyncExitStack
) -> Tracing:
    return await stack.enter_async_context(aclosing(open_tracing(config, metrics, "gateway", rules.gateway_id)))


def _set_up_libraries() -> None:
    """Set what libraries read once, before this process takes much memory or starts threads."""
    limit_freed_memory()
    # Texts are tokenized one at a time, so the library's thread pool would only add overhead.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def gateway_rules(config: GatewayConfig, rng: Random) -> GatewayRules:
    """Return the settings of one gateway process, with a random gateway id."""
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
        stream_buffer_bytes=config.stream_buffer_bytes,
        max_response_bytes=config.max_response_bytes,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        allow_request_chat_template=config.allow_request_chat_template,
        strict_fields=config.strict_fields,
    )


def _exported_budget(memory_budget: int, registry: CollectorRegistry) -> ByteBudget:
    """Return the memory budget of the gateway, with its metrics in `registry`."""
    budget = gateway_budget(memory_budget)
    BudgetMetrics(registry).follow(budget)
    return budget


def _export_vllm_names(config: GatewayConfig, service: GatewayService, registry: CollectorRegistry) -> None:
    """Repeat the gateway's metrics under the names of vLLM, if the configuration asks for it."""
    if config.vllm_metric_names:
        VllmMetrics(config.model_name, service.metrics, lambda: service.view.reports).follow(registry)


async def _text_tools(
    config: GatewayConfig, registry: CollectorRegistry, stack: AsyncExitStack
) -> tuple[HfTokenizer, GrammarChecker]:
    """Load the tokenizer of the model, in a thread because that reads files, and prepare checks of grammars.

    The process that checks grammars starts with the first one.
    """
    tokenizer = await asyncio.to_thread(lambda: HfTokenizer(resolve_model(config.model, weights=False)))
    stack.callback(tokenizer.close)
    program = [sys.executable, "-P", "-m", "baton.gateway.grammar_checks.grammar_compiler"]
    argv = [*program, str(tokenizer.model_dir), str(tokenizer.vocab_size), str(COMPILER_MEMORY_BYTES)]
    checker = GrammarChecker(argv, GrammarMetrics(registry))
    stack.push_async_callback(checker.aclose)
    return tokenizer, checker


def _network(config: GatewayConfig, budget: ByteBudget, awake: AwakeClock, stack: AsyncExitStack) -> GrpcNetwork:
    """Return the network through which schedulers and workers are called."""
    network = GrpcNetwork(
        heartbeat_s=config.heartbeat_s,
        dial_s=config.detection_s,
        call_s=config.detection_s,
        limits=stream_limits(budget),
        tls=between_services(config),
        awake_clock=awake,
    )
    stack.push_async_callback(network.aclose)
    return network


def _membership(config: GatewayConfig, stack: AsyncExitStack) -> Membership | None:
    """Return the membership store in Redis; None if the schedulers' addresses are configured instead."""
    if config.redis_url is None:
        return None
    connection = RedisConnection(config.redis_url)
    stack.push_async_callback(connection.aclose)
    return RedisMembership(connection, Keys(cluster=config.cluster))


def _process_info(config: GatewayConfig, rules: GatewayRules, http_socket: socket.socket) -> ProcessInfo:
    """Return how this process appears in status output and membership."""
    address = join_address(advertised_host(config.host, config.advertise_host), http_socket.getsockname()[1])
    return ProcessInfo(process_id=rules.gateway_id, pid=os.getpid(), host=socket.gethostname(), address=address)


@asynccontextmanager
async def _grpc_server(config: GatewayConfig, service: GatewayService, admin: AdminService) -> AsyncIterator[int]:
    """Serve the gRPC API and yield its port. A message may be as large as an HTTP body."""
    tls = None if config.front_tls_pair is None else Tls(pair=config.front_tls_pair)
    gate = ReceiveGate(
        service.keys.identify,
        budget=service.budget,
        max_message_bytes=config.max_body_bytes,
        receive_s=config.receive_deadline_s,
        on_refused=partial(service.count_result, Endpoint.GRPC.value),
    )
    server = GrpcServer(
        heartbeat_s=CLIENT_KEEPALIVE_S,
        max_message_bytes=config.max_body_bytes,
        tls=tls,
        gates=(gate, KeylessGate(service.budget)),
        max_streams=config.max_open_requests,
        max_connections=config.max_connections,
        idle_s=CLIENT_IDLE_S,
    )
    server.add_inference(InferenceService(service))
    server.add_admin(admin)
    server.follow(service.health)
    port = await server.start(config.host, config.grpc_port, flag="--grpc-port")
    log.info("grpc_started", address=join_address(config.host, port))
    try:
        yield port
    finally:
        await server.stop(CLOSE_S)


def _http_server(
    config: GatewayConfig,
    service: GatewayService,
    admin: AdminService,
    registry: CollectorRegistry,
    http_socket: socket.socket,
    grpc_port: int,
) -> HttpServer:
    """Return the server of the OpenAI API on a socket that already listens."""
    app = HttpApp(
        service,
        admin,
        max_body_bytes=config.max_body_bytes,
        unread_s=config.receive_deadline_s,
        metrics=lambda: expose(registry),
        created=int(time.time()),
        grpc_port=grpc_port,
    )
    return HttpServer(
        Cors(app, config.cors_allow_origins) if config.cors_allow_origins else app,
        http_socket,
        receive_deadline_s=config.receive_deadline_s,
        unread_s=config.receive_deadline_s,
        max_connections=config.max_connections,
        heads=SharedAccount(service.budget, Account.HEADS, "the request head"),
        grace_s=CLOSE_S,
        tls=config.front_tls_pair,
    )


def _announcements(
    config: GatewayConfig, membership: Membership, process: ProcessInfo, admin_port: int | None, rng: Random
) -> Announcements:
    """Return the announcements of this gateway in membership. They only serve operators' tools."""
    member = Member(
        kind=MemberKind.GATEWAY,
        member_id=process.process_id,
        epoch=rng.getrandbits(64),
        address=process.address,
        info=process_details(process.pid, process.host, None if config.admin_tls else admin_port),
    )
    return Announcements(membership, member, heartbeat_s=config.heartbeat_s)
