"""One worker inside a Ray actor: Ray owns the process and its main thread, the service runs in a thread with a loop of its own."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.runtime.config import restore
from baton.runtime.settings import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a started worker says of itself."""

    worker_id: str
    worker_epoch: int
    address: str
    pid: int
    host: str
    summary: str
    start_s: float


class WorkerActor:
    """The class behind the Ray actor. Methods may be called from several threads at a time (`max_concurrency`)."""

    def __init__(self, settings: dict[str, Any], cores: tuple[int, ...], log_dir: str | None) -> None:
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        from baton.runtime import logging
        from baton.runtime.process import report_to_nobody

        report_to_nobody()
        config = restore(WorkerConfig, settings)
        logging.configure(f"worker-{config.worker_id}", level=config.log_level, log_dir=Path(log_dir) if log_dir else None)
        from baton.worker.main import WorkerThread

        self._worker = WorkerThread(config)

    def start(self) -> WorkerFacts:
        """Load the model and serve; returns when the worker is ready, at once where it is already. Raises what made it fail."""
        ready = self._worker.start()
        return WorkerFacts(
            worker_id=ready.worker.worker_id,
            worker_epoch=ready.worker.worker_epoch,
            address=ready.worker.address,
            pid=os.getpid(),
            host=ready.host,
            summary=ready.summary,
            start_s=ready.start_s,
        )

    def wait(self, limit_s: float) -> str | None:
        """Block until the service has ended; why it did, empty for a drain or stop that was asked for, None when it has not in `limit_s`.

        The limit also frees the thread that a driver's call took here, when that driver has gone away.
        """
        return self._worker.wait(limit_s)

    def stop(self) -> None:
        """End now."""
        self._worker.stop()
