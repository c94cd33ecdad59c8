"""Merges the token streams of an attempt's prefill and decode job into one stream of new tokens."""

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import TokenDelta
from baton.gateway.cluster.attempt_errors import AttemptFailed, ConflictingTokens, WorkerLost
from baton.gateway.cluster.worker_session import WorkerSession
from baton.gateway.request.delivery import Delivery

_Event = TokenDelta | Failure | WorkerLost
MAX_TURN_S = 0.002
"""Time of one event loop turn that a request may use for tokens that have arrived. A step can bring tokens
for many samples; the writer of the response and other requests get their turn in between."""


class _JobStream:
    """Token stream of one job. Implements `JobListener`.

    was_sent: the worker may have received the job.
    has_delivered: the worker has sent at least one delta.
    """

    __slots__ = ("_streams", "has_delivered", "is_prefill", "job", "session", "was_sent")

    def __init__(self, streams: "JobStreams", session: WorkerSession, job: PrefillJob | DecodeJob) -> None:
        self._streams = streams
        self.session = session
        self.job = job
        self.is_prefill = isinstance(job, PrefillJob)
        self.has_delivered = False
        self.was_sent = False

    def deliver(self, delta: TokenDelta) -> None:
        self.has_delivered = True
        self._streams.put(self, delta)

    def failed(self, failure: Failure) -> None:
        self._streams.put(self, failure)

    def lost(self, loss: WorkerLost, *, was_sent: bool) -> None:
        self.was_sent = was_sent
        self._streams.put(self, loss)


class JobStreams:
    """Jobs of one attempt. Use as `async with`: entering sends the jobs, leaving cancels those that still
    run.

    The buffer holds each token of the request at most twice, so it is bounded.
    """

    def __init__(
        self, delivery: Delivery, deadline_s: float, jobs: Sequence[tuple[WorkerSession, PrefillJob | DecodeJob]]
    ) -> None:
        """Prepare the jobs. `deadline_s` is event loop time; it decides the reason sent with a cancel."""
        self._delivery = delivery
        self._samples = frozenset(jobs[0][1].sample_indices)
        self._deadline_s = deadline_s
        self._streams = [_JobStream(self, session, job) for session, job in jobs]
        self._num_replayed = len(jobs[0][1].token_ids) - jobs[0][1].num_prompt_tokens
        self._events: deque[tuple[_JobStream, _Event]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._turn_began_s = 0.0

    @property
    def finished(self) -> bool:
        """True if every sample of this attempt has ended."""
        return self._delivery.open.isdisjoint(self._samples)

    async def next(self) -> TokenDelta:
        """Wait for new tokens of one sample, from either worker.

        Raises AttemptFailed if another attempt may succeed, and Refused if none can.
        """
        loop = asyncio.get_running_loop()
        while True:
            while self._events:
                if loop.time() - self._turn_began_s > MAX_TURN_S:
                    await asyncio.sleep(0)
                    self._turn_began_s = loop.time()
                stream, event = self._events.popleft()
                if not isinstance(event, TokenDelta):
                    self._raise_unless_done(stream, event)
                elif (delta := self._accept(stream, event)) is not None:
                    return delta
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            self._turn_began_s = loop.time()

    def end_sample(self, sample_index: int) -> None:
        """End one sample, for example at a stop string, and cancel it on the workers. Other samples
        continue."""
        self._delivery.end(sample_index)
        if not self.finished:
            for stream in self._streams:
                stream.session.cancel(stream.job.job, Reason.CANCELLED, (sample_index,))

    def put(self, stream: _JobStream, event: _Event) -> None:
        """Queue an event of one job for `next`. It is dropped if the attempt has ended."""
        if not self._streams:
            return
        self._events.append((stream, event))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aenter__(self) -> "JobStreams":
        for stream in self._streams:
            try:
                stream.session.open(stream.job, stream)
            except WorkerLost as loss:
                stream.lost(loss, was_sent=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = self._reason_of(error)
        streams, self._streams = self._streams, []  # no cycle remains, so the request is freed at once
        self._events.clear()
        for stream in streams:
            stream.session.cancel(stream.job.job, reason)

    def _reason_of(self, error: BaseException | None) -> Reason:
        if isinstance(error, Refused):
            return error.failure.reason
        if isinstance(error, AttemptFailed):
            return Reason.SUPERSEDED
        is_late = error is not None and asyncio.get_running_loop().time() >= self._deadline_s
        return Reason.DEADLINE if is_late else Reason.CANCELLED

    def _accept(self, stream: _JobStream, delta: TokenDelta) -> TokenDelta | None:
        """Return what is new in `delta`. Tokens that conflict with delivered ones fail the attempt."""
        try:
            return self._delivery.accept(delta)
        except ConflictingTokens as conflict:
            raise AttemptFailed(conflict.failure, blamed=stream.session.worker) from conflict

    def _raise_unless_done(self, stream: _JobStream, event: Failure | WorkerLost) -> None:
        """Raise the error for a failed job. A prefill job that has delivered its tokens may fail without
        effect."""
        is_handoff = len(self._streams) > 1
        if stream.is_prefill and is_handoff and self._delivery.all_past(self._num_replayed, self._samples):
            return
        if isinstance(event, WorkerLost):
            # Until its first delta, the decode job of a handoff only waits for KV. None of the worker's steps
            # included this request, so the request cannot have killed the worker.
            was_running = stream.was_sent and (stream.is_prefill or stream.has_delivered or not is_handoff)
            raise AttemptFailed(
                event.failure,
                blamed=event.worker,
                dead=event.worker if event.has_died else None,
                killed=event.has_died and was_running,
            )
        if event.retriable or event.code is Code.CANCELLED:  # this gateway did not cancel: the worker dropped the job
            raise AttemptFailed(event, blamed=event.blamed or stream.session.worker)
        raise Refused(event)
