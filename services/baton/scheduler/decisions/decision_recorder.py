"""Writes decision records, off the decision path: a slow or absent store costs records, never time."""

import asyncio
from contextlib import suppress

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.errors import StoreUnavailable
from baton.core.ids import DecisionId
from baton.core.interfaces import DecisionStore
from baton.core.request import RequestActuals
from baton.runtime.observability.metrics import SchedulerMetrics
from baton.scheduler.decisions.explain import Decided, RecentDecisions

RECORD_TTL_S = 3_600.0
MAX_UNWRITTEN_RECORDS = 1_024
RECORDS_PART = 0.2
"""Of the scheduler's time, at most, that goes into telling records."""
LAST_RECORDS_S = 1.0
"""How long a scheduler that ends goes on writing records."""


class DecisionRecorder:
    """What one scheduler decided lately, and what came of it; the store has it a little later."""

    def __init__(self, store: DecisionStore, metrics: SchedulerMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._recent = RecentDecisions()
        self._unwritten: asyncio.Queue[DecisionId] = asyncio.Queue(MAX_UNWRITTEN_RECORDS)

    def decided(self, decided: Decided) -> None:
        self._recent.decided(decided)
        self._keep(decided.decision_id)

    def finished(self, actuals: RequestActuals) -> None:
        """A request has ended so. Of a decision that is not known any more nothing is kept."""
        if self._recent.finish(actuals):
            self._keep(actuals.decision_id)

    async def of_request(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """By attempt; those that another scheduler has decided, too, where the store knows them. None: the
        request decided last."""
        recent = self._recent.of_request(request_id)
        kept: tuple[DecisionRecord, ...] = ()
        with suppress(StoreUnavailable):
            kept = await self._store.get(recent[0].request_id if recent else request_id)
        by_attempt = {record.attempt: record for record in (*kept, *recent)}
        return tuple(by_attempt[attempt] for attempt in sorted(by_attempt))

    async def run(self) -> None:
        """For ever. Telling a record takes longer than deciding, so no more than a part of the time goes to
        it; of decisions that come faster only the answers are kept."""
        loop = asyncio.get_running_loop()
        while True:
            decision_id = await self._unwritten.get()
            began_s = loop.time()
            record = self._recent.tell(decision_id)
            await asyncio.sleep((loop.time() - began_s) * (1 / RECORDS_PART - 1))
            try:
                if record is not None:
                    await self._store.put(record, RECORD_TTL_S)
                self._metrics.store_degraded.set(0)
            except StoreUnavailable:
                self._metrics.store_degraded.set(1)
            finally:
                self._unwritten.task_done()

    async def flush(self) -> None:
        """Wait, not long, until what is left is written."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_RECORDS_S):
                await self._unwritten.join()

    def _keep(self, decision_id: DecisionId) -> None:
        """Write the record later; drop it where the store is too slow to keep up."""
        with suppress(asyncio.QueueFull):
            self._unwritten.put_nowait(decision_id)
