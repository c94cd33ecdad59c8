"""Every implementation of `Network`, behind one handle: services come and go by address."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import StreamBroken
from baton.core.interfaces import Duplex, Network, SchedulerService, Source, WorkerService
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.request import RequestActuals
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_streams import StreamLimits
from baton.runtime.network.in_process_network import InProcessNetwork

HEARTBEAT_S = 0.2
MAX_MESSAGES = 8
"""Small, so that a stuck stream shows soon."""


class World(Protocol):
    """A network and the services on it."""

    network: Network

    async def add_worker(self, service: WorkerService) -> str: ...

    async def add_scheduler(self, service: SchedulerService) -> str: ...

    async def remove(self, address: str) -> None:
        """The process at `address` dies."""
        ...


class InProcessWorld:
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


class GrpcWorld:
    def __init__(self) -> None:
        limits = StreamLimits(max_messages=MAX_MESSAGES, max_received=MAX_MESSAGES)
        self.network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=2.0, call_s=2.0, limits=limits)
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


WORLDS: dict[str, Callable[[], InProcessWorld | GrpcWorld]] = {"in_process": InProcessWorld, "grpc": GrpcWorld}


@asynccontextmanager
async def world_of(kind: str) -> AsyncIterator[World]:
    """Checks on leaving that no task is left behind."""
    before = asyncio.all_tasks()
    world = WORLDS[kind]()
    try:
        yield world
    finally:
        await world.aclose()
    for _ in range(100):
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"tasks left behind: {left}")


Serve = Callable[[Duplex[Any, Any]], Awaitable[None]]


class StubWorker:
    """A worker whose streams are served by given functions. `ended` counts the streams whose service has
    returned."""

    def __init__(self, session: Serve | None = None, peer: Serve | None = None) -> None:
        self._session = session
        self._peer = peer
        self.ended = 0

    async def session(self, stream: Duplex[WorkerMessage, GatewayMessage]) -> None:
        await self._serve(self._session, stream)

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        await self._serve(self._peer, stream)

    async def _serve(self, serve: Serve | None, stream: Duplex[Any, Any]) -> None:
        assert serve is not None
        try:
            await serve(stream)
        finally:
            self.ended += 1


class StubScheduler:
    """A scheduler that answers as told: `answer` is returned, or raised if it is an error."""

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
        for one in actuals:
            self._answer(one)

    async def watch(self) -> Source[ClusterUpdate]:
        assert self._updates is not None
        return self._updates

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        return self._answer(request_id)  # type: ignore[no-any-return]

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        return self._answer((worker_id, node_shutting_down))  # type: ignore[no-any-return]

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        assert self._report is not None
        await self._report(stream)

    def _answer(self, question: Any) -> Any:
        self.asked.append(question)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


async def echo(stream: Duplex[Any, Any], answer: Callable[[Any], Any] = lambda message: message) -> None:
    """Answer each message with `answer(message)` until the stream breaks."""
    while True:
        stream.send(answer(await stream.receive()))


async def until_broken(stream: Duplex[Any, Any]) -> list[Any]:
    """Everything that still arrives."""
    messages = []
    try:
        while True:
            messages.append(await stream.receive())
    except StreamBroken:
        return messages


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - any condition, not only those with an event
            await asyncio.sleep(0.005)
