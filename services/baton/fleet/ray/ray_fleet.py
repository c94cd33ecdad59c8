"""Workers as Ray actors: placed, started, watched, started again with a new epoch. Tokens and KV never go
through Ray.

Workers that end with their driver (`baton up`) are started together, and where one cannot be, that is an
error. Detached ones (`baton fleet` on a cluster of others) each have a life of their own: all are looked
after, also where one has no node yet, or keeps dying.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.processes.supervisor import RestartBudget, RestartLimit
from baton.fleet.ray.actor_placement import LOOK_S, ActorOf, WorkerFailed
from baton.fleet.ray.node_resources import Demand, places_by_role, workers_on
from baton.fleet.ray.ray_actors import ask_where, drain_others
from baton.fleet.ray.ray_calls import CALL_LIMIT_S, RayCalls, RayFailed, as_future, cause, the_ray
from baton.fleet.ray.ray_nodes import NodesRefused, RayNodes
from baton.fleet.ray.ray_session import join_ray, start_ray
from baton.fleet.ray.release_check import release_probe
from baton.fleet.ray.worker_actor import NODE_SHUTTING_DOWN, WorkerFacts
from baton.fleet.worker_plan import Wanted, WorkerSpec, changes
from baton.runtime.config.config_base import dump
from baton.runtime.config.settings import FleetSettings, RayPlacement, WorkerConfig
from baton.runtime.logging import get_logger

log = get_logger(__name__)

CONNECT_LIMIT_S = 120.0
"""A Ray on two busy cores takes ten seconds; one that never answers is given up."""
LEFT_BEHIND_LIMIT_S = 5.0
"""One that has not said so within so long is not preferred to others. While that is asked nobody is looked
after."""
WAIT_S = 10.0
"""A worker is asked anew at such intervals whether it has ended, so that a driver that went away leaves no
thread of it waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A Ray cluster that others run, and what workers get there. `is_detached`: they outlive this driver, and
    the next one of the same `cluster` adopts them; else they end with it."""

    address: str
    cluster: str
    placement: RayPlacement = "auto"
    is_detached: bool = False

    @property
    def namespace(self) -> str:
        """Where Ray keeps the names of this cluster's actors, and our driver looks for them."""
        return f"baton-{self.cluster}"


class Stage(Enum):
    """How far a worker is. WAITING: for a node; it has nothing that serves. STARTING: also while it is looked
    up. FAILING: it has died, or could not start, and is tried again."""

    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    FAILING = "failing"


@dataclass(kw_only=True)
class _Worker:
    """`num_failures`: deaths and starts that failed since it has served. `is_settled`: it has served, has
    failed, or is known to wait for a node. `task`: who looks after it, where each has its own."""

    spec: WorkerSpec
    config: WorkerConfig
    budget: RestartBudget
    place: ActorOf
    facts: WorkerFacts | None = None
    stage: Stage = Stage.STARTING
    num_failures: int = 0
    is_settled: bool = False
    leaving: bool = False
    task: asyncio.Task[None] | None = None

    def starts(self) -> None:
        """It is on its way, and not for the first time where that has just failed."""
        self.stage = Stage.FAILING if self.num_failures else Stage.STARTING


class RayFleet:
    """Keeps the given workers alive, on a Ray of its own or on one that it joins."""

    def __init__(
        self,
        *,
        ray_dir: Path,
        log_dir: Path | None,
        joined: Joined | None = None,
        limit: RestartLimit | None = None,
        start_limit_s: float = FleetSettings.worker_start_s,
        on_change: Callable[[str, WorkerFacts | None], None] = lambda worker_id, facts: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`start_limit_s`: from a worker's place on a node until it is ready. `on_change`: called with a
        worker's id and its facts when it came up, None when it died. `say`: told what people wait for."""
        self._ray_dir = ray_dir
        self._log_dir = log_dir
        self._joined = joined
        self._limit = limit or RestartLimit()
        self._start_limit_s = start_limit_s
        self._on_change = on_change
        self._say = say
        self._calls: RayCalls | None = None
        self._nodes = RayNodes(self._call)
        self._workers: dict[str, _Worker] = {}
        self.node_address = "127.0.0.1"
        """Of this machine, as the workers' nodes know it."""

    async def connect(self) -> str:
        """Start a Ray on this machine, or join one; returns what it is, for people. Raises RayFailed."""
        self._calls = RayCalls()
        if self._joined is None:
            return str(await self._call("be started", self._start_ray, CONNECT_LIMIT_S))
        try:
            self.node_address = await self._call(
                f"be joined at {self._joined.address}", self._join_ray, CONNECT_LIMIT_S
            )
        except RayFailed as error:
            raise RayFailed(
                f"{error}; this machine has to be one of its nodes: `ray start --address {self._joined.address} --num-cpus 0`"
            ) from error
        await self._nodes.look()
        num_nodes = len(self._nodes.living)
        return "; ".join(
            [f"joined {self._joined.address}, {num_nodes} node{'' if num_nodes == 1 else 's'}"]
            + [f"{refused}: refused" for refused in self._nodes.refused]
        )

    @property
    def stages(self) -> Mapping[tuple[WorkerRole, Stage], int]:
        """How many workers are how far."""
        return Counter((worker.spec.role, worker.stage) for worker in self._workers.values())

    async def start(self, spec: WorkerSpec, config: WorkerConfig) -> WorkerFacts:
        """Start (or adopt) one worker. Raises WorkerFailed, NodesRefused or RayFailed."""
        return await self._bring_up(self._add(spec, config))

    async def keep(self, wanted: Wanted) -> None:
        """Have these detached workers, each looked after from its own first start, until cancelled. One that
        has no node, or keeps dying, is tried again and again. Raises RayFailed when Ray does not answer."""
        are_others_told = False
        left_behind = await self._left_behind()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._adapt(wanted, left_behind, group)
                if not are_others_told and all(worker.is_settled for worker in self._workers.values()):
                    await self.let_go_of_others()  # not before: until ours serve, they may be all that there is
                    are_others_told, left_behind = True, ()
                await asyncio.sleep(LOOK_S)

    async def let_go_of_others(self) -> None:
        """Drain workers that an earlier driver of this cluster has started and that are none of ours. Raises
        RayFailed."""
        if not self._is_detached:
            return
        for worker_id in await self._call("let go of workers", lambda: drain_others(self._workers)):
            log.info("worker_not_wanted", worker=worker_id)

    async def supervise(self) -> None:
        """Start dead workers again until cancelled; on a cluster of others also those that were drained.
        Raises WorkerFailed when one dies too often, RayFailed when Ray does not answer."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers.values():
                group.create_task(self._keep_alive(worker), name=f"fleet-{worker.spec.worker_id}")

    async def close(self, grace_s: float) -> None:
        """End all workers, and the Ray that `connect` started. Detached actors stay. Raises RayFailed when
        Ray does not answer; its processes then end with ours. Safe to call when nothing was connected."""
        if self._calls is None:
            return
        failed: RayFailed | None = None
        if not self._is_detached:
            try:
                await self._call("end the workers", lambda: self._stop_all(grace_s), grace_s + CALL_LIMIT_S)
            except RayFailed as error:
                failed = error
        await self._call("be shut down", lambda: the_ray().shutdown())
        self._calls.close()
        if failed is not None:
            raise failed

    @property
    def _is_detached(self) -> bool:
        return self._joined is not None and self._joined.is_detached

    def _stop_all(self, grace_s: float) -> None:
        ended = []
        for worker in self._workers.values():
            worker.leaving = True
            if (actor := worker.place.actor) is not None:
                actor.stop.remote()
                if worker.facts is not None:
                    ended.append(actor.wait.remote(grace_s))
        if ended:
            the_ray().wait(ended, num_returns=len(ended), timeout=grace_s)

    def _add(self, spec: WorkerSpec, config: WorkerConfig) -> _Worker:
        place = ActorOf(spec=spec, is_detached=self._is_detached, nodes=self._nodes, ask=self._call)
        worker = _Worker(spec=spec, config=config, budget=RestartBudget(self._limit), place=place)
        self._workers[spec.worker_id] = worker
        return worker

    async def _left_behind(self) -> Collection[str]:
        """The ids of workers that an earlier driver left on a node. Raises RayFailed."""
        asked = await self._call("ask the workers where they are", lambda: ask_where(self._workers))
        answers = {worker_id: asyncio.create_task(as_future(where)) for worker_id, where in asked.items()}
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=LEFT_BEHIND_LIMIT_S)
        finally:
            for answer in answers.values():
                answer.cancel()
        said = await asyncio.gather(*answers.values(), return_exceptions=True)
        return {
            worker_id for worker_id, where in zip(answers, said, strict=True) if not isinstance(where, BaseException)
        }

    async def _adapt(self, wanted: Wanted, left_behind: Collection[str], group: asyncio.TaskGroup) -> None:
        """Have as many workers of each role as there should be, of those that are there already where there
        are any."""
        places: Mapping[str, int] = {}
        if wanted.follows_places:
            await self._nodes.look()
            places = places_by_role(self._nodes.open)
        for role, least in wanted.least.items():
            number = max(least, places.get(role.value, 0))
            waits = {w.spec.worker_id: w.stage is Stage.WAITING for w in self._workers.values() if w.spec.role is role}
            new, dropped = changes(role, number, waits, left_behind)
            for spec in new:
                worker = self._add(spec, wanted.config_of(spec))
                worker.task = group.create_task(self._keep_from_the_start(worker), name=f"fleet-{spec.worker_id}")
            for worker_id in dropped:
                await self._drop(worker_id)

    async def _drop(self, worker_id: str) -> None:
        """There is no place for it any more, unless it has got one while another was dropped."""
        worker = self._workers[worker_id]
        if worker.stage is not Stage.WAITING:
            return
        del self._workers[worker_id]
        assert worker.task is not None
        worker.task.cancel()
        await asyncio.wait((worker.task,))
        await worker.place.kill()
        log.info("worker_not_wanted", worker=worker_id)

    async def _keep_from_the_start(self, worker: _Worker) -> None:
        await self._bring_up_again(worker, "")
        await self._keep_alive(worker)

    async def _bring_up(self, worker: _Worker) -> WorkerFacts:
        worker.starts()
        if self._is_detached and await worker.place.is_found_on_a_node():
            try:
                return await self._start_actor(worker, worker.config)
            except WorkerFailed as error:  # an earlier driver left it so; it has made room
                log.warning("worker_not_adopted", worker=worker.spec.worker_id, why=str(error))
        if self._joined is None:
            await worker.place.create({})
            return await self._start_actor(worker, worker.config)
        worker.stage = Stage.WAITING
        node = await worker.place.place(worker.config, self._joined.placement, partial(self._say_waiting, worker))
        num_workers = max(worker.config.workers_on_host, len(self._workers))
        return await self._start_actor(
            worker, replace(worker.config, workers_on_host=workers_on(node, num_workers, self._nodes.living))
        )

    def _say_waiting(self, worker: _Worker, demand: Demand, waited_s: float) -> None:
        worker.is_settled = True
        worker_id, places = worker.spec.worker_id, self._nodes.places()
        refused = {"refused": self._nodes.refused} if self._nodes.refused else {}
        log.warning(
            "worker_waits_for_a_node",
            worker=worker_id,
            asks_for=str(demand),
            nodes=places,
            waited_s=round(waited_s),
            **refused,
        )
        self._say(f"{worker_id} waits for a node that has {demand} to spare; of the nodes, {places}")

    async def _start_actor(self, worker: _Worker, config: WorkerConfig) -> WorkerFacts:
        """Let the actor serve, if it does not already. One that cannot is ended, since it would say the same
        when asked again."""
        worker.starts()
        log_dir = str(self._log_dir) if self._log_dir else None
        arguments = (dump(config), log_dir, self._joined is not None, release_probe()())
        began = await self._call("start a worker", lambda: worker.place.actor.start.remote(*arguments))
        limit = asyncio.timeout(self._start_limit_s)
        try:
            async with limit:
                facts: WorkerFacts = await as_future(began)
        except Exception as error:
            why = self._too_slow(worker) if limit.expired() else f"did not start: {cause(error)}"
            await worker.place.end()
            raise WorkerFailed(f"worker {worker.spec.worker_id} {why}") from error
        worker.facts, worker.stage, worker.num_failures, worker.is_settled = facts, Stage.SERVING, 0, True
        log.info(
            "worker_started",
            worker=facts.worker_id,
            pid=facts.pid,
            host=facts.host,
            address=facts.address,
            seconds=facts.start_s,
        )
        self._on_change(facts.worker_id, facts)
        return facts

    async def _keep_alive(self, worker: _Worker) -> None:
        while True:
            why = await self._until_ended(worker)
            if worker.leaving or (self._joined is None and why in ("", NODE_SHUTTING_DOWN)):
                log.info("worker_left", worker=worker.spec.worker_id)
                return
            if why in ("", NODE_SHUTTING_DOWN):
                why = await self._has_left(worker, node_shutting_down=why == NODE_SHUTTING_DOWN)
            else:
                self._on_change(worker.spec.worker_id, None)
            await self._bring_up_again(worker, why)
            if worker.leaving:
                return

    async def _bring_up_again(self, worker: _Worker, why: str) -> None:
        """As often as it takes, or until it shall leave. `why` it has died; empty: it has not. Raises
        WorkerFailed when it has too often, within a time or without having served between, unless it is
        detached: then it is left alone for a while."""
        while True:
            wait_s: float | None = 0.0
            if why:
                worker.stage, worker.num_failures, worker.is_settled = Stage.FAILING, worker.num_failures + 1, True
                log.warning("worker_died", worker=worker.spec.worker_id, why=why)
                wait_s = worker.budget.wait_s(asyncio.get_running_loop().time())
            if wait_s is None or worker.num_failures > self._limit.deaths:  # however long each start took to fail
                if not self._is_detached:
                    raise WorkerFailed(f"worker {worker.spec.worker_id} keeps dying: {why}")
                wait_s = self._limit.window_s
                log.error("worker_keeps_dying", worker=worker.spec.worker_id, why=why, wait_s=wait_s)
            await asyncio.sleep(wait_s)
            if worker.leaving:
                return
            try:
                await self._bring_up(worker)
                return
            except (WorkerFailed, NodesRefused) as error:
                why = str(error)

    async def _has_left(self, worker: _Worker, *, node_shutting_down: bool) -> str:
        """It was asked to: its place is filled again, on another node where its own is about to end. Returns
        why it cannot be, if so."""
        assert worker.facts is not None
        log.info(
            "worker_left", worker=worker.spec.worker_id, host=worker.facts.host, node_shutting_down=node_shutting_down
        )
        if node_shutting_down:
            self._nodes.leave(worker.facts.node_id)
        try:
            await worker.place.end()
        except WorkerFailed as error:
            return str(error)
        return ""

    async def _until_ended(self, worker: _Worker) -> str:
        """Why it ended; empty when it was asked to, by `baton drain` or by us, `NODE_SHUTTING_DOWN` when its
        node was drained."""
        while True:
            asked = await self._call("watch a worker", lambda: worker.place.actor.wait.remote(WAIT_S))
            try:
                why: str | None = await as_future(asked)
            except Exception as error:  # an actor's death arrives as one of many classes of Ray's
                return cause(error)
            if why is not None:
                return why

    def _start_ray(self) -> str:
        return start_ray(self._ray_dir)

    def _join_ray(self) -> str:
        assert self._joined is not None
        return join_ray(self._joined.address, self._joined.namespace)

    def _too_slow(self, worker: _Worker) -> str:
        log_file = (
            f"{self._log_dir}/worker-{worker.spec.worker_id}.log"
            if self._log_dir
            else "in the logs of Ray (see --log-dir)"
        )
        return (
            f"was not ready within {self._start_limit_s:g} s. What it did last: {log_file}. "
            "Where memory is short or the disk is slow, start fewer workers, or a smaller --model"
        )

    async def _call(self, what: str, call: Callable[[], Any], limit_s: float = CALL_LIMIT_S) -> Any:
        assert self._calls is not None, "connect comes first"
        return await self._calls(what, call, limit_s)
