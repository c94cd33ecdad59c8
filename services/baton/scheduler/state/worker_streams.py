"""The workers' standing report streams: who is there, what it says, what it is told; and who watches them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import WorkerReport, WorkerRole, WorkerState
from baton.core.errors import StreamBroken
from baton.core.ids import WorkerRef
from baton.core.interfaces import Duplex, KvEventFeed, Source
from baton.prefix_index.index import PrefixIndex
from baton.runtime.config.settings import HeartbeatSettings
from baton.runtime.logging import get_logger
from baton.runtime.observability.metrics import SchedulerMetrics
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.kv_event_reader import KvEventFollowing
from baton.scheduler.state.watch_streams import Watchers
from baton.scheduler.state.worker_replacement import WorkerReplacement

log = get_logger(__name__)

UPDATES_A_HEARTBEAT = 20
"""At most so many on a Watch stream; workers report no more often."""
BACK_SILENCES = 24
"""Of `silence_s`: how long the successor of a worn-out worker is waited for before the next one of its role
may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTimes:
    """`silence_s`: a worker not heard of for so long is gone. `settle_s`: for so long after the start, or
    after a worker's stream broke, a request for which there is no worker waits for one to report.
    `reservation_s`: how long a placement counts if no report ever does. `watch_interval_s`: at most one
    update an interval goes to a gateway."""

    silence_s: float
    settle_s: float
    reservation_s: float
    watch_interval_s: float

    @classmethod
    def of(cls, config: HeartbeatSettings) -> "SchedulerTimes":
        """Workers look for schedulers once a heartbeat, and may be busy when they do: one that lives has
        reported after a detection time, which is two heartbeats at least. A job reaches its worker, and the
        next report its scheduler, long before a second one is over."""
        return cls(
            silence_s=config.detection_s,
            settle_s=config.detection_s,
            reservation_s=2 * config.detection_s,
            watch_interval_s=config.heartbeat_s / UPDATES_A_HEARTBEAT,
        )


class WorkerStreams:
    """Keeps `view` and `index` up to date. Single owner: the scheduler's event loop. `on_report`: a worker
    has said something new."""

    def __init__(
        self,
        scheduler_id: str,
        *,
        times: SchedulerTimes,
        view: ClusterState,
        index: PrefixIndex,
        feed: KvEventFeed,
        metrics: SchedulerMetrics,
        rng: Random,
        on_report: Callable[[], None],
    ) -> None:
        self._times = times
        self._view = view
        self._index = index
        self._metrics = metrics
        self._on_report = on_report
        self._following = KvEventFollowing(
            feed=feed,
            index=index,
            request_snapshot=lambda worker: self._command(worker, CommandKind.SNAPSHOT),
            on_degraded=lambda is_degraded: metrics.kv_events_degraded.set(is_degraded),
            rng=rng,
        )
        self._watchers = Watchers(scheduler_id, times.watch_interval_s)
        self._leaving = WorkerReplacement(settle_s=times.silence_s, back_s=BACK_SILENCES * times.silence_s)
        self._streams: dict[WorkerRef, Duplex[WorkerCommand, WorkerReport]] = {}
        self._view_changed = asyncio.Event()
        self._was_here: set[str] = set()
        """Ids of workers, at the last look."""
        self._unsettled_until_s = 0.0
        self._unsettled()

    def watch(self) -> Source[ClusterUpdate]:
        return self._watchers.add(self._view.reports())

    def drain(self, worker_id: str, *, node_shutting_down: bool) -> bool:
        for worker, stream in self._streams.items():
            if worker.worker_id == worker_id:
                with suppress(StreamBroken):
                    stream.send(WorkerCommand(kind=CommandKind.DRAIN, node_shutting_down=node_shutting_down))
                    return True
        return False

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        """One worker life's reports, from its first to the end of the stream, which is the end of that life
        as far as we know."""
        worker: WorkerRef | None = None
        warmed: set[WorkerRef] = set()
        try:
            while True:
                report = await stream.receive()
                if worker is None:
                    worker = report.worker
                    self._streams[worker] = stream
                    log.info("worker_joined", worker=str(worker), role=report.role.value, address=worker.address)
                if self._view.take_report(report, asyncio.get_running_loop().time()):
                    self._following.follow(report.worker, report.blocks.total)
                    self._following.heard(report.worker, report.event_seq)
                    self._changed()
                    self._on_report()
                self._warm_pairs(report, stream, warmed)
        except StreamBroken:
            pass
        finally:
            if worker is not None and self._streams.get(worker) is stream:
                del self._streams[worker]
                self._unsettled()
                self._following.unfollow(worker)
                if self._view.lose(worker):
                    log.warning("worker_lost", worker=str(worker))
                    self._changed()

    async def end_streams(self) -> None:
        """Their other ends then go to another scheduler."""
        self._watchers.close()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.aclose()

    async def follow(self) -> None:
        """Which blocks workers hold, for ever."""
        await self._following.run()

    async def may_report(self) -> bool:
        """Wait for the view to change, while workers may only not have reported yet: after our own start, or
        after a stream broke."""
        if not self.is_unsettled:
            return False
        self._view_changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._unsettled_until_s):
                await self._view_changed.wait()
        return True

    @property
    def is_unsettled(self) -> bool:
        """Workers may only not have reported yet."""
        return asyncio.get_running_loop().time() < self._unsettled_until_s

    def _unsettled(self) -> None:
        self._unsettled_until_s = asyncio.get_running_loop().time() + self._times.settle_s

    def _warm_pairs(
        self, report: WorkerReport, stream: Duplex[WorkerCommand, WorkerReport], warmed: set[WorkerRef]
    ) -> None:
        """Ask a decode worker to connect to each prefill worker whose KV it may be sent for, before the first
        request needs the pair."""
        if report.role is not WorkerRole.DECODE:
            return
        for other in self._view.reports():
            is_source = other.role.can_prefill and other.state is WorkerState.READY and other.worker not in warmed
            if is_source and other.layout.mismatch(report.layout) is None:
                warmed.add(other.worker)
                stream.send(WorkerCommand(kind=CommandKind.CONNECT, peer=other.worker))

    def _changed(self) -> None:
        reports = self._view.reports()
        self._metrics.workers.clear()
        for (role, state), number in Counter((r.role.value, r.state.value) for r in reports).items():
            self._metrics.workers.labels(role, state).set(number)
        self._watchers.update(reports)
        self._view_changed.set()

    async def look_after(self) -> None:
        """A worker whose stream stays open but says nothing (a half-open host) leaves the view without
        waiting for a placement; worn-out ones are let go, each in its turn."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._times.silence_s / 4)
            before = self._view.reports()
            self._view.snapshot(loop.time())
            if self._view.reports() != before:
                self._changed()
            for worker in self._leaving.choose(self._view.reports(), loop.time()):
                log.warning("worker_let_go", worker=str(worker))
                self._command(worker, CommandKind.LEAVE)
            self._forget_gone()
            self._following_metrics()

    def _forget_gone(self) -> None:
        """Metrics tell workers apart for as long as they are there."""
        here = {report.worker.worker_id for report in self._view.reports()}
        for worker_id in self._was_here - here:
            self._metrics.predicted_over_actual.remove_by_labels({"worker": worker_id})
        self._was_here = here

    def _following_metrics(self) -> None:
        self._metrics.prefix_index_blocks.set(self._index.num_claims)
        self._metrics.prefix_index_workers_behind.set(self._following.num_behind)

    def _command(self, worker: WorkerRef, kind: CommandKind) -> None:
        stream = self._streams.get(worker)
        if stream is not None:
            with suppress(StreamBroken):
                stream.send(WorkerCommand(kind=kind))
