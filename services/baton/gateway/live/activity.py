"""Remembers what a gateway did recently, for the live view: requests, decisions, rates and faults.

Each hook costs microseconds, and about 1 ms for the longest prompts. All memory is bounded. No prompt, answer
or key is kept.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from baton.core.cluster.placement import Placement, Rejection
from baton.core.errors import Code, Failure
from baton.gateway.cluster.attempt_errors import AttemptFailed
from baton.gateway.cluster.cluster_view import ClusterView
from baton.gateway.input.client_call import Identity
from baton.gateway.live.cluster_changes import ClusterFacts, changes
from baton.gateway.live.seen_prefixes import SeenPrefixes
from baton.gateway.live.traces.request_trace import RequestTrace
from baton.gateway.live.window import Window
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.open_request import FINISHED, OpenRequest

MAX_ENDED = 512
MAX_DECISIONS = 64
MAX_EVENTS = 200
MAX_TEXT = 300
"""Longest text of an event or message, in characters."""
TOO_MANY_REQUESTS = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredAttempt:
    """A scheduler's answer to one attempt. Exactly one of `placement` and `rejection` is set."""

    at_s: float
    request_id: str
    attempt: int
    placement: Placement | None = None
    rejection: Rejection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityEvent:
    """A fault, or its repair. `severity` is info, warning or error; `number` grows by one with each event."""

    number: int
    at_s: float
    severity: str
    text: str


@dataclass(slots=True)
class Refusals:
    """Calls that failed for one reason, and the message of the last one."""

    count: int = 0
    last_s: float = 0.0
    message: str = ""


class Activity:
    """Implements `RequestObserver`, and follows the changes of a `ClusterView`. Used from one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._view: ClusterView | None = None
        self._facts = ClusterFacts()
        self._open: dict[str, tuple[RequestTrace, OpenRequest]] = {}
        self._prefixes = SeenPrefixes()
        self._num_events = 0
        self.num_decisions = 0
        self.window = Window()
        self.ended: deque[RequestTrace] = deque(maxlen=MAX_ENDED)
        self.decisions: deque[AnsweredAttempt] = deque(maxlen=MAX_DECISIONS)
        self.events: deque[ActivityEvent] = deque(maxlen=MAX_EVENTS)
        self.refusals: dict[str, Refusals] = {}
        self.handoffs: Counter[tuple[str, str]] = Counter()
        """Requests placed on a (prefill, decode) pair; only ever grows, for pairs of listed workers."""
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        """KV bytes of ended requests by (owner, reader), likewise."""

    def follow(self, view: ClusterView) -> None:
        """Record changes of this view as events from now on."""
        self._view = view
        view.on_change(self._cluster_changed)

    def open_traces(self) -> Iterator[RequestTrace]:
        """Yield the open requests, oldest first, with their progress so far."""
        for trace, request in self._open.values():
            self._update(trace, request)
            yield trace

    def find(self, request_id: str) -> RequestTrace | None:
        """Return an open or recently ended request."""
        if request_id in self._open:
            trace, request = self._open[request_id]
            self._update(trace, request)
            return trace
        return next((trace for trace in reversed(self.ended) if trace.request_id == request_id), None)

    def opened(self, request: OpenRequest, identity: Identity) -> None:
        given = request.request
        trace = RequestTrace(
            request_id=given.request_id.hex(),
            tenant=identity.tenant,
            num_prompt_tokens=given.num_prompt_tokens,
            max_tokens=given.sampling.max_tokens,
            received_s=request.received_s,
            priority=given.priority,
            slo=given.slo,
        )
        self._open[trace.request_id] = trace, request

    def closed(self, request: OpenRequest, failure: Failure | None) -> None:
        found = self._open.pop(request.request.request_id.hex(), None)
        if found is None:
            return
        trace, now_s = found[0], self._clock()
        self._update(trace, request)
        trace.ended_s = now_s
        trace.outcome = FINISHED if failure is None else failure.reason.value
        trace.message = "" if failure is None else failure.message[:MAX_TEXT]
        trace.legs = tuple((job.attempt, leg) for job, legs in request.delivery.legs.items() for leg in legs)
        self.ended.append(trace)
        self._count(trace, now_s)

    def counted(self, endpoint: str, failure: Failure | None) -> None:
        now_s = self._clock()
        interval = self.window.at(now_s)
        if failure is None:
            interval.ok += 1
            return
        if failure.code.http == TOO_MANY_REQUESTS:
            interval.refused += 1
        elif failure.code is not Code.CANCELLED:  # a client that leaves is no fault
            interval.failed += 1
        refusals = self.refusals.setdefault(failure.reason.value, Refusals())
        refusals.count, refusals.last_s, refusals.message = refusals.count + 1, now_s, failure.message[:MAX_TEXT]

    def started(self, request_id: bytes, attempt: Attempt) -> None:
        found = self._open.get(request_id.hex())
        if found is None:
            return
        trace = found[0]
        trace.attempt(attempt.number, self._clock())
        layout = self._view.layout if self._view is not None else None
        if attempt.number == 0 and layout is not None:
            num_tokens = self._prefixes.add(attempt.block_hashes) * layout.block_size_tokens
            trace.seen_tokens = min(num_tokens, trace.num_prompt_tokens - 1)  # the last token is always computed

    def placed(self, request_id: bytes, attempt: int, placement: Placement) -> None:
        now_s, text = self._clock(), request_id.hex()
        if (found := self._open.get(text)) is not None:
            trace = found[0].attempt(attempt, now_s)
            trace.placed_s, trace.placement, trace.rejected = now_s, placement, ""
        if placement.prefill is not None and placement.decode is not None:
            self.handoffs[placement.prefill.worker_id, placement.decode.worker_id] += 1
        self._decided(AnsweredAttempt(at_s=now_s, request_id=text, attempt=attempt, placement=placement))

    def rejected(self, request_id: bytes, attempt: int, rejection: Rejection) -> None:
        now_s, text = self._clock(), request_id.hex()
        if (found := self._open.get(text)) is not None:
            found[0].attempt(attempt, now_s).rejected = rejection.message[:MAX_TEXT]
        self._decided(AnsweredAttempt(at_s=now_s, request_id=text, attempt=attempt, rejection=rejection))

    def lost(self, request_id: bytes, attempt: int, failed: AttemptFailed, num_output_tokens: int) -> None:
        now_s, reason = self._clock(), failed.failure.reason.value
        if (found := self._open.get(request_id.hex())) is not None:
            trace = found[0].attempt(attempt, now_s)
            trace.lost_s, trace.lost_reason, trace.lost_problem = now_s, reason, str(failed)[:MAX_TEXT]
        what = f"request {request_id.hex()[:8]} lost attempt {attempt + 1} after {num_output_tokens} tokens"
        self._event("warning", f"{what} ({reason}): {failed}")

    def _decided(self, decision: AnsweredAttempt) -> None:
        self.num_decisions += 1
        self.decisions.append(decision)

    def _update(self, trace: RequestTrace, request: OpenRequest) -> None:
        latency = request.delivery.latency
        trace.first_s, trace.last_s, trace.tpot_s = latency.first_s, latency.last_s, latency.tpot_s
        self.window.at(self._clock()).output_tokens += request.output.num_tokens - trace.num_output_tokens
        trace.num_output_tokens = request.output.num_tokens
        trace.num_cached_tokens = request.num_cached_tokens

    def _count(self, trace: RequestTrace, now_s: float) -> None:
        interval = self.window.at(now_s)
        if (met := trace.meets_slo) is not None:
            interval.judged += 1
            interval.met += met
        if trace.outcome == FINISHED:
            interval.observe_latency(trace.ttft_s, trace.tpot_s)
            interval.prompt_tokens += trace.num_prompt_tokens
            interval.cached_tokens += trace.num_cached_tokens
            interval.seen_tokens += trace.seen_tokens
        placements = {each.number: each.placement for each in trace.attempts}
        for attempt, leg in trace.legs:
            owner = owner_of(placements.get(attempt), leg.worker_id)
            if leg.kv_bytes and owner:
                self.moved_bytes[owner, leg.worker_id] += leg.kv_bytes

    def _cluster_changed(self) -> None:
        assert self._view is not None
        scheduler = self._view.scheduler.process_id if self._view.scheduler is not None else ""
        before, self._facts = self._facts, ClusterFacts.of(scheduler, self._view.reports)
        for severity, text in changes(before, self._facts):
            self._event(severity, text)
        if before.workers.keys() - self._facts.workers.keys():
            for counts in (self.handoffs, self.moved_bytes):
                for pair in [pair for pair in counts if not self._facts.workers.keys() >= set(pair)]:
                    del counts[pair]

    def _event(self, severity: str, text: str) -> None:
        self._num_events += 1
        self.events.append(
            ActivityEvent(number=self._num_events, at_s=self._clock(), severity=severity, text=text[:MAX_TEXT])
        )


def owner_of(placement: Placement | None, reader: str) -> str:
    """Return the worker from which `reader` pulls KV in this placement; empty if from none."""
    if placement is None:
        return ""
    if placement.prefill is not None and placement.prefill.worker_id != reader:
        return placement.prefill.worker_id
    return placement.prefix_source.worker.worker_id if placement.prefix_source is not None else ""


def newest(items: deque[RequestTrace], number: int) -> list[RequestTrace]:
    """Return the last `number` requests, newest first."""
    return list(islice(reversed(items), number))
