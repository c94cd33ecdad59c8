"""Runs one scheduler as a process (`baton scheduler`): the service, its stores, gRPC and the admin port."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random

from prometheus_client import CollectorRegistry

from baton.core.interfaces import DecisionStore, KvEventFeed, Member, MemberKind, Membership
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import between_services
from baton.rpc.streams.stream_limits import stream_limits
from baton.runtime.config.settings import SchedulerConfig
from baton.runtime.logging import get_logger
from baton.runtime.memory.garbage_collection import infrequent_gc
from baton.runtime.network.addresses import advertised_host, join_address
from baton.runtime.network.announcements import Announcements, process_details
from baton.runtime.observability.admin_http import AdminServer
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import BudgetMetrics, ProcessMetrics, SchedulerMetrics, process_registry
from baton.runtime.observability.open_tracing import open_tracing
from baton.runtime.process.awake_clock import AwakeClock
from baton.runtime.process.process import Background, Stop
from baton.scheduler.decisions.scheduler_spans import TracedScheduler
from baton.scheduler.scheduler_budget import scheduler_budget
from baton.scheduler.scheduler_service import Scheduler, SchedulerRules
from baton.scheduler.state.worker_streams import SchedulerTimes
from baton.store.memory.memory_stores import MemoryDecisionStore, MemoryKvEventFeed, MemoryMembership
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_decision_store import RedisDecisionStore
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_kv_event_feed import RedisKvEventFeed
from baton.store.redis.redis_membership import RedisMembership

log = get_logger(__name__)

CALLS_GRACE_S = 1.0
"""Time for calls that are being answered when a drain begins. Each takes milliseconds."""


async def serve(config: SchedulerConfig, stop: Stop, on_ready: Callable[[str], None]) -> None:
    """Serve until `stop` is requested. `on_ready` gets the address for gateways and workers.

    A drain removes this scheduler from the membership, answers the calls that have begun, and ends all
    streams, so that gateways and workers go on with another scheduler. Redis may be unavailable at the start.
    Raises ConfigError if a port is taken or the Redis URL is invalid.
    """
    rng = Random()
    registry = process_registry("scheduler")
    process_metrics = ProcessMetrics(registry)
    awake = AwakeClock(asyncio.get_running_loop().time)
    health = Health("rpc")
    scheduler_id = f"scheduler-{rng.getrandbits(32):08x}"
    async with AsyncExitStack() as stack:  # closes what was started, in reverse order
        tracing = open_tracing(config, process_metrics, "scheduler", scheduler_id)
        stack.push_async_callback(tracing.aclose)
        membership, decisions, feed = _stores(config, stack)
        budget = scheduler_budget(config.memory_budget)
        BudgetMetrics(registry).follow(budget)
        scheduler = Scheduler(
            scheduler_id=scheduler_id,
            rules=SchedulerRules.of(config),
            times=SchedulerTimes.of(config),
            store=decisions,
            feed=feed,
            metrics=SchedulerMetrics(registry),
            rng=rng,
            awake_clock=awake,
            budget=budget,
        )
        stack.push_async_callback(scheduler.aclose)
        server = GrpcServer(heartbeat_s=config.heartbeat_s, limits=stream_limits(budget), tls=between_services(config))
        server.add_scheduler(TracedScheduler(scheduler, tracing) if tracing.is_on else scheduler)
        server.follow(health)
        port = await server.start(config.host, config.rpc_port)
        stack.push_async_callback(server.stop, CALLS_GRACE_S)
        admin_port = _start_admin_server(config, health, registry, stack)

        member = _member(config, scheduler_id, port, admin_port, epoch=rng.getrandbits(64))
        log.info("scheduler_started", scheduler=member.member_id, address=member.address, policy=config.policy)
        announcements = Announcements(
            membership,
            member,
            heartbeat_s=config.heartbeat_s,
            ttl_s=config.detection_s,
            on_listed=scheduler.listed,
        )
        await announcements.announce()
        with infrequent_gc():
            health.ready("rpc")
            async with Background(announcements.reannounce_forever(), awake.run(process_metrics.observe_loop)):
                on_ready(member.address)
                await _wait_for_drain(stop, scheduler)
        log.info("scheduler_drain_started", scheduler=member.member_id)
        health.drain()
        await announcements.withdraw()
        await scheduler.aclose()


def _start_admin_server(
    config: SchedulerConfig, health: Health, registry: CollectorRegistry, stack: AsyncExitStack
) -> int | None:
    """Serve health and metrics over HTTP, unless the admin port is switched off. Return the port."""
    if config.admin_port is None:
        return None
    admin = AdminServer(health, registry)
    admin_port = admin.start(config.host, config.admin_port)
    stack.push_async_callback(admin.stop)
    log.info("admin_started", address=join_address(config.host, admin_port))
    return admin_port


def _member(config: SchedulerConfig, scheduler_id: str, port: int, admin_port: int | None, *, epoch: int) -> Member:
    """Return the entry of this scheduler in the membership."""
    return Member(
        kind=MemberKind.SCHEDULER,
        member_id=scheduler_id,
        epoch=epoch,
        address=join_address(advertised_host(config.host, config.advertise_host), port),
        info=process_details(os.getpid(), socket.gethostname(), admin_port),
    )


async def _wait_for_drain(stop: Stop, scheduler: Scheduler) -> None:
    """Wait until a drain is requested. Raises the exception of a scheduler task that fails before.

    The process then exits, and its supervisor starts another one.
    """
    drain = asyncio.ensure_future(stop.drain.wait())
    try:
        await asyncio.wait((drain, scheduler.failed), return_when=asyncio.FIRST_COMPLETED)
    finally:
        drain.cancel()
    if scheduler.failed.done():
        scheduler.failed.result()


def _stores(config: SchedulerConfig, stack: AsyncExitStack) -> tuple[Membership, DecisionStore, KvEventFeed]:
    """Return the stores in Redis, or in this process if there is no Redis URL.

    Without Redis, gateways and workers must be given this scheduler's address, a restart forgets the
    decisions, and the workers' cached blocks are not known. KV events have a connection of their own, because
    reading them blocks it.
    """
    if config.redis_url is None:
        return MemoryMembership(), MemoryDecisionStore(), MemoryKvEventFeed()
    connection, events = RedisConnection(config.redis_url), RedisConnection(config.redis_url)
    stack.push_async_callback(connection.aclose)
    stack.push_async_callback(events.aclose)
    keys = Keys(cluster=config.cluster)
    return (
        RedisMembership(connection, keys),
        RedisDecisionStore(connection, keys, max_bytes=config.max_record_bytes),
        RedisKvEventFeed(events, keys),
    )
