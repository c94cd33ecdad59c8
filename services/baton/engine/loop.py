"""The engine's heartbeat: plan, execute, apply, for as long as the worker lives. The only part of the engine
that takes time.

While answers merely go on, the step after the one that runs is planned and waits at the device
(`engine.scheduling.async_scheduling`), so that the device has no pause between them. Whatever comes in
meanwhile takes it back, unless it has begun.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError, Code, Failure, Reason, Refused
from baton.core.step_cost import attended_tokens
from baton.engine.engine import Engine
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.sequence import SequenceRequest
from baton.engine.state.step import DeviceFault, Executor, SampledToken, StepPlan, StepResult
from baton.runtime.logging import get_logger

log = get_logger(__name__)


MAX_FAILED_IN_A_ROW = 2
"""Different requests that fail, each alone, while nothing succeeds in between: then it is not they but the
device."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step at the device. `at_s`: since when, by the event loop's clock; it may have waited for the one
    before it."""

    plan: StepPlan
    result: asyncio.Future[StepResult]
    at_s: float


class EngineUnhealthy(BatonError):
    """The device is at fault: it says so itself, or it runs nobody's step any more. The worker says so and
    exits."""


class EngineLoop:
    """Runs one engine on one executor, in one event loop.

    `add`, `cancel`, `fail` and `received` may be called at any time and take effect between steps, in the
    order of the calls. `deliver` is called after each plan (admissions, and what the inbox brought about) and
    each apply, never with an empty Outcome; it must not wait, may call this loop's methods, and must pass
    over sequences that it no longer knows. If it or the engine raises, `run` ends. Tokens of answers that
    merely go on are delivered when the next step has been launched, while the device computes.
    """

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        deliver: Callable[[EngineOutcome], None],
        on_step: Callable[[StepPlan, float], None] = lambda plan, step_s: None,
    ) -> None:
        """`on_step`: told of each step that ran as it was planned, and the seconds it took: from the end of
        the one before, or since there was something to do again. Whoever decodes waits for all that lies
        between two steps, planning mostly, where that was not done ahead."""
        self.engine = engine
        self.executor = executor
        self.draining = False
        self.steps_done = 0
        self.step_started_s: float | None = None  # by the event loop's clock; None between steps
        self.last_step_started_s = 0.0
        self.last_step_ended_s = 0.0
        """Of the last step that has ended: the one whose tokens are delivered."""
        self._busy_since_s = 0.0  # since the step before has ended, or there was something to do
        self._deliver = deliver
        self._on_step = on_step
        self._inbox: list[
            Callable[[], None]
        ] = []  # bounded by the callers' sequences: each is added, landed, failed or cancelled by one
        self._adds: dict[int, SequenceRequest] = {}  # in the inbox, by seq_id
        self._wake = asyncio.Event()
        self._current: _Launched | None = None  # the last whose result was awaited, or is to be
        self._ahead: _Launched | None = None  # behind the step whose result is awaited
        self._held = EngineOutcome()
        """Not delivered yet: nobody's next move depends on it."""
        self._has_ended = False
        self._failed_in_a_row: set[int] = set()  # requests, since anything has succeeded
        engine.pool.on_freed(self._wake.set)

    # -- inbox --------------------------------------------------------------------------------------------------------------------------

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence. Raises Refused at once as `Engine.check_request` does, or with DRAINING once the
        loop has ended."""
        if self._has_ended:
            raise Refused(
                Failure(
                    code=Code.UNAVAILABLE, reason=Reason.DRAINING, message="this worker has stopped", retriable=True
                )
            )
        if request.seq_id in self._adds:
            raise ValueError(f"sequence {request.seq_id} exists already")
        self.engine.check_request(request, num_more_waiting=len(self._adds))
        self._adds[request.seq_id] = request
        self.engine.queued_prefix.add(request)
        self._put(lambda: self.engine.add(request))

    def cancel(self, seq_id: int, sample_indices: Sequence[int] = ()) -> None:
        self._put(lambda: self.engine.cancel(seq_id, sample_indices))

    def fail(self, seq_id: int, failure: Failure) -> None:
        self._put(lambda: self.engine.fail(seq_id, failure))

    def received(self, seq_id: int, first_tokens: Sequence[SampledToken]) -> None:
        self._put(lambda: self.engine.received(seq_id, first_tokens))

    def drain(self) -> None:
        """`run` returns once every sequence has ended. Sequences added until then are still served."""
        self.draining = True
        self._wake.set()

    def step_age_s(self) -> float:
        """How long the current step has run; 0 between steps."""
        return 0.0 if self.step_started_s is None else asyncio.get_running_loop().time() - self.step_started_s

    @property
    def inbox_seqs(self) -> int:
        """Sequences that were added since the step in flight began: the engine does not count them yet."""
        return len(self._adds)

    @property
    def inbox_prefill_tokens(self) -> int:
        """As `Engine.waiting_prefill_tokens`, of these."""
        return sum(behind for behind, _ in self._inbox_prefills())

    @property
    def inbox_prefill_attended_tokens(self) -> int:
        """As `Engine.waiting_prefill_attended_tokens`, of these."""
        return sum(attended_tokens(behind, before) for behind, before in self._inbox_prefills())

    def _inbox_prefills(self) -> Iterable[tuple[int, int]]:
        for request in self._adds.values():
            if not request.pulled:
                before = self.engine.queued_prefix.shared_tokens(request.seq_id)
                yield len(request.token_ids) - before, before

    # -- the loop -----------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until drained. Raises EngineUnhealthy when the device is at fault."""
        self._busy_since_s = asyncio.get_running_loop().time()
        try:
            while True:
                step, self._ahead = self._ahead, None
                if step is None:
                    self._wake.clear()
                    self._take_inbox()  # adds and cancels land between steps, never during one
                    plan = self.engine.plan()
                    self._hand_over(self.engine.take_outcome())  # before the step, so that a pull starts while it runs
                    if plan.is_empty:
                        self._hand_over_held()
                        if self.draining and self.engine.is_idle and not self._inbox:
                            return
                        await self._wake.wait()
                        self._busy_since_s = asyncio.get_running_loop().time()
                        continue
                    step = self._launch(plan)
                    self._begun(step)
                    await asyncio.sleep(0)  # it has been launched now
                else:
                    self._begun(step)
                await self._plan_ahead(step.plan)
                self._hand_over_held()
                outcome = self.engine.apply(step.plan, await self._result_of(step))
                if outcome.only_continues:
                    self._held = outcome
                else:
                    self._hand_over(outcome)
                await asyncio.sleep(0)  # an executor that returns at once must not keep everybody else waiting
        finally:
            self._has_ended = True
            self._withdraw_ahead()
            if self._ahead is not None:
                await _stopped(self._ahead.result)
                self.engine.step_withdrawn()
            if self._current is not None:
                await _stopped(self._current.result)
            self.step_started_s = None

    def _put(self, change: Callable[[], None]) -> None:
        self._inbox.append(change)
        self._wake.set()
        self._withdraw_ahead()

    def _take_inbox(self) -> None:
        changes, self._inbox = self._inbox, []
        self._adds.clear()
        for change in changes:
            change()

    def _hand_over(self, outcome: EngineOutcome) -> None:
        if not outcome.is_empty:
            self._hand_over_held()
            self._deliver(outcome)

    def _hand_over_held(self) -> None:
        held, self._held = self._held, EngineOutcome()
        if not held.is_empty:
            self._deliver(held)

    def _launch(self, plan: StepPlan) -> _Launched:
        return _Launched(plan, asyncio.ensure_future(self.executor.execute(plan)), asyncio.get_running_loop().time())

    async def _plan_ahead(self, plan: StepPlan) -> None:
        """Of what follows on the step that runs now, if that can be known."""
        if not self._inbox and not (after := self.engine.plan_ahead(plan)).is_empty:
            self._ahead = self._launch(after)
            await asyncio.sleep(0)  # it waits at the device now
            if self._inbox:
                self._withdraw_ahead()

    def _withdraw_ahead(self) -> None:
        if self._ahead is not None and self.executor.withdraw(self._ahead.plan.step_id):
            self._ahead = None
            self.engine.step_withdrawn()

    async def _let_go_of_ahead(self) -> None:
        """The step that it follows has failed. One that has begun must end first: it may write to what others
        get next."""
        self._withdraw_ahead()
        if (ahead := self._ahead) is not None:
            self._begun(ahead)  # so that one that does not end is noticed
            await asyncio.wait((ahead.result,))
            await _stopped(ahead.result)
            self.step_started_s, self._ahead = None, None
            self.engine.step_withdrawn()

    async def _result_of(self, step: _Launched) -> StepResult:
        """If it raises, each of its sequences is run alone: one that raises again fails, the rest goes on.
        That is so where it is the only one, too; but not for one request after the other."""
        plan = step.plan
        try:
            try:
                result, took_s = await self._timed(step)
            except DeviceFault:
                raise
            except Exception as error:
                log.exception("step_failed", step_id=plan.step_id, num_seqs=len(plan.sequences))
                await self._let_go_of_ahead()
                again = self.engine.without_placeholders(plan)
                if again.is_empty:  # whoever was in it has ended since: nobody's step
                    return StepResult(step_id=plan.step_id, samples={})
                return await self._find_guilty(again, error)
        except DeviceFault as fault:
            raise EngineUnhealthy(f"the device cannot go on: {fault}; restart the worker") from fault
        self._failed_in_a_row.clear()
        if all(part.sample is None or part.seq_id in result.samples for part in plan.sequences):
            self._on_step(plan, took_s)
        return result

    def _begun(self, step: _Launched) -> float:
        """It is the one that runs now; since when."""
        self._current = step
        self.step_started_s = started_s = max(step.at_s, self.last_step_ended_s)
        return started_s

    async def _timed(self, step: _Launched) -> tuple[StepResult, float]:
        """And how long those who decode have waited for it."""
        started_s = self._begun(step)
        try:
            result = await step.result
        finally:
            await _stopped(step.result)  # if we were interrupted
            self.step_started_s = None
            self.last_step_started_s, self.last_step_ended_s = started_s, asyncio.get_running_loop().time()
            took_s = self.last_step_ended_s - self._busy_since_s
            self._busy_since_s = self.last_step_ended_s
        self.steps_done += 1
        return result, took_s

    async def _find_guilty(self, plan: StepPlan, error: Exception) -> StepResult:
        """Running a sequence's part again writes the same KV to the same places. The copies are made again
        until one part has run: from then on their sources may have been written to."""
        samples: dict[int, tuple[SampledToken, ...]] = {}
        failures: dict[int, Failure] = {}
        num_raised = 0
        block_copies = plan.block_copies
        for part in plan.sequences:
            try:
                result, _ = await self._timed(
                    self._launch(StepPlan(step_id=plan.step_id, sequences=(part,), block_copies=block_copies))
                )
            except DeviceFault:
                raise
            except Exception as part_error:
                log.exception("sequence_failed", step_id=plan.step_id, key=part.seq_id)
                error = part_error
                num_raised += 1
                message = f"this request's part of a step failed: {type(part_error).__name__}"
                failures[part.seq_id] = Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)
            else:
                block_copies = ()
                samples.update(result.samples)
                failures.update(result.failures)
        if num_raised < len(plan.sequences):
            self._failed_in_a_row.clear()
        else:
            self._failed_in_a_row.update(self.engine.seq_id_of(part.seq_id) for part in plan.sequences)
            if len(self._failed_in_a_row) >= MAX_FAILED_IN_A_ROW or not plan.sequences:
                message = f"{len(self._failed_in_a_row)} requests in a row have failed, each of them alone; restart the worker"
                raise EngineUnhealthy(message) from error
        return StepResult(step_id=plan.step_id, samples=samples, failures=failures)


async def _stopped(result: asyncio.Future[StepResult]) -> None:
    """It has ended, one way or another, and nobody else need look at how."""
    if not result.done():
        result.cancel()
        await asyncio.wait((result,))
    if not result.cancelled():
        result.exception()
