"""Starts Ray on this machine, or joins an existing Ray cluster."""

import logging
import os
import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.runtime.config.fleet_settings import RayPlacement
from baton.runtime.logging import get_logger
from baton.runtime.process.process import disable_usage_reports

log = get_logger(__name__)

OBJECT_STORE_BYTES = 80 * 2**20
"""The minimum that Ray accepts. Baton stores nothing in it."""

MEMORY_CHECK_MS = 250
"""Ray's own default."""
PRINT_FUNCTION = "print_to_stdstream"
"""Function of `ray._private.worker` that prints messages of Ray's other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedCluster:
    """An existing Ray cluster that the fleet joins.

    address: address of the Ray head, `HOST:PORT`.
    cluster: name of the Baton cluster. Its workers are found by this name.
    placement: how workers choose their nodes, as the setting `ray_placement`.
    is_detached: workers outlive this driver, and the next driver of the same `cluster` adopts them.
    """

    address: str
    cluster: str
    placement: RayPlacement = "auto"
    is_detached: bool = False

    @property
    def namespace(self) -> str:
        """The Ray namespace of this cluster's actor names."""
        return f"baton-{self.cluster}"


class RayConnection:
    """Access to the `ray` module. All methods are called from the Ray thread (`RayCalls`).

    Tests pass a subclass with another `api`.
    """

    @property
    def api(self) -> Any:
        """The `ray` module. It is imported on first use, because the import takes most of a second."""
        import ray

        return ray

    def start(self, ray_dir: Path, memory_limit: float | None) -> str:
        """Start a private Ray, protected by a token, with all its files in `ray_dir`.

        memory_limit: see `set_memory_monitor`. Return a description.
        """
        set_memory_monitor(memory_limit, os.environ)
        token = ray_dir / "token"
        ray_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._init(
            address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(ray_dir)
        )
        return f"local, {int(self.api.cluster_resources().get('CPU', 0))} cores"

    def join(self, address: str, namespace: str) -> str:
        """Join an existing Ray cluster as a driver.

        Return the address at which other nodes reach this one.
        """
        self._init(address=address, namespace=namespace)
        return str(self.api.util.get_node_ip_address())

    def _init(self, **options: Any) -> None:
        disable_usage_reports()
        # Ray reads these variables when it is imported. Its signal handler would abort this process three seconds after
        # SIGTERM, also while a slow shutdown is under way.
        os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
        from ray.job_config import JobConfig

        ray = self.api
        send_messages_to_log(ray)
        logging.getLogger("ray").setLevel(logging.ERROR)  # Ray warns that its signal handlers are not installed
        # A job of a Ray client: Ray puts the current directory first on the module search path of other jobs' workers.
        job = JobConfig(_client_job=True)
        ray.init(log_to_driver=False, configure_logging=False, job_config=job, **options)


def set_memory_monitor(limit: float | None, environ: MutableMapping[str, str]) -> None:
    """Configure the memory monitor of a private Ray by environment variables, which its processes inherit.

    The monitor looks at the memory of the whole machine and ends a Baton worker if too much is used, also if
    another user's process uses it. A worker allocates its KV cache at start and has limits for the rest, so
    ending it helps only others. Therefore the monitor is off unless `limit`, a share of the memory, is given.
    Variables of Ray that are set already take precedence.
    """
    given = any(name in environ for name in ("RAY_memory_usage_threshold", "RAY_memory_monitor_refresh_ms"))
    if limit is not None:
        environ["RAY_memory_usage_threshold"] = f"{limit:g}"
        environ.setdefault("RAY_memory_monitor_refresh_ms", str(MEMORY_CHECK_MS))
    elif not given:
        environ["RAY_memory_monitor_refresh_ms"] = "0"


def send_messages_to_log(ray: Any) -> None:
    """Send the messages that Ray prints in the driver, such as the death of a worker, to the log.

    Ray has no setting for that: its listener thread calls this function of its module by name.
    """

    def log_message(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        log.warning("ray_message", source=str(data.get("pid", "")), lines=list(data.get("lines", ())))

    worker_module = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker_module, PRINT_FUNCTION):
        setattr(worker_module, PRINT_FUNCTION, log_message)
