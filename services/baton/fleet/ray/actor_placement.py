"""One worker's actor: found where an earlier driver has left it, put on a node that has our Baton, ended."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.core.errors import BatonError
from baton.fleet.ray.node_resources import Demand, Node, demand_of
from baton.fleet.ray.ray_actors import create_actor, find_actor, kill_actor, options_of
from baton.fleet.ray.ray_calls import as_future, cause
from baton.fleet.ray.ray_nodes import RayCall, RayNodes
from baton.fleet.worker_plan import WorkerSpec
from baton.runtime.config.settings import RayPlacement, WorkerConfig
from baton.runtime.logging import get_logger

log = get_logger(__name__)

PLACE_LIMIT_S = 900.0
"""Until a worker that ends with its driver is on a node of a cluster, which may have to come first. A
detached one waits for ever."""
LOOK_S = 5.0
"""Between two looks at the nodes while a worker waits for one, or while there shall be as many workers as
nodes have places for."""
ADOPT_LIMIT_S = 30.0
"""An actor of an earlier driver that has not said within so long on which node it is waits for one itself,
and is asked for anew."""
NAME_FREE_S = 10.0
"""Until the name of an actor that was ended may be used again,"""
NAME_POLL_S = 0.05
"""which is looked at in such intervals."""
PLACE_ATTEMPTS = 20
"""Nodes that turn out to have another Baton, or do not say which, until a worker is given up."""
SAY_WAITING_S = 10.0
"""A worker that has not been placed for so long is told of,"""
SAY_AGAIN_S = 300.0
"""and again at such intervals."""


class WorkerFailed(BatonError):
    """A worker did not start, or died more often than it may; the message says why, in its own words."""


OnWaiting = Callable[[Demand, float], None]
"""Told now and then what a worker that has no node asks for, and for how many seconds it has."""


@dataclass(kw_only=True)
class ActorOf:
    """The actor of one worker. `is_detached`: it outlives this driver, known by its name. `actor`: None where
    there is none now."""

    spec: WorkerSpec
    is_detached: bool
    nodes: RayNodes
    ask: RayCall
    actor: Any = None

    async def is_found_on_a_node(self) -> bool:
        """Whether an earlier driver has left it, and not one that waits for a node, with what was known of
        nodes at that time. Raises WorkerFailed."""
        if not await self.ask("look a worker up", self._find):
            return False
        asked = await self.ask("look a worker up", lambda: self.actor.node_id.remote())
        limit = asyncio.timeout(ADOPT_LIMIT_S)
        try:
            async with limit:
                await as_future(asked)
        except Exception as error:  # also those of an actor that has just died
            why = "it is on no node" if limit.expired() else cause(error)
            log.warning("worker_not_adopted", worker=self.spec.worker_id, why=why)
            await self.end()
            return False
        return True

    async def create(self, options: dict[str, Any]) -> None:
        """Have Ray make one."""
        await self.ask("place a worker", lambda: self._create(options))

    async def place(self, config: WorkerConfig, placement: RayPlacement, on_waiting: OnWaiting) -> Node:
        """Have one on a node that has our Baton, which Ray chooses; the node. Raises WorkerFailed or
        NodesRefused."""
        for _ in range(PLACE_ATTEMPTS):
            num_refused = len(self.nodes.refused)
            try:
                node_id = await self._placed(config, placement, on_waiting)
            except WorkerFailed:
                await self.end()
                await self.nodes.look()
                if len(self.nodes.refused) == num_refused:
                    raise
                continue  # it was on a node that had just come, with a Baton that could not even make the actor
            await self.nodes.look()
            node = self.nodes.node(node_id)
            if node is not None and self.nodes.is_accepted(node_id):
                return node
            await self.end()
        raise WorkerFailed(
            f"worker {self.spec.worker_id} was placed {PLACE_ATTEMPTS} times on nodes that cannot be used"
        )

    async def end(self) -> None:
        """End it, if there is one, and with it a detached one's claim to its name. Raises WorkerFailed when
        Ray keeps that."""
        if not await self.kill() or not self.is_detached:
            return
        worker_id = self.spec.worker_id
        try:
            async with asyncio.timeout(NAME_FREE_S):
                while await self.ask("look a worker up", lambda: find_actor(worker_id)) is not None:  # noqa: ASYNC110 - nothing says when
                    await asyncio.sleep(NAME_POLL_S)
        except TimeoutError:
            raise WorkerFailed(
                f"Ray has not let go of the name of worker {worker_id} within {NAME_FREE_S:g} s"
            ) from None

    async def kill(self) -> bool:
        """End it, and wait for nothing; whether there was one."""
        return bool(await self.ask("end a worker", self._kill))

    async def _placed(self, config: WorkerConfig, placement: RayPlacement, on_waiting: OnWaiting) -> str:
        """The id of the node on which it is, once it is on one; until then Ray's autoscaler sees that a node
        is missing. What is asked for follows the nodes that come and go. Raises WorkerFailed, but never
        because a detached one waits."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        end_s = None if self.is_detached else began_s + PLACE_LIMIT_S
        say_s = began_s + SAY_WAITING_S
        asked: asyncio.Task[Any] | None = None
        options: dict[str, Any] | None = None
        try:
            while True:
                await self.nodes.look()
                demand = demand_of(config, placement, self.nodes.offered)
                if not self.is_detached:
                    self.nodes.check(demand)
                if (new_options := options_of(demand, self.nodes.selector())) != options:
                    if asked is not None:
                        asked.cancel()
                        await asyncio.gather(asked, return_exceptions=True)
                        await self.end()
                    options = new_options
                    await self.create(options)
                    asked = asyncio.create_task(
                        as_future(await self.ask("place a worker", lambda: self.actor.node_id.remote()))
                    )
                assert asked is not None
                await asyncio.wait(
                    (asked,), timeout=LOOK_S if end_s is None else min(LOOK_S, max(0.0, end_s - loop.time()))
                )
                if asked.done():
                    return str(asked.result())
                if end_s is not None and loop.time() >= end_s:
                    asks = f"it asks for {demand}; of the nodes, {self.nodes.places()}"
                    raise WorkerFailed(
                        f"worker {self.spec.worker_id} was not placed within {PLACE_LIMIT_S:g} s: {asks}"
                    )
                if loop.time() >= say_s:
                    on_waiting(demand, loop.time() - began_s)
                    say_s = loop.time() + SAY_AGAIN_S
        except BatonError:
            raise
        except Exception as error:  # of the actor's making, in one of many classes of Ray's
            raise WorkerFailed(f"worker {self.spec.worker_id} could not be placed: {cause(error)}") from error
        finally:
            if asked is not None:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    def _find(self) -> bool:
        self.actor = find_actor(self.spec.worker_id)
        return self.actor is not None

    def _create(self, options: dict[str, Any]) -> None:
        self.actor = create_actor(self.spec, options, is_detached=self.is_detached)

    def _kill(self) -> bool:
        actor, self.actor = self.actor, None
        if actor is not None:
            kill_actor(actor)
        return actor is not None
