"""Places the Ray actor of one worker: adopts an existing actor, or creates one on an accepted node."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import BatonError
from baton.fleet.ray.node_resources import Demand, Node, demand_of
from baton.fleet.ray.ray_actors import actor_options, create_actor, find_actor, kill_actor
from baton.fleet.ray.ray_calls import wait_for_object
from baton.fleet.ray.ray_connection import RayConnection
from baton.fleet.ray.ray_errors import root_cause
from baton.fleet.ray.ray_nodes import RayCall, RayNodes
from baton.fleet.worker_plan import WorkerSpec
from baton.runtime.config.fleet_settings import RayPlacement
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger

log = get_logger(__name__)

PLACEMENT_ATTEMPTS = 20
"""Number of placements on unusable nodes (another release, or no answer) after which a worker fails."""


class WorkerFailed(BatonError):
    """A worker did not start, or died too often. The message contains its own error."""


OnWaiting = Callable[[Demand, float], None]
"""Called from time to time with the demand of a worker that has no node, and the seconds that it has
waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTimes:
    """Intervals and timeouts of placing actors, in seconds."""

    timeout_s: float = 900.0
    """Longest wait for a node, which the autoscaler may have to start. Detached workers wait for ever."""
    refresh_interval_s: float = 5.0
    """Interval at which the list of nodes is refreshed while a worker waits."""
    adopt_timeout_s: float = 30.0
    """An actor of an earlier driver that does not name its node within this time still waits for one. It is
    killed and created again."""
    name_timeout_s: float = 10.0
    """Longest wait until Ray frees the name of a killed actor."""
    name_poll_s: float = 0.05
    """Interval at which the name is checked."""
    report_after_s: float = 10.0
    """A worker that has waited for this long is reported."""
    report_interval_s: float = 300.0
    """Interval of further reports."""


@dataclass(kw_only=True)
class ActorPlacement:
    """The Ray actor of one worker.

    spec: the worker.
    is_detached: the actor outlives this driver and is found by its name.
    actor: Ray's actor handle, None if there is no actor now.
    """

    spec: WorkerSpec
    is_detached: bool
    nodes: RayNodes
    connection: RayConnection
    call: RayCall
    times: PlacementTimes = field(default_factory=PlacementTimes)
    actor: Any = None

    async def adopt(self) -> bool:
        """Take over the actor of an earlier driver. Return False if there is none, or if it waits for a node.

        A waiting actor is killed, because its demand reflects an old list of nodes. Raises WorkerFailed.
        """
        if not await self.call("look a worker up", self._find):
            return False
        node_id = await self.call("look a worker up", lambda: self.actor.node_id.remote())
        timeout = asyncio.timeout(self.times.adopt_timeout_s)
        try:
            async with timeout:
                await wait_for_object(node_id)
        except Exception as error:  # also raised by an actor that has just died
            reason = "it is on no node" if timeout.expired() else root_cause(error)
            log.warning("worker_not_adopted", worker=self.spec.worker_id, reason=reason)
            await self.end()
            return False
        return True

    async def create(self, options: dict[str, Any]) -> None:
        """Create the actor with these Ray options."""
        await self.call("place a worker", lambda: self._create(options))

    async def place(self, config: WorkerConfig, placement: RayPlacement, on_waiting: OnWaiting) -> Node:
        """Create the actor and wait until Ray has started it on an accepted node. Return the node.

        Raises WorkerFailed or NodesRefused.
        """
        for _ in range(PLACEMENT_ATTEMPTS):
            num_refused = len(self.nodes.refused)
            try:
                node_id = await self._create_on_node(config, placement, on_waiting)
            except WorkerFailed:
                await self.end()
                await self.nodes.refresh()
                if len(self.nodes.refused) == num_refused:
                    raise
                continue  # it was on a new node whose Baton could not even create the actor
            await self.nodes.refresh()
            node = self.nodes.node(node_id)
            if node is not None and self.nodes.is_accepted(node_id):
                return node
            await self.end()
        raise WorkerFailed(
            f"worker {self.spec.worker_id} was placed {PLACEMENT_ATTEMPTS} times on nodes that cannot be used"
        )

    async def end(self) -> None:
        """Kill the actor if there is one, and wait until the name of a detached one is free.

        Raises WorkerFailed if Ray does not free the name in time.
        """
        if not await self.kill() or not self.is_detached:
            return
        worker_id, timeout_s = self.spec.worker_id, self.times.name_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while await self._is_name_used():  # noqa: ASYNC110 - Ray has no event for this
                    await asyncio.sleep(self.times.name_poll_s)
        except TimeoutError:
            raise WorkerFailed(f"Ray did not free the name of worker {worker_id} within {timeout_s:g} s") from None

    async def kill(self) -> bool:
        """Kill the actor without waiting for its end. Return True if there was one."""
        return bool(await self.call("end a worker", self._kill))

    async def _create_on_node(self, config: WorkerConfig, placement: RayPlacement, on_waiting: OnWaiting) -> str:
        """Create the actor and return the id of its node once it has one.

        The pending actor makes Ray's autoscaler add a node. If the list of nodes changes what the worker must
        request, the actor is created again. Raises WorkerFailed, but never because a detached worker waits.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        end_s = None if self.is_detached else began_s + self.times.timeout_s
        report_s = began_s + self.times.report_after_s
        node_id: asyncio.Task[Any] | None = None
        options: dict[str, Any] | None = None
        try:
            while True:
                await self.nodes.refresh()
                demand = demand_of(config, placement, self.nodes.offered)
                if not self.is_detached:
                    self.nodes.check(demand)
                if (new_options := actor_options(demand, self.nodes.label_selector())) != options:
                    if node_id is not None:
                        await _cancel(node_id)
                        await self.end()
                    options = new_options
                    await self.create(options)
                    node_id = await self._request_node_id()
                assert node_id is not None
                await asyncio.wait((node_id,), timeout=self._wait_s(end_s))
                if node_id.done():
                    return str(node_id.result())
                if end_s is not None and loop.time() >= end_s:
                    raise WorkerFailed(
                        f"worker {self.spec.worker_id} was not placed within {self.times.timeout_s:g} s: "
                        f"it requests {demand}; available nodes: {self.nodes.describe()}"
                    )
                if loop.time() >= report_s:
                    on_waiting(demand, loop.time() - began_s)
                    report_s = loop.time() + self.times.report_interval_s
        except BatonError:
            raise
        except Exception as error:  # an error of the actor, in one of many classes of Ray
            raise WorkerFailed(f"worker {self.spec.worker_id} could not be placed: {root_cause(error)}") from error
        finally:
            if node_id is not None:
                await _cancel(node_id)

    async def _request_node_id(self) -> asyncio.Task[Any]:
        """Ask the actor for its node. The task stays pending while the actor waits for one."""
        reference = await self.call("place a worker", lambda: self.actor.node_id.remote())
        return asyncio.create_task(wait_for_object(reference))

    def _wait_s(self, end_s: float | None) -> float:
        if end_s is None:
            return self.times.refresh_interval_s
        return min(self.times.refresh_interval_s, max(0.0, end_s - asyncio.get_running_loop().time()))

    async def _is_name_used(self) -> bool:
        find = lambda: find_actor(self.connection.api, self.spec.worker_id)  # noqa: E731
        return await self.call("look a worker up", find) is not None

    def _find(self) -> bool:
        self.actor = find_actor(self.connection.api, self.spec.worker_id)
        return self.actor is not None

    def _create(self, options: dict[str, Any]) -> None:
        self.actor = create_actor(self.connection.api, self.spec, options, is_detached=self.is_detached)

    def _kill(self) -> bool:
        actor, self.actor = self.actor, None
        if actor is not None:
            kill_actor(self.connection.api, actor)
        return actor is not None


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
