"""The scheduler: takes reports, places requests, tells gateways who is there, remembers why. Its decisions
wait for nobody."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import NamedTuple

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
from baton.scheduler.admission.admission_queue import LEAVING, AdmissionQueue, MustWait
from baton.scheduler.admission.slo_admission import AdmissionMode
from baton.scheduler.decisions.decide import DecisionRules, decide
from baton.scheduler.decisions.decision_recorder import DecisionRecorder
from baton.scheduler.decisions.deferred_work import DeferredWork
from baton.scheduler.decisions.explain import Decided
from baton.scheduler.policies import POLICIES
from baton.scheduler.policies.policy_result import Choice
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.worker_streams import SchedulerTimes, WorkerStreams

log = get_logger(__name__)

MAX_OPEN = 65_536
"""Placements whose end has not been told; beyond that the oldest counts no more."""
FINISHED = "finished"
"""What a gateway says of a placement whose attempt went to its end."""
EXPECTED_S = 1.0
"""Beyond twice the predicted TTFT: how long the blocks of a placed prompt are expected before an event says
that they are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRules:
    """What an operator decides. `max_waiting`: requests that wait at the scheduler while every worker's
    predicted queue is over `max_worker_queue_s`; of 0 nobody waits, and who finds `max_waiting_seqs`
    sequences waiting at the best worker is refused."""

    policy: str
    admission: AdmissionMode
    max_waiting_seqs: int
    max_worker_queue_s: float
    max_waiting: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> "SchedulerRules":
        return cls(
            policy=config.policy,
            admission=AdmissionMode(config.admission),
            max_waiting_seqs=config.max_queued_jobs,
            max_worker_queue_s=config.max_worker_queue_s,
            max_waiting=config.max_queued_requests,
        )


class _Open(NamedTuple):
    """A placement whose end has not been told."""

    placement: Placement
    num_prompt_tokens: int

    @property
    def overlap_blocks(self) -> int:
        """Blocks of the prompt that need not be computed, as predicted."""
        placement = self.placement
        overlap = placement.prefill_overlap_blocks if placement.prefill is not None else placement.decode_overlap_blocks
        return max(overlap, placement.prefix_source.num_blocks if placement.prefix_source is not None else 0)


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
        self._decisions = metrics.decisions.labels(rules.policy)
        self._prefix_asked, self._prefix_predicted, self._prefix_actual = map(
            metrics.prefix_tokens.labels, ("asked", "predicted", "actual")
        )
        self._rng = rng
        self.index = PrefixIndex()
        self._view = ClusterState(silence_s=times.silence_s, reservation_s=times.reservation_s)
        self._recorder = DecisionRecorder(store, metrics)
        self._afterwards = DeferredWork(at_end=self._view.bring_up_to_date)
        self._room = AdmissionQueue(
            max_waiting=rules.max_waiting,
            keeps_slos=rules.admission is not AdmissionMode.OFF,
            decide=self._decide_in_turn,
            refuse=self._refuse,
            abandon=self._abandon,
            on_size=metrics.queued_requests.set,
        )
        self._open: OrderedDict[DecisionId, _Open] = OrderedDict()
        self._workers = WorkerStreams(
            scheduler_id,
            times=times,
            view=self._view,
            index=self.index,
            feed=feed,
            metrics=metrics,
            rng=Random(rng.getrandbits(64)),
            on_report=self._room.look,
        )
        self._turn = 0
        self._has_left = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that has ended one of this scheduler's own tasks: it must not go on without
        it."""
        self._tasks = [
            asyncio.create_task(self._recorder.run(), name="scheduler-records"),
            asyncio.create_task(self._room.run(), name="scheduler-waiting"),
            asyncio.create_task(self._workers.look_after(), name="scheduler-look-after"),
            asyncio.create_task(self._workers.follow(), name="scheduler-kv-events"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        """Raises Refused when this scheduler leaves."""
        if self._has_left:
            raise Refused(LEAVING)
        if not self._room.holds(query):
            decided, may_wait = self._decide(query)
            while (
                isinstance(decided.answer, Rejection)
                and decided.answer.reason is Reason.NO_WORKERS
                and await self._workers.may_report()
            ):
                decided, may_wait = self._decide(query)
            if not (self._room.is_open and (may_wait or self._is_behind_others(decided))):
                return self._conclude(decided)
            self._room.enter(query, _work_s(decided))
        return await self._room.stay(query)

    def _is_behind_others(self, decided: Decided) -> bool:
        """A new request does not overtake those that wait; a later attempt may."""
        return len(self._room) > 0 and decided.query.attempt == 0 and isinstance(decided.answer, Placement)

    def _decide_in_turn(self, query: PlacementQuery, waiting_s: float) -> Placement | Rejection | MustWait:
        """Of a request that waits in the room."""
        decided, must_wait = self._decide(query, is_next=True)
        answer = decided.answer
        if must_wait and isinstance(answer, Rejection):
            return MustWait.THIS if answer.reason is Reason.NO_CAPACITY else MustWait.ALL
        if isinstance(answer, Rejection) and answer.reason is Reason.NO_WORKERS and self._workers.is_unsettled:
            return MustWait.THIS
        return self._end_wait(decided, waiting_s)

    def _refuse(self, query: PlacementQuery, rejection: Rejection, waiting_s: float) -> Rejection:
        self._end_wait(
            self._decided(self._new_decision_id(), query, rejection, None, None, self._rules_now(0.0)), waiting_s
        )
        return rejection

    def _end_wait(self, decided: Decided, waiting_s: float) -> Placement | Rejection:
        if isinstance(decided.answer, Placement):
            decided = replace(decided, answer=replace(decided.answer, waiting_s=waiting_s))
        self._metrics.queued_s.observe(waiting_s)
        return self._conclude(decided)

    def _conclude(self, decided: Decided) -> Placement | Rejection:
        """From now on the answer counts."""
        answer = decided.answer
        self._turn += 1
        if isinstance(answer, Placement):
            self._open[decided.decision_id] = _Open(answer, decided.query.num_prompt_tokens)
            if len(self._open) > MAX_OPEN:
                self._release(next(iter(self._open)))
            self._view.reserve(decided.decision_id, decided.query, answer, asyncio.get_running_loop().time())
        self._afterwards.add(partial(self._follow_up, decided))
        return answer

    def _follow_up(self, decided: Decided) -> None:
        """What the answer need not wait for, but the next decision must."""
        answer = decided.answer
        if isinstance(answer, Placement):
            self._expect(decided.query, answer)
            self._decisions.inc()
        else:
            self._metrics.rejections.labels(answer.reason.value).inc()
        self._recorder.decided(decided)

    def _decide(self, query: PlacementQuery, *, is_next: bool = False) -> tuple[Decided, bool]:
        """Nothing is waited for, and nothing counts yet. The other value: the answer is a refusal that
        waiting may spare the request. `is_next`: nobody has a turn before it."""
        self._afterwards.catch_up()
        decision_id = self._new_decision_id()
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        ahead_s = (
            0.0
            if is_next or not len(self._room)
            else self._room.work_before_s(query) / max(1, self._view.num_prefilling)
        )
        rules = self._rules_now(ahead_s)
        cluster = self._view.snapshot(now_s, self.index.overlaps(query.block_hashes, now_s))
        verdict = decide(decision_id, self.scheduler_id, self._rules.policy, self._policy, query, cluster, rules)
        self._metrics.decision_s.observe(loop.time() - now_s)
        return self._decided(decision_id, query, verdict.answer, verdict.choice, cluster, rules), verdict.may_wait

    def _new_decision_id(self) -> DecisionId:
        return DecisionId(self._rng.getrandbits(64).to_bytes(8, "big").hex())

    def _rules_now(self, ahead_s: float) -> DecisionRules:
        return DecisionRules(
            turn_number=self._turn,
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
        rules: DecisionRules,
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

    def _expect(self, query: PlacementQuery, placement: Placement) -> None:
        """Its prompt's blocks are as good as there: a burst on one new prefix is not scattered."""
        until_s = asyncio.get_running_loop().time() + 2 * (placement.ttft_s or 0.0) + EXPECTED_S
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self.index.expect(worker, query.block_hashes, until_s)

    async def finished(self, *actuals: RequestActuals) -> None:
        self._afterwards.catch_up()
        for one in actuals:
            self._finished(one)

    def _finished(self, actuals: RequestActuals) -> None:
        self._recorder.finished(actuals)
        one = self._release(actuals.decision_id)
        if one is not None:
            self._compare(one.placement, actuals)
            if actuals.outcome == FINISHED:
                self._compare_prefix(one, actuals)
            self._room.look()

    def _abandon(self, answer: Placement | Rejection) -> None:
        """Nobody has fetched it, so nothing will come of it."""
        if isinstance(answer, Placement):
            self._release(answer.decision_id)

    def _release(self, decision_id: DecisionId) -> "_Open | None":
        """The placement counts no more; None if it did not any more."""
        one = self._open.pop(decision_id, None)
        if one is not None:
            ends = (one.placement.prefill, one.placement.decode)
            self._view.release(decision_id, tuple(w.worker_id for w in ends if w is not None))
            self._afterwards.take_turn()
        return one

    def _compare(self, predicted: Placement, actuals: RequestActuals) -> None:
        """What was predicted, held against what happened."""
        for term, said_s, was_s in (
            ("ttft", predicted.ttft_s and predicted.ttft_s + predicted.waiting_s, actuals.ttft_s),
            ("tpot", predicted.tpot_s, actuals.tpot_s),
        ):
            worker = (
                predicted.prefill
                if term == "ttft" and predicted.prefill is not None
                else predicted.decode or predicted.prefill
            )
            if said_s and was_s and worker is not None and self._view.report_of(worker) is not None:
                self._metrics.predicted_over_actual.labels(term, worker.worker_id).observe(said_s / was_s)

    def _compare_prefix(self, one: "_Open", actuals: RequestActuals) -> None:
        """Of its prompt: what was predicted to be in a cache where it is computed, or pulled there, and what
        was."""
        computing = one.placement.prefill or one.placement.decode
        report = self._view.report_of(computing) if computing is not None else None
        if report is None:
            return
        self._prefix_asked.inc(one.num_prompt_tokens)
        self._prefix_predicted.inc(min(one.num_prompt_tokens, one.overlap_blocks * report.layout.block_size_tokens))
        self._prefix_actual.inc(actuals.num_cached_tokens)

    async def watch(self) -> Source[ClusterUpdate]:
        return self._workers.watch()

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Also the attempts that another scheduler has decided, where the store knows them."""
        self._afterwards.catch_up()
        return await self._recorder.of_request(request_id)

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        return self._workers.drain(worker_id, node_shutting_down=node_shutting_down)

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        await self._workers.report(stream)

    async def aclose(self) -> None:
        """End the standing streams, whose other ends then go to another scheduler, and write what is left to
        write. Safe to call twice."""
        if self._has_left:
            return
        self._has_left = True
        self._room.close()
        await self._workers.end_streams()
        self._afterwards.catch_up()
        await self._recorder.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.failed.cancel()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            log.critical("scheduler_task_failed", task=task.get_name(), exc_info=error)
            self.failed.set_exception(error)


def _work_s(decided: Decided) -> float:
    """Seconds that a worker is predicted to need for the prompt; 0 where nothing is predicted."""
    predicted = decided.choice.predicted if decided.choice is not None else None
    return predicted.prefix_pull_s + predicted.prefill_s if predicted is not None else 0.0
