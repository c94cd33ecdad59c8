"""What this worker tells every scheduler, and what schedulers ask of it: one stream to each, dialled from
here.

A report goes out on change, at most one an interval, and at least one a heartbeat. On one stream each
decision that this worker counts is named once; a new stream begins with all that are open.
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

REPORTS_A_HEARTBEAT = 20
"""At most so many, however much changes."""
FIRST_RETRY_S = 0.05
MAX_SCHEDULERS = 16


class ReportStream:
    """To one scheduler: dials, reports, obeys, and dials again with a growing, jittered pause."""

    def __init__(self, address: str, reporter: "Reporter") -> None:
        self.address = address
        self.is_wanted = True
        self.is_up = False
        self.unsaid: list[DecisionId] = []
        self.changed = asyncio.Event()
        self._reporter = reporter

    async def run(self) -> None:
        """Until nobody lists that scheduler any more and it does not answer."""
        reporter, pause_s = self._reporter, FIRST_RETRY_S
        while self.is_wanted:
            try:
                stream = await reporter.network.open_report(self.address)
            except StreamBroken:
                await asyncio.sleep(pause_s * (0.5 + reporter.rng.random()))
                pause_s = min(2 * pause_s, reporter.heartbeat_s)
                continue
            pause_s = FIRST_RETRY_S
            commands = asyncio.create_task(self._obey(stream))
            try:
                self.is_up, self.unsaid = True, list(reporter.open_decisions())
                await self._send(stream)
            except StreamBroken as broken:
                log.info("report_stream_broken", scheduler=self.address, problem=str(broken))
            finally:
                self.is_up = False
                commands.cancel()
                await asyncio.wait((commands,))
                await stream.aclose()
            if not commands.cancelled():
                commands.result()
            await asyncio.sleep(pause_s * (0.5 + reporter.rng.random()))

    async def _send(self, stream: Duplex[WorkerReport, WorkerCommand]) -> None:
        heartbeat_s = self._reporter.heartbeat_s
        interval_s = heartbeat_s / REPORTS_A_HEARTBEAT
        while True:
            self.changed.clear()
            decisions, self.unsaid = tuple(self.unsaid), []
            stream.send(self._reporter.next_report(decisions))
            await asyncio.sleep(interval_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s - 2 * interval_s):
                    await self.changed.wait()

    async def _obey(self, stream: Duplex[WorkerReport, WorkerCommand]) -> None:
        """Until the stream breaks, which the next report then finds."""
        try:
            while True:
                self._reporter.on_command(await stream.receive())
        except StreamBroken:
            self.changed.set()


class Reporter:
    """Keeps one stream to each scheduler: those given, or those that membership lists."""

    def __init__(
        self,
        *,
        network: Network,
        membership: Membership,
        schedulers: tuple[str, ...],
        build: Callable[[int, tuple[DecisionId, ...]], WorkerReport],
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
        self._tasks = tasks
        self._seq = count(1)
        self._streams: dict[str, ReportStream] = {}

    @property
    def num_up(self) -> int:
        """Schedulers that hear this worker now."""
        return sum(stream.is_up for stream in self._streams.values())

    def next_report(self, decisions: tuple[DecisionId, ...]) -> WorkerReport:
        return self._build(next(self._seq), decisions)

    def changed(self) -> None:
        """Something that a report contains is different now."""
        for stream in self._streams.values():
            stream.changed.set()

    def counted(self, decision_id: DecisionId) -> None:
        """From the next report on this worker's numbers contain this decision."""
        for stream in self._streams.values():
            if stream.is_up:
                stream.unsaid.append(decision_id)
        self.changed()

    async def run(self) -> None:
        """Find schedulers, for ever; a store that is away changes nothing."""
        while True:
            with suppress(StoreUnavailable):
                self._want(
                    self._schedulers or tuple(m.address for m in await self._membership.members(MemberKind.SCHEDULER))
                )
            await asyncio.sleep(self.heartbeat_s)

    def _want(self, addresses: tuple[str, ...]) -> None:
        for address in addresses[:MAX_SCHEDULERS]:
            if address not in self._streams:
                stream = self._streams[address] = ReportStream(address, self)
                self._tasks.start(self._keep(stream), name=f"report-{address}")
        for address, stream in self._streams.items():
            stream.is_wanted = address in addresses

    async def _keep(self, stream: ReportStream) -> None:
        try:
            await stream.run()
        finally:
            del self._streams[stream.address]
