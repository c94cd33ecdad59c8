"""Keeps one worker of the fleet alive: places its actor, starts it, waits for its end and starts it again."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from baton.fleet.processes.restart_policy import RestartBudget, RestartLimit
from baton.fleet.ray.actor_placement import ActorPlacement, PlacementTimes, WorkerFailed
from baton.fleet.ray.node_resources import Demand, max_workers_on
from baton.fleet.ray.ray_calls import CALL_TIMEOUT_S, wait_for_object
from baton.fleet.ray.ray_connection import JoinedCluster, RayConnection
from baton.fleet.ray.ray_errors import is_death, is_memory_monitor, root_cause
from baton.fleet.ray.ray_nodes import NodesRefused, RayNodes
from baton.fleet.ray.release_check import release_probe
from baton.fleet.ray.worker_actor import NODE_SHUTTING_DOWN, WorkerFacts
from baton.fleet.worker_plan import WorkerSpec
from baton.runtime.config.config_base import dump
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.runtime.process.process_end import CRASH_SIGNALS, ProcessEnd, describe_exit, describe_unknown_exit

log = get_logger(__name__)

WAIT_TIMEOUT_S = 10.0
"""Timeout of each call that waits for a worker's end. The call is then repeated. So a driver that disappears
leaves no waiting thread in the actor."""

REAP_S = 1.0
"""Longest wait until the parent of a dead worker process has collected its exit status."""
REAP_POLL_S = 0.02


class WorkerStage(Enum):
    """Progress of a worker.

    WAITING: it waits for a node and has no process.
    STARTING: it is looked up, placed or loads its model.
    SERVING: it is ready.
    FAILING: it died or could not start, and is tried again.
    """

    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    FAILING = "failing"


class TimedRayCall(Protocol):
    """Runs a function on the Ray thread, as `RayCalls` does."""

    def __call__(self, action: str, call: Callable[[], Any], timeout_s: float = CALL_TIMEOUT_S) -> Awaitable[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetContext:
    """The properties of a fleet that all its workers share.

    joined: the existing Ray cluster, None on a private Ray.
    start_timeout_s: longest time from a worker's placement on a node until it is ready.
    on_started: called with a worker's facts after each start.
    on_died: called with a worker's id and the reason after its death.
    on_activity: called with a worker's id and what it does, while it starts.
    notify: prints a line for the user.
    num_workers: returns the number of workers in the fleet.
    can_serve: returns True if a worker that can decode is left that does not keep dying.
    """

    call: TimedRayCall
    connection: RayConnection
    nodes: RayNodes
    joined: JoinedCluster | None
    log_dir: Path | None
    restart_limit: RestartLimit
    start_timeout_s: float
    placement_times: PlacementTimes
    on_started: Callable[[WorkerFacts], None]
    on_died: Callable[[str, str], None]
    on_activity: Callable[[str, str], None]
    notify: Callable[[str], None]
    num_workers: Callable[[], int]
    can_serve: Callable[[], bool]

    @property
    def is_detached(self) -> bool:
        """True if workers outlive this driver."""
        return self.joined is not None and self.joined.is_detached


class FleetWorker:
    """One worker of the fleet and its Ray actor.

    stage: its progress.
    facts: facts of the last successful start.
    is_settled: it has served, has failed, or is known to wait for a node.
    is_stopping: it is being ended on purpose and is not started again.
    keeps_dying: it died more often than the restart limit allows, and has not served since.
    task: the task that runs `run`, for detached workers.
    """

    def __init__(self, spec: WorkerSpec, config: WorkerConfig, fleet: FleetContext) -> None:
        self.spec = spec
        self._config = config
        self._fleet = fleet
        self._budget = RestartBudget(fleet.restart_limit)
        self._num_failures = 0
        """Deaths and failed starts since it served last."""
        self.placement = ActorPlacement(
            spec=spec,
            is_detached=fleet.is_detached,
            nodes=fleet.nodes,
            connection=fleet.connection,
            call=fleet.call,
            times=fleet.placement_times,
        )
        self.stage = WorkerStage.STARTING
        self.facts: WorkerFacts | None = None
        self.is_settled = False
        self.is_stopping = False
        self.keeps_dying = False
        self.task: asyncio.Task[None] | None = None
        self._process: ProcessEnd | None = None

    async def run(self) -> None:
        """Start the worker and keep it alive until cancelled."""
        await self._start_with_retries("")
        await self.keep_alive()

    async def start(self) -> WorkerFacts:
        """Adopt or place the actor and start the worker in it.

        Raises WorkerFailed, NodesRefused or RayFailed.
        """
        self._set_starting()
        if self._fleet.is_detached and await self.placement.adopt():
            try:
                return await self._start_actor(self._config)
            except WorkerFailed as error:  # an earlier driver left a broken worker, which has now been ended
                log.warning("worker_not_adopted", worker=self.spec.worker_id, reason=str(error))
        if self._fleet.joined is None:
            await self.placement.create({})
            return await self._start_actor(self._config)
        self.stage = WorkerStage.WAITING
        node = await self.placement.place(self._config, self._fleet.joined.placement, self._report_waiting)
        num_workers = max(self._config.workers_on_host, self._fleet.num_workers())
        workers_on_host = max_workers_on(node, num_workers, self._fleet.nodes.living)
        return await self._start_actor(replace(self._config, workers_on_host=workers_on_host))

    async def keep_alive(self) -> None:
        """Wait for the worker's end and start it again, until cancelled.

        Returns if the worker is being stopped, or was drained on a private Ray: there, drained workers stay
        away. Raises WorkerFailed if it dies too often, is not detached, and no other worker can serve.
        """
        while True:
            reason = await self._wait_until_ended()
            was_drained = reason in ("", NODE_SHUTTING_DOWN)
            if self.is_stopping or (self._fleet.joined is None and was_drained):
                log.info("worker_drained", worker=self.spec.worker_id)
                return
            if was_drained:
                reason = await self._clean_up_drained(node_shutting_down=reason == NODE_SHUTTING_DOWN)
            else:
                self._fleet.on_died(self.spec.worker_id, reason)
            await self._start_with_retries(reason)
            if self.is_stopping:
                return

    async def _start_with_retries(self, reason: str) -> None:
        """Start the worker until it serves or is being stopped.

        `reason`: why it has died, empty if it has not. A worker that died more often than the restart limit
        allows, within its window or without serving in between, is tried again after a pause. Raises
        WorkerFailed instead if it is not detached and no worker is left that can serve.
        """
        while True:
            await asyncio.sleep(self._record_failure(reason) if reason else 0.0)
            if self.is_stopping:
                return
            try:
                await self.start()
                return
            except (WorkerFailed, NodesRefused) as error:
                reason = str(error)

    def _record_failure(self, reason: str) -> float:
        """Count one failure. Return the seconds until the next attempt.

        Raises WorkerFailed if it is not detached and the fleet cannot serve without it.
        """
        worker_id, limit = self.spec.worker_id, self._fleet.restart_limit
        self.stage, self.is_settled = WorkerStage.FAILING, True
        self._num_failures += 1
        log.warning("worker_died", worker=worker_id, reason=reason)
        wait_s = self._budget.wait_s(asyncio.get_running_loop().time())
        if wait_s is not None and self._num_failures <= limit.deaths:  # the second limit also counts slow failures
            return wait_s
        self.keeps_dying = True
        if not self._fleet.is_detached and not self._fleet.can_serve():
            raise WorkerFailed(f"worker {worker_id} keeps dying: {reason}")
        log.error("worker_crash_looping", worker=worker_id, reason=reason, wait_s=limit.window_s)
        self._fleet.notify(
            f"worker {worker_id} keeps dying: {reason}; it is tried again in {limit.window_s:g} s, the others go on"
        )
        return limit.window_s

    async def _start_actor(self, config: WorkerConfig) -> WorkerFacts:
        """Start the worker inside the actor, if it does not serve already.

        An actor that fails is ended, because a second call would return the same error.
        """
        self._set_starting()
        fleet = self._fleet
        log_dir = str(fleet.log_dir) if fleet.log_dir else None
        arguments = (dump(config), log_dir, fleet.joined is not None, release_probe()())
        started = await fleet.call("start a worker", lambda: self.placement.actor.start.remote(*arguments))
        timeout = asyncio.timeout(fleet.start_timeout_s)
        following = asyncio.create_task(self._follow_start(), name=f"follow-{self.spec.worker_id}")
        try:
            async with timeout:
                await self._watch_process()
                facts: WorkerFacts = await wait_for_object(started)
        except Exception as error:
            reason = self._too_slow() if timeout.expired() else f"did not start: {await self._reason(error)}"
            await self.placement.end()
            raise WorkerFailed(f"worker {self.spec.worker_id} {reason}") from error
        finally:
            following.cancel()
            await asyncio.wait((following,))
        self.facts, self.stage, self._num_failures, self.is_settled = facts, WorkerStage.SERVING, 0, True
        self.keeps_dying = False
        log.info(
            "worker_started",
            worker=facts.worker_id,
            pid=facts.pid,
            host=facts.host,
            address=facts.address,
            seconds=facts.start_s,
        )
        fleet.on_started(facts)
        return facts

    async def _follow_start(self) -> None:
        """Report what the worker does until cancelled. It is for people: the start itself reports errors."""
        num_known = 0
        with suppress(Exception):
            while True:
                asked = await self._fleet.call("watch a worker", partial(self._ask_activities, num_known))
                for text in await wait_for_object(asked):
                    num_known += 1
                    self._fleet.on_activity(self.spec.worker_id, text)

    def _ask_activities(self, num_known: int) -> Any:
        return self.placement.actor.activities.remote(num_known, WAIT_TIMEOUT_S)

    async def _watch_process(self) -> None:
        """Watch the process of the actor, if it runs on this machine. Raises Ray's error for a dead actor."""
        if self._fleet.joined is not None:
            return
        if self._process is not None:  # of the actor before
            self._process.close()
            self._process = None
        asked = await self._fleet.call("watch a worker", lambda: self.placement.actor.pid.remote())
        self._process = ProcessEnd(await wait_for_object(asked))

    async def _reason(self, error: Exception) -> str:
        """Return why the worker ended or could not start: its exit status if known, else Ray's reason."""
        if not is_death(error) or is_memory_monitor(error) or self._process is None:
            return root_cause(error)
        end_s = asyncio.get_running_loop().time() + REAP_S
        while (code := self._process.exit_code) is None:
            if asyncio.get_running_loop().time() >= end_s:
                return describe_unknown_exit(root_cause(error), self._process.num_kernel_kills, self._log_file)
            await asyncio.sleep(REAP_POLL_S)
        crash = f", a crash in native code; its log: {self._log_file}" if -code in CRASH_SIGNALS else ""
        return f"{describe_exit(code, self._process.num_kernel_kills)}{crash}"

    async def _wait_until_ended(self) -> str:
        """Wait until the worker has ended and return the reason, as `WorkerActor.wait` does."""
        while True:
            waiting = await self._fleet.call("watch a worker", lambda: self.placement.actor.wait.remote(WAIT_TIMEOUT_S))
            try:
                reason: str | None = await wait_for_object(waiting)
            except Exception as error:  # the death of an actor arrives as one of many classes of Ray
                return await self._reason(error)
            if reason is not None:
                return reason

    async def _clean_up_drained(self, *, node_shutting_down: bool) -> str:
        """End the actor of a drained worker and exclude its node if that shuts down.

        Returns an error text if the actor could not be ended, which counts as a failure, else an empty
        string.
        """
        assert self.facts is not None
        log.info(
            "worker_drained",
            worker=self.spec.worker_id,
            host=self.facts.host,
            node_shutting_down=node_shutting_down,
        )
        if node_shutting_down:
            self._fleet.nodes.mark_draining(self.facts.node_id)
        try:
            await self.placement.end()
        except WorkerFailed as error:
            return str(error)
        return ""

    def _report_waiting(self, demand: Demand, waited_s: float) -> None:
        self.is_settled = True
        nodes = self._fleet.nodes
        refused = {"refused": nodes.refused} if nodes.refused else {}
        log.warning(
            "worker_waiting_for_node",
            worker=self.spec.worker_id,
            demand=str(demand),
            nodes=nodes.describe(),
            waited_s=round(waited_s),
            **refused,
        )
        self._fleet.notify(
            f"{self.spec.worker_id} waits for a node with free {demand}; available nodes: {nodes.describe()}"
        )

    def _set_starting(self) -> None:
        """Set the stage to STARTING, or leave it at FAILING during a retry."""
        self.stage = WorkerStage.FAILING if self._num_failures else WorkerStage.STARTING

    def _too_slow(self) -> str:
        return (
            f"was not ready within {self._fleet.start_timeout_s:g} s. Its log: {self._log_file}. "
            "If memory is short or the disk is slow, start fewer workers or use a smaller --model"
        )

    @property
    def _log_file(self) -> str:
        log_dir = self._fleet.log_dir
        return f"{log_dir}/worker-{self.spec.worker_id}.log" if log_dir else "Ray's logs (see --log-dir)"
