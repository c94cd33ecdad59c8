"""`baton status`, `explain` and `drain`: questions to a running cluster, over `baton.v1.Admin` at one of its
gateways."""

import asyncio
import json
import math
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import click
from click.core import ParameterSource

from baton.core.client_api import ClusterStatus, WorkerStatus
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.errors import BatonError, Code, Refused, StreamBroken
from baton.core.plain_json import to_plain
from baton.runtime.config.settings import FrontDoorSettings
from baton.runtime.network.addresses import host_of, own_addresses
from baton.runtime.network.tls_files import machine_authorities
from baton.runtime.process.drain_socket import ANSWER_S, request_drain

T = TypeVar("T")

GATEWAY = f"127.0.0.1:{FrontDoorSettings.grpc_port}"
CALL_S = 5.0
WATCH_S = 1.0
WAIT_POLL_S = 0.25
SILENCE_S = 30.0
"""How long a wait for a drain goes on without an answer of the gateway; it may be restarted meanwhile."""
RETRY_S = 1.0
FIND_S = 5.0
"""How long a drain that waits goes on asking for workers that the gateway does not know: its scheduler may
have just come."""
DRAIN_LIMIT_S = 300.0
HEARD_S = 1.0
"""Who looks after a worker hears of its end within that time; then its machine may go."""
NOT_GONE_EXIT_CODE = 3
"""Of `baton drain --wait` whose workers are still there after --limit-s."""
LAST = "last"
SYSTEM = "system"
"""Instead of a file of authorities: those that the machine trusts."""


class Gateway(Protocol):
    """What these commands ask of a gateway: `AdminApi` as its client has it. Raises Refused or
    StreamBroken."""

    async def status(self) -> ClusterStatus: ...

    async def explain(self, request_id: str | None = None) -> tuple[DecisionRecord, ...]: ...

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Where:
    """A gateway's gRPC address, the key that it wants, if any, and who signs its certificate: a file or
    `SYSTEM`; none in plain text. `name`: what the certificate calls it; empty: as the address does."""

    address: str
    api_key: str = ""
    ca: str = ""
    name: str = ""


@asynccontextmanager
async def connect(where: Where) -> AsyncIterator[Gateway]:
    """A client of that gateway; nothing is dialled before the first call. Raises ConfigError when there are
    no authorities to read."""
    from baton.rpc.admin_rpc import AdminClient
    from baton.rpc.channel import channel_options, open_channel
    from baton.rpc.grpc_tls import Tls

    tls = Tls(ca=machine_authorities() if where.ca == SYSTEM else Path(where.ca), name=where.name) if where.ca else None
    channel = open_channel(where.address, channel_options(CALL_S), tls)
    authorization = f"Bearer {where.api_key}" if where.api_key else ""
    try:
        yield AdminClient(channel, where.address, authorization=authorization, call_s=CALL_S)
    finally:
        await channel.close(None)


class Redialled:
    """A gateway that is dialled anew, and its name looked up again, after a call that did not reach it."""

    def __init__(self, where: Where) -> None:
        self._where = where
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

    async def _call(self, question: Callable[[Gateway], Coroutine[Any, Any, T]]) -> T:
        if self._gateway is None:
            self._gateway = await self._connection.enter_async_context(connect(self._where))
        try:
            return await question(self._gateway)
        except StreamBroken:
            self._gateway = None
            await self._connection.aclose()
            raise


def _address(ctx: click.Context, param: click.Parameter, value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise click.BadParameter(f"expected HOST:PORT of a gateway's gRPC port, got {value!r}")
    return value


def _gateway_option(function: Callable[..., Any]) -> Callable[..., Any]:
    @click.option(
        "--gateway",
        "address",
        default=GATEWAY,
        envvar="BATON_GATEWAY",
        metavar="HOST:PORT",
        callback=_address,
        help=f"gRPC port of a gateway. Default: {GATEWAY}. [BATON_GATEWAY]",
    )
    @click.option(
        "--api-key",
        default="",
        envvar="BATON_API_KEY",
        help="Where the gateway wants an admin's. Default: none. [BATON_API_KEY]",
    )
    @click.option(
        "--gateway-ca",
        "ca",
        default="",
        envvar="BATON_GATEWAY_CA",
        metavar=f"FILE|{SYSTEM}",
        help=f"Who signs the gateway's certificate, PEM; `{SYSTEM}` for whom this machine trusts. Default: none, plain text. "
        "[BATON_GATEWAY_CA]",
    )
    @click.option(
        "--gateway-name",
        "name",
        default="",
        envvar="BATON_GATEWAY_NAME",
        help="What the gateway's certificate calls it. Default: the host of --gateway. [BATON_GATEWAY_NAME]",
    )
    @wraps(function)
    def with_where(*args: Any, address: str, api_key: str, ca: str, name: str, **others: Any) -> Any:
        return function(*args, where=Where(address, api_key, ca, name), **others)

    return with_where


@click.command()
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object (with --watch, one a line) instead of tables."
)
@_gateway_option
def status(watch: bool, as_json: bool, where: Where) -> None:
    """Show workers, roles, load, blocks, links and leases."""
    if not watch:
        found = _ask(where, lambda gateway: gateway.status())
        if as_json:
            click.echo(json.dumps(to_plain(found), indent=2))
        else:
            from baton.cli.formatting import console
            from baton.cli.status_view import render_status

            console().print(render_status(found))
        return
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(where, as_json))


@click.command()
@click.argument("request_id", metavar="REQUEST_ID|last")
@_gateway_option
def explain(request_id: str, where: Where) -> None:
    """Show why a request ran where it ran, and what came of it.

    REQUEST_ID is the answer's header x-request-id; `last` is the request that was placed last.
    """
    records = _ask(where, lambda gateway: gateway.explain(None if request_id == LAST else request_id))
    if not records:
        raise BatonError(
            "nothing has been decided yet" if request_id == LAST else f"no decision about request {request_id} is kept"
        )
    from baton.cli.explain_view import policy_rules, render_decisions
    from baton.cli.formatting import console

    console().print(render_decisions(records, policy_rules()))


@click.command()
@click.argument("worker", required=False)
@click.option("--here", is_flag=True, help="Drain the workers of this machine (of this pod) instead of one by name.")
@click.option(
    "--drain-socket",
    type=click.Path(path_type=Path),
    envvar="BATON_DRAIN_SOCKET",
    help="With --here, the file at which the worker listens: it is asked there, and no gateway is. Default: none. [BATON_DRAIN_SOCKET]",
)
@click.option("--wait", is_flag=True, help="Return when they have left, instead of when they have been told.")
@click.option(
    "--limit-s",
    type=click.FloatRange(min=0, min_open=True),
    default=DRAIN_LIMIT_S,
    help=f"With --wait, seconds after which whoever is still there is named, and the exit code is {NOT_GONE_EXIT_CODE}. "
    f"Default: {DRAIN_LIMIT_S:g}.",
)
@_gateway_option
def drain(worker: str | None, here: bool, drain_socket: Path | None, wait: bool, limit_s: float, where: Where) -> None:
    """Let a worker finish what it runs, take nothing new, and leave.

    WORKER is its name in `baton status`. It leaves after its own --drain-s at the latest. Of a fleet on a Ray
    cluster of others its place is then filled again; after --here, for which the machine itself is about to
    end, on another node.
    """
    if here == (worker is not None):
        raise click.UsageError("give the name of a worker, or --here")
    if not here and click.get_current_context().get_parameter_source("drain_socket") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--drain-socket is of this machine's worker: give it with --here")
    if here and drain_socket is not None:
        left = _drain_at(drain_socket, limit_s if wait else None)
    else:
        left = _ask(where, lambda gateway: _drain(gateway, worker, limit_s if wait else None))
    if left:
        click.echo(f"baton: not gone within {limit_s:g} s: {', '.join(left)}", err=True)
        sys.exit(NOT_GONE_EXIT_CODE)


COMMANDS = (status, explain, drain)


def _ask(where: Where, question: Callable[[Gateway], Coroutine[Any, Any, Any]]) -> Any:
    """The answer of that gateway. Raises BatonError saying what to do where none answers."""

    async def asked() -> Any:
        async with Redialled(where) as gateway:
            return await question(gateway)

    try:
        return asyncio.run(asked())
    except StreamBroken as broken:
        raise _nobody(broken) from broken


def _nobody(broken: StreamBroken) -> BatonError:
    return BatonError(
        f"no gateway answers at {broken}; start a cluster with `baton up`, or name a gateway with --gateway HOST:PORT, "
        "and with --gateway-ca FILE who signs its certificate if it has one"
    )


async def _watch(where: Where, as_json: bool) -> None:
    from rich.live import Live

    from baton.cli.formatting import console
    from baton.cli.status_view import render_status

    async with Redialled(where) as gateway:
        out = console()
        with Live(console=out, auto_refresh=False) as live:
            while True:
                try:
                    found = await gateway.status()
                except StreamBroken as broken:
                    if as_json:
                        click.echo(json.dumps({"error": str(_nobody(broken))}))
                    else:
                        live.update(str(_nobody(broken)), refresh=True)
                else:
                    if as_json:
                        click.echo(json.dumps(to_plain(found)))
                    else:
                        live.update(render_status(found), refresh=True)
                await asyncio.sleep(WATCH_S)


async def _drain(gateway: Gateway, worker_id: str | None, wait_s: float | None) -> list[str]:
    """Ask one worker, or for None those of this machine; with `wait_s`, return when those lives of theirs are
    gone, or after as long. Returns the names of those that are not."""
    if wait_s is None:
        await _tell(gateway, worker_id)
        return []
    end_s = asyncio.get_running_loop().time() + wait_s
    leaving = await _tell_some_time(gateway, worker_id, wait_s)
    return await _until_gone(gateway, leaving, end_s - asyncio.get_running_loop().time())


async def _tell_some_time(gateway: Gateway, worker_id: str | None, limit_s: float) -> tuple[WorkerStatus, ...]:
    """Who has been asked to leave. A gateway that does not answer yet, or does not know them yet, is asked
    again: a machine that ends has no second chance. Raises what the last answer was after `limit_s`, or
    earlier where that will not change."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    is_said = False
    while True:
        try:
            return await _tell(gateway, worker_id)
        except (StreamBroken, Refused, NoScheduler, NobodyMeant) as error:
            patience_s = min(limit_s, _patience_s(error))
            if loop.time() - began_s + RETRY_S > patience_s:
                raise
            if not is_said:
                click.echo(f"baton: {error}; trying again for {patience_s:g} s", err=True)
                is_said = True
        await asyncio.sleep(RETRY_S)


async def _tell(gateway: Gateway, worker_id: str | None) -> tuple[WorkerStatus, ...]:
    """Who has been asked to leave."""
    found = await gateway.status()
    if found.scheduler is None:
        raise NoScheduler("the gateway knows no scheduler that could tell workers to leave")
    leaving = drained(found, worker_id, socket.gethostname(), own_addresses())
    for worker in leaving:
        await gateway.drain(worker.worker.worker_id, node_shutting_down=worker_id is None)
        click.echo(
            f"{worker.worker.worker_id} ({worker.role.value}, pid {worker.pid}) finishes {_work(worker)} and leaves"
        )
    return leaving


def _patience_s(error: BatonError) -> float:
    """How long it may take until there is another answer than this one."""
    if isinstance(error, NobodyMeant):
        return FIND_S
    if isinstance(error, Refused) and error.failure.code is not Code.UNAVAILABLE:
        return 0.0
    return math.inf


class NoScheduler(BatonError):
    """The gateway knows none."""


class NobodyMeant(BatonError):
    """The gateway knows no such worker; the message names those it knows."""


def _drain_at(drain_socket: Path, wait_s: float | None) -> list[str]:
    """The same of the one worker that listens there. Raises BatonError where none does."""
    with request_drain(drain_socket, wait_s or ANSWER_S) as (name, has_ended):
        click.echo(f"{name} finishes what it runs and leaves")
        if wait_s is None:
            return []
        if not has_ended(wait_s):
            return [name]
    click.echo(f"{name} has left")
    time.sleep(HEARD_S)
    return []


def drained(
    found: ClusterStatus, worker_id: str | None, host: str, addresses: Collection[str]
) -> tuple[WorkerStatus, ...]:
    """The workers meant: the one of that name, or for None all of this machine, those that serve at one of
    its `addresses`, or, where none does, those that say that they are on `host`. Raises NobodyMeant when it
    is nobody."""
    if worker_id is None:
        leaving = tuple(worker for worker in found.workers if host_of(worker.worker.address) in addresses)
        leaving = leaving or tuple(worker for worker in found.workers if worker.host == host)
        what = f"no worker on this machine ({host})"
    else:
        leaving = tuple(worker for worker in found.workers if worker.worker.worker_id == worker_id)
        what = f"no worker {worker_id!r}"
    if not leaving:
        there = ", ".join(f"{worker.worker.worker_id} on {worker.host}" for worker in found.workers) or "none"
        raise NobodyMeant(f"{what}; there {'is' if len(found.workers) < 2 else 'are'} {there}")
    return leaving


def _work(worker: WorkerStatus) -> str:
    count = worker.running_seqs + worker.waiting_seqs
    return f"{count} sequence{'' if count == 1 else 's'}"


async def _until_gone(gateway: Gateway, leaving: tuple[WorkerStatus, ...], limit_s: float) -> list[str]:
    """Who is not after `limit_s`. Raises StreamBroken where the gateway does not answer for `SILENCE_S`. A
    scheduler that has just come lists those that have reported to it so far: whoever is missing is gone only
    after `FIND_S` there."""
    loop = asyncio.get_running_loop()
    left = {worker.worker.worker_id: worker.worker for worker in leaving}
    scheduler, complete_s = None, 0.0
    heard_s = loop.time()
    end_s = heard_s + limit_s
    while left and loop.time() < end_s:
        await asyncio.sleep(WAIT_POLL_S)
        try:
            found = await gateway.status()
        except StreamBroken:
            if loop.time() - heard_s > SILENCE_S:
                raise
            continue
        heard_s = loop.time()
        if found.scheduler != scheduler:
            complete_s = heard_s + FIND_S * (scheduler is not None)
            scheduler = found.scheduler or scheduler
        if found.scheduler is None or heard_s < complete_s:
            continue
        for worker_id, life in tuple(left.items()):
            if not any(life.is_same_incarnation(worker.worker) for worker in found.workers):
                click.echo(f"{worker_id} has left")
                del left[worker_id]
    return list(left)
