"""Watch streams: every gateway and tool gets the newest cluster state, never a backlog of old ones."""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import StreamBroken
from baton.core.interfaces import Source


class Watchers:
    """The open Watch streams of one scheduler."""

    def __init__(self, scheduler_id: str, interval_s: float) -> None:
        self._nobody = ClusterUpdate(scheduler_id=scheduler_id, reports=(), pid=os.getpid(), host=socket.gethostname())
        self._interval_s = interval_s
        self._watchers: dict[Watcher, None] = {}  # in order, so that a simulation repeats itself

    def add(self, reports: tuple[WorkerReport, ...]) -> "Watcher":
        watcher = Watcher(self._interval_s, lambda closed: self._watchers.pop(closed, None))
        self._watchers[watcher] = None
        watcher.offer(replace(self._nobody, reports=reports))
        return watcher

    def update(self, reports: tuple[WorkerReport, ...]) -> None:
        update = replace(self._nobody, reports=reports)
        for watcher in self._watchers:
            watcher.offer(update)

    def close(self) -> None:
        for watcher in tuple(self._watchers):
            watcher.end()


class Watcher(Source[ClusterUpdate]):
    """One stream. A newer update replaces one that was not taken yet; updates come at least `interval_s`
    apart."""

    def __init__(self, interval_s: float, on_close: "Callable[[Watcher], object]") -> None:
        self._interval_s = interval_s
        self._on_close = on_close
        self._latest: ClusterUpdate | None = None
        self._wake = asyncio.Event()
        self._next_s = 0.0
        self._ended = False

    def offer(self, update: ClusterUpdate) -> None:
        self._latest = update
        self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._on_close(self)
        self._wake.set()

    async def receive(self) -> ClusterUpdate:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            if self._ended:
                raise StreamBroken("the watch stream has ended")
            if loop.time() < self._next_s:
                await asyncio.sleep(self._next_s - loop.time())
            if self._ended or self._latest is None:
                continue
            self._wake.clear()
            self._next_s = loop.time() + self._interval_s
            update, self._latest = self._latest, None
            return update

    async def aclose(self) -> None:
        self.end()
