"""Workers as Ray actors: placed, started, watched, started again with a new epoch. Tokens and KV never go through Ray."""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from baton.fleet.plan import WorkerSpec
from baton.fleet.supervisor import RestartBudget, RestartLimit
from baton.fleet.worker_actor import WorkerActor, WorkerFacts
from baton.runtime.config import dump
from baton.runtime.logging import get_logger
from baton.runtime.settings import WorkerConfig

log = get_logger(__name__)

NAMESPACE = "baton"
OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes: nothing of ours goes through it."""


class WorkerFailed(BatonError):
    """A worker did not start, or died more often than it may; the message says why, in its own words."""


@dataclass(kw_only=True)
class _Worker:
    spec: WorkerSpec
    config: WorkerConfig
    budget: RestartBudget
    actor: Any = None
    facts: WorkerFacts | None = None
    ended: Any = None
    leaving: bool = field(default=False)


class RayFleet:
    """Keeps the given workers alive. Ray is called from one thread of its own, which stays for as long as Ray's processes
    shall (the kernel ends them with the thread that started them)."""

    def __init__(
        self,
        *,
        ray_dir: Path,
        ray_address: str | None,
        log_dir: Path | None,
        detached: bool,
        limit: RestartLimit | None = None,
        on_change: Callable[[str, WorkerFacts | None], None] = lambda worker_id, facts: None,
    ) -> None:
        """`detached`: actors outlive this driver and are adopted by the next one; else they end with it. `on_change`: called with a
        worker's id and its facts when it came up, None when it died."""
        self._ray_dir = ray_dir
        self._ray_address = ray_address
        self._log_dir = log_dir
        self._detached = detached
        self._limit = limit or RestartLimit()
        self._on_change = on_change
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._workers: dict[str, _Worker] = {}

    async def connect(self) -> str:
        """Start a Ray on this machine, or join the one at `ray_address`; returns what it is, for people."""
        return await self._in_thread(self._init)

    async def start(self, spec: WorkerSpec, config: WorkerConfig) -> WorkerFacts:
        """Start (or adopt) one worker. Raises WorkerFailed."""
        worker = _Worker(spec=spec, config=config, budget=RestartBudget(self._limit))
        self._workers[spec.worker_id] = worker
        return await self._bring_up(worker)

    async def supervise(self) -> None:
        """Start dead workers again until cancelled. Raises WorkerFailed when one dies too often."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers.values():
                group.create_task(self._keep_alive(worker), name=f"fleet-{worker.spec.worker_id}")

    async def close(self, grace_s: float) -> None:
        """End all workers, and the Ray that `connect` started. Detached actors stay."""
        if not self._detached:
            ended = [w.ended for w in self._workers.values() if w.ended is not None]
            await self._stop_all()
            if ended:
                await self._in_thread(lambda: _ray().wait(ended, num_returns=len(ended), timeout=grace_s))
        await self._in_thread(lambda: _ray().shutdown())
        self._thread.shutdown(wait=True)

    async def _stop_all(self) -> None:
        for worker in self._workers.values():
            worker.leaving = True
            if worker.actor is not None:
                actor = worker.actor
                await self._in_thread(partial(actor.stop.remote))

    async def _bring_up(self, worker: _Worker) -> WorkerFacts:
        await self._in_thread(lambda: self._create(worker))
        started = await self._in_thread(lambda: worker.actor.start.remote())
        try:
            facts: WorkerFacts = await _as_future(started)
        except Exception as error:
            raise WorkerFailed(f"worker {worker.spec.worker_id} did not start: {_cause(error)}") from error
        worker.ended = await self._in_thread(lambda: worker.actor.wait.remote())
        worker.facts = facts
        log.info("worker_started", worker=facts.worker_id, pid=facts.pid, address=facts.address, seconds=facts.start_s)
        self._on_change(facts.worker_id, facts)
        return facts

    async def _keep_alive(self, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        while True:
            why = await self._until_ended(worker)
            if worker.leaving or not why:
                log.info("worker_left", worker=worker.spec.worker_id)
                return
            self._on_change(worker.spec.worker_id, None)
            while True:
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
                except WorkerFailed as error:
                    why = str(error)

    async def _until_ended(self, worker: _Worker) -> str:
        """Why it ended; empty when it was asked to, by `baton drain` or by us."""
        try:
            return str(await _as_future(worker.ended))
        except Exception as error:  # an actor's death arrives as one of many classes of Ray's
            return _cause(error)

    def _init(self) -> str:
        token = self._ray_dir / "token"
        if self._ray_address is None:
            self._ray_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            token.write_text(secrets.token_hex(32))
            token.chmod(0o600)
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        ray = _ray()
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that its signal handlers are not ours
        shared = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
        if self._ray_address is not None:
            ray.init(address=self._ray_address, **shared)
            return f"joined {self._ray_address}"
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(self._ray_dir), **shared)
        return f"local, {int(ray.cluster_resources().get('CPU', 0))} cores"

    def _create(self, worker: _Worker) -> None:
        """A detached actor is known by its name, under which the next driver finds it; one of ours alone needs none, and its successor
        need not wait until Ray has forgotten the name."""
        ray = _ray()
        options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": 4, "num_cpus": 0}
        if self._detached:
            name = f"worker-{worker.spec.worker_id}"
            options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        worker.actor = (
            ray.remote(WorkerActor)
            .options(**options)
            .remote(dump(worker.config), worker.spec.cores, str(self._log_dir) if self._log_dir else None)
        )

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _ray() -> Any:
    """Ray is imported where it is first needed: it takes most of a second."""
    import ray

    return ray


async def _as_future(reference: Any) -> Any:
    """Await a Ray object without a thread that waits."""
    return await asyncio.wrap_future(reference.future())


def _cause(error: BaseException) -> str:
    """The first line of what went wrong inside an actor, without Ray's wrapping."""
    inner = getattr(error, "cause", None) or error.__cause__ or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return lines[-1] if lines else type(inner).__name__
