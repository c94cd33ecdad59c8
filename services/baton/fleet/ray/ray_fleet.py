"""Runs the workers of a cluster as Ray actors. Tokens and KV blocks never pass through Ray.

Workers that end with their driver (`baton up`) are started together, and a worker that cannot start is an
error. Detached workers (`baton fleet` on an existing Ray cluster) are independent: each is retried by itself,
while it has no node or keeps dying.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.processes.restart_policy import RestartLimit
from baton.fleet.ray.actor_placement import PlacementTimes
from baton.fleet.ray.fleet_worker import FleetContext, FleetWorker, WorkerStage
from baton.fleet.ray.node_resources import places_by_role
from baton.fleet.ray.ray_actors import drain_unmanaged, request_node_ids
from baton.fleet.ray.ray_calls import CALL_TIMEOUT_S, RayCalls, RayFailed, wait_for_object
from baton.fleet.ray.ray_connection import JoinedCluster, RayConnection
from baton.fleet.ray.ray_nodes import RayNodes
from baton.fleet.ray.worker_actor import WorkerFacts
from baton.fleet.worker_plan import DesiredWorkers, WorkerSpec, plan_changes
from baton.runtime.config.fleet_settings import FleetSettings
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger

log = get_logger(__name__)

CONNECT_TIMEOUT_S = 120.0
"""Starting Ray on two busy cores takes about ten seconds."""
LEFT_BEHIND_TIMEOUT_S = 5.0
"""Longest wait for the node ids of workers of an earlier driver. Workers are not supervised meanwhile."""


class RayFleet:
    """Keeps a set of workers alive on a private Ray or on an existing Ray cluster."""

    def __init__(
        self,
        *,
        ray_dir: Path,
        log_dir: Path | None,
        joined: JoinedCluster | None = None,
        memory_limit: float | None = None,
        limit: RestartLimit | None = None,
        start_timeout_s: float = FleetSettings.worker_start_s,
        on_started: Callable[[WorkerFacts], None] = lambda facts: None,
        on_died: Callable[[str, str], None] = lambda worker_id, reason: None,
        on_activity: Callable[[str, str], None] = lambda worker_id, text: None,
        notify: Callable[[str], None] = lambda text: None,
        connection: RayConnection | None = None,
        placement_times: PlacementTimes | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        left_behind_timeout_s: float = LEFT_BEHIND_TIMEOUT_S,
    ) -> None:
        """Prepare a fleet without touching Ray.

        ray_dir: directory for the files of a private Ray.
        log_dir: directory for the logs of the workers; None: Ray's own log directory.
        joined: the existing Ray cluster; None: start a private Ray on this machine.
        limit: how often a worker may die.
        start_timeout_s, on_started, on_died, on_activity, notify: as in `FleetContext`.
        memory_limit: setting `ray_memory_limit`, for a private Ray.
        connection, placement_times, and the timeouts: replaced in tests.
        """
        self._ray_dir = ray_dir
        self._joined = joined
        self._memory_limit = memory_limit
        self._connection = connection or RayConnection()
        self._times = placement_times or PlacementTimes()
        self._connect_timeout_s = connect_timeout_s
        self._left_behind_timeout_s = left_behind_timeout_s
        self._calls: RayCalls | None = None
        self._nodes = RayNodes(self._call, self._connection)
        self._workers: dict[str, FleetWorker] = {}
        self._context = FleetContext(
            call=self._call,
            connection=self._connection,
            nodes=self._nodes,
            joined=joined,
            log_dir=log_dir,
            restart_limit=limit or RestartLimit(),
            start_timeout_s=start_timeout_s,
            placement_times=self._times,
            on_started=on_started,
            on_died=on_died,
            on_activity=on_activity,
            notify=notify,
            num_workers=lambda: len(self._workers),
            can_serve=self._can_serve,
        )
        self.node_address = "127.0.0.1"
        """Address of this machine, as the nodes of the workers reach it."""

    async def connect(self) -> str:
        """Start a Ray on this machine, or join the existing one. Return a description. Raises RayFailed."""
        self._calls = RayCalls()
        joined = self._joined
        if joined is None:
            start = lambda: self._connection.start(self._ray_dir, self._memory_limit)  # noqa: E731
            return str(await self._call("be started", start, self._connect_timeout_s))
        try:
            self.node_address = await self._call(
                f"be joined at {joined.address}",
                lambda: self._connection.join(joined.address, joined.namespace),
                self._connect_timeout_s,
            )
        except RayFailed as error:
            raise RayFailed(
                f"{error}; this machine must be a node of that cluster: "
                f"run `ray start --address {joined.address} --num-cpus 0`"
            ) from error
        await self._nodes.refresh()
        num_nodes = len(self._nodes.living)
        return "; ".join(
            [f"joined {joined.address}, {num_nodes} node{'' if num_nodes == 1 else 's'}"]
            + [f"{refused}: refused" for refused in self._nodes.refused]
        )

    @property
    def num_workers(self) -> int:
        """Number of workers that this fleet has."""
        return len(self._workers)

    @property
    def owns_ray(self) -> bool:
        """True if `connect` has begun to start a private Ray."""
        return self._joined is None and self._calls is not None

    @property
    def stages(self) -> Mapping[tuple[WorkerRole, WorkerStage], int]:
        """Number of workers by role and stage."""
        return Counter((worker.spec.role, worker.stage) for worker in self._workers.values())

    async def start(self, spec: WorkerSpec, config: WorkerConfig) -> WorkerFacts:
        """Start or adopt one worker. Raises WorkerFailed, NodesRefused or RayFailed."""
        return await self._add(spec, config).start()

    async def reconcile(self, desired: DesiredWorkers) -> None:
        """Keep the desired detached workers running until cancelled.

        Each worker is retried by itself, for ever. Workers of an earlier driver that are not desired are
        drained once all desired workers have served, failed, or are known to wait: until then they may be the
        only ones that serve. Raises RayFailed if Ray does not answer.
        """
        are_others_drained = False
        left_behind = await self._find_left_behind()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._apply(desired, left_behind, group)
                if not are_others_drained and all(worker.is_settled for worker in self._workers.values()):
                    await self.drain_unmanaged()
                    are_others_drained, left_behind = True, ()
                await asyncio.sleep(self._times.refresh_interval_s)

    async def drain_unmanaged(self) -> None:
        """Drain detached workers of this cluster that are not part of this fleet. Raises RayFailed."""
        if not self._context.is_detached:
            return
        for worker_id in await self._call(
            "drain workers", lambda: drain_unmanaged(self._connection.api, self._workers)
        ):
            log.info("unmanaged_worker_drained", worker=worker_id)

    async def supervise(self) -> None:
        """Restart dead workers until cancelled; on an existing Ray cluster also workers that were drained.

        A worker that dies too often is tried again from time to time. Raises WorkerFailed if then no worker
        is left that can serve, and RayFailed if Ray does not answer.
        """
        async with asyncio.TaskGroup() as group:
            for worker in self._workers.values():
                group.create_task(worker.keep_alive(), name=f"fleet-{worker.spec.worker_id}")

    async def close(self, grace_s: float) -> None:
        """Stop all workers that are not detached, and the Ray that `connect` started.

        Raises RayFailed if Ray does not answer. Its processes then end together with this process. Does
        nothing if `connect` was never called.
        """
        if self._calls is None:
            return
        failed: RayFailed | None = None
        if not self._context.is_detached:
            try:
                await self._call("end the workers", lambda: self._stop_all(grace_s), grace_s + CALL_TIMEOUT_S)
            except RayFailed as error:
                failed = error
        await self._call("be shut down", lambda: self._connection.api.shutdown())
        self._calls.close()
        if failed is not None:
            raise failed

    def _stop_all(self, grace_s: float) -> None:
        ended = []
        for worker in self._workers.values():
            worker.is_stopping = True
            if (actor := worker.placement.actor) is not None:
                actor.stop.remote()
                if worker.facts is not None:
                    ended.append(actor.wait.remote(grace_s))
        if ended:
            self._connection.api.wait(ended, num_returns=len(ended), timeout=grace_s)

    def _can_serve(self) -> bool:
        """Return True if a worker that can decode does not keep dying. Decode workers can also prefill."""
        return any(worker.spec.role.can_decode and not worker.keeps_dying for worker in self._workers.values())

    def _add(self, spec: WorkerSpec, config: WorkerConfig) -> FleetWorker:
        worker = FleetWorker(spec, config, self._context)
        self._workers[spec.worker_id] = worker
        return worker

    async def _find_left_behind(self) -> Collection[str]:
        """Return the ids of workers that an earlier driver left running on a node. Raises RayFailed."""
        references = await self._call(
            "list running workers", lambda: request_node_ids(self._connection.api, self._workers)
        )
        answers = {worker_id: asyncio.create_task(wait_for_object(ref)) for worker_id, ref in references.items()}
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=self._left_behind_timeout_s)
        finally:
            for answer in answers.values():
                answer.cancel()
        node_ids = await asyncio.gather(*answers.values(), return_exceptions=True)
        return {
            worker_id
            for worker_id, node_id in zip(answers, node_ids, strict=True)
            if not isinstance(node_id, BaseException)
        }

    async def _apply(self, desired: DesiredWorkers, left_behind: Collection[str], group: asyncio.TaskGroup) -> None:
        """Add or remove workers until each role has its desired number. Running workers are preferred."""
        places: Mapping[str, int] = {}
        if desired.scale_with_nodes:
            await self._nodes.refresh()
            places = places_by_role(self._nodes.not_draining)
        for role, minimum in desired.minimum.items():
            number = max(minimum, places.get(role.value, 0))
            is_waiting = {
                worker.spec.worker_id: worker.stage is WorkerStage.WAITING
                for worker in self._workers.values()
                if worker.spec.role is role
            }
            added, removed = plan_changes(role, number, is_waiting, left_behind)
            for spec in added:
                worker = self._add(spec, desired.config_of(spec))
                worker.task = group.create_task(worker.run(), name=f"fleet-{spec.worker_id}")
            for worker_id in removed:
                await self._remove_waiting(worker_id)

    async def _remove_waiting(self, worker_id: str) -> None:
        """Remove a worker for which no node has a place, unless it got one in the meantime."""
        worker = self._workers[worker_id]
        if worker.stage is not WorkerStage.WAITING:
            return
        del self._workers[worker_id]
        assert worker.task is not None
        worker.task.cancel()
        await asyncio.wait((worker.task,))
        await worker.placement.kill()
        log.info("waiting_worker_removed", worker=worker_id)

    async def _call(self, action: str, call: Callable[[], Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        assert self._calls is not None, "connect must be called first"
        return await self._calls(action, call, timeout_s)
