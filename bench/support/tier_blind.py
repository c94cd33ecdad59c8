"""A policy that does not know slower tiers, to compare with."""

from dataclasses import dataclass, replace

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, Overlap
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.kv_centric import kv_centric
from baton.scheduler.policies.policy_types import Choice, PolicyContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOverlap:
    """Implements `Overlap` for the blocks that a worker has on its device."""

    num_blocks: int
    num_held_blocks: int
    num_reloaded_blocks: int = 0
    num_disk_blocks: int = 0


def place(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Place as `kv_centric` does if no worker has announced a block of a slower tier."""
    overlaps = {worker: _on_device(overlap) for worker, overlap in cluster.overlaps.items()}
    return kv_centric(query, replace(cluster, overlaps=overlaps), context)


def _on_device(overlap: Overlap) -> DeviceOverlap:
    reloaded = overlap.num_reloaded_blocks
    return DeviceOverlap(
        num_blocks=max(0, overlap.num_blocks - reloaded), num_held_blocks=max(0, overlap.num_held_blocks - reloaded)
    )
