"""The two jobs of one attempt, as one stream of new tokens."""

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import TokenDelta
from baton.gateway.cluster.attempt_errors import Contradiction, LegLost, WorkerLost
from baton.gateway.cluster.worker_session import WorkerSession
from baton.gateway.request.delivery import Delivery

_Event = TokenDelta | Failure | WorkerLost


class _Leg:
    """One side. Implements `session.Leg`. `was_sent`: its worker may have had the job."""

    __slots__ = ("_legs", "has_spoken", "is_prefill", "job", "session", "was_sent")

    def __init__(self, legs: "JobStreams", session: WorkerSession, job: PrefillJob | DecodeJob) -> None:
        self._legs = legs
        self.session = session
        self.job = job
        self.is_prefill = isinstance(job, PrefillJob)
        self.has_spoken = False
        self.was_sent = False

    def deliver(self, delta: TokenDelta) -> None:
        self.has_spoken = True
        self._legs.put(self, delta)

    def failed(self, failure: Failure) -> None:
        self._legs.put(self, failure)

    def lost(self, loss: WorkerLost, *, was_sent: bool) -> None:
        self.was_sent = was_sent
        self._legs.put(self, loss)


class JobStreams:
    """Use as `async with`: entering sends both jobs, leaving cancels what still runs. What waits here is
    bounded by the request's own tokens, twice at most."""

    def __init__(
        self, progress: Delivery, deadline_s: float, jobs: Sequence[tuple[WorkerSession, PrefillJob | DecodeJob]]
    ) -> None:
        """`deadline_s`: loop time, to tell workers why they are cancelled."""
        self._progress = progress
        self._samples = frozenset(jobs[0][1].sample_indices)
        self._deadline_s = deadline_s
        self._legs = [_Leg(self, session, job) for session, job in jobs]
        self._num_replayed = len(jobs[0][1].token_ids) - jobs[0][1].num_prompt_tokens
        self._events: deque[tuple[_Leg, _Event]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Every sample of this attempt has ended."""
        return self._progress.open.isdisjoint(self._samples)

    async def next(self) -> TokenDelta:
        """New tokens of one sample, from whichever leg had them first. Raises LegLost, or Refused where
        another attempt would not help."""
        while True:
            while self._events:
                leg, event = self._events.popleft()
                if not isinstance(event, TokenDelta):
                    self._raise_unless_done(leg, event)
                elif (delta := self._take(leg, event)) is not None:
                    return delta
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def end_sample(self, sample_index: int) -> None:
        """A sample has ended for a reason that only the gateway sees: a normal end, so the others go on."""
        self._progress.end(sample_index)
        if not self.finished:
            for leg in self._legs:
                leg.session.cancel(leg.job.job, Reason.CANCELLED, (sample_index,))

    def put(self, leg: _Leg, event: _Event) -> None:
        self._events.append((leg, event))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aenter__(self) -> "JobStreams":
        for leg in self._legs:
            try:
                leg.session.open(leg.job, leg)
            except WorkerLost as loss:
                leg.lost(loss, was_sent=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = self._reason_of(error)
        for leg in self._legs:
            leg.session.cancel(leg.job.job, reason)

    def _reason_of(self, error: BaseException | None) -> Reason:
        if isinstance(error, Refused):
            return error.failure.reason
        if isinstance(error, LegLost):
            return Reason.SUPERSEDED
        is_late = error is not None and asyncio.get_running_loop().time() >= self._deadline_s
        return Reason.DEADLINE if is_late else Reason.CANCELLED

    def _take(self, leg: _Leg, delta: TokenDelta) -> TokenDelta | None:
        """What is new in `delta`. A leg that contradicts what was delivered cannot be believed."""
        try:
            return self._progress.take(delta)
        except Contradiction as contradiction:
            raise LegLost(contradiction.failure, blamed=leg.session.worker) from contradiction

    def _raise_unless_done(self, leg: _Leg, event: Failure | WorkerLost) -> None:
        """A prefill leg that has done its part may go."""
        if leg.is_prefill and len(self._legs) > 1 and self._progress.all_beyond(self._num_replayed, self._samples):
            return
        if isinstance(event, WorkerLost):
            # Before its first word a decode leg with a prefill leg beside it only waits for KV: none of its
            # steps had this request.
            was_running = leg.was_sent and (leg.is_prefill or leg.has_spoken or len(self._legs) == 1)
            raise LegLost(
                event.failure,
                blamed=event.worker,
                dead=event.worker if event.has_died else None,
                killed=event.has_died and was_running,
            )
        if (
            event.retriable or event.code is Code.CANCELLED
        ):  # nobody here has cancelled: the worker itself dropped the job
            raise LegLost(event, blamed=event.blamed or leg.session.worker)
        raise Refused(event)
