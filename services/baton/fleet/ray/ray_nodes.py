"""Which nodes of a joined Ray cluster may hold workers: those with our own Baton, but for those that are
being drained."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from baton.core.errors import BatonError
from baton.fleet.ray.node_resources import Demand, Node, living_nodes
from baton.fleet.ray.ray_calls import as_future, cause, the_ray
from baton.fleet.ray.release_check import Release, release_probe, why_refused
from baton.runtime.logging import get_logger

log = get_logger(__name__)

PROBE_LIMIT_S = 60.0
"""A node that was just started may start its first Python slowly."""
NODE_LABEL = "ray.io/node-id"
"""Ray gives it to each node by itself."""


class NodesRefused(BatonError):
    """All nodes that could hold a worker have another Baton; the message names them, and both versions."""


class RayCall(Protocol):
    """`RayCalls`."""

    def __call__(self, what: str, call: Callable[[], Any]) -> Awaitable[Any]: ...


class RayNodes:
    """Looks at the cluster anew before each placement, and asks each node once which Baton it has."""

    def __init__(self, call: RayCall) -> None:
        self._call = call
        self._ours: Release = release_probe()()
        self._looking = asyncio.Lock()
        self._accepted: set[str] = set()
        self._refused: dict[str, str] = {}
        self._left: set[str] = set()
        self.living: tuple[Node, ...] = ()
        self.offered: set[str] = set()
        """The resources that any node has, or has had: one that was just lost is no reason to place its
        worker elsewhere."""

    async def look(self) -> None:
        """See which nodes there are, and ask those that are new. Raises RayFailed."""
        async with self._looking:
            self.living = await self._call("list its nodes", lambda: living_nodes(the_ray().nodes()))
            self.offered |= {name for node in self.living for name, amount in node.resources.items() if amount > 0}
            alive = {node.node_id for node in self.living}
            self._accepted &= alive
            self._left &= alive
            self._refused = {node_id: why for node_id, why in self._refused.items() if node_id in alive}
            known = self._accepted | self._refused.keys()
            await asyncio.gather(
                *[self._ask(node) for node in self.living if node.places and node.node_id not in known]
            )

    @property
    def refused(self) -> list[str]:
        """For people: each node that is, and why."""
        return [f"{node} {self._refused[node.node_id]}" for node in self.living if node.node_id in self._refused]

    @property
    def open(self) -> tuple[Node, ...]:
        """Those that live, but for those that were left. A refused one counts: what it offers will be of use
        once it has our Baton."""
        return tuple(node for node in self.living if node.node_id not in self._left)

    def is_accepted(self, node_id: str) -> bool:
        return node_id in self._accepted

    def node(self, node_id: str) -> Node | None:
        return next((node for node in self.living if node.node_id == node_id), None)

    def leave(self, node_id: str) -> None:
        """This node was drained, and is about to end: no worker is started there for as long as it lives."""
        self._left.add(node_id)

    def check(self, demand: Demand) -> None:
        """Raises NodesRefused where there are nodes for it, but each has another Baton. Where there are none,
        one may still come."""
        fitting = [node for node in self.living if demand.fits(node)]
        if fitting and all(node.node_id in self._refused for node in fitting):
            raise NodesRefused(
                f"no node can hold a worker that asks for {demand}: "
                + "; ".join(f"{node} {self._refused[node.node_id]}" for node in fitting)
                + ". Install the same Baton on all nodes"
            )

    def places(self) -> str:
        """For people: what the nodes that may be chosen have."""
        barred = self._refused.keys() | self._left
        open_nodes = [node for node in self.living if node.places and node.node_id not in barred]
        return (
            "; ".join(
                f"{node} has {', '.join(f'{name}: {n:g}' for name, n in node.places.items())}" for node in open_nodes
            )
            or "none may be used"
        )

    def selector(self) -> dict[str, str]:
        """The labels of nodes that Ray may choose."""
        barred = sorted({node.node_id for node in self.living} & (self._refused.keys() | self._left))
        return {NODE_LABEL: f"!in({','.join(barred)})"} if barred else {}

    async def _ask(self, node: Node) -> None:
        """A node that does not answer is neither accepted nor refused; the next look asks it again."""
        try:
            asked = await self._call("ask a node", lambda: _probe(node.node_id))
            async with asyncio.timeout(PROBE_LIMIT_S):
                why = why_refused(await as_future(asked), self._ours)
        except Exception as error:  # whatever Ray says of a node that went away meanwhile
            log.warning("node_not_asked", node=str(node), why=cause(error))
            return
        if why is None:
            self._accepted.add(node.node_id)
            return
        self._refused[node.node_id] = why
        log.warning("node_refused", node=str(node), why=why)


def _probe(node_id: str) -> Any:
    return (
        the_ray()
        .remote(release_probe())
        .options(num_cpus=0, max_retries=0, label_selector={NODE_LABEL: node_id})
        .remote()
    )
