"""The engine loop: plan, execute, apply, until the worker drains. Only this part of the engine waits for the
device.

While sequences only decode, the next step is planned before the current one has ended, and queued at the
device (`engine.scheduling.async_scheduling`). The device then has no pause between steps. If a request
arrives meanwhile, the queued step is withdrawn, unless the device has started it.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import BatonError, Code, Failure, Reason, Refused
from baton.core.request import PromptLogprobs
from baton.core.step_cost import attended_tokens
from baton.engine.engine import Engine
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.sequence import SequenceRequest
from baton.engine.state.step import DeviceFault, Executor, SampledToken, StepPlan, StepResult
from baton.runtime.logging import get_logger

log = get_logger(__name__)


MAX_CONSECUTIVE_FAILED_REQUESTS = 2
"""Different requests that may fail in steps of their own, with no successful step in between, before the
device is considered at fault."""


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step that was given to the device. It may still be waiting for the step before it.

    launched_s: launch time, by the event loop's clock.
    """

    plan: StepPlan
    result: asyncio.Future[StepResult]
    launched_s: float


class EngineUnhealthy(BatonError):
    """The device can run no further steps. The worker reports this and exits."""


class EngineLoop:
    """Runs one engine on one executor, in one event loop.

    `add`, `cancel`, `fail`, `received` and `returned` may be called at any time. They take effect between
    steps, in the order of the calls.
    """

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        deliver: Callable[[EngineOutcome], None],
        on_step: Callable[[StepPlan, float], None] = lambda plan, step_s: None,
    ) -> None:
        """Create a loop; `run` starts it.

        deliver: called with each non-empty outcome, after planning and after applying a step. It must not
            block. It may call methods of this loop, and must ignore sequences that it no longer knows. Tokens
            of sequences that merely continue are delivered after the next step was launched, while the device
            computes. An exception of `deliver` or of the engine ends `run`.
        on_step: called with each step that ran as planned and its duration in seconds. The duration counts
            from the end of the previous step, or from the time when there was work again. It includes
            planning, because the decoding sequences wait for that too.
        """
        self.engine = engine
        self.executor = executor
        self.draining = False
        self.steps_done = 0
        self.step_started_s: float | None = None  # by the event loop's clock; None between steps
        self.last_step_started_s = 0.0  # of the last step that has ended: the one whose tokens are delivered
        self.last_step_ended_s = 0.0
        self.draft_model_s = 0.0  # time of the draft model before the current step
        self._busy_since_s = 0.0  # end of the previous step, or when there was work again
        self._deliver = deliver
        self._on_step = on_step
        self._inbox: list[Callable[[], None]] = []  # bounded: a few calls per sequence of the caller
        self._adds: dict[int, SequenceRequest] = {}  # requests in the inbox, by seq_id
        self._wake = asyncio.Event()
        self._current: _LaunchedStep | None = None  # the step whose result is awaited, or was awaited last
        self._ahead: _LaunchedStep | None = None  # the step that is queued behind it
        self._deferred = EngineOutcome()  # delivered after the next launch: no later action depends on it
        self._has_ended = False
        self._failed_requests: set[int] = set()  # seq_ids that failed since the last success
        engine.pool.on_freed(self._wake.set)

    # -- inbox ---------------------------------------------------------------------------------------------------------

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence.

        Raises Refused and ValueError as `Engine.check_request` does, and Refused with DRAINING after `run`
        has returned.
        """
        if self._has_ended:
            raise Refused(
                Failure(
                    code=Code.UNAVAILABLE,
                    reason=Reason.DRAINING,
                    message="this worker has stopped; send the request to another one",
                    retriable=True,
                )
            )
        if request.seq_id in self._adds:
            raise ValueError(f"seq_id {request.seq_id} is already in use; use a new one")
        self.engine.check_request(request, num_more_waiting=len(self._adds))
        self._adds[request.seq_id] = request
        self.engine.queued_prefix.add(request)
        self._put(lambda: self.engine.add(request))

    def cancel(self, seq_id: int, sample_indices: Sequence[int] = ()) -> None:
        """Call `Engine.cancel` before the next step."""
        self._put(lambda: self.engine.cancel(seq_id, sample_indices))

    def fail(self, seq_id: int, failure: Failure) -> None:
        """Call `Engine.fail` before the next step."""
        self._put(lambda: self.engine.fail(seq_id, failure))

    def received(self, seq_id: int, first_tokens: Sequence[SampledToken]) -> None:
        """Call `Engine.received` before the next step."""
        self._put(lambda: self.engine.received(seq_id, first_tokens))

    def returned(self, key: int) -> None:
        """Call `Engine.returned` before the next step."""
        self._put(lambda: self.engine.returned(key))

    def drain(self) -> None:
        """Make `run` return once every sequence has ended. Sequences added until then are still served."""
        self.draining = True
        self._wake.set()

    def step_age_s(self) -> float:
        """Return how long the current step has been running, in seconds; 0 between steps."""
        return 0.0 if self.step_started_s is None else asyncio.get_running_loop().time() - self.step_started_s

    @property
    def inbox_seqs(self) -> int:
        """Sequences that were added during the current step. The engine does not count them yet."""
        return len(self._adds)

    @property
    def inbox_prefill_tokens(self) -> int:
        """`Engine.waiting_prefill_tokens` of the sequences in the inbox."""
        return sum(num_tokens for num_tokens, _ in self._inbox_prefills())

    @property
    def inbox_prefill_attended_tokens(self) -> int:
        """`Engine.waiting_prefill_attended_tokens` of the sequences in the inbox."""
        return sum(attended_tokens(num_tokens, before) for num_tokens, before in self._inbox_prefills())

    def _inbox_prefills(self) -> Iterable[tuple[int, int]]:
        for request in self._adds.values():
            if not request.pulled:
                before = self.engine.queued_prefix.shared_tokens(request.seq_id)
                yield len(request.token_ids) - before, before

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run steps until drained. Raises EngineUnhealthy if the device is at fault."""
        self._busy_since_s = asyncio.get_running_loop().time()
        try:
            while True:
                step, self._ahead = self._ahead, None
                self.draft_model_s = 0.0
                if step is None:
                    self._wake.clear()
                    self._take_inbox()  # adds and cancels take effect between steps, never during one
                    await self._run_draft_model()
                    plan = self.engine.plan()
                    self._deliver_outcome(self.engine.take_outcome())  # before the step, so that pulls run with it
                    if plan.is_empty:
                        self._deliver_deferred()
                        if self.draining and self.engine.is_idle and not self._inbox:
                            return
                        await self._wake.wait()
                        self._busy_since_s = asyncio.get_running_loop().time()
                        continue
                    step = self._launch(plan)
                    if self.engine.drafts is not None:
                        self.engine.drafts.observe_gap(step.launched_s - self._busy_since_s)
                    self._set_current(step)
                    await asyncio.sleep(0)  # lets the executor start
                else:
                    self._set_current(step)
                await self._plan_ahead(step.plan)
                self._deliver_deferred()
                outcome = self.engine.apply(step.plan, await self._result_of(step))
                if outcome.only_continues:
                    self._deferred = outcome
                else:
                    self._deliver_outcome(outcome)
                await asyncio.sleep(0)  # an executor that returns immediately must not starve other tasks
        finally:
            self._has_ended = True
            self._withdraw_ahead()
            if self._ahead is not None:
                await _cancel_and_wait(self._ahead.result)
                self.engine.step_withdrawn()
            if self._current is not None:
                await _cancel_and_wait(self._current.result)
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

    def _deliver_outcome(self, outcome: EngineOutcome) -> None:
        if not outcome.is_empty:
            self._deliver_deferred()
            self._deliver(outcome)

    def _deliver_deferred(self) -> None:
        deferred, self._deferred = self._deferred, EngineOutcome()
        if not deferred.is_empty:
            self._deliver(deferred)

    async def _run_draft_model(self) -> None:
        """Let the draft model guess tokens for the next step, if that pays. Raises EngineUnhealthy.

        Its time belongs to no step of the model that verifies. Meanwhile the tokens of the last step are
        delivered.
        """
        drafts = self.engine.drafts
        jobs = () if drafts is None else drafts.plan_round()
        if drafts is None or drafts.model is None or not jobs:
            return
        loop = asyncio.get_running_loop()
        began_s = self.step_started_s = loop.time()  # so that the watchdog notices if it never ends
        running = asyncio.ensure_future(drafts.model.run(jobs))
        try:
            await asyncio.sleep(0)  # lets the executor start
            self._deliver_deferred()
            found = await running
        except DeviceFault as fault:
            raise EngineUnhealthy(f"the device is at fault: {fault}; restart the worker") from fault
        finally:
            await _cancel_and_wait(running)
            self.step_started_s = None
        self.draft_model_s = loop.time() - began_s
        self._busy_since_s += self.draft_model_s
        drafts.offer_round(found, self.draft_model_s)

    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        result = asyncio.ensure_future(self.executor.execute(plan))
        return _LaunchedStep(plan, result, asyncio.get_running_loop().time())

    async def _plan_ahead(self, plan: StepPlan) -> None:
        """Queue the step after `plan`, which is running, if it does not depend on the result of `plan`."""
        if not self._inbox and not (following := self.engine.plan_ahead(plan)).is_empty:
            self._ahead = self._launch(following)
            await asyncio.sleep(0)  # lets the executor queue it
            if self._inbox:
                self._withdraw_ahead()

    def _withdraw_ahead(self) -> None:
        if self._ahead is not None and self.executor.withdraw(self._ahead.plan.step_id):
            self._ahead = None
            self.engine.step_withdrawn()

    async def _discard_ahead(self) -> None:
        """Withdraw the queued step, because the step that it follows has failed.

        If it has started, wait for its end: it may write to blocks that are reallocated afterwards.
        """
        self._withdraw_ahead()
        if (ahead := self._ahead) is not None:
            self._set_current(ahead)  # so that the watchdog notices if it never ends
            await asyncio.wait((ahead.result,))
            await _cancel_and_wait(ahead.result)
            self.step_started_s, self._ahead = None, None
            self.engine.step_withdrawn()

    async def _result_of(self, step: _LaunchedStep) -> StepResult:
        """Wait for the result of `step`. If it raises, run each of its sequences in a step of its own.

        A sequence that raises again has failed; the others continue. This also holds for a step with a single
        sequence, but not for several requests in a row: then the device is at fault (EngineUnhealthy).
        """
        plan = step.plan
        try:
            try:
                result, took_s = await self._timed(step)
            except DeviceFault:
                raise
            except Exception as error:
                log.exception("step_failed", step_id=plan.step_id, num_seqs=len(plan.sequences))
                await self._discard_ahead()
                again = self.engine.without_placeholders(plan)
                if again.is_empty:  # all its sequences have ended since
                    return StepResult(step_id=plan.step_id, samples={})
                return await self._isolate_failing_sequences(again, error)
        except DeviceFault as fault:
            raise EngineUnhealthy(f"the device is at fault: {fault}; restart the worker") from fault
        self._failed_requests.clear()
        if all(part.sample is None or part.seq_id in result.samples for part in plan.sequences):
            self._on_step(plan, took_s)
        return result

    def _set_current(self, step: _LaunchedStep) -> float:
        """Record that `step` is the one that runs now. Returns its start time."""
        self._current = step
        self.step_started_s = started_s = max(step.launched_s, self.last_step_ended_s)
        return started_s

    async def _timed(self, step: _LaunchedStep) -> tuple[StepResult, float]:
        """Wait for `step`. Returns its result and the time that decoding sequences have waited for it."""
        started_s = self._set_current(step)
        try:
            result = await step.result
        finally:
            await _cancel_and_wait(step.result)  # if this task was cancelled
            self.step_started_s = None
            self.last_step_started_s, self.last_step_ended_s = started_s, asyncio.get_running_loop().time()
            took_s = self.last_step_ended_s - self._busy_since_s
            self._busy_since_s = self.last_step_ended_s
        self.steps_done += 1
        return result, took_s

    async def _isolate_failing_sequences(self, plan: StepPlan, error: Exception) -> StepResult:
        """Run each sequence of the failed `plan` in a step of its own, to find those that make it fail.

        Running a part again writes the same KV to the same slots. The block copies are repeated until one
        part has run; after that their sources may have been overwritten.
        """
        samples: dict[int, tuple[SampledToken, ...]] = {}
        failures: dict[int, Failure] = {}
        deferred: frozenset[int] = frozenset()
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        forced: dict[int, tuple[int, ...]] = {}
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
                prompt_logprobs.update(result.prompt_logprobs)
                forced.update(result.forced)
                failures.update(result.failures)
                deferred |= result.deferred
        if num_raised < len(plan.sequences):
            self._failed_requests.clear()
        else:
            # Those with drafts have not failed yet: they run once more without.
            without_drafts = [part for part in plan.sequences if not part.num_drafts]
            self._failed_requests.update(self.engine.seq_id_of(part.seq_id) for part in without_drafts)
            if len(self._failed_requests) >= MAX_CONSECUTIVE_FAILED_REQUESTS or not plan.sequences:
                message = (
                    f"{len(self._failed_requests)} requests in a row have failed, each in a step of its own "
                    f"(the last: {type(error).__name__}: {error}); restart the worker"
                )
                raise EngineUnhealthy(message) from error
        return StepResult(
            step_id=plan.step_id,
            samples=samples,
            failures=failures,
            deferred=deferred,
            prompt_logprobs=prompt_logprobs,
            forced=forced,
        )


async def _cancel_and_wait(result: asyncio.Future[Any]) -> None:
    """Cancel a step that is still running, wait for its end, and ignore how it ended."""
    if not result.done():
        result.cancel()
        await asyncio.wait((result,))
    if not result.cancelled():
        result.exception()
