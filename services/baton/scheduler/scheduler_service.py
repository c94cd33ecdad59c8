"""The scheduler service: receives reports, places requests, and publishes the cluster state to gateways.

A decision never waits for I/O.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.cluster_snapshot import ClusterSnapshot, ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Reason, Refused
from baton.core.ids import DecisionId
from baton.core.interfaces import DecisionStore, Duplex, KvEventFeed, SchedulerService, Source
from baton.core.request import RequestActuals
from baton.prefix_index.index import PrefixIndex
from baton.runtime.config.settings import SchedulerConfig
from baton.runtime.logging import get_logger
from baton.runtime.observability.metrics import SchedulerMetrics
from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget
from baton.scheduler.admission.admission_queue import SCHEDULER_DRAINING, AdmissionQueue, Blocked
from baton.scheduler.admission.slo_admission import AdmissionMode
from baton.scheduler.decisions.cache_use import CacheUseCounter
from baton.scheduler.decisions.decide import DecisionRules, decide
from baton.scheduler.decisions.decision_recorder import DecisionRecorder
from baton.scheduler.decisions.decision_records import UnrecordedDecision
from baton.scheduler.decisions.deferred_work import DeferredWork
from baton.scheduler.decisions.missing_prefixes import MissingPrefixes
from baton.scheduler.decisions.prediction_accuracy import PredictionAccuracy
from baton.scheduler.policies.policy_types import Choice
from baton.scheduler.policy_loading.load_policy import load_policy
from baton.scheduler.scheduler_budget import query_bytes
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.open_placements import OpenPlacements
from baton.scheduler.state.session_table import SessionTable
from baton.scheduler.state.worker_streams import SchedulerTimes, WorkerStreams

log = get_logger(__name__)

EXPECTED_MARGIN_S = 1.0
"""Blocks of a placed prompt are expected for twice the predicted TTFT plus this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRules:
    """The operator's settings for decisions.

    max_queued_requests: limit of the scheduler's queue. With 0 none may wait, and a request is rejected if
        `max_waiting_seqs` sequences wait at the best worker.
    max_worker_queue_s: a request waits at the scheduler while every worker's predicted queue is longer than
        this.
    """

    policy: str
    admission: AdmissionMode
    max_waiting_seqs: int
    max_worker_queue_s: float
    max_queued_requests: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> "SchedulerRules":
        """Take the rules from the configuration."""
        return cls(
            policy=config.policy,
            admission=AdmissionMode(config.admission),
            max_waiting_seqs=config.max_queued_jobs,
            max_worker_queue_s=config.max_worker_queue_s,
            max_queued_requests=config.max_queued_requests,
        )


class Scheduler(SchedulerService):
    """One scheduler. All schedulers are active at once, because each worker decides which jobs it accepts."""

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
        budget: ByteBudget,
        awake_clock: Callable[[], float] | None = None,
    ) -> None:
        """Start the scheduler's tasks in the running event loop.

        feed: the workers' KV events.
        budget: the memory budget of the process.
        awake_clock: clock for the silence of workers, see `AwakeClock`; None uses the event loop's.
        """
        self.scheduler_id = scheduler_id
        self._rules = rules
        self._policy = load_policy(rules.policy)
        self._metrics = metrics
        self.budget = budget
        self._placements_made = metrics.decisions.labels(rules.policy)
        self._rng = rng
        self.index = PrefixIndex()
        self._missing = MissingPrefixes(self.index.evictions)
        self._sessions = SessionTable()
        self._cache_use = CacheUseCounter(asyncio.get_running_loop().time())
        self._state = ClusterState(
            silence_s=times.silence_s, reservation_s=times.reservation_s, awake_clock=awake_clock
        )
        self._recorder = DecisionRecorder(store, metrics, self.budget)
        self._deferred = DeferredWork(after_batch=self._state.update_stale)
        self._queue = self._build_queue()
        self._workers = WorkerStreams(
            scheduler_id,
            times=times,
            state=self._state,
            index=self.index,
            feed=feed,
            metrics=metrics,
            rng=Random(rng.getrandbits(64)),
            on_report=self._queue.wake,
        )
        self._open_placements = OpenPlacements(self._state, self.budget, on_release=self._deferred.schedule)
        self._accuracy = PredictionAccuracy(metrics, self._state)
        self._num_answers = 0
        self._is_closed = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that has ended one of the scheduler's tasks.

        It must not go on without that task.
        """
        self._tasks = self._start_tasks()

    def _build_queue(self) -> AdmissionQueue:
        return AdmissionQueue(
            max_queued_requests=self._rules.max_queued_requests,
            slos_set_due=self._rules.admission is not AdmissionMode.OFF,
            decide=self._decide_queued,
            refuse=self._reject_queued,
            abandon=self._abandon,
            on_size=self._metrics.queued_requests.set,
            budget=self.budget,
        )

    def _start_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [
            asyncio.create_task(self._recorder.run(), name="scheduler-records"),
            asyncio.create_task(self._queue.run(), name="scheduler-admission-queue"),
            asyncio.create_task(self._workers.run_maintenance(), name="scheduler-maintenance"),
            asyncio.create_task(self._workers.read_kv_events(), name="scheduler-kv-events"),
        ]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        return tasks

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        """Place or reject a request, or let it wait in the admission queue.

        Raises Refused if this scheduler drains, and OverBudget if its memory budget is used up.
        """
        if self._is_closed:
            raise Refused(SCHEDULER_DRAINING)
        try:
            with self.budget.reserve(Account.QUERIES, query_bytes(query), "the placement query"):
                return await self._place(query)
        except OverBudget as error:
            self._metrics.rejections.labels(error.failure.reason.value).inc()
            raise

    async def _place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        if not self._queue.contains(query):
            decision, may_wait = self._decide(query)
            while (
                isinstance(decision.answer, Rejection)
                and decision.answer.reason is Reason.NO_WORKERS
                and await self._workers.wait_for_report()
            ):
                decision, may_wait = self._decide(query)
            if not (self._queue.is_open and (may_wait or self._must_queue_behind(decision))):
                return self._conclude(decision)
            self._queue.add(query, _prefill_work_s(decision), self._sessions.attained_s(query))
        return await self._queue.wait(query)

    def _must_queue_behind(self, decision: UnrecordedDecision) -> bool:
        """True if requests are waiting that a new one must not overtake. A later attempt may."""
        return len(self._queue) > 0 and decision.query.attempt == 0 and isinstance(decision.answer, Placement)

    def _decide_queued(self, query: PlacementQuery, waiting_s: float) -> Placement | Rejection | Blocked:
        """Answer a request in the admission queue, or say what blocks it."""
        decision, must_wait = self._decide(query, is_next=True)
        answer = decision.answer
        if must_wait and isinstance(answer, Rejection):
            return Blocked.THIS_REQUEST if answer.reason is Reason.NO_CAPACITY else Blocked.ALL_REQUESTS
        if isinstance(answer, Rejection) and answer.reason is Reason.NO_WORKERS and self._workers.is_settling:
            return Blocked.THIS_REQUEST
        return self._conclude_queued(decision, waiting_s)

    def _reject_queued(self, query: PlacementQuery, rejection: Rejection, waiting_s: float) -> Rejection:
        """Record a rejection by the admission queue itself."""
        decision = self._unrecorded(self._new_decision_id(), query, rejection, None, None, self._decision_rules(0.0))
        self._conclude_queued(decision, waiting_s)
        return rejection

    def _conclude_queued(self, decision: UnrecordedDecision, waiting_s: float) -> Placement | Rejection:
        if isinstance(decision.answer, Placement):
            decision = replace(decision, answer=replace(decision.answer, waiting_s=waiting_s))
        self._metrics.queued_s.observe(waiting_s)
        return self._conclude(decision)

    def _conclude(self, decision: UnrecordedDecision) -> Placement | Rejection:
        """Reserve what the placement takes, and return the answer."""
        answer = decision.answer
        self._num_answers += 1
        if isinstance(answer, Placement):
            self._open_placements.add(decision.query, answer, asyncio.get_running_loop().time())
        self._deferred.add(partial(self._follow_up, decision))
        return answer

    def _follow_up(self, decision: UnrecordedDecision) -> None:
        """Do what the answer need not wait for. The next decision must find it done."""
        answer = decision.answer
        now_s = asyncio.get_running_loop().time()
        decision = replace(decision, missing=self._missing.explain(decision, now_s))
        if isinstance(answer, Placement):
            decision = replace(decision, session=self._sessions.placed(decision.query, now_s))
            self._open_placements.set_ceiling(answer.decision_id, self._cache_use.placed(decision))
            self._expect_blocks(decision.query, answer)
            self._placements_made.inc()
        else:
            self._metrics.rejections.labels(answer.reason.value).inc()
        self._recorder.add(decision)

    def _decide(self, query: PlacementQuery, *, is_next: bool = False) -> tuple[UnrecordedDecision, bool]:
        """Make a decision without any effect yet.

        Returns (the decision, True if the request may wait instead).

        `is_next`: the request is the first in the admission queue.
        """
        self._deferred.run_pending()
        decision_id = self._new_decision_id()
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        ahead_s = 0.0
        if not is_next and len(self._queue):
            before_s = self._queue.work_before_s(query, self._sessions.attained_s(query))
            ahead_s = before_s / max(1, self._state.num_prefilling)
        rules = self._decision_rules(ahead_s)
        cluster = self._state.snapshot(now_s, self.index.overlaps(query.block_hashes, now_s))
        decision = decide(decision_id, self.scheduler_id, self._rules.policy, self._policy, query, cluster, rules)
        self._metrics.decision_s.observe(loop.time() - now_s)
        unrecorded = self._unrecorded(decision_id, query, decision.answer, decision.choice, cluster, rules)
        return unrecorded, decision.may_wait

    def _new_decision_id(self) -> DecisionId:
        return DecisionId(self._rng.getrandbits(64).to_bytes(8, "big").hex())

    def _decision_rules(self, ahead_s: float) -> DecisionRules:
        return DecisionRules(
            decision_number=self._num_answers,
            admission=self._rules.admission,
            max_waiting_seqs=self._rules.max_waiting_seqs,
            max_worker_queue_s=self._rules.max_worker_queue_s if self._queue.is_open else None,
            ahead_s=ahead_s,
        )

    def _unrecorded(
        self,
        decision_id: DecisionId,
        query: PlacementQuery,
        answer: Placement | Rejection,
        choice: Choice | None,
        cluster: ClusterSnapshot | None,
        rules: DecisionRules,
    ) -> UnrecordedDecision:
        return UnrecordedDecision(
            decision_id=decision_id,
            scheduler_id=self.scheduler_id,
            policy=self._rules.policy,
            query=query,
            answer=answer,
            choice=choice,
            cluster=cluster,
            rules=rules,
        )

    def _expect_blocks(self, query: PlacementQuery, placement: Placement) -> None:
        """Expect the prompt's blocks on its workers, so that a burst with one new prefix is not scattered."""
        until_s = asyncio.get_running_loop().time() + 2 * (placement.ttft_s or 0.0) + EXPECTED_MARGIN_S
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self.index.expect(worker, query.block_hashes, until_s)

    async def finished(self, *actuals: RequestActuals) -> None:
        """Take the outcomes of requests that have ended."""
        self._deferred.run_pending()
        for each in actuals:
            self._finished(each)

    def _finished(self, actuals: RequestActuals) -> None:
        self._recorder.finished(actuals)
        ended = self._open_placements.release(actuals.decision_id)
        if ended is not None:
            if ended.session is not None:
                service_s = sum((leg.compute_s or 0.0) + (leg.decode_s or 0.0) for leg in actuals.legs)
                self._sessions.ended(ended.session, asyncio.get_running_loop().time(), service_s)
            self._accuracy.observe(ended, actuals)
            self._cache_use.finished(ended, actuals)
            self._queue.wake()

    def _abandon(self, answer: Placement | Rejection) -> None:
        """Release a placement that was not fetched and will not be used."""
        if isinstance(answer, Placement):
            self._open_placements.release(answer.decision_id)

    def check_clean(self) -> None:
        """Raise AssertionError unless no request is queued and no worker's memory is reserved.

        Placements whose outcome was not reported, because the gateway died, are kept up to their limit.
        """
        if len(self._queue) or self._state.has_reservations:
            raise AssertionError(
                f"{self.scheduler_id} is not clean: {len(self._queue)} queued requests, "
                f"reservations: {self._state.has_reservations}"
            )

    def listed(self) -> None:
        """Record that workers can find this scheduler from now on, because the store lists it."""
        self._workers.expect_reports()

    def reports(self) -> tuple[WorkerReport, ...]:
        """Return the last report of each worker that this scheduler knows."""
        return self._state.reports()

    async def watch(self) -> Source[ClusterUpdate]:
        """Open a stream of cluster updates."""
        return self._workers.watch()

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Return the records of a request's attempts, including those of other schedulers in the store.

        `request_id` None: the request that was decided last.
        """
        self._deferred.run_pending()
        return await self._recorder.of_request(request_id)

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        """Tell a worker to drain. Returns False if it is not known."""
        return self._workers.drain(worker_id, node_shutting_down=node_shutting_down)

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        """Tell all workers to erase the cached KV of a tenant. Returns their ids."""
        return self._workers.clear_tenant(tenant_salt)

    async def cache_stats(self) -> CacheStats:
        """Return the cache use of the requests that were placed here since the start."""
        self._deferred.run_pending()
        return self._cache_use.stats(asyncio.get_running_loop().time())

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        """Receive a worker's reports until its stream ends."""
        await self._workers.report(stream)

    async def aclose(self) -> None:
        """End all streams, so that clients go on with another scheduler, and write the remaining records.

        Safe to call twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.close()
        await self._workers.end_streams()
        self._deferred.run_pending()
        await self._recorder.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.failed.cancel()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            log.critical("scheduler_task_failed", task=task.get_name(), exc_info=error)
            self.failed.set_exception(error)


def _prefill_work_s(decision: UnrecordedDecision) -> float:
    """Return the predicted time of one worker for the prompt; 0 if the policy predicts nothing."""
    predicted = decision.choice.predicted if decision.choice is not None else None
    return predicted.prefix_pull_s + predicted.prefill_s if predicted is not None else 0.0
