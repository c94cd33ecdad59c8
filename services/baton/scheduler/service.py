"""The scheduler: takes reports, places requests, tells gateways who is there, remembers why. Its decisions wait for nobody."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from baton.core.apis import DecisionStore, Duplex, KvEventFeed, SchedulerService, Source
from baton.core.cluster import (
    ClusterUpdate,
    Command,
    CommandKind,
    DecisionRecord,
    Placement,
    PlacementQuery,
    Rejection,
    WorkerReport,
    WorkerRole,
    WorkerState,
)
from baton.core.errors import Reason, StoreUnavailable, StreamBroken
from baton.core.ids import DecisionId, WorkerRef
from baton.core.request import RequestActuals
from baton.prefix.index import PrefixIndex
from baton.runtime.logging import get_logger
from baton.runtime.metrics import SchedulerMetrics
from baton.scheduler.admission import Admission, admit
from baton.scheduler.explain import Decided, RecentDecisions, Rules, turn_of
from baton.scheduler.following import KvEventFollowing
from baton.scheduler.leaving import Leaving
from baton.scheduler.policies import POLICIES
from baton.scheduler.view import ClusterView
from baton.scheduler.watch import Watchers

log = get_logger(__name__)

RECORD_TTL_S = 3_600.0
MAX_UNWRITTEN_RECORDS = 1_024
BACK_SILENCES = 24
"""Of `silence_s`: how long the successor of a worn-out worker is waited for before the next one of its role may leave."""
EXPECTED_S = 1.0
"""Beyond twice the predicted TTFT: how long the blocks of a placed prompt are expected before an event says that they are there."""
RECORDS_PART = 0.2
"""Of the scheduler's time, at most, that goes into telling records."""
LAST_RECORDS_S = 1.0
"""How long a scheduler that ends goes on writing records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTimes:
    """`silence_s`: a worker not heard of for so long is gone. `settle_s`: for so long after the start, or after a worker's stream broke, a
    request for which there is no worker waits for one to report. `reservation_s`: how long a placement counts if no report ever does."""

    silence_s: float
    settle_s: float
    reservation_s: float
    watch_interval_s: float


class Scheduler(SchedulerService):
    """One scheduler. All are active; each is advice, since workers admit for themselves."""

    def __init__(
        self,
        *,
        scheduler_id: str,
        policy: str,
        admission: Admission,
        times: SchedulerTimes,
        max_waiting_seqs: int,
        store: DecisionStore,
        feed: KvEventFeed,
        metrics: SchedulerMetrics,
        rng: Random,
    ) -> None:
        """`feed`: where workers tell which blocks they hold."""
        self.scheduler_id = scheduler_id
        self._policy_name = policy
        self._policy = POLICIES[policy]
        self._admission = admission
        self._max_waiting_seqs = max_waiting_seqs
        self._store = store
        self._metrics = metrics
        self._rng = rng
        self.index = PrefixIndex()
        self._following = KvEventFollowing(
            feed=feed,
            index=self.index,
            ask_snapshot=lambda worker: self._command(worker, CommandKind.SNAPSHOT),
            on_degraded=lambda is_degraded: metrics.kv_events_degraded.set(is_degraded),
            rng=Random(rng.getrandbits(64)),
        )
        self._view = ClusterView(silence_s=times.silence_s, reservation_s=times.reservation_s)
        self._watchers = Watchers(scheduler_id, times.watch_interval_s)
        self._recent = RecentDecisions()
        self._unwritten: asyncio.Queue[DecisionId] = asyncio.Queue(MAX_UNWRITTEN_RECORDS)
        self._streams: dict[WorkerRef, Duplex[Command, WorkerReport]] = {}
        self._leaving = Leaving(settle_s=times.silence_s, back_s=BACK_SILENCES * times.silence_s)
        self._turn = 0
        self._times = times
        self._view_changed = asyncio.Event()
        self._unsettled_until_s = 0.0
        self._unsettled()
        self._tasks = [
            asyncio.create_task(self._write_records(), name="scheduler-records"),
            asyncio.create_task(self._look_after(times.silence_s / 4), name="scheduler-look-after"),
            asyncio.create_task(self._following.run(), name="scheduler-kv-events"),
        ]

    async def place(self, query: PlacementQuery) -> Placement | Rejection:
        asked_s = asyncio.get_running_loop().time()
        decided = self._decide(query)
        while isinstance(decided.answer, Rejection) and decided.answer.reason is Reason.NO_WORKERS and await self._may_find_more():
            decided = self._decide(query)
        now_s = asyncio.get_running_loop().time()
        answer = decided.answer
        if isinstance(answer, Placement):
            self._view.reserve(decided.decision_id, query, answer, now_s)
            self._expect(query, answer, now_s)
            self._metrics.decisions.labels(self._policy_name).inc()
        else:
            self._metrics.rejections.labels(answer.reason.value).inc()
        self._metrics.decision_s.observe(now_s - asked_s)
        self._recent.decided(decided)
        self._keep(decided.decision_id)
        return answer

    def _decide(self, query: PlacementQuery) -> Decided:
        """Nothing is waited for."""
        decision_id = DecisionId(self._rng.getrandbits(64).to_bytes(8, "big").hex())
        rules = Rules(turn_number=self._turn, admission=self._admission, max_waiting_seqs=self._max_waiting_seqs)
        self._turn += 1
        now_s = asyncio.get_running_loop().time()
        cluster = self._view.snapshot(now_s, self.index.overlaps(query.block_hashes, now_s))
        choice = self._policy(query, cluster, turn_of(decision_id, rules))
        answer: Placement | Rejection
        if isinstance(choice, Rejection):
            answer = choice
        else:
            refused = admit(query, choice, max_waiting_seqs=rules.max_waiting_seqs, mode=rules.admission)
            answer = refused or choice.placement(decision_id, self.scheduler_id, self._policy_name)
        return Decided(
            decision_id=decision_id,
            scheduler_id=self.scheduler_id,
            policy=self._policy_name,
            query=query,
            answer=answer,
            choice=None if isinstance(choice, Rejection) else choice,
            cluster=cluster,
            rules=rules,
        )

    def _expect(self, query: PlacementQuery, placement: Placement, now_s: float) -> None:
        """Its prompt's blocks are as good as there: a burst on one new prefix is not scattered."""
        until_s = now_s + 2 * (placement.ttft_s or 0.0) + EXPECTED_S
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self.index.expect(worker, query.block_hashes, until_s)

    async def finished(self, *actuals: RequestActuals) -> None:
        for one in actuals:
            self._finished(one)

    def _finished(self, actuals: RequestActuals) -> None:
        record = self._recent.finish(actuals)
        if record is None:
            return
        if record.placement is not None:
            self._compare(record.placement, actuals)
            ends = (record.placement.prefill, record.placement.decode)
            self._view.release(actuals.decision_id, tuple(w.worker_id for w in ends if w is not None))
        self._keep(actuals.decision_id)

    def _compare(self, predicted: Placement, actuals: RequestActuals) -> None:
        """What was predicted, held against what happened."""
        for term, said_s, was_s in (("ttft", predicted.ttft_s, actuals.ttft_s), ("tpot", predicted.tpot_s, actuals.tpot_s)):
            worker = predicted.prefill if term == "ttft" and predicted.prefill is not None else predicted.decode or predicted.prefill
            if said_s and was_s and worker is not None:
                self._metrics.predicted_over_actual.labels(term, worker.worker_id).observe(said_s / was_s)

    async def watch(self) -> Source[ClusterUpdate]:
        return self._watchers.add(self._view.reports())

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Also the attempts that another scheduler has decided, where the store knows them."""
        recent = self._recent.of_request(request_id)
        kept: tuple[DecisionRecord, ...] = ()
        with suppress(StoreUnavailable):
            kept = await self._store.get(recent[0].request_id if recent else request_id)
        by_attempt = {record.attempt: record for record in (*kept, *recent)}
        return tuple(by_attempt[attempt] for attempt in sorted(by_attempt))

    async def drain(self, worker_id: str) -> bool:
        for worker, stream in self._streams.items():
            if worker.worker_id == worker_id:
                with suppress(StreamBroken):
                    stream.send(Command(kind=CommandKind.DRAIN))
                    return True
        return False

    async def report(self, stream: Duplex[Command, WorkerReport]) -> None:
        """One worker life's reports, from its first to the end of the stream, which is the end of that life as far as we know."""
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

    async def aclose(self) -> None:
        """End the standing streams, whose other ends then go to another scheduler, and write what is left to write. Safe to call twice."""
        if not self._tasks:
            return
        self._watchers.close()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.aclose()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_RECORDS_S):
                await self._unwritten.join()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _may_find_more(self) -> bool:
        """Wait for the view to change, while workers may only not have reported yet: after our own start, or after a stream broke."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._unsettled_until_s:
            return False
        self._view_changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._unsettled_until_s):
                await self._view_changed.wait()
        return True

    def _unsettled(self) -> None:
        self._unsettled_until_s = asyncio.get_running_loop().time() + self._times.settle_s

    def _warm_pairs(self, report: WorkerReport, stream: Duplex[Command, WorkerReport], warmed: set[WorkerRef]) -> None:
        """Ask a decode worker to connect to each prefill worker whose KV it may be sent for, before the first request needs the pair."""
        if report.role is not WorkerRole.DECODE:
            return
        for other in self._view.reports():
            is_source = other.role.can_prefill and other.state is WorkerState.READY and other.worker not in warmed
            if is_source and other.layout.mismatch(report.layout) is None:
                warmed.add(other.worker)
                stream.send(Command(kind=CommandKind.CONNECT, peer=other.worker))

    def _changed(self) -> None:
        reports = self._view.reports()
        self._metrics.workers.clear()
        for (role, state), number in Counter((r.role.value, r.state.value) for r in reports).items():
            self._metrics.workers.labels(role, state).set(number)
        self._watchers.update(reports)
        self._view_changed.set()

    def _keep(self, decision_id: DecisionId) -> None:
        """Write the record later; drop it where the store is too slow to keep up."""
        with suppress(asyncio.QueueFull):
            self._unwritten.put_nowait(decision_id)

    async def _write_records(self) -> None:
        """Off the decision path: a slow or absent store costs records, never time. Telling one takes longer than deciding, so no more
        than a part of the time goes to it; of decisions that come faster only the answers are kept."""
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

    async def _look_after(self, interval_s: float) -> None:
        """A worker whose stream stays open but says nothing (a half-open host) leaves the view without waiting for a placement; worn-out
        ones are let go, each in its turn."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            before = self._view.reports()
            self._view.snapshot(loop.time())
            if self._view.reports() != before:
                self._changed()
            for worker in self._leaving.choose(self._view.reports(), loop.time()):
                log.warning("worker_let_go", worker=str(worker))
                self._command(worker, CommandKind.LEAVE)
            self._following_metrics()

    def _following_metrics(self) -> None:
        self._metrics.prefix_index_claims.set(self.index.num_claims)
        self._metrics.prefix_workers_behind.set(self._following.num_behind)

    def _command(self, worker: WorkerRef, kind: CommandKind) -> None:
        stream = self._streams.get(worker)
        if stream is not None:
            with suppress(StreamBroken):
                stream.send(Command(kind=kind))
