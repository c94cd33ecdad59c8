"""Runs a request: attempts one after another, until every sample has ended or the request must fail."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from baton.core.cluster.placement import Placement, Rejection
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import REQUEST_ID_BYTES, DecisionId, JobId
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import GenerateRequest, RequestActuals, TokenDelta
from baton.core.state_machines import REQUEST_TRANSITIONS, Lifecycle, RequestState
from baton.gateway.cluster.attempt_errors import AttemptFailed
from baton.gateway.cluster.cluster_view import ClusterView
from baton.gateway.cluster.scheduler_pool import SchedulerPool
from baton.gateway.request.attempt import Attempt, continued_request, make_attempt, single_sample_request
from baton.gateway.request.attempt_observer import NO_ATTEMPT_OBSERVER, AttemptObserver
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.failures.failure_history import FailureHistory
from baton.gateway.request.failures.poison_detector import PoisonDetector
from baton.gateway.request.failures.retry_rules import RetryRules
from baton.gateway.request.failures.suspicion import Suspicion
from baton.gateway.request.latency import TokenLatency
from baton.gateway.request.relay import TokenSink, relay
from baton.gateway.request.worker_sessions import WorkerSessions
from baton.runtime.logging import get_logger
from baton.runtime.observability.metrics import GatewayMetrics
from baton.runtime.observability.tracing import NO_SPAN, OFF, Span, Tracing

log = get_logger(__name__)

_OVERLOAD = {Reason.QUEUE_FULL, Reason.TENANT_QUOTA, Reason.NO_CAPACITY, Reason.TTFT_SLO, Reason.TPOT_SLO}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestServices:
    """Objects that all requests of a gateway share."""

    schedulers: SchedulerPool
    workers: WorkerSessions
    view: ClusterView
    rules: RetryRules
    metrics: GatewayMetrics
    rng: Random
    poison_detector: PoisonDetector = field(default_factory=PoisonDetector)
    tracing: Tracing = OFF
    observer: AttemptObserver = NO_ATTEMPT_OBSERVER


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Facts about one request for its timeline and trace span.

    span: the request's trace span.
    num_attempts: attempts started, over all samples.
    placed_s, policy: event loop time and policy of the first placement.
    placement: the last placement.
    """

    span: Span = NO_SPAN
    num_attempts: int = 0
    placed_s: float | None = None
    policy: str = ""
    placement: Placement | None = None


class RequestRun:
    """One request from QUEUED to its end. Implements `Placer` and `TokenSink` for its attempts.

    After a failed attempt with several samples, each unfinished sample continues as a run of its own that
    shares the same `Delivery`.
    """

    def __init__(
        self,
        request: GenerateRequest,
        delivery: Delivery,
        record: RequestRecord,
        out: TokenSink,
        services: RequestServices,
        *,
        attempt_number: int = 0,
        history: FailureHistory | None = None,
        stalled_since_s: float | None = None,
        delivered_layout: KvLayout | None = None,
    ) -> None:
        """Prepare a run. The keyword arguments are the state of the run that this one continues.

        stalled_since_s: event loop time of the last token before a failed attempt; None if no attempt failed.
        delivered_layout: KV layout of the workers that produced the delivered tokens. Only workers with the
            same model fingerprint may continue. None if no token was delivered.
        """
        self._request = request
        self._delivery = delivery
        self._record = record
        self._out = out
        self._services = services
        self._attempt_number = attempt_number
        self._history = history or FailureHistory(original_request_id=request.request_id)
        self._stalled_since_s = stalled_since_s
        self._delivered_layout = delivered_layout
        self._state = Lifecycle(REQUEST_TRANSITIONS, RequestState.QUEUED)
        self._decision: DecisionId | None = None
        self._placement_started_s = 0.0
        self._attempt_latency = TokenLatency()
        self._attempt_layout: KvLayout | None = None  # of the current attempt's workers; None if unknown
        self._last_problem = ""
        self._suspicion = Suspicion(self._history, services.poison_detector)

    async def run(self) -> None:
        """Run attempts until every sample has ended. Raises Refused if the request fails or its deadline
        passes."""
        scope = asyncio.timeout_at(self._request.deadline_s)
        try:
            async with scope:
                await self._run_attempts()
        except TimeoutError:
            self._state.move(RequestState.FAILED)
            if not scope.expired():
                raise
            message = (
                f"the deadline passed after {self._num_output_tokens} output tokens{self._last_problem}; "
                "allow more time or request fewer tokens"
            )
            raise Refused(Failure(code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message=message)) from None
        except asyncio.CancelledError:
            self._state.move(RequestState.CANCELLED)
            raise
        except BaseException:
            self._state.move(RequestState.FAILED)
            raise
        finally:
            del scope  # its task keeps the error, whose traceback keeps this frame: a cycle
        self._state.move(RequestState.FINISHED)

    async def place(self, attempt: Attempt) -> Placement:
        """Ask for a placement of this attempt.

        Raises Refused if a first attempt is rejected. A later attempt asks again until the deadline.
        """
        self._placement_started_s = asyncio.get_running_loop().time()
        while (placement := await self._ask_for_placement(attempt)) is None:
            await asyncio.sleep(self._services.rules.retry_placement_s * self._services.rng.uniform(0.5, 1.0))
            await self._suspicion.lock_exclusive_run()
        return placement

    async def _ask_for_placement(self, attempt: Attempt) -> Placement | None:
        """Return a placement that may be used, or None if the attempt must ask again later."""
        if self._suspicion.must_wait:
            return None
        is_first = attempt.number == 0
        try:
            answer = await self._services.schedulers.place(
                attempt.query, is_first=is_first, deadline_s=attempt.request.deadline_s
            )
        except Refused as refused:
            has_no_memory = (Code.RESOURCE_EXHAUSTED, Reason.MEMORY_BUDGET)
            if is_first or (refused.failure.code, refused.failure.reason) != has_no_memory:
                raise
            self._continue_without_placement(refused.failure.message)
            return None
        if not isinstance(answer, Placement):
            self._services.observer.rejected(self._history.original_request_id, attempt.number, answer)
            if is_first:
                raise Refused(failure_of(answer))
            self._continue_without_placement(answer.message)
            return None
        self._decision = answer.decision_id
        if self._uses_dead_worker(answer):
            self._report_outcome(Reason.WORKER_LOST.value)  # the scheduler has not noticed the death yet
            return None
        if self._suspicion.forbids(answer):
            self._report_outcome(Reason.SUPERSEDED.value)
            return None
        self._accept_placement(answer)
        if self._suspicion.runs_alone:
            await self._services.workers.confirm_alive(answer)
        return answer

    def _continue_without_placement(self, problem: str) -> None:
        """Note why a later attempt got no placement. Other suspects may run alone meanwhile."""
        self._last_problem = f" ({problem})"
        self._suspicion.clear()

    def put(self, delta: TokenDelta) -> bool:
        """Pass new tokens to the client, and update state, latency and failure history."""
        num_new = (
            delta.output_index + len(delta.token_ids) - (len(self._request.token_ids) - self._request.num_prompt_tokens)
        )
        self._suspicion.record_progress(num_new)
        if delta.token_ids and self._delivered_layout is None:
            self._delivered_layout = self._attempt_layout
        now_s = asyncio.get_running_loop().time()
        self._attempt_latency.record(delta.sample_index, len(delta.token_ids), now_s)
        if self._state.state is RequestState.PREFILLING:
            self._state.move(RequestState.DECODING)
            if self._stalled_since_s is not None:
                self._services.metrics.pause_s.observe(now_s - self._stalled_since_s)
                self._stalled_since_s = None
        return self._out.put(delta)

    async def _run_attempts(self) -> None:
        while True:
            layout = self._delivered_layout or self._services.view.layout
            avoid = tuple(self._history.avoid.values())
            attempt = await make_attempt(self._request, self._attempt_number, layout, avoid)
            if self._delivered_layout is not None:
                attempt = replace(attempt, model_fingerprint=self._delivered_layout.model_fingerprint)
            self._record.num_attempts += 1
            self._services.observer.started(self._history.original_request_id, attempt)
            self._attempt_latency = TokenLatency()
            try:
                await self._suspicion.lock_exclusive_run()
                await relay(attempt, self._delivery, self, self._services.workers, self)
                self._report_outcome("finished")
                return
            except AttemptFailed as failed:
                self._report_outcome(failed.failure.reason.value)
                self._state.move(RequestState.QUEUED)
                self._record_failure(failed)
            except Refused as refused:
                self._report_outcome(refused.failure.reason.value)
                raise
            except BaseException:
                is_late = asyncio.get_running_loop().time() >= self._request.deadline_s
                self._report_outcome((Reason.DEADLINE if is_late else Reason.CANCELLED).value)
                raise
            finally:
                self._suspicion.clear()
            if len(self._request.sample_indices) > 1 and self._num_output_tokens:
                await self._split_samples()
                return
            tokens = self._delivery.tokens[self._request.sample_indices[0]]
            self._request = continued_request(self._request, tokens)
            self._attempt_number += 1
            await self._pause()

    async def _split_samples(self) -> None:
        """Continue each unfinished sample as a run of its own, because the samples now have different
        tokens."""
        runs = [
            RequestRun(
                single_sample_request(
                    self._request,
                    index,
                    self._delivery.tokens[index],
                    self._services.rng.randbytes(REQUEST_ID_BYTES),
                ),
                self._delivery,
                self._record,
                self._out,
                self._services,
                attempt_number=self._attempt_number + 1,
                history=self._history.copy(),
                stalled_since_s=self._stalled_since_s,
                delivered_layout=self._delivered_layout,
            )
            for index in sorted(self._delivery.open.intersection(self._request.sample_indices))
        ]
        self._state.move(RequestState.PREFILLING)  # stands for the state of the samples' runs from here on
        await run_concurrently([run.run() for run in runs])

    def _record_failure(self, failed: AttemptFailed) -> None:
        """Update the history after a failed attempt. Raises Refused if the request must not be tried
        again."""
        history = self._history
        now_s = asyncio.get_running_loop().time()
        self._last_problem = f" ({failed})"
        if failed.killed and failed.dead is not None:
            self._suspicion.record_death(failed.dead)
        history.record(failed, now_s)
        if self._stalled_since_s is None:
            self._stalled_since_s = self._delivery.latency.last_s
        self._report_failure(failed, now_s)
        if history.is_poison:
            message = (
                f"{history.num_killed + 1} workers in a row died while running this request, the last one without "
                "another suspected request; it is not retried"
            )
            raise Refused(Failure(code=Code.INTERNAL, reason=Reason.POISON, message=message))
        if not history.allows_retry(failed.failure, self._services.rules, has_output=bool(self._num_output_tokens)):
            raise Refused(replace(failed.failure, retriable=False, blamed=None))

    def _report_failure(self, failed: AttemptFailed, now_s: float) -> None:
        """Add a failed attempt to the metrics, the trace and the log."""
        self._services.metrics.attempts.labels(failed.failure.reason.value).inc()
        self._services.observer.lost(
            self._history.original_request_id, self._attempt_number, failed, self._num_output_tokens
        )
        if self._record.span.is_recorded:
            attributes = {"baton.attempt": self._attempt_number, "baton.reason": failed.failure.reason.value}
            self._record.span.event("attempt lost", now_s, attributes)
        log.warning(
            "attempt_lost",
            request_id=self._request.request_id,
            attempt=self._attempt_number,
            reason=failed.failure.reason,
            problem=str(failed),
            num_output_tokens=self._num_output_tokens,
        )

    async def _pause(self) -> None:
        """Wait before the third and later attempts, twice as long each time, so that a cluster that rejects
        quickly is not asked in a tight loop."""
        rules = self._services.rules
        if self._history.num_failed > 1:
            pause_s = min(rules.max_pause_s, rules.pause_s * 2 ** (self._history.num_failed - 2))
            await asyncio.sleep(pause_s * self._services.rng.uniform(0.5, 1.0))

    def _accept_placement(self, placement: Placement) -> None:
        self._state.move(RequestState.PREFILLING)
        self._attempt_layout = self._services.view.layout_of(placement.decode or placement.prefill)
        self._suspicion.track(placement)
        self._record.placement = placement
        self._services.observer.placed(self._history.original_request_id, self._attempt_number, placement)
        if self._record.placed_s is None:
            self._record.placed_s = asyncio.get_running_loop().time()
            self._record.policy = placement.policy

    def _uses_dead_worker(self, placement: Placement) -> bool:
        """True if the placement names a worker that this request recently saw die.

        A scheduler lists a dead worker until it notices the death. If it still lists the worker after
        `dead_worker_s`, the scheduler is right and the worker is alive.
        """
        since_s = asyncio.get_running_loop().time() - self._services.rules.dead_worker_s
        return self._history.saw_die_since(placement, since_s)

    def _report_outcome(self, outcome: str) -> None:
        """Report the outcome of the latest placement to the scheduler that decided it."""
        decision, self._decision = self._decision, None
        if decision is None:
            return
        delivery = self._delivery
        job = JobId(request_id=self._request.request_id, attempt=self._attempt_number)
        cached_tokens = delivery.cached_tokens_of(job)
        first_s = delivery.latency.first_s
        has_first_token = first_s is not None and first_s >= self._placement_started_s
        self._services.schedulers.finished(
            RequestActuals(
                decision_id=decision,
                outcome=outcome,
                ttft_s=delivery.latency.ttft_s(self._placement_started_s) if has_first_token else None,
                tpot_s=self._attempt_latency.tpot_s,
                num_output_tokens=self._attempt_latency.num_tokens,
                num_cached_tokens=sum(cached_tokens.values()),
                legs=tuple(delivery.legs.get(job, ())),
                cached_tokens_by_tier=cached_tokens,
            )
        )

    @property
    def _num_output_tokens(self) -> int:
        return sum(len(self._delivery.tokens[index]) for index in self._request.sample_indices)


def failure_of(rejection: Rejection) -> Failure:
    """Return the client's error for a rejected placement.

    The status is 429 for overload, 404 for an unknown model, 504 for a passed deadline, and 503 otherwise.
    """
    code = Code.RESOURCE_EXHAUSTED if rejection.reason in _OVERLOAD else Code.UNAVAILABLE
    if rejection.reason is Reason.MODEL_NOT_FOUND:
        code = Code.NOT_FOUND
    elif rejection.reason is Reason.DEADLINE:
        code = Code.DEADLINE_EXCEEDED
    return Failure(code=code, reason=rejection.reason, message=rejection.message, retry_after_s=rejection.retry_after_s)


async def run_concurrently(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines. The first error cancels the others and is raised unchanged."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
