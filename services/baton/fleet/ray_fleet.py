"""Workers as Ray actors: placed, started, watched, started again with a new epoch. Tokens and KV never go through Ray."""

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from baton.core.errors import BatonError
from baton.fleet.plan import WorkerSpec
from baton.fleet.supervisor import RestartBudget, RestartLimit
from baton.fleet.worker_actor import WorkerActor, WorkerFacts
from baton.runtime.config import dump
from baton.runtime.logging import get_logger
from baton.runtime.process import report_to_nobody
from baton.runtime.settings import WorkerConfig

log = get_logger(__name__)

NAMESPACE = "baton"
OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes: nothing of ours goes through it."""


CONNECT_LIMIT_S = 120.0
"""A Ray on two busy cores takes ten seconds; one that never answers is given up."""
WORKER_START_LIMIT_S = 900.0
"""From the request to be placed until it is ready: a large model, read from a slow disk by several workers at once, and proven."""
CALL_LIMIT_S = 30.0
"""Any other call of Ray's. None of them waits for a worker."""
WAIT_S = 10.0
"""A worker is asked anew at such intervals whether it has ended, so that a driver that went away leaves no thread of it waiting."""
NAME_FREE_S = 10.0


class RayFailed(BatonError):
    """Ray did not start, cannot be joined, or does not answer."""


class WorkerFailed(BatonError):
    """A worker did not start, or died more often than it may; the message says why, in its own words."""


@dataclass(kw_only=True)
class _Worker:
    spec: WorkerSpec
    config: WorkerConfig
    budget: RestartBudget
    actor: Any = None
    facts: WorkerFacts | None = None
    leaving: bool = field(default=False)


class RayFleet:
    """Keeps the given workers alive."""

    def __init__(
        self,
        *,
        ray_dir: Path,
        ray_address: str | None,
        log_dir: Path | None,
        detached: bool,
        limit: RestartLimit | None = None,
        start_limit_s: float = WORKER_START_LIMIT_S,
        on_change: Callable[[str, WorkerFacts | None], None] = lambda worker_id, facts: None,
    ) -> None:
        """`detached`: actors outlive this driver and are adopted by the next one; else they end with it. `on_change`: called with a
        worker's id and its facts when it came up, None when it died."""
        self._ray_dir = ray_dir
        self._ray_address = ray_address
        self._log_dir = log_dir
        self._detached = detached
        self._limit = limit or RestartLimit()
        self._start_limit_s = start_limit_s
        self._on_change = on_change
        self._thread: _RayThread | None = None
        self._workers: dict[str, _Worker] = {}

    async def connect(self) -> str:
        """Start a Ray on this machine, or join the one at `ray_address`; returns what it is, for people. Raises RayFailed."""
        self._thread = _RayThread()
        where = f"be joined at {self._ray_address}" if self._ray_address is not None else "be started"
        return str(await self._call(where, self._init, CONNECT_LIMIT_S))

    async def start(self, spec: WorkerSpec, config: WorkerConfig) -> WorkerFacts:
        """Start (or adopt) one worker. Raises WorkerFailed or RayFailed."""
        worker = _Worker(spec=spec, config=config, budget=RestartBudget(self._limit))
        self._workers[spec.worker_id] = worker
        return await self._bring_up(worker)

    async def supervise(self) -> None:
        """Start dead workers again until cancelled. Raises WorkerFailed when one dies too often, RayFailed when Ray does not answer."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers.values():
                group.create_task(self._keep_alive(worker), name=f"fleet-{worker.spec.worker_id}")

    async def close(self, grace_s: float) -> None:
        """End all workers, and the Ray that `connect` started. Detached actors stay. Raises RayFailed when Ray does not answer; its
        processes then end with ours. Safe to call when nothing was connected."""
        if self._thread is None:
            return
        failed: RayFailed | None = None
        if not self._detached:
            try:
                await self._call("end the workers", lambda: self._stop_all(grace_s), grace_s + CALL_LIMIT_S)
            except RayFailed as error:
                failed = error
        await self._call("be shut down", lambda: _ray().shutdown())
        self._thread.close()
        if failed is not None:
            raise failed

    def _stop_all(self, grace_s: float) -> None:
        ended = []
        for worker in self._workers.values():
            worker.leaving = True
            if worker.actor is not None:
                worker.actor.stop.remote()
                if worker.facts is not None:
                    ended.append(worker.actor.wait.remote(grace_s))
        if ended:
            _ray().wait(ended, num_returns=len(ended), timeout=grace_s)

    async def _bring_up(self, worker: _Worker) -> WorkerFacts:
        if self._detached and await self._call("look a worker up", lambda: self._find(worker)):
            try:
                return await self._start_actor(worker)
            except WorkerFailed as error:  # an earlier driver left it so; it has made room
                log.warning("worker_not_adopted", worker=worker.spec.worker_id, why=str(error))
        await self._call("place a worker", lambda: self._create(worker))
        return await self._start_actor(worker)

    async def _start_actor(self, worker: _Worker) -> WorkerFacts:
        """Let the actor serve, if it does not already. One that cannot is ended, since it would say the same when asked again."""
        began = await self._call("start a worker", lambda: worker.actor.start.remote())
        try:
            async with asyncio.timeout(self._start_limit_s):
                facts: WorkerFacts = await _as_future(began)
        except Exception as error:
            why = self._too_slow(worker) if isinstance(error, TimeoutError) else f"did not start: {_cause(error)}"
            await self._call("end a worker", lambda: self._kill(worker))
            raise WorkerFailed(f"worker {worker.spec.worker_id} {why}") from error
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
        while True:
            asked = await self._call("watch a worker", lambda: worker.actor.wait.remote(WAIT_S))
            try:
                why: str | None = await _as_future(asked)
            except Exception as error:  # an actor's death arrives as one of many classes of Ray's
                return _cause(error)
            if why is not None:
                return why

    def _init(self) -> str:
        token = self._ray_dir / "token"
        if self._ray_address is None:
            self._ray_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            token.write_text(secrets.token_hex(32))
            token.chmod(0o600)
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        report_to_nobody()
        os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}  # which aborts us on SIGTERM
        ray = _ray()
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that its signal handlers are not ours
        shared = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
        if self._ray_address is not None:
            ray.init(address=self._ray_address, **shared)
            return f"joined {self._ray_address}"
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(self._ray_dir), **shared)
        return f"local, {int(ray.cluster_resources().get('CPU', 0))} cores"

    def _find(self, worker: _Worker) -> bool:
        """Take the detached actor that an earlier driver left, if there is one."""
        try:
            worker.actor = _ray().get_actor(_name(worker), namespace=NAMESPACE)
        except ValueError:
            return False
        return True

    def _create(self, worker: _Worker) -> None:
        """A detached actor is known by its name, under which the next driver finds it; one of ours alone needs none, and its successor
        need not wait until Ray has forgotten the name."""
        ray = _ray()
        options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": 4, "num_cpus": 0}
        if self._detached:
            options |= {"name": _name(worker), "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        worker.actor = (
            ray.remote(WorkerActor)
            .options(**options)
            .remote(dump(worker.config), worker.spec.cores, str(self._log_dir) if self._log_dir else None)
        )

    def _kill(self, worker: _Worker) -> None:
        """End the actor, and with it a detached one's claim to its name."""
        actor, worker.actor = worker.actor, None
        _ray().kill(actor, no_restart=True)
        deadline_s = time.monotonic() + NAME_FREE_S
        while self._detached and self._find(worker):
            worker.actor = None
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Ray has not let go of {_name(worker)} within {NAME_FREE_S:g} s")
            time.sleep(0.05)

    def _too_slow(self, worker: _Worker) -> str:
        log_file = f"{self._log_dir}/worker-{worker.spec.worker_id}.log" if self._log_dir else "in the logs of Ray (see --log-dir)"
        return (
            f"was not ready within {self._start_limit_s:g} s. What it did last: {log_file}. "
            "Where memory is short or the disk is slow, start fewer workers, or a smaller --model"
        )

    async def _call(self, what: str, call: Callable[[], Any], limit_s: float = CALL_LIMIT_S) -> Any:
        """Call Ray. Whatever it raises, and its silence for `limit_s`, is RayFailed."""
        assert self._thread is not None, "connect comes first"
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(self._thread.submit(call))
        except Exception as error:
            why = f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) and not str(error) else _cause(error)
            raise RayFailed(f"Ray could not {what}: {why}") from error


class _RayThread:
    """Calls Ray, one call after the other, from one thread, which stays for as long as Ray's processes shall (the kernel ends them with
    the thread that started them). A daemon: a call that hangs keeps no process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """End after the calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # raised where the call was made
                future.set_exception(error)


def _name(worker: _Worker) -> str:
    return f"worker-{worker.spec.worker_id}"


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
