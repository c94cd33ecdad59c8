"""The jobs of one worker: who sent them, what they still owe, and which attempt of a request is the valid
one.

A job is known by its JobId from its receipt until the gateway has acknowledged its last message, so that a
job or cancel that is repeated over a new stream changes nothing. It ends with exactly one last message,
whatever else happens to it at that moment.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count

from baton.core.errors import Code, Failure, Reason, Refused, invalid
from baton.core.ids import DecisionId, JobId
from baton.core.messages.jobs import Cancel, DecodeJob, Job, PrefillJob
from baton.core.request import LegTimeline, TokenDelta
from baton.engine.state.outcome import EngineOutcome
from baton.runtime.logging import get_logger
from baton.worker.jobs.decode_leg import LocalDecodeLeg
from baton.worker.jobs.job_span import JobSpan
from baton.worker.jobs.leg import Leg, LegParts
from baton.worker.jobs.prefill_leg import PrefillLeg
from baton.worker.jobs.pulled_decode_leg import PulledDecodeLeg
from baton.worker.sessions.gateway_sessions import GatewaySession

log = get_logger(__name__)

MAX_REMEMBERED_REQUESTS = 1 << 16
"""Requests whose highest attempt is remembered. A lower attempt comes within moments, or not at all."""
MAX_SAMPLES = 1024


class OpenJob:
    """One job as the table keeps it; the `LegOutput` of its leg."""

    def __init__(
        self,
        job: Job,
        session: GatewaySession,
        on_counted: Callable[[DecisionId], None],
        on_end: Callable[["OpenJob"], None],
    ) -> None:
        self.id = job.job
        self.decision_id = job.decision_id
        self.session = session
        self.leg: Leg | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.span: JobSpan | None = None
        """None: not traced."""
        self.has_ended = False
        self.is_counted = False
        self._on_counted = on_counted
        self._on_end = on_end

    def delta(self, delta: TokenDelta, *, is_last: bool) -> None:
        if self.has_ended:
            return
        self.session.put_delta(delta, is_last=is_last)
        if is_last:
            self._end(timeline=delta.timeline)

    def fail(self, failure: Failure) -> None:
        if self.has_ended:
            return
        self.session.put_failure(self.id, failure)
        self._end(failure=failure)

    def counted(self) -> None:
        if not self.is_counted:
            self.is_counted = True
            if self.decision_id:
                self._on_counted(self.decision_id)

    def _end(self, *, timeline: LegTimeline | None = None, failure: Failure | None = None) -> None:
        self.has_ended = True
        self.counted()  # whatever was reserved for it is not needed any more
        if self.deadline is not None:
            self.deadline.cancel()
        if self.span is not None:
            self.span.end(
                timeline, failure, num_output_tokens=self.leg.num_output_tokens if self.leg is not None else 0
            )
        self._on_end(self)


class JobTable:
    """All jobs that have not been acknowledged to their end. `on_counted`: a decision is contained in this
    worker's numbers from now on."""

    def __init__(
        self,
        parts: LegParts,
        *,
        max_following: int,
        on_counted: Callable[[DecisionId], None],
    ) -> None:
        """`max_following`: jobs that may wait for another worker's KV; what waits for memory the engine
        bounds."""
        self._parts = parts
        self._max_model_len = parts.engine.engine.config.max_model_len
        self._max_following = max_following
        self._on_counted = on_counted
        self._jobs: dict[JobId, OpenJob] = {}
        self._by_request: dict[bytes, set[JobId]] = {}
        self._by_seq: dict[int, OpenJob] = {}
        self._attempts: OrderedDict[bytes, int] = OrderedDict()
        self._seq_ids = count(1)
        self._refusal: Failure | None = None

    # -- what sessions ask ---------------------------------------------------------------------------------------------------------------

    def start(self, job: PrefillJob | DecodeJob, session: GatewaySession) -> None:
        """Begin a job, unless it is here or has been. What cannot be done is answered by its Failure."""
        known = self._jobs.get(job.job)
        has_been_here = self._attempts.get(job.job.request_id) == job.job.attempt
        if (known is not None and known.session is session) or (known is None and has_been_here):
            return
        opened = OpenJob(job, session, self._on_counted, self._ended)
        if (
            known is not None
        ):  # another gateway session: its owner lost the first one, and places again with a higher attempt
            session.put_failure(job.job, superseded(f"job {job.job} runs for another session"))
            return
        self._jobs[job.job] = opened
        self._by_request.setdefault(job.job.request_id, set()).add(job.job)
        if self._parts.tracing.is_on:
            opened.span = JobSpan(self._parts.tracing, job, self._parts.worker)
            job = replace(job, trace_context=opened.span.context)
        try:
            self._fence(job.job)
            if self._refusal is not None:
                raise Refused(self._refusal)
            self._check(job)
            leg = opened.leg = self._leg(job, opened)
            self._by_seq[leg.seq_id] = opened
            opened.deadline = asyncio.get_running_loop().call_later(
                max(0.0, job.deadline_s), leg.stop, _over_deadline(job)
            )
            leg.begin()
        except Refused as refused:
            log.info(
                "job_refused", job=str(job.job), reason=refused.failure.reason.value, problem=refused.failure.message
            )
            self._end_unbegun(opened, refused.failure)
        except Exception as error:  # a bug of ours: it costs this job, not the session with all its jobs
            log.exception("job_failed", job=str(job.job))
            message = f"the job could not be started: {type(error).__name__}"
            self._end_unbegun(opened, Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message))

    def cancel(self, cancel: Cancel, session: GatewaySession) -> None:
        """End samples of a job. One that has ended, or was never here, needs nothing."""
        opened = self._jobs.get(cancel.job)
        if opened is not None and opened.session is session and opened.leg is not None:
            opened.leg.cancel(cancel.sample_indices, cancel.reason)

    def forget(self, jobs: Iterable[JobId], session: GatewaySession) -> None:
        for job in jobs:
            opened = self._jobs.get(job)
            if opened is not None and opened.session is session:
                self._forget(job)

    def drop_session(self, session: GatewaySession) -> None:
        for opened in [o for o in self._jobs.values() if o.session is session]:
            if opened.leg is not None:
                opened.leg.stop(Failure(code=Code.CANCELLED, reason=Reason.CANCELLED, message="the session has ended"))
            self._forget(opened.id)

    # -- what the engine tells -----------------------------------------------------------------------------------------------------------

    def deliver(self, outcome: EngineOutcome) -> None:
        """Hand what a plan or a step brought to the legs. Of sequences whose job has ended nothing is wanted
        but their receiving blocks."""
        for admission in outcome.admissions:
            self._parts.pool.count_use(admission.block_table[: admission.num_cached_blocks])
            opened = self._by_seq.get(admission.seq_id)
            if opened is not None and opened.leg is not None:
                opened.leg.admitted(admission)
            elif admission.receiving_block_ids:
                self._parts.pool.drop_receiving(admission.receiving_block_ids)
        for progress in outcome.progress:
            opened = self._by_seq.get(progress.seq_id)
            if opened is not None and opened.leg is not None:
                opened.leg.progressed(progress)
        for output in outcome.outputs:
            opened = self._by_seq.get(output.seq_id)
            if opened is not None and opened.leg is not None:
                opened.leg.produced(output)

    # -- what the worker asks ------------------------------------------------------------------------------------------------------------

    def refuse(self, failure: Failure) -> None:
        """Answer every new job with `failure`; open ones go on."""
        self._refusal = failure

    def stop_all(self, failure: Failure) -> None:
        """End every open job with `failure`."""
        for opened in tuple(self._jobs.values()):
            if opened.leg is not None:
                opened.leg.stop(failure)

    def open_jobs(self) -> Iterator[JobId]:
        return (opened.id for opened in self._jobs.values() if not opened.has_ended)

    def remembers(self, job: JobId) -> bool:
        """Whether the gateway has not acknowledged the job's last message yet."""
        return job in self._jobs

    def counted_decisions(self) -> Iterator[DecisionId]:
        """Of jobs that this worker's numbers contain now, for a scheduler that has heard of none yet."""
        return (o.decision_id for o in self._jobs.values() if o.is_counted and not o.has_ended and o.decision_id)

    @property
    def num_open(self) -> int:
        return len(self._by_seq)

    @property
    def num_following(self) -> int:
        """Jobs that wait for another worker's KV, the engine does not know of them: decodes for its first
        blocks, others for a prefix."""
        return sum(o.leg is not None and o.leg.is_following for o in self._by_seq.values())

    # -- inside --------------------------------------------------------------------------------------------------------------------------

    def _leg(self, job: PrefillJob | DecodeJob, opened: OpenJob) -> Leg:
        seq_id = next(self._seq_ids)
        follows = job.prefix_source if isinstance(job, PrefillJob) else job.owner or job.prefix_source
        if follows is not None and self.num_following >= self._max_following:
            raise Refused(
                Failure(
                    code=Code.RESOURCE_EXHAUSTED,
                    reason=Reason.QUEUE_FULL,
                    message=f"{self._max_following} requests wait here for their KV; try another worker, or later",
                    retriable=True,
                )
            )
        if isinstance(job, PrefillJob):
            return PrefillLeg(job, seq_id, self._parts, opened)
        if job.owner is None:
            return LocalDecodeLeg(job, seq_id, self._parts, opened)
        return PulledDecodeLeg(job, job.owner, seq_id, self._parts, opened)

    @staticmethod
    def _end_unbegun(opened: OpenJob, failure: Failure) -> None:
        """The leg holds nothing yet."""
        if opened.leg is not None:
            opened.leg.has_ended = True
        opened.fail(failure)

    def _fence(self, job: JobId) -> None:
        """Drop lower attempts of the request. Raises Refused if a higher one has been here."""
        highest = self._attempts.get(job.request_id, job.attempt)
        if highest > job.attempt:
            raise Refused(superseded(f"attempt {highest} of this request has been here"))
        self._attempts[job.request_id] = job.attempt
        self._attempts.move_to_end(job.request_id)
        if len(self._attempts) > MAX_REMEMBERED_REQUESTS:
            self._attempts.popitem(last=False)
        for other in tuple(self._by_request[job.request_id]):
            lower = self._jobs[other]
            if other.attempt < job.attempt and lower.leg is not None:
                lower.leg.stop(superseded(f"attempt {job.attempt} of this request has come"))

    def _check(self, job: PrefillJob | DecodeJob) -> None:
        """Raises Refused for a job that no gateway of ours sends. What the engine can see it checks
        itself."""
        samples = job.sample_indices
        if not 0 < len(samples) <= MAX_SAMPLES or len(set(samples)) != len(samples):
            raise invalid(f"sample_indices must be 1 to {MAX_SAMPLES} different numbers")
        peer = job.reader if isinstance(job, PrefillJob) else job.owner
        if peer is not None and peer.worker_id == self._parts.worker.worker_id:
            raise invalid("a worker reads no KV from itself; send a decode job without an owner")
        if job.sampling.sampler_version != self._parts.sampler_version:
            raise Refused(other_sampler(job.sampling.sampler_version, self._parts.sampler_version))
        if (
            len(job.token_ids) >= self._max_model_len
        ):  # the engine would say so, too, but only once all of them are hashed
            message = f"{len(job.token_ids)} tokens leave no room for an answer in the model's length of {self._max_model_len}; send fewer"
            raise invalid(message, Reason.CONTEXT_LENGTH_EXCEEDED)

    def _ended(self, opened: OpenJob) -> None:
        if opened.leg is not None:
            self._by_seq.pop(opened.leg.seq_id, None)

    def _forget(self, job: JobId) -> None:
        opened = self._jobs.pop(job, None)
        if opened is None:
            return
        jobs = self._by_request[job.request_id]
        jobs.discard(job)
        if not jobs:
            del self._by_request[job.request_id]


def other_sampler(asked: int, here: int) -> Failure:
    """The same seed would draw other tokens here, and an answer that goes on here would change. A worker of
    the gateway's release can take the request."""
    return Failure(
        code=Code.UNAVAILABLE,
        reason=Reason.LAYOUT_MISMATCH,
        message=f"sampler_version: {here} here, {asked} asked for; only workers of the gateway's own release may run this request",
        retry_after_s=1.0,
        retriable=True,
    )


def superseded(message: str) -> Failure:
    return Failure(code=Code.CANCELLED, reason=Reason.SUPERSEDED, message=message)


def _over_deadline(job: Job) -> Failure:
    return Failure(
        code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message=f"not done within its {job.deadline_s:g} s"
    )
