"""What happens around `relay`: attempts, one after another, until every sample of a request has ended, or the
request cannot be helped."""

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

from baton.core.cluster.placement import Placement, Rejection
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import REQUEST_ID_BYTES, DecisionId, JobId, WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import GenerateRequest, RequestActuals, TokenDelta
from baton.core.state_machines import REQUEST_TRANSITIONS, Lifecycle, RequestState
from baton.gateway.cluster.attempt_errors import LegLost
from baton.gateway.cluster.cluster_view import ClusterView
from baton.gateway.cluster.scheduler_pool import SchedulerPool
from baton.gateway.request.attempt import Attempt, attempt_at, going_on, sample_alone
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.latency import TokenLatency
from baton.gateway.request.poison_detector import PoisonDetector
from baton.gateway.request.relay import TokenSink, relay
from baton.gateway.request.run_all import run_all
from baton.gateway.request.worker_sessions import WorkerSessions
from baton.runtime.logging import get_logger
from baton.runtime.observability.metrics import GatewayMetrics
from baton.runtime.observability.tracing import NO_SPAN, OFF, Span, Tracing

log = get_logger(__name__)

MAX_FULL_QUEUES = 2
"""Workers that had no place in their queue for a new request; then it is told to come back later, while it
can still go elsewhere."""
MAX_KILLED_WORKERS = 2
"""Workers in a row that died under a request before they had brought it further; then it is taken for the
cause."""
TOKENS_OF_A_STEP_EACH = 2
"""New tokens of an attempt after which both its workers have run a step of it: the first is made by the
prefill worker."""
_OVERLOAD = {Reason.QUEUE_FULL, Reason.TENANT_QUOTA, Reason.NO_CAPACITY, Reason.TTFT_SLO, Reason.TPOT_SLO}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """`pause_s`: the first pause between attempts that fail at once; it doubles up to `max_pause_s`.
    `ask_again_s`: how often a request that is under way asks for a place while there is none. `dead_s`: how
    long a life that is over is not believed to be back."""

    max_attempts: int
    pause_s: float
    max_pause_s: float
    ask_again_s: float
    dead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts:
    """What every request is carried by."""

    schedulers: SchedulerPool
    workers: WorkerSessions
    view: ClusterView
    rules: RetryRules
    metrics: GatewayMetrics
    rng: Random
    suspects: PoisonDetector = field(default_factory=PoisonDetector)
    tracing: Tracing = OFF


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What a timeline tells of one request, besides its legs. `placed_s`, `policy`: of the first placement;
    loop time. `placement`: the last one. `span`: what happens on the way is told there, too."""

    span: Span = NO_SPAN
    num_attempts: int = 0
    placed_s: float | None = None
    policy: str = ""
    placement: Placement | None = None


@dataclass(slots=True, kw_only=True)
class _History:
    """What went wrong so far: workers to avoid, lives that are over (and since when). `num_killed`: workers
    that died under the request, one after the other, without bringing it further; `must_be_alone`: others may
    have been the cause as well. `suspect_id` is shared by the samples of one request."""

    suspect_id: bytes
    num_failed: int = 0
    num_killed: int = 0
    must_be_alone: bool = False
    avoid: dict[tuple[str, int], WorkerRef] = field(default_factory=dict)
    dead: dict[tuple[str, int], float] = field(default_factory=dict)

    def copy(self) -> "_History":
        return replace(self, avoid=dict(self.avoid), dead=dict(self.dead))


class RequestRun:
    """One request from QUEUED to its end. Samples that go on alone after a lost leg are runs of their own,
    over the same `progress`."""

    def __init__(
        self,
        request: GenerateRequest,
        progress: Delivery,
        record: RequestRecord,
        out: TokenSink,
        parts: RelayParts,
        number: int = 0,
    ) -> None:
        self._request = request
        self._progress = progress
        self._record = record
        self._out = out
        self._parts = parts
        self._number = number
        self._history = _History(suspect_id=request.request_id)
        self._state = Lifecycle(REQUEST_TRANSITIONS, RequestState.QUEUED)
        self._decision: DecisionId | None = None
        self._asked_s = 0.0
        self._pace = TokenLatency()
        """Of the present attempt."""
        self._paused_s: float | None = None
        self._last_problem = ""
        self._has_turn = False
        self._placed_with: KvLayout | None = None
        """Of the workers of the present attempt; None: not known."""
        self._written_with: KvLayout | None = None
        """Of those that wrote what the client has: no others may go on with it."""

    async def run(self) -> None:
        """Returns when every sample has ended. Raises Refused; at the deadline at the latest."""
        scope = asyncio.timeout_at(self._request.deadline_s)
        try:
            async with scope:
                await self._attempts()
        except TimeoutError:
            self._state.move(RequestState.FAILED)
            if not scope.expired():
                raise
            message = f"the deadline passed after {self._num_output_tokens} tokens{self._last_problem}; allow more time, or ask for fewer"
            raise Refused(Failure(code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message=message)) from None
        except asyncio.CancelledError:
            self._state.move(RequestState.CANCELLED)
            raise
        except BaseException:
            self._state.move(RequestState.FAILED)
            raise
        self._state.move(RequestState.FINISHED)

    async def place(self, attempt: Attempt) -> Placement:
        """Where this attempt runs. A new request that is rejected is refused; one under way asks again, until
        its deadline."""
        loop = asyncio.get_running_loop()
        self._asked_s = loop.time()
        while True:
            answer = await self._parts.schedulers.place(
                attempt.query, is_first=attempt.number == 0, deadline_s=attempt.request.deadline_s
            )
            if isinstance(answer, Placement):
                self._decision = answer.decision_id
                if not self._names_the_dead(answer):
                    self._placed(answer)
                    return answer
                self._tell(Reason.WORKER_LOST.value)  # the scheduler does not know yet
            elif attempt.number == 0:
                raise Refused(failure_of(answer))
            else:
                self._last_problem = f" ({answer.message})"
            await asyncio.sleep(self._parts.rules.ask_again_s * self._parts.rng.uniform(0.5, 1.0))

    def put(self, delta: TokenDelta) -> bool:
        """To the client; notes when an attempt's first token is through, and when its workers have done what
        others died of."""
        num_new = (
            delta.output_index + len(delta.token_ids) - (len(self._request.token_ids) - self._request.num_prompt_tokens)
        )
        if self._history.num_killed and num_new >= TOKENS_OF_A_STEP_EACH:
            self._history.num_killed, self._history.must_be_alone = 0, False
            self._no_longer_suspect()
        if delta.token_ids and self._written_with is None:
            self._written_with = self._placed_with
        now_s = asyncio.get_running_loop().time()
        self._pace.took(delta.sample_index, len(delta.token_ids), now_s)
        if self._state.state is RequestState.PREFILLING:
            self._state.move(RequestState.DECODING)
            if self._paused_s is not None:
                self._parts.metrics.pause_s.observe(now_s - self._paused_s)
                self._paused_s = None
        return self._out.put(delta)

    async def _attempts(self) -> None:
        while True:
            layout = self._written_with or self._parts.view.layout
            attempt = await attempt_at(self._request, self._number, layout, tuple(self._history.avoid.values()))
            if self._written_with is not None:
                attempt = replace(attempt, model_fingerprint=self._written_with.model_fingerprint)
            self._record.num_attempts += 1
            self._pace = TokenLatency()
            try:
                if self._history.must_be_alone:
                    await self._parts.suspects.turn.acquire()
                    self._has_turn = True
                await relay(attempt, self._progress, self, self._parts.workers, self)
                self._tell("finished")
                return
            except LegLost as lost:
                self._tell(lost.failure.reason.value)
                self._state.move(RequestState.QUEUED)
                self._count(lost)
            except Refused as refused:
                self._tell(refused.failure.reason.value)
                raise
            except BaseException:
                is_late = asyncio.get_running_loop().time() >= self._request.deadline_s
                self._tell((Reason.DEADLINE if is_late else Reason.CANCELLED).value)
                raise
            finally:
                self._no_longer_suspect()
            if len(self._request.sample_indices) > 1 and self._num_output_tokens:
                await self._each_alone()
                return
            self._request = going_on(self._request, self._progress.tokens[self._request.sample_indices[0]])
            self._number += 1
            await self._pause()

    async def _each_alone(self) -> None:
        """The samples' tokens have parted: each unfinished one goes on as a request of its own."""
        runs = []
        for index in sorted(self._progress.open.intersection(self._request.sample_indices)):
            alone = sample_alone(
                self._request, index, self._progress.tokens[index], self._parts.rng.randbytes(REQUEST_ID_BYTES)
            )
            run = RequestRun(alone, self._progress, self._record, self._out, self._parts, self._number + 1)
            run._history = self._history.copy()
            run._paused_s = self._paused_s
            run._written_with = self._written_with
            runs.append(run)
        self._state.move(RequestState.PREFILLING)  # as its samples are, from here on
        await run_all([run.run() for run in runs])

    def _count(self, lost: LegLost) -> None:
        """Learn from a lost leg. Raises Refused when there must be no other attempt."""
        history = self._history
        self._last_problem = f" ({lost})"
        history.num_failed += 1
        if lost.killed and lost.dead is not None:
            self._count_death(lost.dead)
        for worker in filter(None, (lost.blamed, lost.dead)):
            history.avoid[(worker.worker_id, worker.worker_epoch)] = worker
        if lost.dead is not None:
            history.dead[(lost.dead.worker_id, lost.dead.worker_epoch)] = asyncio.get_running_loop().time()
        if self._paused_s is None:
            self._paused_s = self._progress.pace.last_s
        self._parts.metrics.attempts.labels(lost.failure.reason.value).inc()
        if self._record.span.is_recorded:
            attributes = {"baton.attempt": self._number, "baton.reason": lost.failure.reason.value}
            self._record.span.event("attempt lost", asyncio.get_running_loop().time(), attributes)
        log.warning(
            "attempt_lost",
            request_id=self._request.request_id,
            attempt=self._number,
            reason=lost.failure.reason,
            problem=str(lost),
            num_output_tokens=self._num_output_tokens,
        )
        if history.num_killed >= MAX_KILLED_WORKERS:
            message = f"{history.num_killed} workers died while running this request; it is not tried again"
            raise Refused(Failure(code=Code.INTERNAL, reason=Reason.POISON, message=message))
        is_turned_away = (
            lost.failure.reason is Reason.QUEUE_FULL
            and history.num_failed >= MAX_FULL_QUEUES
            and not self._num_output_tokens
        )
        if is_turned_away or history.num_failed >= self._parts.rules.max_attempts:
            raise Refused(replace(lost.failure, retriable=False, blamed=None))

    def _count_death(self, worker: WorkerRef) -> None:
        """Two deaths in a row are proof only where no other request had the same two; else this one goes on
        alone, to be told apart."""
        history = self._history
        if history.num_killed and not self._parts.suspects.was_only_one(history.suspect_id, worker):
            history.must_be_alone = True
        else:
            history.num_killed += 1

    def _no_longer_suspect(self) -> None:
        """It has gone on, or its attempt is over: others may go."""
        self._parts.suspects.leave(self._history.suspect_id)
        if self._has_turn:
            self._has_turn = False
            self._parts.suspects.turn.release()

    async def _pause(self) -> None:
        """None before the second attempt, then longer and longer: workers that refuse at once are not asked
        in a tight loop."""
        rules = self._parts.rules
        if self._history.num_failed > 1:
            pause_s = min(rules.max_pause_s, rules.pause_s * 2 ** (self._history.num_failed - 2))
            await asyncio.sleep(pause_s * self._parts.rng.uniform(0.5, 1.0))

    def _placed(self, placement: Placement) -> None:
        self._state.move(RequestState.PREFILLING)
        self._placed_with = self._parts.view.layout_of(placement.decode or placement.prefill)
        if self._history.num_killed:
            for worker in filter(None, (placement.prefill, placement.decode)):
                self._parts.suspects.enter(self._history.suspect_id, worker)
        self._record.placement = placement
        if self._record.placed_s is None:
            self._record.placed_s = asyncio.get_running_loop().time()
            self._record.policy = placement.policy

    def _names_the_dead(self, placement: Placement) -> bool:
        """A scheduler that still lists a dead worker does so until it notices; one that lists it much later
        knows better."""
        source = placement.prefix_source.worker if placement.prefix_source else None
        since_s = asyncio.get_running_loop().time() - self._parts.rules.dead_s
        return any(
            worker is not None and self._history.dead.get((worker.worker_id, worker.worker_epoch), since_s) > since_s
            for worker in (placement.prefill, placement.decode, source)
        )

    def _tell(self, outcome: str) -> None:
        """The scheduler, what came of its latest decision for this request."""
        decision, self._decision = self._decision, None
        if decision is None:
            return
        progress = self._progress
        job = JobId(request_id=self._request.request_id, attempt=self._number)
        is_first_token_ours = progress.pace.first_s is not None and progress.pace.first_s >= self._asked_s
        self._parts.schedulers.finished(
            RequestActuals(
                decision_id=decision,
                outcome=outcome,
                ttft_s=progress.pace.ttft_s(self._asked_s) if is_first_token_ours else None,
                tpot_s=self._pace.tpot_s,
                num_output_tokens=self._pace.num_tokens,
                num_cached_tokens=progress.num_cached_tokens_of(job),
                legs=tuple(progress.legs.get(job, ())),
            )
        )

    @property
    def _num_output_tokens(self) -> int:
        return sum(len(self._progress.tokens[index]) for index in self._request.sample_indices)


def failure_of(rejection: Rejection) -> Failure:
    """What the client is told: come back later (429), nobody is there (503), or its time is over (504)."""
    code = Code.RESOURCE_EXHAUSTED if rejection.reason in _OVERLOAD else Code.UNAVAILABLE
    if rejection.reason is Reason.MODEL_NOT_FOUND:
        code = Code.NOT_FOUND
    elif rejection.reason is Reason.DEADLINE:
        code = Code.DEADLINE_EXCEEDED
    return Failure(code=code, reason=rejection.reason, message=rejection.message, retry_after_s=rejection.retry_after_s)
