"""Tracks which nodes of a joined Ray cluster may run workers.

Only nodes with the same Baton release as this fleet are accepted. Nodes that are being drained are excluded.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from baton.core.errors import BatonError
from baton.fleet.ray.node_resources import Demand, Node, living_nodes
from baton.fleet.ray.ray_calls import wait_for_object
from baton.fleet.ray.ray_connection import RayConnection
from baton.fleet.ray.ray_errors import root_cause
from baton.fleet.ray.release_check import Release, release_mismatch, release_probe
from baton.runtime.logging import get_logger

log = get_logger(__name__)

PROBE_TIMEOUT_S = 60.0
"""The first Python process on a new node may start slowly."""
NODE_LABEL = "ray.io/node-id"
"""Label that Ray sets on every node."""


class NodesRefused(BatonError):
    """All nodes that could hold a worker have another Baton release.

    The message names them and both versions.
    """


class RayCall(Protocol):
    """Runs a function on the Ray thread, as `RayCalls` does."""

    def __call__(self, action: str, call: Callable[[], Any]) -> Awaitable[Any]: ...


class RayNodes:
    """The nodes of a Ray cluster. `refresh` is called before each placement and probes each new node once."""

    def __init__(self, call: RayCall, connection: RayConnection) -> None:
        self._call = call
        self._connection = connection
        self._release: Release = release_probe()()
        self._refreshing = asyncio.Lock()
        self._accepted: set[str] = set()
        self._refused: dict[str, str] = {}
        self._draining: set[str] = set()
        self.living: tuple[Node, ...] = ()
        self.offered: set[str] = set()
        """Names of all resources that any node has or had. They are remembered, because the loss of a node is
        no reason to place its worker elsewhere."""

    async def refresh(self) -> None:
        """List the living nodes and probe the new ones. Raises RayFailed."""
        async with self._refreshing:
            self.living = await self._call("list its nodes", lambda: living_nodes(self._connection.api.nodes()))
            self.offered |= {name for node in self.living for name, amount in node.resources.items() if amount > 0}
            alive = {node.node_id for node in self.living}
            self._accepted &= alive
            self._draining &= alive
            self._refused = {node_id: reason for node_id, reason in self._refused.items() if node_id in alive}
            known = self._accepted | self._refused.keys()
            await asyncio.gather(
                *[self._probe(node) for node in self.living if node.places and node.node_id not in known]
            )

    @property
    def refused(self) -> list[str]:
        """Describe each refused node and the reason."""
        return [f"{node} {self._refused[node.node_id]}" for node in self.living if node.node_id in self._refused]

    @property
    def not_draining(self) -> tuple[Node, ...]:
        """Living nodes without those that are being drained.

        Refused nodes are included, because they become usable once they have the right release.
        """
        return tuple(node for node in self.living if node.node_id not in self._draining)

    def is_accepted(self, node_id: str) -> bool:
        """Return True if the node has the same Baton release as this fleet."""
        return node_id in self._accepted

    def node(self, node_id: str) -> Node | None:
        """Return the living node with this id, or None."""
        return next((node for node in self.living if node.node_id == node_id), None)

    def mark_draining(self, node_id: str) -> None:
        """Exclude a node that is about to shut down from all further placements."""
        self._draining.add(node_id)

    def check(self, demand: Demand) -> None:
        """Raise NodesRefused if there are nodes for this demand and all of them are refused.

        If there are none at all, one may still join the cluster, so that is no error.
        """
        fitting = [node for node in self.living if demand.fits(node)]
        if fitting and all(node.node_id in self._refused for node in fitting):
            raise NodesRefused(
                f"no node can hold a worker that requests {demand}: "
                + "; ".join(f"{node} {self._refused[node.node_id]}" for node in fitting)
                + ". Install the same Baton on all nodes"
            )

    def describe(self) -> str:
        """Describe the resources of all nodes that may be chosen."""
        excluded = self._refused.keys() | self._draining
        usable = [node for node in self.living if node.places and node.node_id not in excluded]
        return (
            "; ".join(f"{node} has {', '.join(f'{name}: {n:g}' for name, n in node.places.items())}" for node in usable)
            or "no node can be used"
        )

    def label_selector(self) -> dict[str, str]:
        """Return the Ray label selector that excludes refused and draining nodes. Empty if there are none."""
        excluded = sorted({node.node_id for node in self.living} & (self._refused.keys() | self._draining))
        return {NODE_LABEL: f"!in({','.join(excluded)})"} if excluded else {}

    async def _probe(self, node: Node) -> None:
        """Accept or refuse a node by its release.

        A node that does not answer is probed again at the next refresh.
        """
        try:
            reference = await self._call("ask a node", lambda: self._start_probe(node.node_id))
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                mismatch = release_mismatch(await wait_for_object(reference), self._release)
        except Exception as error:  # Ray raises many classes of error if a node dies meanwhile
            log.warning("node_probe_failed", node=str(node), reason=root_cause(error))
            return
        if mismatch is None:
            self._accepted.add(node.node_id)
            return
        self._refused[node.node_id] = mismatch
        log.warning("node_refused", node=str(node), reason=mismatch)

    def _start_probe(self, node_id: str) -> Any:
        return (
            self._connection.api.remote(release_probe())
            .options(num_cpus=0, max_retries=0, label_selector={NODE_LABEL: node_id})
            .remote()
        )
