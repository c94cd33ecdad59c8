"""The scheduler: takes reports, places requests, tells gateways who is there, remembers why. Its decisions wait for nobody."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

from baton.core.apis import DecisionStore, Duplex, KvEventFeed, SchedulerService, Source
from baton.core.cluster import (
    ClusterSnapshot,
    ClusterUpdate,
    Command,
    CommandKind,
    DecisionRecord,
    Placement,
    PlacementQuery,
    Rejection,
    StillWaiting,
    WorkerReport,
    WorkerRole,
    WorkerState,
)
from baton.core.errors import Reason, StreamBroken
from baton.core.ids import DecisionId, WorkerRef
from baton.core.request import RequestActuals
from baton.prefix.index import PrefixIndex
from baton.runtime.logging import get_logger
from baton.runtime.metrics import SchedulerMetrics
from baton.runtime.settings import SchedulerConfig
from baton.scheduler.admission import Admission
from baton.scheduler.deciding import Rules, decide
from baton.scheduler.explain import Decided
from baton.scheduler.following import KvEventFollowing
from baton.scheduler.leaving import Leaving
from baton.scheduler.policies import POLICIES
from baton.scheduler.policies.choice import Choice
from baton.scheduler.recording import Recorder
from baton.scheduler.view import ClusterView
from baton.scheduler.waiting_room import WaitingRoom
from baton.scheduler.watch import Watchers

log = get_logger(__name__)

BACK_SILENCES = 24
"""Of `silence_s`: how long the successor of a worn-out worker is waited for before the next one of its role may leave."""
EXPECTED_S = 1.0
"""Beyond twice the predicted TTFT: how long the blocks of a placed prompt are expected before an event says that they are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTimes:
    """`silence_s`: a worker not heard of for so long is gone. `settle_s`: for so long after the start, or after a worker's stream broke, a
    request for which there is no worker waits for one to report. `reservation_s`: how long a placement counts if no report ever does."""

    silence_s: float
    settle_s: float
    reservation_s: float
    watch_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRules:
    """What an operator decides. `max_waiting`: requests that wait at the scheduler while every worker's predicted queue is over
    `max_worker_queue_s`; of 0 nobody waits, and who finds `max_waiting_seqs` sequences waiting at the best worker is refused."""

    policy: str
    admission: Admission
    max_waiting_seqs: int
    max_worker_queue_s: float
    max_waiting: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> "SchedulerRules":
        return cls(
            policy=config.policy,
            admission=Admission(config.admission),
            max_waiting_seqs=config.max_queue,
            max_worker_queue_s=config.max_worker_queue_s,
            max_waiting=config.max_waiting,
        )


class Scheduler(SchedulerService):
    """One scheduler. All are active; each is advice, since workers admit for themselves."""

    def __init__(
        self,
        *,
        scheduler_id: str,
        rules: SchedulerRules,
        times: SchedulerTimes,
        store: DecisionStore,
        feed: KvEventFeed,
        metrics: SchedulerMetrics,
        rng: Random,
    ) -> None:
        """`feed`: where workers tell which blocks they hold."""
        self.scheduler_id = scheduler_id
        self._rules = rules
        self._policy = POLICIES[rules.policy]
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
        self._recorder = Recorder(store, metrics)
        self._room = WaitingRoom(
            max_waiting=rules.max_waiting,
            keeps_slos=rules.admission is not Admission.OFF,
            decide=self._decide_in_turn,
            refuse=self._refuse,
        )
        self._streams: dict[WorkerRef, Duplex[Command, WorkerReport]] = {}
        self._leaving = Leaving(settle_s=times.silence_s, back_s=BACK_SILENCES * times.silence_s)
        self._turn = 0
        self._times = times
        self._view_changed = asyncio.Event()
        self._unsettled_until_s = 0.0
        self._unsettled()
        self._tasks = [
            asyncio.create_task(self._recorder.run(), name="scheduler-records"),
            asyncio.create_task(self._room.run(), name="scheduler-waiting"),
            asyncio.create_task(self._look_after(times.silence_s / 4), name="scheduler-look-after"),
            asyncio.create_task(self._following.run(), name="scheduler-kv-events"),
        ]

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        if not self._room.holds(query):
            asked_s = asyncio.get_running_loop().time()
            decided, may_wait = self._decide(query)
            while isinstance(decided.answer, Rejection) and decided.answer.reason is Reason.NO_WORKERS and await self._may_find_more():
                decided, may_wait = self._decide(query)
            if not (self._room.is_open and (may_wait or self._is_behind_others(decided))):
                self._metrics.decision_s.observe(asyncio.get_running_loop().time() - asked_s)
                return self._conclude(decided)
            self._room.enter(query, _work_s(decided))
            self._metrics.waiting_requests.set(len(self._room))
        return await self._room.stay(query)

    def _is_behind_others(self, decided: Decided) -> bool:
        """A new request does not overtake those that wait; a later attempt may."""
        return len(self._room) > 0 and decided.query.attempt == 0 and isinstance(decided.answer, Placement)

    def _decide_in_turn(self, query: PlacementQuery, waiting_s: float) -> Placement | Rejection | None:
        """Of the request that has waited longest, by the room's reckoning; None if it must wait on."""
        decided, must_wait = self._decide(query, is_next=True)
        return None if must_wait else self._end_wait(decided, waiting_s)

    def _refuse(self, query: PlacementQuery, rejection: Rejection, waiting_s: float) -> Rejection:
        self._end_wait(self._decided(self._new_decision_id(), query, rejection, None, None, self._rules_now(0.0)), waiting_s)
        return rejection

    def _end_wait(self, decided: Decided, waiting_s: float) -> Placement | Rejection:
        if isinstance(decided.answer, Placement):
            decided = replace(decided, answer=replace(decided.answer, waiting_s=waiting_s))
        self._metrics.waiting_s.observe(waiting_s)
        self._metrics.waiting_requests.set(len(self._room))
        return self._conclude(decided)

    def _conclude(self, decided: Decided) -> Placement | Rejection:
        """From now on the answer counts."""
        answer = decided.answer
        if isinstance(answer, Placement):
            now_s = asyncio.get_running_loop().time()
            self._view.reserve(decided.decision_id, decided.query, answer, now_s)
            self._expect(decided.query, answer, now_s)
            self._metrics.decisions.labels(self._rules.policy).inc()
        else:
            self._metrics.rejections.labels(answer.reason.value).inc()
        self._recorder.decided(decided)
        return answer

    def _decide(self, query: PlacementQuery, *, is_next: bool = False) -> tuple[Decided, bool]:
        """Nothing is waited for, and nothing counts yet. The other value: the answer is a refusal that waiting may spare the request.
        `is_next`: nobody has a turn before it."""
        decision_id = self._new_decision_id()
        now_s = asyncio.get_running_loop().time()
        ahead_s = 0.0 if is_next or not len(self._room) else self._room.work_before_s(query) / max(1, self._view.num_prefilling)
        rules = self._rules_now(ahead_s)
        cluster = self._view.snapshot(now_s, self.index.overlaps(query.block_hashes, now_s))
        verdict = decide(decision_id, self.scheduler_id, self._rules.policy, self._policy, query, cluster, rules)
        return self._decided(decision_id, query, verdict.answer, verdict.choice, cluster, rules), verdict.may_wait

    def _new_decision_id(self) -> DecisionId:
        return DecisionId(self._rng.getrandbits(64).to_bytes(8, "big").hex())

    def _rules_now(self, ahead_s: float) -> Rules:
        self._turn += 1
        return Rules(
            turn_number=self._turn - 1,
            admission=self._rules.admission,
            max_waiting_seqs=self._rules.max_waiting_seqs,
            max_worker_queue_s=self._rules.max_worker_queue_s if self._room.is_open else None,
            ahead_s=ahead_s,
        )

    def _decided(
        self,
        decision_id: DecisionId,
        query: PlacementQuery,
        answer: Placement | Rejection,
        choice: Choice | None,
        cluster: ClusterSnapshot | None,
        rules: Rules,
    ) -> Decided:
        return Decided(
            decision_id=decision_id,
            scheduler_id=self.scheduler_id,
            policy=self._rules.policy,
            query=query,
            answer=answer,
            choice=choice,
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
        placement = self._recorder.finished(actuals)
        if placement is None:
            return
        self._compare(placement, actuals)
        ends = (placement.prefill, placement.decode)
        self._view.release(actuals.decision_id, tuple(w.worker_id for w in ends if w is not None))
        self._room.look()

    def _compare(self, predicted: Placement, actuals: RequestActuals) -> None:
        """What was predicted, held against what happened."""
        for term, said_s, was_s in (
            ("ttft", predicted.ttft_s and predicted.ttft_s + predicted.waiting_s, actuals.ttft_s),
            ("tpot", predicted.tpot_s, actuals.tpot_s),
        ):
            worker = predicted.prefill if term == "ttft" and predicted.prefill is not None else predicted.decode or predicted.prefill
            if said_s and was_s and worker is not None:
                self._metrics.predicted_over_actual.labels(term, worker.worker_id).observe(said_s / was_s)

    async def watch(self) -> Source[ClusterUpdate]:
        return self._watchers.add(self._view.reports())

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Also the attempts that another scheduler has decided, where the store knows them."""
        return await self._recorder.of_request(request_id)

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
                    self._room.look()
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
        self._room.close()
        self._watchers.close()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.aclose()
        await self._recorder.flush()
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


def _work_s(decided: Decided) -> float:
    """Seconds that a worker is predicted to need for the prompt; 0 where nothing is predicted."""
    predicted = decided.choice.predicted if decided.choice is not None else None
    return predicted.prefix_pull_s + predicted.prefill_s if predicted is not None else 0.0
