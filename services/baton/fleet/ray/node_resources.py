"""Resource arithmetic of worker placement: what a worker requests, and what Ray nodes offer.

Pure functions.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.cluster.worker_report import WorkerRole
from baton.runtime.config.fleet_settings import RayPlacement
from baton.runtime.config.settings import WorkerConfig

ROLE_RESOURCES: Mapping[str, str] = {role.value: f"baton_{role.value}" for role in WorkerRole}
"""Custom Ray resource of each role, by role name. A node offers places for workers of a role with it, for
example `ray start --resources '{"baton_prefill": 1}'`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine or pod of a Ray cluster.

    node_id: Ray's id of the node.
    name: its host name.
    address: its IP address.
    resources: total amount of each Ray resource, whether in use or not.
    """

    node_id: str
    name: str
    address: str
    resources: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def places(self) -> dict[str, float]:
        """The resources that workers request.

        Empty on nodes started with `--num-cpus=0`, such as a head node.
        """
        return {
            name: self.resources[name] for name in ("CPU", "GPU", *ROLE_RESOURCES.values()) if self.resources.get(name)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Ray resources that a worker requests from its node.

    num_cpus, num_gpus, resources: as in the options of a Ray actor.
    spread: prefer nodes that run no worker yet.
    """

    num_cpus: int = 0
    num_gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    spread: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name}: {amount:g}" for name, amount in self._amounts.items() if amount)

    def fits(self, node: Node) -> bool:
        """Return True if an empty node of this kind could satisfy the request."""
        return all(node.resources.get(name, 0) >= amount for name, amount in self._amounts.items())

    @property
    def _amounts(self) -> dict[str, float]:
        return {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.resources}


def living_nodes(rows: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """Convert the rows of `ray.nodes()` and drop dead nodes."""
    return tuple(
        Node(
            node_id=row["NodeID"],
            name=row["NodeManagerHostname"],
            address=row["NodeManagerAddress"],
            resources=row.get("Resources") or {},
        )
        for row in rows
        if row["Alive"]
    )


def places_by_role(nodes: Collection[Node]) -> dict[str, int]:
    """Return how many workers of each role these nodes offer to hold, whether in use or not."""
    return {
        role: sum(int(node.resources.get(resource, 0)) for node in nodes) for role, resource in ROLE_RESOURCES.items()
    }


def demand_of(config: WorkerConfig, placement: RayPlacement, offered: Collection[str]) -> Demand:
    """Return the resources that this worker requests from its node.

    `offered`: names of the resources that any node of the cluster has or had. With placement by role the
    worker requests one unit of its role's resource. Otherwise it requests one CPU, which keeps it away from
    nodes without CPUs, such as the head's. It requests a GPU if it will use one, because Ray hides GPUs that
    were not requested.
    """
    resource = ROLE_RESOURCES[config.role]
    num_gpus = int(config.device == "cuda" or (config.device == "auto" and "GPU" in offered))
    if placement == "role" or (placement == "auto" and resource in offered):
        return Demand(num_gpus=num_gpus, resources={resource: 1.0})
    return Demand(num_cpus=1, num_gpus=num_gpus, spread=True)


def max_workers_on(node: Node, num_workers: int, nodes: Sequence[Node]) -> int:
    """Return how many of a fleet's `num_workers` workers may share `node`.

    This is the number of places that it offers. If it names none, it is an even share over all `nodes` with
    CPUs.
    """
    places = sum(node.resources.get(name, 0) for name in ROLE_RESOURCES.values())
    if places:
        return max(1, min(num_workers, math.ceil(places)))
    return math.ceil(num_workers / max(1, sum(other.resources.get("CPU", 0) > 0 for other in nodes)))
