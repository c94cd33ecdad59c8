"""Workers as Ray actors: placed, started, watched, started again with a new epoch. Tokens and KV never go through Ray."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from baton.fleet.nodes import Demand, Node, demand_of, workers_on
from baton.fleet.plan import WorkerSpec
from baton.fleet.ray_calls import CALL_LIMIT_S, RayCalls, RayFailed, as_future, cause, the_ray
from baton.fleet.ray_nodes import NodesRefused, RayNodes
from baton.fleet.releases import release_probe
from baton.fleet.supervisor import RestartBudget, RestartLimit
from baton.fleet.worker_actor import WorkerActor, WorkerFacts
from baton.runtime.config import dump
from baton.runtime.logging import get_logger
from baton.runtime.process import report_to_nobody
from baton.runtime.settings import RayPlacement, WorkerConfig

log = get_logger(__name__)

OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes: nothing of ours goes through it."""

CONNECT_LIMIT_S = 120.0
"""A Ray on two busy cores takes ten seconds; one that never answers is given up."""
PLACE_LIMIT_S = 900.0
"""Until a worker is on a node of a cluster, which may have to come first."""
WORKER_START_LIMIT_S = 900.0
"""From then until it is ready: a large model, read from a slow disk by several workers at once, and proven."""
WAIT_S = 10.0
"""A worker is asked anew at such intervals whether it has ended, so that a driver that went away leaves no thread of it waiting."""
NAME_FREE_S = 10.0
PLACE_ATTEMPTS = 20
"""Nodes that turn out to have another Baton, or do not say which, until a worker is given up."""
SAY_WAITING_S = 10.0
"""A worker that has not been placed for so long is told of."""


class WorkerFailed(BatonError):
    """A worker did not start, or died more often than it may; the message says why, in its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A Ray cluster that others run, and what workers get there. `is_detached`: they outlive this driver, and the next one of the same
    `cluster` adopts them; else they end with it."""

    address: str
    cluster: str
    placement: RayPlacement = "auto"
    is_detached: bool = False

    @property
    def namespace(self) -> str:
        """Where Ray keeps the names of this cluster's actors, and our driver looks for them."""
        return f"baton-{self.cluster}"


@dataclass(kw_only=True)
class _Worker:
    spec: WorkerSpec
    config: WorkerConfig
    budget: RestartBudget
    actor: Any = None
    facts: WorkerFacts | None = None
    leaving: bool = field(default=False)


class RayFleet:
    """Keeps the given workers alive, on a Ray of its own or on one that it joins."""

    def __init__(
        self,
        *,
        ray_dir: Path,
        log_dir: Path | None,
        joined: Joined | None = None,
        limit: RestartLimit | None = None,
        start_limit_s: float = WORKER_START_LIMIT_S,
        on_change: Callable[[str, WorkerFacts | None], None] = lambda worker_id, facts: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`on_change`: called with a worker's id and its facts when it came up, None when it died. `say`: told what people wait for."""
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
            self.node_address = await self._call(f"be joined at {self._joined.address}", self._join_ray, CONNECT_LIMIT_S)
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

    async def start(self, spec: WorkerSpec, config: WorkerConfig) -> WorkerFacts:
        """Start (or adopt) one worker. Raises WorkerFailed, NodesRefused or RayFailed."""
        worker = _Worker(spec=spec, config=config, budget=RestartBudget(self._limit))
        self._workers[spec.worker_id] = worker
        return await self._bring_up(worker)

    async def let_go_of_others(self) -> None:
        """Drain workers that an earlier driver of this cluster has started and that are none of ours. Raises RayFailed."""
        if not self._is_detached:
            return
        for worker_id in await self._call("let go of workers", self._drain_others):
            log.info("worker_not_wanted", worker=worker_id)

    async def supervise(self) -> None:
        """Start dead workers again until cancelled; on a cluster of others also those that were drained, on another node. Raises
        WorkerFailed when one dies too often, RayFailed when Ray does not answer."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers.values():
                group.create_task(self._keep_alive(worker), name=f"fleet-{worker.spec.worker_id}")

    async def close(self, grace_s: float) -> None:
        """End all workers, and the Ray that `connect` started. Detached actors stay. Raises RayFailed when Ray does not answer; its
        processes then end with ours. Safe to call when nothing was connected."""
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
            if worker.actor is not None:
                worker.actor.stop.remote()
                if worker.facts is not None:
                    ended.append(worker.actor.wait.remote(grace_s))
        if ended:
            the_ray().wait(ended, num_returns=len(ended), timeout=grace_s)

    async def _bring_up(self, worker: _Worker) -> WorkerFacts:
        if self._is_detached and await self._call("look a worker up", lambda: self._find(worker)):
            try:
                return await self._start_actor(worker, worker.config)
            except WorkerFailed as error:  # an earlier driver left it so; it has made room
                log.warning("worker_not_adopted", worker=worker.spec.worker_id, why=str(error))
        if self._joined is None:
            await self._call("place a worker", lambda: self._create(worker, {}))
            return await self._start_actor(worker, worker.config)
        node = await self._place(worker, self._joined.placement)
        return await self._start_actor(
            worker, replace(worker.config, workers_on_host=workers_on(node, worker.config.workers_on_host, self._nodes.living))
        )

    async def _place(self, worker: _Worker, placement: RayPlacement) -> Node:
        """Have an actor on a node that has our Baton, which Ray chooses; the node. Raises WorkerFailed or NodesRefused."""
        for _ in range(PLACE_ATTEMPTS):
            await self._nodes.look()
            demand = demand_of(worker.config, placement, self._nodes.offered)
            self._nodes.check(demand)
            options = _options(demand, self._nodes.selector())
            await self._call("place a worker", lambda options=options: self._create(worker, options))  # type: ignore[misc]
            try:
                node_id = await self._placed(worker, demand)
            except WorkerFailed:
                await self._call("end a worker", lambda: self._kill(worker))
                num_refused = len(self._nodes.refused)
                await self._nodes.look()
                if len(self._nodes.refused) == num_refused:
                    raise
                continue  # it was on a node that had just come, with a Baton that could not even make the actor
            await self._nodes.look()
            node = self._nodes.node(node_id)
            if node is not None and self._nodes.is_accepted(node_id):
                return node
            await self._call("end a worker", lambda: self._kill(worker))
        raise WorkerFailed(f"worker {worker.spec.worker_id} was placed {PLACE_ATTEMPTS} times on nodes that cannot be used")

    async def _placed(self, worker: _Worker, demand: Demand) -> str:
        """The id of the node on which the actor is, once it is on one; until then Ray's autoscaler sees that a node is missing."""
        asked = as_future(await self._call("place a worker", lambda: worker.actor.node_id.remote()))
        waiting = asyncio.create_task(self._say_waiting(worker, demand))
        try:
            async with asyncio.timeout(PLACE_LIMIT_S):
                return str(await asked)
        except Exception as error:
            why = (
                f"was not placed within {PLACE_LIMIT_S:g} s: it asks for {demand}; of the nodes, {self._nodes.places()}"
                if isinstance(error, TimeoutError)
                else f"could not be placed: {cause(error)}"
            )
            raise WorkerFailed(f"worker {worker.spec.worker_id} {why}") from error
        finally:
            waiting.cancel()
            await asyncio.wait((waiting,))

    async def _say_waiting(self, worker: _Worker, demand: Demand) -> None:
        await asyncio.sleep(SAY_WAITING_S)
        worker_id, places = worker.spec.worker_id, self._nodes.places()
        log.warning("worker_waits_for_a_node", worker=worker_id, asks_for=str(demand), nodes=places)
        self._say(f"{worker_id} waits for a node that has {demand} to spare; of the nodes, {places}")

    async def _start_actor(self, worker: _Worker, config: WorkerConfig) -> WorkerFacts:
        """Let the actor serve, if it does not already. One that cannot is ended, since it would say the same when asked again."""
        log_dir = str(self._log_dir) if self._log_dir else None
        arguments = (dump(config), log_dir, self._joined is not None, release_probe()())
        began = await self._call("start a worker", lambda: worker.actor.start.remote(*arguments))
        try:
            async with asyncio.timeout(self._start_limit_s):
                facts: WorkerFacts = await as_future(began)
        except Exception as error:
            why = self._too_slow(worker) if isinstance(error, TimeoutError) else f"did not start: {cause(error)}"
            await self._call("end a worker", lambda: self._kill(worker))
            raise WorkerFailed(f"worker {worker.spec.worker_id} {why}") from error
        worker.facts = facts
        log.info("worker_started", worker=facts.worker_id, pid=facts.pid, host=facts.host, address=facts.address, seconds=facts.start_s)
        self._on_change(facts.worker_id, facts)
        return facts

    async def _keep_alive(self, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        while True:
            why = await self._until_ended(worker)
            if worker.leaving or (not why and self._joined is None):
                log.info("worker_left", worker=worker.spec.worker_id)
                return
            if why:
                self._on_change(worker.spec.worker_id, None)
            else:
                await self._has_left_its_node(worker)
            while True:
                wait_s: float | None = 0.0
                if why:
                    log.warning("worker_died", worker=worker.spec.worker_id, why=why)
                    wait_s = worker.budget.wait_s(loop.time())
                if wait_s is None:
                    raise WorkerFailed(f"worker {worker.spec.worker_id} keeps dying: {why}")
                await asyncio.sleep(wait_s)
                if worker.leaving:
                    return
                try:
                    await self._bring_up(worker)
                    break
                except (WorkerFailed, NodesRefused) as error:
                    why = str(error)

    async def _has_left_its_node(self, worker: _Worker) -> None:
        """It was asked to leave, and its node may be about to end: its place is filled on another one."""
        assert worker.facts is not None
        log.info("worker_left", worker=worker.spec.worker_id, host=worker.facts.host)
        self._nodes.leave(worker.facts.node_id)
        await self._call("end a worker", lambda: self._kill(worker))

    async def _until_ended(self, worker: _Worker) -> str:
        """Why it ended; empty when it was asked to, by `baton drain` or by us."""
        while True:
            asked = await self._call("watch a worker", lambda: worker.actor.wait.remote(WAIT_S))
            try:
                why: str | None = await as_future(asked)
            except Exception as error:  # an actor's death arrives as one of many classes of Ray's
                return cause(error)
            if why is not None:
                return why

    def _start_ray(self) -> str:
        token = self._ray_dir / "token"
        self._ray_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(self._ray_dir))
        return f"local, {int(the_ray().cluster_resources().get('CPU', 0))} cores"

    def _join_ray(self) -> str:
        assert self._joined is not None
        self._init(address=self._joined.address, namespace=self._joined.namespace)
        return str(the_ray().util.get_node_ip_address())

    def _init(self, **options: Any) -> None:
        report_to_nobody()
        os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}  # which aborts us on SIGTERM
        ray = the_ray()
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that its signal handlers are not ours
        ray.init(log_to_driver=False, configure_logging=False, **options)

    def _find(self, worker: _Worker) -> bool:
        """Take the detached actor that an earlier driver left, if there is one."""
        try:
            worker.actor = the_ray().get_actor(_name(worker.spec.worker_id))
        except ValueError:
            return False
        return True

    def _create(self, worker: _Worker, options: dict[str, Any]) -> None:
        """A detached actor is known by its name, under which the next driver finds it; one of ours alone needs none, and its successor
        need not wait until Ray has forgotten the name."""
        options = {"max_restarts": 0, "max_concurrency": 4, "num_cpus": 0, **options}
        if self._is_detached:
            options |= {"name": _name(worker.spec.worker_id), "lifetime": "detached", "get_if_exists": True}
        worker.actor = the_ray().remote(WorkerActor).options(**options).remote(worker.spec.cores)

    def _kill(self, worker: _Worker) -> None:
        """End the actor, and with it a detached one's claim to its name."""
        actor, worker.actor = worker.actor, None
        the_ray().kill(actor, no_restart=True)
        deadline_s = time.monotonic() + NAME_FREE_S
        while self._is_detached and self._find(worker):
            worker.actor = None
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Ray has not let go of {_name(worker.spec.worker_id)} within {NAME_FREE_S:g} s")
            time.sleep(0.05)

    def _drain_others(self) -> list[str]:
        """The ids of those that were asked to."""
        ray = the_ray()
        there = {name.removeprefix(_name("")) for name in ray.util.list_named_actors() if name.startswith(_name(""))}
        others = sorted(there - self._workers.keys())
        for worker_id in others:
            ray.get_actor(_name(worker_id)).drain.remote()
        return others

    def _too_slow(self, worker: _Worker) -> str:
        log_file = f"{self._log_dir}/worker-{worker.spec.worker_id}.log" if self._log_dir else "in the logs of Ray (see --log-dir)"
        return (
            f"was not ready within {self._start_limit_s:g} s. What it did last: {log_file}. "
            "Where memory is short or the disk is slow, start fewer workers, or a smaller --model"
        )

    async def _call(self, what: str, call: Callable[[], Any], limit_s: float = CALL_LIMIT_S) -> Any:
        assert self._calls is not None, "connect comes first"
        return await self._calls(what, call, limit_s)


def _options(demand: Demand, selector: dict[str, str]) -> dict[str, Any]:
    """In the words of Ray's `options`."""
    options: dict[str, Any] = {"num_cpus": demand.num_cpus, "num_gpus": demand.num_gpus, "resources": dict(demand.resources)}
    if demand.spread:
        options["scheduling_strategy"] = "SPREAD"
    if selector:
        options["label_selector"] = selector
    return options


def _name(worker_id: str) -> str:
    return f"worker-{worker_id}"
