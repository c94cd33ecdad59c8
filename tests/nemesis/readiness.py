"""Waits until a cluster serves without restriction: the state in which answers without faults are taken."""

import asyncio
from collections.abc import Callable, Collection

from baton.core.client_api import ClusterStatus, WorkerStatus
from baton.core.cluster.worker_report import WorkerRole, WorkerState
from tests.cluster import ProcessCluster

SETTLED_S = 4.0
"""Time for which a cluster must stay ready. A machine that is too busy loses workers again within it."""


async def until_settled(cluster: ProcessCluster, workers: Collection[str], *, limit_s: float) -> None:
    """Wait until all gateways know exactly these workers, all are ready and linked, and none was lost for
    `SETTLED_S`.

    Raises AssertionError after `limit_s`.
    """
    what = f"workers {workers} ready and linked for {SETTLED_S:g} s"
    async with asyncio.TaskGroup() as group:
        for gateway in cluster.gateways:
            is_settled = holds_for(SETTLED_S, lambda status: all_linked(status, workers), _now_s)
            group.create_task(cluster.until(is_settled, limit_s, f"{what} at {gateway}", gateway=gateway))


def all_linked(status: ClusterStatus, workers: Collection[str]) -> bool:
    """True if exactly these workers are ready, and each decode worker has a link to each that prefills."""
    is_complete = sorted(w.worker.worker_id for w in status.workers if w.state is WorkerState.READY) == sorted(workers)
    decode = [w for w in status.workers if w.role is WorkerRole.DECODE]
    prefill = [w for w in status.workers if w.role.can_prefill]
    return is_complete and all(_has_link(reader, owner) for reader in decode for owner in prefill)


def holds_for(
    duration_s: float, condition: Callable[[ClusterStatus], bool], clock: Callable[[], float]
) -> Callable[[ClusterStatus], bool]:
    """Return a condition that is true once `condition` was true at each evaluation for `duration_s`."""
    since_s: float | None = None

    def has_held(status: ClusterStatus) -> bool:
        nonlocal since_s
        if not condition(status):
            since_s = None
            return False
        since_s = clock() if since_s is None else since_s
        return clock() - since_s >= duration_s

    return has_held


def _has_link(reader: WorkerStatus, owner: WorkerStatus) -> bool:
    return any(link.peer.is_same_incarnation(owner.worker) and not link.broken for link in reader.links)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
