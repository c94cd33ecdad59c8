"""Writes decision records to the store in the background.

If the store is slow or absent, records are lost, but no decision is delayed.
"""

import asyncio
from contextlib import suppress

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.errors import StoreUnavailable
from baton.core.ids import DecisionId
from baton.core.interfaces import DecisionStore
from baton.core.request import RequestActuals
from baton.runtime.observability.metrics import SchedulerMetrics
from baton.runtime.process.byte_budget import ByteBudget
from baton.scheduler.decisions.decision_records import UnrecordedDecision
from baton.scheduler.decisions.recent_decisions import RecentDecisions

RECORD_TTL_S = 3_600.0
MAX_UNWRITTEN_RECORDS = 1_024
MAX_TIME_FRACTION = 0.2
"""Largest fraction of the scheduler's time that is spent on building records."""
FLUSH_TIMEOUT_S = 1.0
"""Maximum time that a scheduler writes records while it shuts down."""


class DecisionRecorder:
    """Keeps one scheduler's recent decisions with their outcomes, and copies them to the store later."""

    def __init__(self, store: DecisionStore, metrics: SchedulerMetrics, budget: ByteBudget) -> None:
        """The recent decisions take the account `RECORDS` of `budget`."""
        self._store = store
        self._metrics = metrics
        self._recent = RecentDecisions(budget)
        self._unwritten: asyncio.Queue[DecisionId] = asyncio.Queue(MAX_UNWRITTEN_RECORDS)

    def add(self, decision: UnrecordedDecision) -> None:
        """Remember a decision and write its record later."""
        self._recent.add(decision)
        self._write_later(decision.decision_id)

    def finished(self, actuals: RequestActuals) -> None:
        """Add the outcome of a request to its record. Ignored if the decision has been forgotten."""
        if self._recent.finish(actuals):
            self._write_later(actuals.decision_id)

    async def of_request(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Return the records of one request by attempt, including those of other schedulers in the store.

        `request_id` None: the request that was decided last.
        """
        recent = self._recent.of_request(request_id)
        stored: tuple[DecisionRecord, ...] = ()
        with suppress(StoreUnavailable):
            stored = await self._store.get(recent[0].request_id if recent else request_id)
        by_attempt = {record.attempt: record for record in (*stored, *recent)}
        return tuple(by_attempt[attempt] for attempt in sorted(by_attempt))

    async def run(self) -> None:
        """Write records until cancelled.

        Building a record takes longer than deciding, so it is limited to `MAX_TIME_FRACTION`. If decisions
        come faster, only the answers of the oldest are kept (`RecentDecisions`).
        """
        loop = asyncio.get_running_loop()
        while True:
            decision_id = await self._unwritten.get()
            began_s = loop.time()
            record = self._recent.record_of(decision_id)
            await asyncio.sleep((loop.time() - began_s) * (1 / MAX_TIME_FRACTION - 1))
            try:
                if record is not None:
                    await self._store.put(record, RECORD_TTL_S)
                self._metrics.store_degraded.set(0)
            except StoreUnavailable:
                self._metrics.store_degraded.set(1)
            finally:
                self._unwritten.task_done()

    async def flush(self) -> None:
        """Wait until all records are written, at most `FLUSH_TIMEOUT_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._unwritten.join()

    def _write_later(self, decision_id: DecisionId) -> None:
        """Queue a record, or drop it if the store is too slow."""
        with suppress(asyncio.QueueFull):
            self._unwritten.put_nowait(decision_id)
