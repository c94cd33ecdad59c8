"""Runs one worker in a thread, for a Ray actor."""

import os
import threading
from collections.abc import Callable, Sequence

from baton.core.errors import BatonError
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.process.process import ServiceThread, Stop, StoppedNow
from baton.worker.device.open_device import open_device
from baton.worker.worker_main import UNHEALTHY_EXIT_CODE, OpenDevice, WorkerReady, run_worker
from baton.worker.worker_service import WorkerNeedsReplacement, WorkerUnhealthy


class WorkerThread:
    """A worker in a thread of another process, such as a Ray actor.

    The thread has its own event loop and no signal handlers. All methods are thread-safe. A worker that
    becomes unhealthy ends the whole process through `exit_now`; one that needs replacement does not.

    node_shutting_down: after the end, True if the worker was drained because its machine is shutting down
    """

    def __init__(
        self,
        config: WorkerConfig,
        exit_now: Callable[[int], None] = os._exit,
        open_device: OpenDevice = open_device,
    ) -> None:
        self._config = config
        self._exit_now = exit_now
        self._open_device = open_device
        self._starting = threading.Lock()
        self._is_started = False
        self._is_ready = threading.Event()
        self._activities: list[str] = []
        self._has_changed = threading.Condition()
        self._ready: WorkerReady | None = None
        self.node_shutting_down = False
        self._thread = ServiceThread(self._main, name="worker")

    def start(self) -> WorkerReady:
        """Load the model and start to serve. Blocks until the worker is ready.

        Further calls return the same result. Raises the error that made the start fail, or BatonError if the
        worker has ended since.
        """
        with self._starting:
            if not self._is_started:
                self._is_started = True
                self._thread.start()
        self._is_ready.wait()
        if self._ready is None or not self._thread.is_alive:
            self._thread.join()
            error = self._thread.error
            if error is None or isinstance(error, StoppedNow):
                raise BatonError(
                    "the worker was stopped before it was ready" if self._ready is None else "the worker has ended"
                )
            raise error
        return self._ready

    def activities(self, num_known: int, limit_s: float) -> Sequence[str]:
        """Return what this worker has said that it does in its start, without the first `num_known` texts.

        Waits for the next one, at most `limit_s` seconds and until the worker is ready or has ended.
        """
        with self._has_changed:
            self._has_changed.wait_for(
                lambda: len(self._activities) > num_known or self._is_ready.is_set(), timeout=limit_s
            )
            return self._activities[num_known:]

    def wait(self, limit_s: float | None = None) -> str | None:
        """Block until the worker has ended, at most `limit_s` seconds.

        Returns the error text, an empty string after a requested drain or stop, or None if the worker still
        runs.
        """
        if not self._thread.join(limit_s):
            return None
        error = self._thread.error
        return "" if error is None or isinstance(error, StoppedNow) else f"{type(error).__name__}: {error}"

    def drain(self) -> None:
        """Finish running jobs, take no new ones, then end."""
        self._thread.request_stop()

    def stop(self) -> None:
        """End immediately."""
        self._thread.request_stop_now()

    async def _main(self, stop: Stop) -> None:
        try:
            self.node_shutting_down = await run_worker(self._config, stop, self._on_ready, self._open_device, self._say)
        except WorkerNeedsReplacement:
            raise
        except WorkerUnhealthy:
            self._exit_now(UNHEALTHY_EXIT_CODE)
            raise
        finally:
            self._set_ready()

    def _on_ready(self, ready: WorkerReady) -> None:
        self._ready = ready
        self._set_ready()

    def _set_ready(self) -> None:
        """Release those who wait for the end of the start, which failed if there is no `_ready`."""
        with self._has_changed:
            self._is_ready.set()
            self._has_changed.notify_all()

    def _say(self, text: str) -> None:
        with self._has_changed:
            self._activities.append(text)
            self._has_changed.notify_all()
