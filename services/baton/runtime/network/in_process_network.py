"""The network of a cluster in one process: the same seams as over gRPC, without sockets, delays or copies.

`fleet/local` runs on it as it is; the simulator puts delays and cuts around it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Failure, Refused, StreamBroken
from baton.core.interfaces import Duplex, SchedulerApi, SchedulerService, Source, WorkerService
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.request import RequestActuals
from baton.runtime.logging import get_logger
from baton.runtime.network.mailbox import Mailbox

log = get_logger(__name__)

MAX_MESSAGES = 4096
"""Messages that wait in one direction of a stream before it counts as stuck."""
WATCH_MESSAGES = 16
END_S = 5.0
"""How long services get to return after their streams have been broken."""

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")
T = TypeVar("T")


class InProcessDuplex(Generic[SendT, ReceiveT]):
    """One end of a stream whose other end is in the same process. Implements `Duplex`."""

    def __init__(self, inbox: Mailbox[ReceiveT], outbox: Mailbox[SendT]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: SendT) -> None:
        if self._outbox.has_ended:
            raise StreamBroken("the stream has ended")
        if self._outbox.is_full:
            self.break_("the stream's buffer is full: the other end does not keep up")
            raise StreamBroken("the stream's buffer is full: the other end does not keep up")
        self._outbox.put(message)

    async def receive(self) -> ReceiveT:
        return await self._inbox.get()

    async def aclose(self) -> None:
        self.break_("the other end has closed the stream")
        self._inbox.close("this end has closed the stream", discard=True)

    def break_(self, message: str, failure: Failure | None = None) -> None:
        """End the stream for both sides; what was sent before can still be received."""
        self._inbox.close(message, failure)
        self._outbox.close(message, failure)


def duplex_pair(
    max_messages: int = MAX_MESSAGES,
) -> tuple[InProcessDuplex[SendT, ReceiveT], InProcessDuplex[ReceiveT, SendT]]:
    """The two ends of one stream, each direction with room for `max_messages`."""
    left: Mailbox[ReceiveT] = Mailbox(max_messages)
    right: Mailbox[SendT] = Mailbox(max_messages)
    return InProcessDuplex(left, right), InProcessDuplex(right, left)


class InProcessNetwork:
    """Services by address. Implements `Network`."""

    def __init__(self, *, max_messages: int = MAX_MESSAGES) -> None:
        self._max_messages = max_messages
        self._workers: dict[str, WorkerService] = {}
        self._schedulers: dict[str, SchedulerService] = {}
        self._serving: dict[asyncio.Task[Any], _Served] = {}

    def add_worker(self, address: str, service: WorkerService) -> None:
        self._workers[address] = service

    def add_scheduler(self, address: str, service: SchedulerService) -> None:
        self._schedulers[address] = service

    def remove(self, address: str) -> None:
        """As if the process at `address` had died: dials are refused, open streams break at both ends. Its
        services are left to return."""
        self._workers.pop(address, None)
        self._schedulers.pop(address, None)
        for served in list(self._serving.values()):
            if served.address == address:
                served.break_(f"{address} is gone")

    async def open_session(self, address: str) -> Duplex[GatewayMessage, WorkerMessage]:
        return self._open(address, self._worker(address).session)

    async def open_peer(self, address: str) -> Duplex[ReaderMessage, OwnerMessage]:
        return self._open(address, self._worker(address).peer)

    async def open_report(self, address: str) -> Duplex[WorkerReport, WorkerCommand]:
        return self._open(address, self.scheduler_service(address).report)

    def scheduler(self, address: str) -> SchedulerApi:
        return _SchedulerCalls(self, address)

    def scheduler_service(self, address: str) -> SchedulerService:
        """Raises StreamBroken if no scheduler is there."""
        service = self._schedulers.get(address)
        if service is None:
            raise StreamBroken(f"no scheduler answers at {address}")
        return service

    def track(self, served: "_Served") -> None:
        """Break `served` when its address is removed or the network closes."""
        self._serving[served.task] = served
        served.task.add_done_callback(self._serving.pop)

    async def aclose(self) -> None:
        """Break every stream and let its service return; one that does not in `END_S` is cancelled."""
        self._workers.clear()
        self._schedulers.clear()
        tasks = list(self._serving)
        for served in list(self._serving.values()):
            served.break_("the network has closed")
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _worker(self, address: str) -> WorkerService:
        service = self._workers.get(address)
        if service is None:
            raise StreamBroken(f"no worker answers at {address}")
        return service

    def _open(
        self, address: str, serve: Callable[[InProcessDuplex[ReceiveT, SendT]], Coroutine[Any, Any, None]]
    ) -> InProcessDuplex[SendT, ReceiveT]:
        ours: InProcessDuplex[SendT, ReceiveT]
        ours, theirs = duplex_pair(self._max_messages)
        task = asyncio.get_running_loop().create_task(_serve(serve(theirs), theirs))
        self.track(_Served(address=address, task=task, break_=theirs.break_))
        return ours


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """One service's part of a stream or call, and how to break that."""

    address: str
    task: asyncio.Task[Any]
    break_: Callable[[str], None]


async def _serve(work: Coroutine[Any, Any, None], stream: InProcessDuplex[Any, Any]) -> None:
    """The stream ends with the service's part of it."""
    try:
        await work
    except StreamBroken:
        pass  # how a stream's service usually ends
    except Refused as refused:
        stream.break_(str(refused), refused.failure)
    except Exception:
        log.exception("stream_service_failed")
        stream.break_("the service failed")
    finally:
        await stream.aclose()


class _SchedulerCalls:
    """`SchedulerApi` of whatever scheduler is at an address at the moment of each call."""

    def __init__(self, network: InProcessNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        return await self._call(lambda service: service.place(query))

    async def finished(self, *actuals: RequestActuals) -> None:
        await self._call(lambda service: service.finished(*actuals))

    async def watch(self) -> Source[ClusterUpdate]:
        source = await self._call(lambda service: service.watch())
        watch = _Watch(source)
        self._network.track(_Served(address=self._address, task=watch.task, break_=watch.break_))
        return watch

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        return await self._call(lambda service: service.explain(request_id))

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        return await self._call(lambda service: service.drain(worker_id, node_shutting_down=node_shutting_down))

    async def _call(self, call: Callable[[SchedulerService], Coroutine[Any, Any, T]]) -> T:
        """In a task of its own, because a scheduler that dies meanwhile takes it along."""
        task = asyncio.get_running_loop().create_task(call(self._network.scheduler_service(self._address)))
        broken: list[str] = []

        def break_(message: str) -> None:
            broken.append(message)
            task.cancel()

        self._network.track(_Served(address=self._address, task=task, break_=break_))
        try:
            return await task
        except asyncio.CancelledError:
            if broken and task.cancelled():
                raise StreamBroken(broken[0]) from None
            raise


class _Watch:
    """A scheduler's updates, copied by a task of their own, so that they can end before the scheduler's
    source does."""

    def __init__(self, source: Source[ClusterUpdate]) -> None:
        self._inbox: Mailbox[ClusterUpdate] = Mailbox(WATCH_MESSAGES)
        self.task = asyncio.get_running_loop().create_task(self._copy(source))

    async def receive(self) -> ClusterUpdate:
        return await self._inbox.get()

    async def aclose(self) -> None:
        self._inbox.close("this end has closed the stream", discard=True)
        self.task.cancel()
        await asyncio.wait((self.task,))

    def break_(self, message: str) -> None:
        self._inbox.close(message)
        self.task.cancel()

    async def _copy(self, source: Source[ClusterUpdate]) -> None:
        try:
            while True:
                self._inbox.put(await source.receive())
                await self._inbox.room()
        except StreamBroken as broken:
            self._inbox.close(str(broken), broken.failure)
        finally:
            self._inbox.close("the scheduler has ended the stream")
            await source.aclose()
