"""Sends one process's share of a plan at the planned times and records the results.

The loop is open: no request waits for another, and the number in flight is unlimited. Work that can wait
(encoding bodies, opening connections, writing records) is done in small steps, never shortly before a request
is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from loadgen.loadgen_errors import LoadgenError
from loadgen.measure import request_metrics
from loadgen.measure.counts import Counts
from loadgen.measure.records import Arrival, Record
from loadgen.measure.request_metrics import OutcomeRules
from loadgen.plan.plan import AnswerOf, Plan, PlannedRequest
from loadgen.plan.schedule import Schedule
from loadgen.send.client import Client, Exchange
from loadgen.send.prompts import EarlierResponse, Prompts
from loadgen.send.timers import Alarm, new_alarm, now_s

TICK_S = 0.05
BUSY_TICK_S = 0.002
"""Interval of background work: TICK_S, or BUSY_TICK_S while some is left over."""
MAX_WORK_S = 0.001
"""Longest uninterrupted background work."""
QUIET_S = 0.0005
"""Background work ends at least this long before the next due request."""
ENCODE_AHEAD_S = 5.0
"""Bodies are encoded this long before they are due."""
ENCODE_BEFORE_START_S = 60.0
"""Bodies due in this first part of the run are encoded before its start, up to AHEAD_AT_START_BYTES."""
ENCODE_BEFORE_START_BYTES = 128 << 20
CONNECT_AHEAD_S = 0.25
"""Connections are opened this long before they are needed."""
CONNECTIONS_AT_ONCE = 4
"""Connections opened in one step. Each takes about 0.2 ms."""
ROUNDING_S = 1e-7
"""Tolerance for floating-point rounding, so that an alarm that fires on time finds its request due."""
MAX_UNWRITTEN = 20_000
"""Records waiting to be written. Above this, writing takes precedence."""
_GARBAGE_OBJECTS = 500_000


class RunRecorder(Protocol):
    """Stores the record of each request."""

    def write(self, record: Record) -> None:
        """Store one record."""


class Runner:
    """Sends requests and records their results. Everything runs in one thread."""

    def __init__(
        self,
        plan: Plan,
        requests: Sequence[PlannedRequest],
        client: Client,
        prompts: Prompts,
        recorder: RunRecorder,
        *,
        rules: OutcomeRules,
        timeout_s: float,
        clock: Callable[[], float] = now_s,
        alarm: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Alarm] = new_alarm,
        encode_before_start_bytes: int = ENCODE_BEFORE_START_BYTES,
    ) -> None:
        """`requests` is this process's share of `plan`. `alarm` must use the same clock as `clock`."""
        self._plan = plan
        self._client = client
        self._prompts = prompts
        self._recorder = recorder
        self._rules = rules
        self._timeout_s = timeout_s
        self._clock = clock
        self._new_alarm = alarm
        self._encode_before_start_bytes = encode_before_start_bytes
        self._schedule = Schedule(requests)
        self._needed_responses = {s.index for request in requests for s in request.segments if isinstance(s, AnswerOf)}
        self._responses: dict[int, EarlierResponse] = {}
        self._prepared: dict[int, Any] = {}
        self._in_flight: dict[int, tuple[float, PlannedRequest, Exchange]] = {}
        self._unwritten: deque[tuple[float, PlannedRequest, Exchange | None]] = deque()
        self._start_s = 0.0
        self._began_cpu_s = 0.0
        self._is_stopping = False
        self._problem: LoadgenError | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: asyncio.Future[None] | None = None
        self.counts = Counts()

    def prepare(self) -> None:
        """Do the work that is possible before the start: encode bodies and open connections."""
        num_bytes = 0
        while (
            num_bytes < self._encode_before_start_bytes
            and (request := self._schedule.upcoming(ENCODE_BEFORE_START_S)) is not None
        ):
            self._prepared[request.index] = self._encode(request)
            num_bytes += 8 * (self._plan.num_prompt_tokens(request) or 1000)
        num_first = self._schedule.num_due(CONNECT_AHEAD_S)
        self._client.preconnect(num_first, at_most=num_first)
        gc.collect()  # can take a second, so it must not happen in `run`, shortly before the first request is due

    async def run(self, start_s: float) -> None:
        """Send from `start_s`, a time of the clock, and return when the last request has ended.

        Raises LoadgenError if records cannot be written.
        """
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        self._start_s = start_s
        self._began_cpu_s = time.process_time()
        self._alarm = self._new_alarm(self._loop, self._on_alarm)
        try:
            with _NoGarbageCollection():
                self._client.due_check.fire = self._on_alarm
                self._on_alarm()
                self._tick()
                self._finish_if_done()
                await self._done
        finally:
            self._client.due_check.at_s = math.inf
            self._alarm.close()
            if self._tick_handle is not None:
                self._tick_handle.cancel()
            self._write_all()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """Send nothing more and cancel requests in flight. Requests that were not yet due do not count as
        offered."""
        self._is_stopping = True
        now = self._clock()
        for _, _, exchange in tuple(self._in_flight.values()):
            exchange.cancel(now)
        self._finish_if_done()

    # Sending.

    def _on_alarm(self) -> None:
        if self._is_stopping:
            return
        now = self._clock()
        for due_s, request in self._schedule.take_due(now - self._start_s + ROUNDING_S):
            self._send(due_s, request)
        next_s = self._schedule.next_s
        if next_s is None:
            self._client.due_check.at_s = math.inf
        else:
            self._client.due_check.at_s = self._start_s + next_s
            self._alarm.set(self._start_s + next_s)

    def _send(self, due_s: float, request: PlannedRequest) -> None:
        assert self._loop is not None
        exchange = Exchange(request.index, self._on_end, request.cancel_after_tokens)
        self._in_flight[request.index] = (due_s, request, exchange)
        self.counts.due += 1
        self.counts.in_flight += 1
        try:
            prepared = self._prepared.pop(request.index, None) or self._encode(request)
            self._client.send(prepared, exchange)
        except Exception as error:  # a request that cannot be sent is recorded as such and does not end the run
            exchange.not_sent = True
            exchange.fail(self._clock(), f"not sent: {type(error).__name__}: {error}")
        exchange.start_timeout(self._loop, self._timeout_s, self._clock)

    def _on_end(self, exchange: Exchange) -> None:
        due_s, request, _ = self._in_flight.pop(exchange.index)
        self.counts.in_flight -= 1
        self.counts.tokens += exchange.num_tokens
        self._unwritten.append((due_s, request, exchange))
        if self._schedule.has_later_turn(request.index):
            self._release_turns(request, exchange)
        if not self._in_flight:
            self._finish_if_done()

    def _release_turns(self, request: PlannedRequest, exchange: Exchange) -> None:
        assert exchange.ended_s is not None
        is_complete = request_metrics.is_complete_response(self._record(0.0, request, exchange), self._rules)
        if is_complete and request.index in self._needed_responses:
            self._responses[request.index] = EarlierResponse(
                token_ids=tuple(exchange.token_ids), text="".join(exchange.texts)
            )
        dropped = self._schedule.ended(request.index, exchange.ended_s - self._start_s, is_complete=is_complete)
        if not self._is_stopping:
            self.counts.due += len(dropped)
            self._unwritten.extend((due_s, later, None) for due_s, later in dropped)
        if is_complete and not self._is_stopping:
            self._on_alarm()  # the next turn may be due now, or before any other request

    def _finish_if_done(self) -> None:
        has_more = self._schedule.num_unsent > 0 and not self._is_stopping
        if not has_more and not self._in_flight and self._done is not None and not self._done.done():
            self._done.set_result(None)

    # Background work.

    def _tick(self) -> None:
        assert self._loop is not None
        if self._is_stopping:
            return
        now = self._clock()
        elapsed_s = max(0.0, now - self._start_s)
        next_s = self._schedule.next_s
        until_s = now + MAX_WORK_S if next_s is None else min(now + MAX_WORK_S, self._start_s + next_s - QUIET_S)
        has_more = self._client.preconnect(self._schedule.num_due(elapsed_s + CONNECT_AHEAD_S), CONNECTIONS_AT_ONCE)
        has_more |= self._background_work(until_s, elapsed_s + ENCODE_AHEAD_S)
        self._tick_handle = self._loop.call_later(BUSY_TICK_S if has_more else TICK_S, self._tick)

    def _background_work(self, until_s: float, horizon_s: float) -> bool:
        """Write records and encode bodies until `until_s`. Returns True if work is left."""
        while self._unwritten:
            if self._clock() >= until_s and len(self._unwritten) < MAX_UNWRITTEN:
                return True
            self._write_one()
        while self._clock() < until_s:
            request = self._schedule.upcoming(horizon_s)
            if request is None:
                break
            with contextlib.suppress(Exception):  # sending will raise it again and record it
                self._prepared[request.index] = self._encode(request)
        else:
            return True
        if gc.get_count()[0] > _GARBAGE_OBJECTS:
            gc.collect(0)  # only failures leave reference cycles, so this is rare
        return False

    def _encode(self, request: PlannedRequest) -> Any:
        return self._client.prepare(self._prompts.resolve(request, self._responses))

    def _write_one(self) -> None:
        due_s, request, exchange = self._unwritten.popleft()
        record = self._record(due_s, request, exchange)
        counts = self.counts
        counts.outcomes[request_metrics.classify(record, self._rules)] += 1
        if record.sent_s is not None:
            counts.sent += 1
            counts.lags.add(record.sent_s - record.intended_s)
        if exchange is not None and exchange.not_sent:
            counts.not_sent += 1
        if record.error and not record.left_early:
            counts.errors[record.error[:120]] += 1
        try:
            self._recorder.write(record)
        except OSError as error:
            if self._problem is None:
                self._problem = LoadgenError(
                    f"records cannot be written: {error.strerror or error}; the run was stopped"
                )
                self.stop()

    def _write_all(self) -> None:
        while self._unwritten:
            self._write_one()
        self.counts.cpu_s = time.process_time() - self._began_cpu_s

    def _record(self, due_s: float, request: PlannedRequest, exchange: Exchange | None) -> Record:
        """Return a request's record. Without an exchange it was not sent, because an earlier turn failed."""
        start_s = self._start_s
        planned = self._plan.num_prompt_tokens(request)
        if exchange is None:
            return Record(
                index=request.index,
                intended_s=due_s,
                ended_s=due_s,
                planned_prompt_tokens=planned,
                planned_output_tokens=request.output_tokens,
                error="not sent: an earlier turn has no complete response",
                left_early=True,
                session=request.session,
                turn=request.turn,
                tenant=request.tenant,
                priority=request.priority,
                slo_class=request.slo_class,
            )
        assert exchange.ended_s is not None
        return Record(
            index=request.index,
            intended_s=due_s,
            ended_s=exchange.ended_s - start_s,
            planned_prompt_tokens=planned,
            planned_output_tokens=request.output_tokens,
            sent_s=None if exchange.sent_s is None else exchange.sent_s - start_s,
            arrivals=tuple(
                Arrival(at_s=at_s - start_s, num_tokens=count)
                for at_s, count in zip(exchange.times, exchange.counts, strict=True)
            ),
            status=exchange.status,
            reason=exchange.reason,
            error=exchange.error,
            finish_reason=exchange.finish_reason,
            is_complete=exchange.is_complete,
            left_early=exchange.left_early,
            timed_out=exchange.timed_out,
            retry_after_s=exchange.retry_after_s,
            num_prompt_tokens=exchange.num_prompt_tokens,
            num_cached_tokens=exchange.num_cached_tokens,
            num_output_tokens=exchange.num_output_tokens,
            token_ids=tuple(exchange.token_ids),
            request_id=exchange.request_id,
            endpoint=exchange.endpoint,
            session=request.session,
            turn=request.turn,
            tenant=request.tenant,
            priority=request.priority,
            slo_class=request.slo_class,
            timeline=exchange.timeline,
        )


class _NoGarbageCollection:
    """Disables garbage collection while entered.

    A full collection takes tens of milliseconds or more, in which nothing is sent. The last one is in
    `prepare`.
    """

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.freeze()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
