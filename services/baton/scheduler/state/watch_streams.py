"""Sends the newest cluster state to gateways and tools over Watch streams."""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import StreamBroken
from baton.core.interfaces import Source


class WatchStreams:
    """The open Watch streams of one scheduler."""

    def __init__(self, scheduler_id: str, interval_s: float) -> None:
        """`interval_s`: least time between two updates on one stream."""
        self._no_workers = ClusterUpdate(
            scheduler_id=scheduler_id, reports=(), pid=os.getpid(), host=socket.gethostname()
        )
        self._interval_s = interval_s
        self._streams: dict[WatchStream, None] = {}  # ordered, unlike a set, so that a simulation repeats itself

    def open(self, reports: tuple[WorkerReport, ...]) -> "WatchStream":
        """Open a stream whose first update contains `reports`."""
        stream = WatchStream(self._interval_s, lambda closed: self._streams.pop(closed, None))
        self._streams[stream] = None
        stream.offer(replace(self._no_workers, reports=reports))
        return stream

    def update(self, reports: tuple[WorkerReport, ...]) -> None:
        """Send `reports` to all streams."""
        update = replace(self._no_workers, reports=reports)
        for stream in self._streams:
            stream.offer(update)

    def close(self) -> None:
        """End all streams."""
        for stream in tuple(self._streams):
            stream.end()


class WatchStream(Source[ClusterUpdate]):
    """One Watch stream. Holds only the newest update; updates are received at least `interval_s` apart."""

    def __init__(self, interval_s: float, on_close: "Callable[[WatchStream], object]") -> None:
        self._interval_s = interval_s
        self._on_close = on_close
        self._latest: ClusterUpdate | None = None
        self._wake = asyncio.Event()
        self._next_s = 0.0
        self._ended = False

    def offer(self, update: ClusterUpdate) -> None:
        """Replace the update that was not received yet."""
        self._latest = update
        self._wake.set()

    def end(self) -> None:
        """End the stream; `receive` then raises StreamBroken."""
        self._ended = True
        self._on_close(self)
        self._wake.set()

    async def receive(self) -> ClusterUpdate:
        """Wait for the next update. Raises StreamBroken if the stream has ended."""
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
