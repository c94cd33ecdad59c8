"""Implements `baton drain`: requests the drain of workers and waits for their end."""

import asyncio
import math
import socket
import time
from collections.abc import Collection
from pathlib import Path

import click

from baton.cli.admin.gateway_connection import AdminContext, Gateway
from baton.core.client_api import ClusterStatus, WorkerStatus
from baton.core.errors import BatonError, Code, Refused, StreamBroken
from baton.runtime.network.addresses import host_of
from baton.runtime.process.drain_socket import ANSWER_S, request_drain

SUPERVISOR_S = 1.0
"""Time for the supervisor of a worker to notice its end; after that the machine may be shut down."""


class NoScheduler(BatonError):
    """Raised if the gateway knows no scheduler."""


class WorkerNotFound(BatonError):
    """Raised if the gateway knows no such worker; the message names those that it knows."""


async def drain_at_gateway(
    gateway: Gateway, context: AdminContext, worker_id: str | None, wait_s: float | None
) -> list[str]:
    """Drain one worker, or with None all workers of this machine.

    With `wait_s`, waits up to that time until these incarnations of the workers are gone. Returns the ids of
    workers that are still there.
    """
    if wait_s is None:
        await _request(gateway, context, worker_id)
        return []
    loop = asyncio.get_running_loop()
    end_s = loop.time() + wait_s
    draining = await _request_with_retries(gateway, context, worker_id, wait_s)
    return await _wait_until_gone(gateway, context, draining, end_s - loop.time())


def drain_at_socket(drain_socket: Path, wait_s: float | None) -> list[str]:
    """Drain the worker that listens at a Unix socket; parameters and result as `drain_at_gateway`.

    Raises BatonError if no worker listens there.
    """
    with request_drain(drain_socket, wait_s or ANSWER_S) as (name, has_ended):
        click.echo(f"{name} drains")
        if wait_s is None:
            return []
        if not has_ended(wait_s):
            return [name]
    click.echo(f"{name} has ended")
    time.sleep(SUPERVISOR_S)
    return []


def select_workers(
    status: ClusterStatus, worker_id: str | None, host: str, addresses: Collection[str]
) -> tuple[WorkerStatus, ...]:
    """Return the worker called `worker_id`, or with None all workers of this machine.

    Workers of this machine serve at one of its `addresses`. If there are none, they are the workers that
    report the host name `host`. Raises WorkerNotFound if no worker matches.
    """
    if worker_id is None:
        selected = tuple(worker for worker in status.workers if host_of(worker.worker.address) in addresses)
        selected = selected or tuple(worker for worker in status.workers if worker.host == host)
        missing = f"no worker on this machine ({host})"
    else:
        selected = tuple(worker for worker in status.workers if worker.worker.worker_id == worker_id)
        missing = f"no worker {worker_id!r}"
    if not selected:
        known = ", ".join(f"{worker.worker.worker_id} on {worker.host}" for worker in status.workers) or "none"
        raise WorkerNotFound(f"{missing}; the cluster has {known}")
    return selected


async def _request_with_retries(
    gateway: Gateway, context: AdminContext, worker_id: str | None, limit_s: float
) -> tuple[WorkerStatus, ...]:
    """Request the drain, again if the gateway does not answer or does not know the workers yet.

    A machine that shuts down has only this chance. Raises the last error after `limit_s`, or earlier if
    waiting cannot help.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    has_reported = False
    while True:
        try:
            return await _request(gateway, context, worker_id)
        except (StreamBroken, Refused, NoScheduler, WorkerNotFound) as error:
            give_up_s = min(limit_s, _retry_limit_s(error, context))
            if loop.time() - started_s + context.intervals.retry_s > give_up_s:
                raise
            if not has_reported:
                click.echo(f"baton: {error}; trying again for {give_up_s:g} s", err=True)
                has_reported = True
        await asyncio.sleep(context.intervals.retry_s)


async def _request(gateway: Gateway, context: AdminContext, worker_id: str | None) -> tuple[WorkerStatus, ...]:
    """Request the drain of the selected workers and return them."""
    status = await gateway.status()
    if status.scheduler is None:
        raise NoScheduler("the gateway knows no scheduler that could drain workers")
    draining = select_workers(status, worker_id, socket.gethostname(), context.own_addresses())
    for worker in draining:
        await gateway.drain(worker.worker.worker_id, node_shutting_down=worker_id is None)
        count = worker.running_seqs + worker.waiting_seqs
        click.echo(
            f"{worker.worker.worker_id} ({worker.role.value}, pid {worker.pid}) drains {count} "
            f"sequence{'' if count == 1 else 's'}"
        )
    return draining


def _retry_limit_s(error: BatonError, context: AdminContext) -> float:
    """Return how long to retry after `error`: 0 if the answer will not change."""
    if isinstance(error, WorkerNotFound):
        return context.intervals.find_s
    if isinstance(error, Refused) and error.failure.code is not Code.UNAVAILABLE:
        return 0.0
    return math.inf


async def _wait_until_gone(
    gateway: Gateway, context: AdminContext, draining: tuple[WorkerStatus, ...], limit_s: float
) -> list[str]:
    """Wait up to `limit_s` until these worker incarnations are gone, and return the ids of the others.

    A new scheduler lists only workers that have reported to it. So a missing worker counts as gone only
    after `find_s`. Raises StreamBroken if the gateway does not answer for `silence_s`.
    """
    loop = asyncio.get_running_loop()
    remaining = {worker.worker.worker_id: worker.worker for worker in draining}
    scheduler, complete_s = None, 0.0
    answered_s = loop.time()
    end_s = answered_s + limit_s
    while remaining and loop.time() < end_s:
        await asyncio.sleep(context.intervals.poll_s)
        try:
            status = await gateway.status()
        except StreamBroken:
            if loop.time() - answered_s > context.intervals.silence_s:
                raise
            continue
        answered_s = loop.time()
        if status.scheduler != scheduler:
            complete_s = answered_s + context.intervals.find_s * (scheduler is not None)
            scheduler = status.scheduler or scheduler
        if status.scheduler is None or answered_s < complete_s:
            continue
        for worker_id, incarnation in tuple(remaining.items()):
            if not any(incarnation.is_same_incarnation(worker.worker) for worker in status.workers):
                click.echo(f"{worker_id} has ended")
                del remaining[worker_id]
    return list(remaining)
