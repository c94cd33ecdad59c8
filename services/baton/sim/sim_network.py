"""Simulated network: messages take a seeded random time, streams can be cut, and processes can die.

It behaves like TCP connections. Messages arrive in order within a stream, and in any order between streams. A
message is lost only together with its stream. Between two partitioned processes nothing arrives until the
partition is healed, or until keepalive breaks their streams: neither messages that are under way when it
begins, nor the end of a stream, nor the news that a process has died.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Refused, StreamBroken
from baton.core.interfaces import Duplex, Network, SchedulerApi, SchedulerService, Source, WorkerService
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.core.request import RequestActuals
from baton.sim.sim_streams import NETWORK, SimEnd, SimStream, process_at

T = TypeVar("T")

DIAL_S = 2.0
"""Timeout of a dial, as `GrpcNetwork` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Distribution of message delays: `min_s` plus an exponential time with mean `mean_s`.

    late: share of messages that are delayed by up to `late_s` more. Messages of other streams overtake them.
    """

    min_s: float = 0.000_05
    mean_s: float = 0.000_5
    late: float = 0.0
    late_s: float = 0.1

    def draw(self, rng: Random) -> float:
        """Return a random delay in seconds."""
        delay_s = self.min_s + rng.expovariate(1.0 / self.mean_s)
        if self.late and rng.random() < self.late:
            delay_s += rng.uniform(0.0, self.late_s)
        return delay_s


class SimNetwork:
    """The network of one simulated cluster. `rng` draws the delays; the scenario decides on cuts and deaths.

    streams: open streams by number.
    messages_lost: number of messages that were under way in streams that were cut.
    """

    def __init__(self, rng: Random, delays: Delays, *, keepalive_s: float = 0.9) -> None:
        """Create the network.

        keepalive_s: time until the streams between two processes break that cannot reach each other.
        """
        self.keepalive_s = keepalive_s
        self._rng = rng
        self._delays = delays
        self._services: dict[str, WorkerService | SchedulerService] = {}
        self._contexts: dict[str, Context] = {}
        self._partitions: dict[frozenset[str], asyncio.Event] = {}  # set when healed
        self._paused: dict[str, asyncio.Event] = {}  # set when resumed
        self._dead: set[str] = set()  # addresses of processes that are being cleaned up
        # Dicts instead of sets, because the order of a set does not follow from the seed.
        self._handlers: dict[str, dict[asyncio.Task[Any], None]] = {}
        self.streams: dict[int, SimStream] = {}
        self.messages_lost = 0
        self._opened = 0

    def draw_delay(self) -> float:
        """Return the delay of one message in seconds."""
        return self._delays.draw(self._rng)

    def count_lost(self, num_messages: int) -> None:
        """Count messages that were under way in a stream that was cut."""
        self.messages_lost += num_messages

    def forget(self, stream: SimStream) -> None:
        """Remove a stream whose ends are both broken."""
        self.streams.pop(stream.number, None)

    def listen(self, address: str, service: WorkerService | SchedulerService) -> None:
        """Make a service reachable at `address`. Its calls run in the context of the caller's process."""
        self._services[address] = service
        self._contexts[address] = copy_context()
        self._handlers[address] = {}

    async def kill(self, address: str) -> None:
        """Kill the process at this address: its streams break and its running calls are cancelled."""
        self.cut_off(address)
        handlers = self._handlers.pop(address, {})
        await asyncio.gather(*handlers, return_exceptions=True)

    def cut_off(self, address: str) -> None:
        """Break the streams of a process that dies, and cancel its running calls without waiting for them."""
        self._services.pop(address, None)
        self._dead.add(address)
        self.resumed(process_at(address))
        for stream in [s for s in self.streams.values() if address in s.hosts]:
            stream.die(address)
        for task in self._handlers.get(address, {}):
            task.cancel()

    # -- partitions and pauses -------------------------------------------------------------------------------

    def partition(self, first: str, second: str) -> None:
        """Let no message pass between two processes, given by name, until `heal`."""
        pair = frozenset((first, second))
        healed = self._partitions[pair] = asyncio.Event()
        self._break_later([s for s in self.streams.values() if s.processes == pair], healed)

    def heal(self, first: str, second: str) -> None:
        """End a partition. Messages of streams that are not broken yet arrive."""
        pair = frozenset((first, second))
        self._partitions.pop(pair).set()
        for stream in [s for s in self.streams.values() if s.processes == pair]:
            if stream.is_cut_on_heal:
                stream.cut("the process died")
            for end in stream.ends:
                end.release_held()

    def paused(self, process: str) -> None:
        """Handle that a process stands still: it answers no keepalive and no dial."""
        resumed = self._paused[process] = asyncio.Event()
        self._break_later([s for s in self.streams.values() if process in s.processes], resumed)

    def resumed(self, process: str) -> None:
        """Handle that a process runs again. Does nothing if it was not paused."""
        resumed = self._paused.pop(process, None)
        if resumed is not None:
            resumed.set()

    def is_partitioned(self, pair: frozenset[str]) -> bool:
        """True if no message passes between these two processes."""
        return bool(self._partitions) and pair in self._partitions

    async def reachable(self, caller: str, address: str, *, within_s: float) -> None:
        """Wait until a process answers another one. Raises StreamBroken after `within_s`.

        `caller` and `address` are addresses.
        """
        pair = frozenset((process_at(caller), process_at(address)))
        while True:
            obstacle = self._partitions.get(pair) or self._paused.get(process_at(address))
            if obstacle is None:
                return
            try:
                async with asyncio.timeout(within_s):
                    await obstacle.wait()
            except TimeoutError:
                raise StreamBroken(f"{address} did not answer within {within_s:g} s") from None

    def _break_later(self, streams: "list[SimStream]", over: asyncio.Event) -> None:
        def break_streams() -> None:
            if not over.is_set():
                for stream in streams:
                    stream.cut("no answer to keepalive")

        NETWORK.run(asyncio.get_running_loop().call_later, self.keepalive_s, break_streams)

    # -- streams and calls -----------------------------------------------------------------------------------

    def host(self, address: str) -> "HostNetwork":
        """Return the network interface of the process at `address`, which starts now."""
        self._dead.discard(address)
        return HostNetwork(self, address)

    def service_at(self, address: str) -> WorkerService | SchedulerService:
        """Return the service at `address`. Raises StreamBroken if there is none."""
        service = self._services.get(address)
        if service is None:
            raise StreamBroken(f"no service listens at {address}")
        return service

    def open(
        self, hosts: tuple[str, str], serve: Callable[[SimEnd[Any, Any]], Coroutine[Any, Any, None]]
    ) -> SimEnd[Any, Any]:
        """Open a stream between two processes and return the client's end.

        `serve` runs with the server's end.
        """
        if hosts[0] in self._dead:
            raise StreamBroken(f"{hosts[0]} is dead")
        self._opened += 1
        stream = SimStream(self, hosts, self._opened)
        self.streams[stream.number] = stream
        client, server = stream.ends

        async def handle() -> None:
            try:
                await serve(server)
            except StreamBroken:
                pass  # the normal end of a stream's service
            except Refused as refused:
                server.end(str(refused), refused.failure)
            finally:
                await server.aclose()

        task = asyncio.get_running_loop().create_task(
            handle(), name=f"serve-{hosts[1]}-{stream.number}", context=self._contexts[hosts[1]].copy()
        )
        handlers = self._handlers[hosts[1]]
        handlers[task] = None
        task.add_done_callback(lambda done: handlers.pop(done, None))
        return client

    async def run_at(self, address: str, call: Coroutine[Any, Any, T]) -> T:
        """Run a call inside the process at `address`. Raises StreamBroken if that process dies meanwhile.

        If the caller is cancelled, the call is cancelled too, once that process runs. The caller does not
        wait for its end.
        """
        context = self._contexts[address].copy()
        task = asyncio.get_running_loop().create_task(call, name=f"call-{address}", context=context)
        handlers = self._handlers[address]
        handlers[task] = None
        task.add_done_callback(lambda done: handlers.pop(done, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                task.cancel()
                task.add_done_callback(_ignore_result)
                raise
            raise StreamBroken(f"the scheduler at {address} died") from None


def _ignore_result(task: "asyncio.Task[Any]") -> None:
    """Take the error of a call that nobody waits for."""
    if not task.cancelled():
        task.exception()


class HostNetwork(Network):
    """Implements `Network` for one simulated process."""

    def __init__(self, network: SimNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def open_session(self, address: str) -> Duplex[GatewayMessage, WorkerMessage]:
        return await self._dial(address, lambda service: service.session)

    async def open_peer(self, address: str) -> Duplex[ReaderMessage, OwnerMessage]:
        return await self._dial(address, lambda service: service.peer)

    async def open_prefix_copy(self, address: str) -> Duplex[PrefixRequest, PrefixReply]:
        return await self._dial(address, lambda service: service.copy_prefix)

    async def open_report(self, address: str) -> Duplex[WorkerReport, WorkerCommand]:
        return await self._dial(address, lambda service: service.report)

    def scheduler(self, address: str) -> SchedulerApi:
        return SimSchedulerClient(self._network, self._address, address)

    def forget_scheduler(self, address: str) -> None:
        """Do nothing: clients keep no connection between calls."""

    async def aclose(self) -> None:
        """Do nothing: streams are closed by their openers."""

    async def _dial(
        self, address: str, method: Callable[[Any], Callable[[SimEnd[Any, Any]], Coroutine[Any, Any, None]]]
    ) -> Any:
        await asyncio.sleep(self._network.draw_delay())
        await self._network.reachable(self._address, address, within_s=DIAL_S)
        service = self._network.service_at(address)
        return self._network.open((self._address, address), method(service))


class SimSchedulerClient(SchedulerApi):
    """Implements `SchedulerApi`. Calls take a delay each way and fail if the scheduler dies meanwhile."""

    def __init__(self, network: SimNetwork, caller: str, address: str) -> None:
        self._network = network
        self._caller = caller
        self._address = address

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        return await self._call(lambda scheduler: scheduler.place(query))

    async def finished(self, *actuals: RequestActuals) -> None:
        return await self._call(lambda scheduler: scheduler.finished(*actuals))

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        return await self._call(lambda scheduler: scheduler.explain(request_id))

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        return await self._call(lambda scheduler: scheduler.drain(worker_id, node_shutting_down=node_shutting_down))

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        return await self._call(lambda scheduler: scheduler.clear_tenant(tenant_salt))

    async def cache_stats(self) -> CacheStats:
        return await self._call(lambda scheduler: scheduler.cache_stats())

    async def watch(self) -> Source[ClusterUpdate]:
        await asyncio.sleep(self._network.draw_delay())
        await self._network.reachable(self._caller, self._address, within_s=DIAL_S)
        scheduler = self._scheduler()

        async def pump(end: SimEnd[ClusterUpdate, Any]) -> None:
            updates = await scheduler.watch()
            try:
                while not end.is_broken:
                    end.send(await updates.receive())
            finally:
                await updates.aclose()

        return self._network.open((self._caller, self._address), pump)

    async def _call(self, method: Callable[[SchedulerService], Coroutine[Any, Any, T]]) -> T:
        await self._pass_network()
        before = self._scheduler()
        answer = await self._network.run_at(self._address, method(before))
        await self._pass_network()
        if self._scheduler() is not before:
            raise StreamBroken(f"the scheduler at {self._address} died")
        return answer

    async def _pass_network(self) -> None:
        """Wait as long as one message between caller and scheduler takes."""
        await asyncio.sleep(self._network.draw_delay())
        await self._network.reachable(self._caller, self._address, within_s=self._network.keepalive_s)

    def _scheduler(self) -> Any:
        return self._network.service_at(self._address)
