"""Sends the reports of a worker to every scheduler and receives their commands, over one stream per
scheduler.

The worker opens the streams. It sends a report after a change, at most `REPORTS_PER_HEARTBEAT` and at least
one per heartbeat. A report names each newly counted decision once per stream. The first report on a stream
names all decisions that are open.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from random import Random

from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import StoreUnavailable, StreamBroken
from baton.core.ids import DecisionId
from baton.core.interfaces import Duplex, MemberKind, Membership, Network
from baton.runtime.logging import get_logger
from baton.worker.background_tasks import BackgroundTasks

log = get_logger(__name__)

REPORTS_PER_HEARTBEAT = 20
"""Upper bound on the reports per stream and heartbeat."""
FIRST_RETRY_S = 0.05
MAX_SCHEDULERS = 16


class UnreportedChanges:
    """Changes since the last report on one stream.

    `decisions`: newly counted ones, kept only while connected.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.decisions: list[DecisionId] = []
        self.is_connected = False


class ChangeNotifier:
    """Tells all report streams that the worker's reported state has changed.

    Built before what changes the state.
    """

    def __init__(self) -> None:
        self._subscribers: dict[UnreportedChanges, None] = {}

    def subscribe(self, changes: UnreportedChanges) -> None:
        self._subscribers[changes] = None

    def unsubscribe(self, changes: UnreportedChanges) -> None:
        del self._subscribers[changes]

    def changed(self) -> None:
        """A field of the report has a new value."""
        for changes in self._subscribers:
            changes.changed.set()

    def counted(self, decision_id: DecisionId) -> None:
        """The worker's own numbers contain this decision from the next report on."""
        for changes in self._subscribers:
            if changes.is_connected:
                changes.decisions.append(decision_id)
        self.changed()


class ReportStream:
    """The report stream to one scheduler. Reconnects with a growing, jittered delay.

    is_listed: membership lists the scheduler. One that is not listed is kept as long as it answers, because a
        store that was emptied, or is too full for announcements, lists none.
    """

    def __init__(self, address: str, reporter: "Reporter") -> None:
        self.address = address
        self.is_listed = True
        self.changes = UnreportedChanges()
        self._reporter = reporter

    async def run(self) -> None:
        """Report until the scheduler is not listed and does not answer."""
        reporter, retry_s = self._reporter, FIRST_RETRY_S
        while True:
            try:
                stream = await reporter.network.open_report(self.address)
            except StreamBroken:
                if not self.is_listed:
                    return
                await asyncio.sleep(retry_s * (0.5 + reporter.rng.random()))
                retry_s = min(2 * retry_s, reporter.heartbeat_s)
                continue
            retry_s = FIRST_RETRY_S
            commands = asyncio.create_task(self._receive_commands(stream))
            try:
                self.changes.is_connected = True
                self.changes.decisions = list(reporter.open_decisions())
                await self._send_reports(stream)
            except StreamBroken as broken:
                log.info("report_stream_broken", scheduler=self.address, problem=str(broken))
            finally:
                self.changes.is_connected = False
                commands.cancel()
                await asyncio.wait((commands,))
                await stream.aclose()
            if not commands.cancelled():
                commands.result()
            await asyncio.sleep(retry_s * (0.5 + reporter.rng.random()))

    async def _send_reports(self, stream: Duplex[WorkerReport, WorkerCommand]) -> None:
        heartbeat_s = self._reporter.heartbeat_s
        interval_s = heartbeat_s / REPORTS_PER_HEARTBEAT
        changes = self.changes
        while True:
            changes.changed.clear()
            decisions, changes.decisions = tuple(changes.decisions), []
            stream.send(self._reporter.next_report(decisions))
            await asyncio.sleep(interval_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s - 2 * interval_s):
                    await changes.changed.wait()

    async def _receive_commands(self, stream: Duplex[WorkerReport, WorkerCommand]) -> None:
        """Handle commands until the stream breaks. The sender then notices the break at its next report."""
        try:
            while True:
                self._reporter.on_command(await stream.receive())
        except StreamBroken:
            self.changes.changed.set()


class Reporter:
    """Keeps one report stream to each scheduler, either the configured ones or those that membership lists.

    build: builds a report from its sequence number and the newly counted decisions
    open_decisions: decisions of jobs that run now; a new stream begins with them
    on_command: called with each command of a scheduler
    """

    def __init__(
        self,
        *,
        network: Network,
        membership: Membership,
        schedulers: tuple[str, ...],
        build: Callable[[int, tuple[DecisionId, ...]], WorkerReport],
        notifier: ChangeNotifier,
        open_decisions: Callable[[], Iterable[DecisionId]],
        on_command: Callable[[WorkerCommand], None],
        heartbeat_s: float,
        rng: Random,
        tasks: BackgroundTasks,
    ) -> None:
        self.network = network
        self.open_decisions = open_decisions
        self.on_command = on_command
        self.heartbeat_s = heartbeat_s
        self.rng = rng
        self._membership = membership
        self._schedulers = schedulers
        self._build = build
        self._notifier = notifier
        self._tasks = tasks
        self._seq = count(1)
        self._streams: dict[str, ReportStream] = {}

    def next_report(self, decisions: tuple[DecisionId, ...]) -> WorkerReport:
        """Build a report with the next sequence number."""
        return self._build(next(self._seq), decisions)

    async def run(self) -> None:
        """Look for schedulers once a heartbeat. While the store is unavailable the known ones stay."""
        while True:
            with suppress(StoreUnavailable):
                self._update_streams(
                    self._schedulers or tuple(m.address for m in await self._membership.members(MemberKind.SCHEDULER))
                )
            await asyncio.sleep(self.heartbeat_s)

    def _update_streams(self, addresses: tuple[str, ...]) -> None:
        for address in addresses[:MAX_SCHEDULERS]:
            if address not in self._streams:
                stream = self._streams[address] = ReportStream(address, self)
                self._notifier.subscribe(stream.changes)
                self._tasks.start(self._run_stream(stream), name=f"report-{address}")
        for address, stream in self._streams.items():
            stream.is_listed = address in addresses

    async def _run_stream(self, stream: ReportStream) -> None:
        try:
            await stream.run()
        finally:
            self._notifier.unsubscribe(stream.changes)
            del self._streams[stream.address]
