"""Runs one worker inside a Ray actor.

Ray owns the process and its main thread. The worker service runs in another thread with its own event loop.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError, ConfigError
from baton.fleet.local.local_gpus import VISIBLE
from baton.fleet.ray.release_check import Release, release_mismatch, release_probe
from baton.runtime.config.config_base import restore, settings_of
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.network.addresses import EVERY_ADDRESS

NOT_STARTED_WAIT_S = 0.2
"""Time after which a driver asks again what a worker does that is not created yet."""
LINGER_S = 10.0
"""Seconds that an actor stays after its worker has ended, so that its driver can read the reason."""
NODE_SHUTTING_DOWN = "its node is shutting down"
"""The reason that `WorkerActor.wait` returns after a drain because of a node shutdown. No replacement is
started on that node."""
NODE_SETTINGS = ("host", "advertise_host", "admin_port", "rpc_port", "kv_port_range", "drain_socket")
"""Settings that a node of a joined cluster can override with environment variables of its `ray start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Facts about a started worker.

    worker_id, worker_epoch: its identity.
    address: where its RPC server listens.
    pid, host: its process.
    node_id: Ray's id of its node.
    summary: device, threads and KV cache size in words.
    start_s: seconds that the start took.
    """

    worker_id: str
    worker_epoch: int
    address: str
    pid: int
    host: str
    node_id: str
    summary: str
    start_s: float


class WorkerActor:
    """The class of the Ray actor. Several threads may call its methods at the same time (`max_concurrency`).

    The worker's settings are passed to `start` and not to the constructor: Ray keeps constructor arguments in
    the store of its head node, and settings can contain a password.
    """

    def __init__(self, cores: tuple[int, ...], gpu: str, exit_process: Callable[[int], object] = os._exit) -> None:
        """Pin the process to `cores` and `gpu` (see `WorkerSpec`) before CUDA is loaded."""
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        if gpu:
            os.environ[VISIBLE] = gpu
        from baton.runtime.process.process import disable_usage_reports

        disable_usage_reports()
        self._exit_process = exit_process
        self._starting = threading.Lock()
        self._worker: Any = None

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def node_id(self) -> str:
        """Return Ray's id of the node on which this actor runs."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, settings: dict[str, Any], log_dir: str | None, is_joined: bool, release: Release) -> WorkerFacts:
        """Load the model and serve. Returns when the worker is ready; raises what made it fail.

        A second call returns the facts of the same worker, whatever its arguments.

        settings: the dumped WorkerConfig.
        is_joined: True on a node of an existing Ray cluster, where the worker listens at the node's address.
        release: release of the calling driver. Raises BatonError if this node has another one.
        """
        with self._starting:
            if self._worker is None:
                if (mismatch := release_mismatch(release_probe()(), release)) is not None:
                    raise BatonError(f"its node {mismatch}")
                config = restore(WorkerConfig, settings)
                if is_joined:
                    import ray

                    config = apply_node_settings(config, ray.util.get_node_ip_address(), os.environ)
                self._worker = _create_worker(config, log_dir)
                threading.Thread(target=self._exit_with_worker, name="exit-with-worker", daemon=True).start()
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

    def activities(self, num_known: int, timeout_s: float) -> list[str]:
        """Return what the worker does in its start, see `WorkerThread.activities`; nothing before `start`."""
        if self._worker is None:
            time.sleep(min(timeout_s, NOT_STARTED_WAIT_S))
            return []
        return list(self._worker.activities(num_known, timeout_s))

    def wait(self, timeout_s: float) -> str | None:
        """Block until the worker has ended and return the reason, or None after `timeout_s`.

        The reason is empty after a requested drain or stop, and NODE_SHUTTING_DOWN after a drain of the node.
        The timeout also frees this thread if the calling driver is gone.
        """
        reason: str | None = self._worker.wait(timeout_s)
        return NODE_SHUTTING_DOWN if reason == "" and self._worker.node_shutting_down else reason

    def drain(self) -> None:
        """Finish running requests, accept no new ones, then end.

        An actor without a worker exits immediately.
        """
        if self._worker is None:
            self._exit_process(0)  # no other code would ever end this process
        self._worker.drain()

    def stop(self) -> None:
        """End the worker without draining."""
        if self._worker is not None:
            self._worker.stop()

    def _exit_with_worker(self, sleep: Callable[[float], object] = time.sleep) -> None:
        """Wait until the worker has ended, linger for `LINGER_S`, then exit the process.

        Without this, a detached actor would keep its node resources, name and memory until a driver returns.
        """
        with suppress(Exception):  # reported to the caller of `start`
            self._worker.start()
        self._worker.wait()
        sleep(LINGER_S)
        self._exit_process(0)


def apply_node_settings(config: WorkerConfig, address: str, environ: Mapping[str, str]) -> WorkerConfig:
    """Return the settings of a worker on a node that other nodes reach at `address`.

    The worker listens at and advertises that address unless the node's environment says otherwise. Raises
    ConfigError with the name of an environment variable that has an invalid value.
    """
    items = {item.name: item for item in settings_of(WorkerConfig)}
    values: dict[str, Any] = {"host": address}
    for name in NODE_SETTINGS:
        if text := environ.get(items[name].variable):
            try:
                values[name] = items[name].parse(text)
            except ValueError as error:
                raise ConfigError(f"{items[name].variable}: {error}") from error
    if values["host"] in EVERY_ADDRESS:
        values.setdefault("advertise_host", address)
    return replace(config, **values)


def _create_worker(config: WorkerConfig, log_dir: str | None) -> Any:
    from baton.runtime import logging
    from baton.worker.worker_thread import WorkerThread

    logging.configure(f"worker-{config.worker_id}", level=config.log_level, log_dir=Path(log_dir) if log_dir else None)
    return WorkerThread(config)
