"""The nodes of a Ray cluster as placement sees them: what a worker asks of its node, and who could give it.
Pure functions."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.cluster.worker_report import WorkerRole
from baton.runtime.config.settings import RayPlacement, WorkerConfig

ROLE_RESOURCES: Mapping[str, str] = {role.value: f"baton_{role.value}" for role in WorkerRole}
"""By the name of a role, the custom resource with which a node says that it is for such workers, and for how
many: `ray start --resources '{"baton_prefill": 1}'`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine, or pod, of a Ray cluster. `resources`: all that it has, whether in use or not."""

    node_id: str
    name: str
    address: str
    resources: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def places(self) -> dict[str, float]:
        """Of its resources those that workers ask for; none where the node of a head, or of a driver, was
        started with `--num-cpus=0`."""
        return {
            name: self.resources[name] for name in ("CPU", "GPU", *ROLE_RESOURCES.values()) if self.resources.get(name)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a worker asks of its node, in Ray's words. `spread`: of the nodes that have it, not one that has
    workers already."""

    num_cpus: int = 0
    num_gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    spread: bool = False

    def __str__(self) -> str:
        asked = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.resources}
        return ", ".join(f"{name}: {amount:g}" for name, amount in asked.items() if amount)

    def fits(self, node: Node) -> bool:
        """Whether the node has as much, were nobody else there."""
        asked = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.resources}
        return all(node.resources.get(name, 0) >= amount for name, amount in asked.items())


def living_nodes(rows: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """Those that live, of what `ray.nodes()` says."""
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
    """By the name of a role, how many workers of it these nodes offer to hold, in use or not."""
    return {
        role: sum(int(node.resources.get(resource, 0)) for node in nodes) for role, resource in ROLE_RESOURCES.items()
    }


def demand_of(config: WorkerConfig, placement: RayPlacement, offered: Collection[str]) -> Demand:
    """What this worker asks of its node. `offered`: the resources that any node of the cluster has, or has
    had.

    By role it asks for its role's resource, and a node says how many it takes. Otherwise it asks for a CPU,
    which keeps it away from nodes with none, the head's and the driver's. A GPU is asked for where the worker
    will use one: Ray hides those that nobody asked for.
    """
    resource = ROLE_RESOURCES[config.role]
    num_gpus = int(config.device == "cuda" or (config.device == "auto" and "GPU" in offered))
    if placement == "role" or (placement == "auto" and resource in offered):
        return Demand(num_gpus=num_gpus, resources={resource: 1.0})
    return Demand(num_cpus=1, num_gpus=num_gpus, spread=True)


def workers_on(node: Node, num_workers: int, nodes: Sequence[Node]) -> int:
    """How many of the `num_workers` of a fleet may come to share a node: as many as it offers places for;
    where it names none, an even share of those that have CPUs."""
    places = sum(node.resources.get(name, 0) for name in ROLE_RESOURCES.values())
    if places:
        return max(1, min(num_workers, math.ceil(places)))
    return math.ceil(num_workers / max(1, sum(other.resources.get("CPU", 0) > 0 for other in nodes)))
