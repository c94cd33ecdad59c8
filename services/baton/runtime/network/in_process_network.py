"""In-process implementation of the cluster's network, without sockets, delays or copies.

It has the same interfaces as the gRPC network. `fleet/local` uses it unchanged; the simulator adds delays and
link failures around it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Failure, Refused, StreamBroken
from baton.core.interfaces import Duplex, SchedulerApi, SchedulerService, Source, WorkerService
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.core.request import RequestActuals
from baton.runtime.logging import get_logger
from baton.runtime.network.mailbox import Mailbox

log = get_logger(__name__)

MAX_MESSAGES = 4096
"""Maximum number of unread messages in one direction of a stream; one more breaks it."""
WATCH_MESSAGES = 16
END_S = 5.0
"""Time for services to return after their streams were broken."""
BUFFER_FULL = "the stream's buffer is full: the other end does not read fast enough"

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")
T = TypeVar("T")


class InProcessDuplex(Generic[SendT, ReceiveT]):
    """One end of an in-process stream. Implements `Duplex`."""

    def __init__(self, inbox: Mailbox[ReceiveT], outbox: Mailbox[SendT]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: SendT) -> None:
        if self._outbox.has_ended:
            raise StreamBroken("the stream has ended")
        if self._outbox.is_full:
            self.break_(BUFFER_FULL)
            raise StreamBroken(BUFFER_FULL)
        self._outbox.put(message)

    async def receive(self) -> ReceiveT:
        return await self._inbox.get()

    async def aclose(self) -> None:
        self.break_("the other end has closed the stream")
        self._inbox.close("this end has closed the stream", discard=True)

    def break_(self, message: str, failure: Failure | None = None) -> None:
        """End the stream for both sides. Messages sent before can still be received."""
        self._inbox.close(message, failure)
        self._outbox.close(message, failure)


def duplex_pair(
    max_messages: int = MAX_MESSAGES,
) -> tuple[InProcessDuplex[SendT, ReceiveT], InProcessDuplex[ReceiveT, SendT]]:
    """Create both ends of a stream that buffers up to `max_messages` in each direction."""
    left: Mailbox[ReceiveT] = Mailbox(max_messages)
    right: Mailbox[SendT] = Mailbox(max_messages)
    return InProcessDuplex(left, right), InProcessDuplex(right, left)


class InProcessNetwork:
    """Network that connects services of this process by address. Implements `Network`."""

    def __init__(self, *, max_messages: int = MAX_MESSAGES) -> None:
        self._max_messages = max_messages
        self._workers: dict[str, WorkerService] = {}
        self._schedulers: dict[str, SchedulerService] = {}
        self._serving: dict[asyncio.Task[Any], _Served] = {}

    def add_worker(self, address: str, service: WorkerService) -> None:
        """Make a worker reachable at `address`."""
        self._workers[address] = service

    def add_scheduler(self, address: str, service: SchedulerService) -> None:
        """Make a scheduler reachable at `address`."""
        self._schedulers[address] = service

    def remove(self, address: str) -> None:
        """Simulate the death of the process at `address`.

        New connections are refused and open streams break at both ends. The services themselves keep running
        until they return.
        """
        self._workers.pop(address, None)
        self._schedulers.pop(address, None)
        for served in list(self._serving.values()):
            if served.address == address:
                served.break_(f"{address} is gone")

    async def open_session(self, address: str) -> Duplex[GatewayMessage, WorkerMessage]:
        return self._open(address, self._worker(address).session)

    async def open_peer(self, address: str) -> Duplex[ReaderMessage, OwnerMessage]:
        return self._open(address, self._worker(address).peer)

    async def open_prefix_copy(self, address: str) -> Duplex[PrefixRequest, PrefixReply]:
        return self._open(address, self._worker(address).copy_prefix)

    async def open_report(self, address: str) -> Duplex[WorkerReport, WorkerCommand]:
        return self._open(address, self.scheduler_service(address).report)

    def scheduler(self, address: str) -> SchedulerApi:
        return _SchedulerCalls(self, address)

    def forget_scheduler(self, address: str) -> None:
        """Do nothing: clients keep no connection between calls."""

    def scheduler_service(self, address: str) -> SchedulerService:
        """Return the scheduler at `address`. Raises StreamBroken if there is none."""
        service = self._schedulers.get(address)
        if service is None:
            raise StreamBroken(f"no scheduler answers at {address}")
        return service

    def track(self, served: "_Served") -> None:
        """Break `served` when its address is removed or the network closes."""
        self._serving[served.task] = served
        served.task.add_done_callback(self._serving.pop)

    async def aclose(self) -> None:
        """Break every stream and wait for its service; after `END_S` the service is cancelled."""
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
        client: InProcessDuplex[SendT, ReceiveT]
        client, server = duplex_pair(self._max_messages)
        task = asyncio.get_running_loop().create_task(_serve(serve(server), server))
        self.track(_Served(address=address, task=task, break_=server.break_))
        return client


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """Task that serves one stream or call, with a function that breaks it."""

    address: str
    task: asyncio.Task[Any]
    break_: Callable[[str], None]


async def _serve(work: Coroutine[Any, Any, None], stream: InProcessDuplex[Any, Any]) -> None:
    """Run the service side of a stream and close the stream when it returns."""
    try:
        await work
    except StreamBroken:
        pass  # the usual end of a stream's service
    except Refused as refused:
        stream.break_(str(refused), refused.failure)
    except Exception:
        log.exception("stream_service_failed")
        stream.break_("the service failed")
    finally:
        await stream.aclose()


class _SchedulerCalls:
    """`SchedulerApi` that looks up the scheduler at its address for each call."""

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

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        return await self._call(lambda service: service.clear_tenant(tenant_salt))

    async def cache_stats(self) -> CacheStats:
        return await self._call(lambda service: service.cache_stats())

    async def _call(self, call: Callable[[SchedulerService], Coroutine[Any, Any, T]]) -> T:
        """Run a call in its own task, which `InProcessNetwork.remove` can break."""
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
    """Copy of a scheduler's updates, which can be broken independently of the scheduler's source."""

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
                await self._inbox.wait_for_space()
        except StreamBroken as broken:
            self._inbox.close(str(broken), broken.failure)
        finally:
            self._inbox.close("the scheduler has ended the stream")
            await source.aclose()
