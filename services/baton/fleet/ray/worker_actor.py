"""One worker inside a Ray actor: Ray owns the process and its main thread, the service runs in a thread with
a loop of its own."""

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError, ConfigError
from baton.fleet.local.local_gpus import VISIBLE
from baton.fleet.ray.release_check import Release, release_probe, why_refused
from baton.runtime.config.config_base import restore, settings_of
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.network.addresses import EVERY_ADDRESS

LINGER_S = 10.0
"""An actor whose worker has ended ends by itself, this much later: who watches it has heard why, or is not
there."""
NODE_SHUTTING_DOWN = "its node leaves"
"""Why a worker has ended that was drained because its machine is about to end: none is started there
again."""
OF_THE_NODE = ("host", "advertise_host", "admin_port", "rpc_port", "kv_port_range", "drain_socket")
"""Settings that a node of a joined cluster may have its own values for, as variables in the environment of
its `ray start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a started worker says of itself. `node_id`: Ray's, of the node that it is on."""

    worker_id: str
    worker_epoch: int
    address: str
    pid: int
    host: str
    node_id: str
    summary: str
    start_s: float


class WorkerActor:
    """The class behind the Ray actor. Methods may be called from several threads at a time
    (`max_concurrency`).

    The settings come with `start` and not with the constructor, whose arguments Ray keeps in the store of its
    head: a password may stand in them.
    """

    def __init__(self, cores: tuple[int, ...], gpu: str) -> None:
        """Before anything of CUDA is loaded. Both are as in `WorkerSpec`."""
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        if gpu:
            os.environ[VISIBLE] = gpu
        from baton.runtime.process.process import disable_usage_reports

        disable_usage_reports()
        self._starting = threading.Lock()
        self._worker: Any = None

    def node_id(self) -> str:
        """Ray's id of the node that this actor is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, settings: dict[str, Any], log_dir: str | None, is_joined: bool, release: Release) -> WorkerFacts:
        """Load the model and serve; returns when the worker is ready. Raises what made it fail.

        Asked again it says the same of the same worker, whatever the settings. `is_joined`: on a node of a
        Ray cluster that others run, where the worker serves at the node's address. `release`: of who asks;
        where it is another one, no worker is started.
        """
        with self._starting:
            if self._worker is None:
                if (why := why_refused(release_probe()(), release)) is not None:
                    raise BatonError(f"its node {why}")
                config = restore(WorkerConfig, settings)
                if is_joined:
                    import ray

                    config = at_node(config, ray.util.get_node_ip_address(), os.environ)
                self._worker = _worker(config, log_dir)
                threading.Thread(target=self._end_with_the_worker, name="end-with-the-worker", daemon=True).start()
        ready = self._worker.start()
        return WorkerFacts(
            worker_id=ready.worker.worker_id,
            worker_epoch=ready.worker.worker_epoch,
            address=ready.worker.address,
            pid=os.getpid(),
            host=ready.host,
            node_id=self.node_id(),
            summary=ready.summary,
            start_s=ready.start_s,
        )

    def wait(self, limit_s: float) -> str | None:
        """Block until the service has ended; why it did, None when it has not in `limit_s`. Empty for a drain
        or stop that was asked for, `NODE_SHUTTING_DOWN` for a drain of its node.

        The limit also frees the thread that a driver's call took here, when that driver has gone away.
        """
        why: str | None = self._worker.wait(limit_s)
        return NODE_SHUTTING_DOWN if why == "" and self._worker.node_shutting_down else why

    def drain(self) -> None:
        """Finish what runs, take nothing new, then end. One that has not been started ends at once: nobody
        else would ever end it."""
        if self._worker is None:
            os._exit(0)
        self._worker.drain()

    def stop(self) -> None:
        """End now."""
        if self._worker is not None:
            self._worker.stop()

    def _end_with_the_worker(self) -> None:
        """A detached actor would otherwise keep its place, its name and its memory until a driver came."""
        with suppress(Exception):  # said to who has asked it to start
            self._worker.start()
        self._worker.wait()
        time.sleep(LINGER_S)
        os._exit(0)


def at_node(config: WorkerConfig, address: str, environ: Mapping[str, str]) -> WorkerConfig:
    """The settings of a worker on a node that others know by `address`: it listens there, and says so, unless
    the node's own environment says otherwise. Raises ConfigError naming the variable that cannot be used."""
    items = {item.name: item for item in settings_of(WorkerConfig)}
    values: dict[str, Any] = {"host": address}
    for name in OF_THE_NODE:
        if text := environ.get(items[name].variable):
            try:
                values[name] = items[name].parse(text)
            except ValueError as error:
                raise ConfigError(f"{items[name].variable}: {error}") from error
    if values["host"] in EVERY_ADDRESS:
        values.setdefault("advertise_host", address)
    return replace(config, **values)


def _worker(config: WorkerConfig, log_dir: str | None) -> Any:
    from baton.runtime import logging
    from baton.worker.worker_main import WorkerThread

    logging.configure(f"worker-{config.worker_id}", level=config.log_level, log_dir=Path(log_dir) if log_dir else None)
    return WorkerThread(config)
