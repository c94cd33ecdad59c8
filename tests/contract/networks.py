"""Test harnesses for each implementation of `Network`, with stub services."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import StreamBroken
from baton.core.interfaces import Duplex, Network, SchedulerService, Source, WorkerService
from baton.core.messages.jobs import ReceivedGatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.core.request import RequestActuals
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.network.in_process_network import InProcessNetwork
from baton.runtime.network.mailbox import Mailbox
from tests.times import LONG_LIMIT_S

HEARTBEAT_S = 30.0
"""Keepalive interval. None is tested: a busy machine must not end streams."""
MAX_MESSAGES = 8
"""Small, so that a full buffer is reached soon."""


class NetworkHarness(Protocol):
    """A network to which a test adds services by address and removes them."""

    network: Network

    async def add_worker(self, service: WorkerService) -> str: ...

    async def add_scheduler(self, service: SchedulerService) -> str: ...

    async def remove(self, address: str) -> None:
        """Stop the service at `address` as if its process had died."""
        ...


class InProcessHarness:
    def __init__(self) -> None:
        self.network = InProcessNetwork(max_messages=MAX_MESSAGES)
        self._count = 0

    async def add_worker(self, service: WorkerService) -> str:
        self.network.add_worker(address := self._address(), service)
        return address

    async def add_scheduler(self, service: SchedulerService) -> str:
        self.network.add_scheduler(address := self._address(), service)
        return address

    async def remove(self, address: str) -> None:
        self.network.remove(address)

    async def aclose(self) -> None:
        await self.network.aclose()

    def _address(self) -> str:
        self._count += 1
        return f"host:{self._count}"


class GrpcHarness:
    def __init__(self) -> None:
        limits = StreamLimits(max_messages=MAX_MESSAGES, max_received=MAX_MESSAGES, close_s=LONG_LIMIT_S)
        self.network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=LONG_LIMIT_S, call_s=LONG_LIMIT_S, limits=limits)
        self._limits = limits
        self._servers: dict[str, GrpcServer] = {}

    async def add_worker(self, service: WorkerService) -> str:
        return await self._start(lambda server: server.add_worker(service))

    async def add_scheduler(self, service: SchedulerService) -> str:
        return await self._start(lambda server: server.add_scheduler(service))

    async def remove(self, address: str) -> None:
        await self._servers.pop(address).stop(0)

    async def aclose(self) -> None:
        await self.network.aclose()
        for server in self._servers.values():
            await server.stop(0)

    async def _start(self, add: Callable[[GrpcServer], None]) -> str:
        server = GrpcServer(heartbeat_s=HEARTBEAT_S, limits=self._limits)
        add(server)
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        self._servers[address] = server
        return address


HARNESSES: dict[str, Callable[[], InProcessHarness | GrpcHarness]] = {
    "in_process": InProcessHarness,
    "grpc": GrpcHarness,
}


@asynccontextmanager
async def open_harness(kind: str) -> AsyncIterator[NetworkHarness]:
    """Open a harness. Check at exit that no task is still running."""
    before = asyncio.all_tasks()
    harness = HARNESSES[kind]()
    try:
        yield harness
    finally:
        await harness.aclose()
    for _ in range(3000):
        running = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not running:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"tasks still running: {running}")


Serve = Callable[[Duplex[Any, Any]], Awaitable[None]]


class StubWorker:
    """A worker whose streams are served by given functions. `ended` counts the streams that were served."""

    def __init__(
        self, session: Serve | None = None, peer: Serve | None = None, copy_prefix: Serve | None = None
    ) -> None:
        self._session = session
        self._peer = peer
        self._copy_prefix = copy_prefix
        self.ended = 0

    async def session(self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage]) -> None:
        await self._serve(self._session, stream)

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        await self._serve(self._peer, stream)

    async def copy_prefix(self, stream: Duplex[PrefixReply, PrefixRequest]) -> None:
        await self._serve(self._copy_prefix, stream)

    async def _serve(self, serve: Serve | None, stream: Duplex[Any, Any]) -> None:
        assert serve is not None
        try:
            await serve(stream)
        finally:
            self.ended += 1


class StubScheduler:
    """A scheduler that returns `answer`, or raises it if it is an exception. `asked` records arguments."""

    def __init__(
        self, answer: Any = None, updates: Source[ClusterUpdate] | None = None, report: Serve | None = None
    ) -> None:
        self.answer = answer
        self.asked: list[Any] = []
        self._updates = updates
        self._report = report

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        return self._answer(query)  # type: ignore[no-any-return]

    async def finished(self, *actuals: RequestActuals) -> None:
        for request in actuals:
            self._answer(request)

    async def watch(self) -> Source[ClusterUpdate]:
        assert self._updates is not None
        return self._updates

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        return self._answer(request_id)  # type: ignore[no-any-return]

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        return self._answer((worker_id, node_shutting_down))  # type: ignore[no-any-return]

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        return self._answer(tenant_salt)  # type: ignore[no-any-return]

    async def cache_stats(self) -> CacheStats:
        return self._answer("cache_stats")  # type: ignore[no-any-return]

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        assert self._report is not None
        await self._report(stream)

    def _answer(self, argument: Any) -> Any:
        self.asked.append(argument)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class UpdateQueue:
    """A source of cluster updates that a test fills."""

    def __init__(self) -> None:
        self._mailbox: Mailbox[ClusterUpdate] = Mailbox(100)

    @property
    def is_closed(self) -> bool:
        return self._mailbox.has_ended

    def put(self, update: ClusterUpdate) -> None:
        self._mailbox.put(update)

    async def receive(self) -> ClusterUpdate:
        return await self._mailbox.get()

    async def aclose(self) -> None:
        self._mailbox.close("closed")


async def echo(stream: Duplex[Any, Any], answer: Callable[[Any], Any] = lambda message: message) -> None:
    """Answer each message with `answer(message)` until the stream breaks."""
    while True:
        stream.send(answer(await stream.receive()))


async def until_broken(stream: Duplex[Any, Any]) -> list[Any]:
    """Receive messages until the stream breaks, and return them."""
    messages = []
    try:
        while True:
            messages.append(await stream.receive())
    except StreamBroken:
        return messages


def is_broken(stream: Duplex[Any, Any], message: Any) -> bool:
    """Return whether the stream refuses to send `message`. Sends it otherwise."""
    try:
        stream.send(message)
    except StreamBroken:
        return True
    return False


async def eventually(condition: Callable[[], bool], timeout_s: float = LONG_LIMIT_S) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - any condition, not only those with an event
            await asyncio.sleep(0.005)
