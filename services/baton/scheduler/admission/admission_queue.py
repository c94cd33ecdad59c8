"""Where requests wait at the scheduler until a worker is free enough, and are asked for again and again
meanwhile.

A gateway takes a scheduler that says nothing for lost. So who waits is told so (`StillWaiting`) in half the
time that its gateway allows, and keeps its place if it is asked for again; who is not has no client any more,
and leaves.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.errors import Code, Failure, Reason, Refused
from baton.runtime.logging import get_logger
from baton.scheduler.admission.slo_admission import MIN_RETRY_S
from baton.scheduler.admission.waiting_queue import Waiting, WaitingQueue, displaced, overdue

log = get_logger(__name__)

LEAVING = Failure(
    code=Code.UNAVAILABLE, reason=Reason.DRAINING, message="this scheduler leaves; ask another", retry_after_s=0.0
)
BROKEN = Failure(
    code=Code.INTERNAL, reason=Reason.INTERNAL, message="the request could not be placed: see the scheduler's log"
)
LOOKS_A_SECOND = 200
"""At most so often is it looked whether the next one can go: reports come faster from many workers."""
DECISIONS_A_LOOK = 8
"""At most; between looks the event loop answers others."""
MAX_OVERTAKEN = 32
"""So many may pass one for which alone there is no room yet; then room is made for it by nobody else getting
any."""
SWEEP_S = 0.25
"""Between two looks at who has not been asked for again."""

Answer = Placement | Rejection


class MustWait(Enum):
    """Why a request cannot go yet. ALL: nobody can. THIS: there is no room for it; another may be smaller."""

    ALL = "all"
    THIS = "this"


@dataclass(slots=True, eq=False)
class _Seat:
    """One request that waits. `work_s`: predicted to compute its prompt."""

    query: PlacementQuery
    since_s: float
    heard_s: float
    work_s: float
    answer: asyncio.Future[Answer]
    num_asking: int = 0
    num_overtaken: int = 0
    waiting: "Waiting[_Seat] | None" = None

    @property
    def key(self) -> tuple[bytes, int]:
        return self.query.request_id, self.query.attempt

    def is_lost(self, now_s: float) -> bool:
        return not self.num_asking and now_s - self.heard_s > self.query.answer_within_s / 2

    def asks_now(self, now_s: float) -> PlacementQuery:
        """The query as it would be asked now."""
        return self.query.later(now_s - self.since_s)


class AdmissionQueue:
    """Single owner: the scheduler's event loop.

    `decide` answers a query with its final answer, or says that it must wait on; `refuse` makes a refusal
    final. Both are called with the seconds that the request has waited here. `abandon`: of an answer that
    nobody has fetched. `on_size`: how many wait.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        keeps_slos: bool,
        decide: Callable[[PlacementQuery, float], Answer | MustWait],
        refuse: Callable[[PlacementQuery, Rejection, float], Rejection],
        abandon: Callable[[Answer], None],
        on_size: Callable[[int], None],
    ) -> None:
        """`max_waiting` 0: nobody may wait."""
        self._queue: WaitingQueue[_Seat] = WaitingQueue(max_waiting=max(1, max_waiting), keeps_slos=keeps_slos)
        self.is_open = max_waiting > 0
        self._decide = decide
        self._refuse = refuse
        self._abandon = abandon
        self._on_size = on_size
        self._seats: dict[tuple[bytes, int], _Seat] = {}
        self._wake = asyncio.Event()
        self._swept_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def holds(self, query: PlacementQuery) -> bool:
        return (query.request_id, query.attempt) in self._seats

    def work_before_s(self, query: PlacementQuery) -> float:
        """Predicted seconds of one worker for the prompts that would have their turn before that of a new
        request."""
        return sum(seat.work_s for seat in self._queue.before(query, asyncio.get_running_loop().time()))

    def enter(self, query: PlacementQuery, work_s: float) -> None:
        """Take a place; in a full room somebody gives way, perhaps the new one."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        seat = _Seat(query=query, since_s=now_s, heard_s=now_s, work_s=work_s, answer=loop.create_future())
        self._seats[seat.key] = seat
        seat.waiting, victim = self._queue.add(query, seat, now_s)
        if victim is not None:
            retry_s = max(MIN_RETRY_S, victim.handle.work_s)
            self._end(victim.handle, self._refused(victim.handle, displaced(self._queue, retry_s), now_s))
        self._on_size(len(self._queue))
        self.look()

    async def stay(self, query: PlacementQuery) -> Answer | StillWaiting:
        """Wait in the place taken before. Raises Refused when this scheduler leaves."""
        seat = self._seats[(query.request_id, query.attempt)]
        seat.num_asking += 1
        try:
            async with asyncio.timeout(query.answer_within_s / 2):
                answer = await asyncio.shield(seat.answer)
        except TimeoutError:
            return StillWaiting(num_waiting=len(self._queue))
        except Refused:
            self._seats.pop(seat.key, None)
            raise
        except asyncio.CancelledError:
            if seat.num_asking == 1:
                self._leave(seat)
            raise
        finally:
            seat.num_asking -= 1
            seat.heard_s = asyncio.get_running_loop().time()
        self._seats.pop(seat.key, None)
        return answer

    def look(self) -> None:
        """Something has changed: the next one may be able to go."""
        if self._seats:
            self._wake.set()

    async def run(self) -> None:
        """Let go who can, and who has waited too long, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = self._queue.next_due_s
            until_s = loop.time() + SWEEP_S if self._seats else None
            try:
                async with asyncio.timeout_at(until_s if due_s is None or until_s is None else min(due_s, until_s)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._serve(loop.time())
            await asyncio.sleep(1 / LOOKS_A_SECOND)

    def close(self) -> None:
        """Send all away, to another scheduler, and let nobody in any more."""
        self.is_open = False
        for seat in list(self._seats.values()):
            if seat.num_asking and not seat.answer.done():
                seat.answer.set_exception(Refused(LEAVING))
            self._leave(seat)

    def _serve(self, now_s: float) -> None:
        for waiting in self._queue.expire(now_s):
            self._end(waiting.handle, self._refused(waiting.handle, overdue(waiting, now_s), now_s))
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            for seat in [seat for seat in self._seats.values() if seat.is_lost(now_s)]:
                self._leave(seat)
        self._let_go(now_s)
        self._on_size(len(self._queue))

    def _let_go(self, now_s: float) -> None:
        """Whoever can go, in their order. Those for whom alone there is no room are passed by those due next,
        for a while."""
        tries = DECISIONS_A_LOOK
        has_more = True
        while tries and has_more and (first := self._queue.peek()) is not None:
            tries -= 1
            could_not = self._try(first, now_s)
            if could_not is not None:
                has_more = could_not is MustWait.THIS and self._let_pass(first.handle, tries, now_s)
                break
        if has_more and len(self._queue):
            self._wake.set()

    def _let_pass(self, first: _Seat, tries: int, now_s: float) -> bool:
        """There is no room for `first`, but perhaps for some of those due next. Whether any has gone."""
        num_before = first.num_overtaken
        for waiting in self._queue.soonest(tries + 1):
            if waiting.handle is first:
                continue
            could_not = self._try(waiting, now_s) if first.num_overtaken < MAX_OVERTAKEN else MustWait.ALL
            if could_not is MustWait.ALL:
                break
            first.num_overtaken += could_not is None
        return first.num_overtaken > num_before

    def _try(self, waiting: "Waiting[_Seat]", now_s: float) -> MustWait | None:
        """Let it go, if it can: None then. A bug of ours costs the request, not those behind it."""
        seat = waiting.handle
        try:
            answer = self._decide(seat.asks_now(now_s), now_s - seat.since_s)
        except Exception:
            log.exception("placement_failed", request=seat.query.request_id.hex())
            self._queue.take(waiting)
            if not seat.answer.done():
                seat.answer.set_exception(Refused(BROKEN))
            return None
        if isinstance(answer, MustWait):
            return answer
        self._queue.take(waiting)
        self._end(seat, answer)
        return None

    def _refused(self, seat: _Seat, rejection: Rejection, now_s: float) -> Rejection:
        return self._refuse(seat.asks_now(now_s), rejection, now_s - seat.since_s)

    def _end(self, seat: _Seat, answer: Answer) -> None:
        """It is in the queue no more. Who is not asked for in this moment gets the answer when it is."""
        if not seat.answer.done():
            seat.answer.set_result(answer)

    def _leave(self, seat: _Seat) -> None:
        """Its client is gone."""
        self._seats.pop(seat.key, None)
        if seat.waiting is not None:
            self._queue.remove(seat.waiting)
        if seat.answer.done() and not seat.answer.cancelled() and seat.answer.exception() is None:
            self._abandon(seat.answer.result())
        seat.answer.cancel()
        self._on_size(len(self._queue))
