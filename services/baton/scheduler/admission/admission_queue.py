"""Holds requests at the scheduler until a worker is free enough for them.

A gateway gives up on a scheduler that does not answer. A waiting request is therefore answered with
`StillWaiting` after half the time that its gateway allows, and keeps its position if the gateway asks again.
If no gateway asks again, the client is gone and the request is removed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.errors import Code, Failure, Reason, Refused
from baton.runtime.logging import get_logger
from baton.runtime.process.byte_budget import Account, ByteBudget, Reservation
from baton.scheduler.admission.fair_queue import FairQueue, QueueEntry, displaced_rejection, overdue_rejection
from baton.scheduler.admission.slo_admission import MIN_RETRY_S
from baton.scheduler.scheduler_budget import query_bytes

log = get_logger(__name__)

SCHEDULER_DRAINING = Failure(
    code=Code.UNAVAILABLE,
    reason=Reason.DRAINING,
    message="this scheduler is draining; ask another one",
    retry_after_s=0.0,
)
PLACEMENT_FAILED = Failure(
    code=Code.INTERNAL, reason=Reason.INTERNAL, message="the request could not be placed: see the scheduler's log"
)
MAX_ROUNDS_PER_S = 200
"""Limits how often the queue is tried. Many workers report more often."""
MAX_DECISIONS_PER_ROUND = 8
"""Limits one round, so that the event loop serves other calls between rounds."""
MAX_OVERTAKES = 32
"""Requests that may overtake one that fits on no worker. After that, all wait until it fits."""
SWEEP_INTERVAL_S = 0.25
"""Time between two checks for requests that were not asked for again."""

Answer = Placement | Rejection


class Blocked(Enum):
    """The reason for which a request cannot be placed yet.

    ALL_REQUESTS: no request can be placed. THIS_REQUEST: it fits on no worker, but a smaller one may.
    """

    ALL_REQUESTS = "all_requests"
    THIS_REQUEST = "this_request"


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """One request in the queue, or with an answer that was not fetched yet.

    asked_s: when it was last asked for. num_asking: calls that wait for its answer now.
    work_s: predicted time to compute its prompt.
    num_overtaken: requests that have overtaken it because it fits on no worker.
    """

    query: PlacementQuery
    since_s: float
    asked_s: float
    work_s: float
    answer: asyncio.Future[Answer]
    reservation: Reservation
    num_asking: int = 0
    num_overtaken: int = 0
    entry: "QueueEntry[_WaitingRequest] | None" = None

    @property
    def key(self) -> tuple[bytes, int]:
        return self.query.request_id, self.query.attempt

    def is_abandoned(self, now_s: float) -> bool:
        return not self.num_asking and now_s - self.asked_s > self.query.answer_within_s / 2

    def query_at(self, now_s: float) -> PlacementQuery:
        return self.query.after_waiting(now_s - self.since_s)


class AdmissionQueue:
    """The scheduler's queue of requests that cannot be placed yet. Owned by its event loop.

    decide(query, waited_s): answers a queued request, or says what blocks it.
    refuse(query, rejection, waited_s): makes a rejection by the queue itself final.
    abandon(answer): is called for an answer that was not fetched.
    on_size(num_waiting): is called when the number of queued requests may have changed.
    budget: the requests take its account `WAITING`.
    """

    def __init__(
        self,
        *,
        max_queued_requests: int,
        slos_set_due: bool,
        decide: Callable[[PlacementQuery, float], Answer | Blocked],
        refuse: Callable[[PlacementQuery, Rejection, float], Rejection],
        abandon: Callable[[Answer], None],
        on_size: Callable[[int], None],
        budget: ByteBudget,
    ) -> None:
        """If `max_queued_requests` is 0, no request may wait. `slos_set_due`: see `FairQueue`."""
        self._queue: FairQueue[_WaitingRequest] = FairQueue(
            max_queued_requests=max(1, max_queued_requests), slos_set_due=slos_set_due
        )
        self.is_open = max_queued_requests > 0
        self._decide = decide
        self._refuse = refuse
        self._abandon = abandon
        self._on_size = on_size
        self._budget = budget
        self._requests: dict[tuple[bytes, int], _WaitingRequest] = {}
        self._wake = asyncio.Event()
        self._swept_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def contains(self, query: PlacementQuery) -> bool:
        """True if this attempt waits here, or has an answer that was not fetched yet."""
        return (query.request_id, query.attempt) in self._requests

    def work_before_s(self, query: PlacementQuery, attained_s: float = 0.0) -> float:
        """Predict the compute time on one worker of all prompts that would be placed before a new request.

        attained_s: as in `add`
        """
        now_s = asyncio.get_running_loop().time()
        before = self._queue.handles_before(query, now_s, attained_s=attained_s)
        return sum(request.work_s for request in before)

    def add(self, query: PlacementQuery, work_s: float, attained_s: float = 0.0) -> None:
        """Queue a request. If the queue is full, one request is rejected, perhaps the new one.

        work_s: predicted time to compute its prompt
        attained_s: service that its session has attained (`FairQueue`)

        Raises OverBudget if the memory budget is used up.
        """
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        request = _WaitingRequest(
            query=query,
            since_s=now_s,
            asked_s=now_s,
            work_s=work_s,
            answer=loop.create_future(),
            reservation=self._budget.reserve(Account.WAITING, query_bytes(query), "the queued request"),
        )
        self._requests[request.key] = request
        request.entry, displaced = self._queue.add(query, request, now_s, attained_s=attained_s)
        if displaced is not None:
            retry_s = max(MIN_RETRY_S, displaced.handle.work_s)
            self._reject(displaced.handle, displaced_rejection(self._queue, retry_s), now_s)
        self._on_size(len(self._queue))
        self.wake()

    async def wait(self, query: PlacementQuery) -> Answer | StillWaiting:
        """Wait for the answer to a queued request. Raises Refused if this scheduler drains."""
        request = self._requests[(query.request_id, query.attempt)]
        request.num_asking += 1
        try:
            async with asyncio.timeout(query.answer_within_s / 2):
                answer = await asyncio.shield(request.answer)
        except TimeoutError:
            return StillWaiting(num_waiting=len(self._queue))
        except Refused:
            self._forget(request)
            raise
        except asyncio.CancelledError:
            if request.num_asking == 1:
                self._remove(request)
            raise
        finally:
            request.num_asking -= 1
            request.asked_s = asyncio.get_running_loop().time()
        self._forget(request)
        return answer

    def wake(self) -> None:
        """Try the queue soon, because the next request may have become placeable."""
        if self._requests:
            self._wake.set()

    async def run(self) -> None:
        """Place requests as workers become free, and reject overdue ones. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = self._queue.next_due_s
            until_s = loop.time() + SWEEP_INTERVAL_S if self._requests else None
            try:
                async with asyncio.timeout_at(until_s if due_s is None or until_s is None else min(due_s, until_s)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._run_round(loop.time())
            await asyncio.sleep(1 / MAX_ROUNDS_PER_S)

    def close(self) -> None:
        """Refuse all waiting requests, so that their gateways ask another scheduler, and accept no more."""
        self.is_open = False
        for request in list(self._requests.values()):
            if request.num_asking and not request.answer.done():
                request.answer.set_exception(Refused(SCHEDULER_DRAINING))
            self._remove(request)

    def _run_round(self, now_s: float) -> None:
        for entry in self._queue.expire(now_s):
            self._reject(entry.handle, overdue_rejection(entry, now_s), now_s)
        if now_s - self._swept_s >= SWEEP_INTERVAL_S:
            self._swept_s = now_s
            for request in [request for request in self._requests.values() if request.is_abandoned(now_s)]:
                self._remove(request)
        self._place_next(now_s)
        self._on_size(len(self._queue))

    def _place_next(self, now_s: float) -> None:
        """Place requests in fair order until one is blocked.

        If only that one is, smaller ones may overtake it.
        """
        tries = MAX_DECISIONS_PER_ROUND
        has_more = True
        while tries and has_more and (first := self._queue.peek()) is not None:
            tries -= 1
            blocked = self._try(first, now_s)
            if blocked is not None:
                has_more = blocked is Blocked.THIS_REQUEST and self._overtake(first.handle, tries, now_s)
                break
        if has_more and len(self._queue):
            self._wake.set()

    def _overtake(self, first: _WaitingRequest, tries: int, now_s: float) -> bool:
        """Try the requests due earliest while `first` fits on no worker. Returns True if any was answered."""
        num_before = first.num_overtaken
        for entry in self._queue.earliest_due(tries + 1):
            if entry.handle is first:
                continue
            blocked = self._try(entry, now_s) if first.num_overtaken < MAX_OVERTAKES else Blocked.ALL_REQUESTS
            if blocked is Blocked.ALL_REQUESTS:
                break
            first.num_overtaken += blocked is None
        return first.num_overtaken > num_before

    def _try(self, entry: "QueueEntry[_WaitingRequest]", now_s: float) -> Blocked | None:
        """Answer a request if it can be placed or rejected.

        Returns what blocks it, or None if it was answered.

        An unexpected error fails this request only, not those behind it.
        """
        request = entry.handle
        try:
            answer = self._decide(request.query_at(now_s), now_s - request.since_s)
        except Exception:
            log.exception("placement_failed", request=request.query.request_id.hex())
            self._queue.take(entry)
            if not request.answer.done():
                request.answer.set_exception(Refused(PLACEMENT_FAILED))
            return None
        if isinstance(answer, Blocked):
            return answer
        self._queue.take(entry)
        self._resolve(request, answer)
        return None

    def _reject(self, request: _WaitingRequest, rejection: Rejection, now_s: float) -> None:
        self._resolve(request, self._refuse(request.query_at(now_s), rejection, now_s - request.since_s))

    def _resolve(self, request: _WaitingRequest, answer: Answer) -> None:
        """Set the answer of a request that has left the queue.

        If no call waits for it now, the next one gets it.
        """
        if not request.answer.done():
            request.answer.set_result(answer)

    def _remove(self, request: _WaitingRequest) -> None:
        """Remove a request whose client is gone. Its answer, if there is one, is abandoned."""
        self._forget(request)
        if request.entry is not None:
            self._queue.remove(request.entry)
        if request.answer.done() and not request.answer.cancelled() and request.answer.exception() is None:
            self._abandon(request.answer.result())
        request.answer.cancel()
        self._on_size(len(self._queue))

    def _forget(self, request: _WaitingRequest) -> None:
        self._requests.pop(request.key, None)
        request.reservation.release()
