"""Handles the workers' report streams: receives reports, sends commands, and informs Watch streams."""

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
from baton.runtime.config.shared_settings import HeartbeatSettings
from baton.runtime.logging import get_logger
from baton.runtime.observability.metrics import SchedulerMetrics
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.kv_event_reader import KvEventReader
from baton.scheduler.state.watch_streams import WatchStreams
from baton.scheduler.state.worker_replacement import WorkerReplacement

log = get_logger(__name__)

UPDATES_PER_HEARTBEAT = 20
"""Most updates on a Watch stream. Workers report no more often."""
REPLACEMENT_WAIT_SILENCES = 24
"""Longest wait for a replacement before the next worker may be replaced, in multiples of `silence_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTimes:
    """The times of one scheduler.

    silence_s: a worker that has not reported for this time is removed.
    settle_s: after the start, after a report stream broke, or when the store begins to list the scheduler,
        workers may not have reported yet. For this time a request without a worker waits for one.
    reservation_s: how long a placement counts if no report contains it.
    watch_interval_s: least time between two updates to a gateway.
    """

    silence_s: float
    settle_s: float
    reservation_s: float
    watch_interval_s: float

    @classmethod
    def of(cls, config: HeartbeatSettings) -> "SchedulerTimes":
        """Derive the times from the heartbeat settings.

        Workers look for schedulers once per heartbeat, and may be busy then. A live worker has reported after
        a detection time, which is at least two heartbeats. A job reaches its worker, and the next report its
        scheduler, long before a second detection time is over.
        """
        return cls(
            silence_s=config.detection_s,
            settle_s=config.detection_s,
            reservation_s=2 * config.detection_s,
            watch_interval_s=config.heartbeat_s / UPDATES_PER_HEARTBEAT,
        )


class WorkerStreams:
    """Keeps the cluster state and the prefix index up to date. Owned by the scheduler's event loop.

    `on_report` is called after each new report.
    """

    def __init__(
        self,
        scheduler_id: str,
        *,
        times: SchedulerTimes,
        state: ClusterState,
        index: PrefixIndex,
        feed: KvEventFeed,
        metrics: SchedulerMetrics,
        rng: Random,
        on_report: Callable[[], None],
    ) -> None:
        self._times = times
        self._state = state
        self._index = index
        self._metrics = metrics
        self._on_report = on_report
        self._events = KvEventReader(
            feed=feed,
            index=index,
            request_snapshot=lambda worker: self._command(worker, CommandKind.SNAPSHOT),
            on_degraded=lambda is_degraded: metrics.kv_events_degraded.set(is_degraded),
            rng=rng,
        )
        self._watch_streams = WatchStreams(scheduler_id, times.watch_interval_s)
        self._replacement = WorkerReplacement(
            settle_s=times.silence_s, max_wait_s=REPLACEMENT_WAIT_SILENCES * times.silence_s
        )
        self._streams: dict[WorkerRef, Duplex[WorkerCommand, WorkerReport]] = {}
        self._state_changed = asyncio.Event()
        self._ids_with_metrics: set[str] = set()
        self._kinds: list[tuple[WorkerRole, WorkerState]] = []  # of the workers in the metric
        self._settled_s = 0.0
        self.expect_reports()

    def watch(self) -> Source[ClusterUpdate]:
        """Open a Watch stream."""
        return self._watch_streams.open(self._state.reports())

    def drain(self, worker_id: str, *, node_shutting_down: bool) -> bool:
        """Tell a worker to drain. Returns False if it has no open stream."""
        for worker, stream in self._streams.items():
            if worker.worker_id == worker_id:
                with suppress(StreamBroken):
                    stream.send(WorkerCommand(kind=CommandKind.DRAIN, node_shutting_down=node_shutting_down))
                    return True
        return False

    def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        """Tell all workers with an open stream to erase the cached KV of a tenant. Returns their ids."""
        worker_ids: list[str] = []
        for worker, stream in self._streams.items():
            with suppress(StreamBroken):
                stream.send(WorkerCommand(kind=CommandKind.CLEAR, tenant_salt=tenant_salt))
                worker_ids.append(worker.worker_id)
        return tuple(sorted(worker_ids))

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        """Receive one worker epoch's reports until its stream ends. The worker counts as lost then."""
        worker: WorkerRef | None = None
        connected: set[WorkerRef] = set()
        try:
            while True:
                report = await stream.receive()
                if worker is None:
                    worker = report.worker
                    self._streams[worker] = stream
                    log.info("worker_joined", worker=str(worker), role=report.role.value, address=worker.address)
                if self._state.update(report, asyncio.get_running_loop().time()):
                    self._events.follow(report.worker, report.largest_tier_blocks, report.announce_every)
                    self._events.check_event_seq(report.worker, report.event_seq)
                    self._publish_state()
                    self._on_report()
                self._connect_pairs(report, stream, connected)
        except StreamBroken:
            pass
        finally:
            if worker is not None and self._streams.get(worker) is stream:
                del self._streams[worker]
                self.expect_reports()
                self._events.unfollow(worker)
                if self._state.remove(worker):
                    log.warning("worker_lost", worker=str(worker))
                    self._publish_state()

    async def end_streams(self) -> None:
        """End all streams, so that workers and gateways go on with another scheduler."""
        self._watch_streams.close()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.aclose()

    async def read_kv_events(self) -> None:
        """Apply the KV events of all workers to the prefix index, until cancelled."""
        await self._events.run()

    async def wait_for_report(self) -> bool:
        """Wait for the next report if workers may not have reported yet. Returns False at once otherwise."""
        if not self.is_settling:
            return False
        self._state_changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._settled_s):
                await self._state_changed.wait()
        return True

    @property
    def is_settling(self) -> bool:
        """True for `settle_s` after `expect_reports`, as long as workers may not have reported yet."""
        return asyncio.get_running_loop().time() < self._settled_s

    def expect_reports(self) -> None:
        """Let requests without a worker wait for `settle_s` from now: workers may report meanwhile."""
        self._settled_s = asyncio.get_running_loop().time() + self._times.settle_s

    def _connect_pairs(
        self, report: WorkerReport, stream: Duplex[WorkerCommand, WorkerReport], connected: set[WorkerRef]
    ) -> None:
        """Tell a decode worker to connect with new prefill workers before a request needs the pair."""
        if report.role is not WorkerRole.DECODE:
            return
        for other in self._state.reports():
            is_source = other.role.can_prefill and other.state is WorkerState.READY and other.worker not in connected
            if is_source and other.layout.mismatch(report.layout) is None:
                connected.add(other.worker)
                stream.send(WorkerCommand(kind=CommandKind.CONNECT, peer=other.worker))

    def _publish_state(self) -> None:
        reports = self._state.reports()
        kinds = [(report.role, report.state) for report in reports]
        if kinds != self._kinds:
            self._kinds = kinds
            self._metrics.workers.clear()
            for (role, state), number in Counter(kinds).items():
                self._metrics.workers.labels(role.value, state.value).set(number)
        self._watch_streams.update(reports)
        self._state_changed.set()

    async def run_maintenance(self) -> None:
        """Remove silent workers and replace those that ask for it, until cancelled.

        A worker is silent if its stream stays open without reports, as on a half-open connection.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._times.silence_s / 4)
            before = self._state.reports()
            self._state.snapshot(loop.time())
            if self._state.reports() != before:
                self._publish_state()
            for worker in self._replacement.choose(self._state.reports(), loop.time()):
                log.warning("worker_replacement_started", worker=str(worker))
                self._command(worker, CommandKind.REPLACE)
            self._remove_worker_metrics()
            self._metrics.prefix_index_blocks.set(self._index.num_claims)
            self._metrics.prefix_index_workers_behind.set(self._events.num_behind)

    def _remove_worker_metrics(self) -> None:
        """Remove the time series of workers that are gone."""
        ids = {report.worker.worker_id for report in self._state.reports()}
        for worker_id in self._ids_with_metrics - ids:
            self._metrics.predicted_over_actual.remove_by_labels({"worker": worker_id})
        self._ids_with_metrics = ids

    def _command(self, worker: WorkerRef, kind: CommandKind) -> None:
        stream = self._streams.get(worker)
        if stream is not None:
            with suppress(StreamBroken):
                stream.send(WorkerCommand(kind=kind))
