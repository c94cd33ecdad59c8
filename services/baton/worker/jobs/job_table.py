"""Tracks the jobs of one worker by JobId, and drops jobs of outdated attempts.

The table keeps a job from its receipt until the gateway has acknowledged the job's last message. A job or
cancel that a gateway repeats over a new stream therefore changes nothing. Each job ends with exactly one last
message.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from baton.core.errors import QUEUE_FULL_RETRY_S, Code, Failure, Reason, Refused, invalid
from baton.core.ids import DecisionId, JobId
from baton.core.messages.jobs import Cancel, DecodeJob, Job, PrefillJob
from baton.core.request import LegTimeline, TokenDelta
from baton.runtime.logging import get_logger
from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget, Reservation
from baton.worker.jobs.decode_leg import LocalDecodeLeg
from baton.worker.jobs.job_span import JobSpan
from baton.worker.jobs.leg import Leg, LegParts
from baton.worker.jobs.prefill_leg import PrefillLeg
from baton.worker.jobs.pulled_decode_leg import PulledDecodeLeg
from baton.worker.jobs.running_legs import RunningLegs
from baton.worker.sessions.gateway_sessions import GatewaySession
from baton.worker.worker_budget import job_bytes

log = get_logger(__name__)

MAX_REMEMBERED_REQUESTS = 1 << 16
"""Maximum number of requests whose highest attempt is remembered. A lower attempt arrives within moments or
never."""
MAX_SAMPLES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSamples:
    """The samples of one job that have not ended, and the gateway session that the job belongs to."""

    job: JobId
    gateway_id: str
    session_id: str
    sample_indices: frozenset[int]


class OpenJob:
    """One job in the table. Implements `LegOutput` for its leg. `span` is None if the job is not traced."""

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
        self.reservation: Reservation | None = None
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
        self.counted()  # the scheduler may drop its reservation
        if self.deadline is not None:
            self.deadline.cancel()
        if self.span is not None:
            self.span.end(
                timeline, failure, num_output_tokens=self.leg.num_output_tokens if self.leg is not None else 0
            )
        self._on_end(self)


class JobTable:
    """All jobs whose last message has not been acknowledged. Used from one event loop."""

    def __init__(
        self,
        parts: LegParts,
        legs: RunningLegs,
        *,
        max_following: int,
        on_counted: Callable[[DecisionId], None],
        budget: ByteBudget,
    ) -> None:
        """Create an empty table.

        max_following: how many jobs may wait for another worker's KV. The engine bounds those that wait for
            memory.
        on_counted: called when a decision is contained in the worker's own numbers.
        budget: the jobs take its account `JOBS`.
        """
        self._parts = parts
        self._legs = legs
        self._max_model_len = parts.engine.engine.config.max_model_len
        self._max_following = max_following
        self._on_counted = on_counted
        self._budget = budget
        self._jobs: dict[JobId, OpenJob] = {}
        self._by_request: dict[bytes, set[JobId]] = {}
        self._attempts: OrderedDict[bytes, int] = OrderedDict()
        self._seq_ids = count(1)
        self._refusal: Failure | None = None

    # -- called by sessions ------------------------------------------------------------------------

    def start(self, job: PrefillJob | DecodeJob, session: GatewaySession) -> None:
        """Start a job, unless this attempt is known already.

        A job that cannot start gets a Failure as its last message.
        """
        known = self._jobs.get(job.job)
        was_here_before = self._attempts.get(job.job.request_id) == job.job.attempt
        if (known is not None and known.session is session) or (known is None and was_here_before):
            return
        opened = OpenJob(job, session, self._on_counted, self._on_job_ended)
        if known is not None:  # the gateway lost its first session; it retries with a higher attempt
            session.put_failure(job.job, superseded(f"job {job.job} runs for another session"))
            return
        self._jobs[job.job] = opened
        self._by_request.setdefault(job.job.request_id, set()).add(job.job)
        if self._parts.tracing.is_on:
            opened.span = JobSpan(self._parts.tracing, job, self._parts.worker)
            job = replace(job, trace_context=opened.span.context)
        try:
            self._drop_lower_attempts(job.job)
            if self._refusal is not None:
                raise Refused(self._refusal)
            self._validate(job)
            opened.reservation = self._reserve(job)
            leg = opened.leg = self._build_leg(job, opened)
            self._legs.add(leg)
            opened.deadline = asyncio.get_running_loop().call_later(
                max(0.0, job.deadline_s), leg.stop, _deadline_exceeded(job)
            )
            leg.begin()
        except Refused as refused:
            log.info(
                "job_refused", job=str(job.job), reason=refused.failure.reason.value, problem=refused.failure.message
            )
            self._fail_unstarted(opened, refused.failure)
        except Exception as error:  # a bug in Baton; it must not end the session with all its jobs
            log.exception("job_failed", job=str(job.job))
            message = f"the job could not be started: {type(error).__name__}"
            self._fail_unstarted(opened, Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message))

    def cancel(self, cancel: Cancel, session: GatewaySession) -> None:
        """End samples of a job. Does nothing if the job has ended or is unknown."""
        opened = self._jobs.get(cancel.job)
        if opened is not None and opened.session is session and opened.leg is not None:
            opened.leg.cancel(cancel.sample_indices, cancel.reason)

    def forget(self, jobs: Iterable[JobId], session: GatewaySession) -> None:
        """Drop jobs whose last message the gateway has acknowledged."""
        for job in jobs:
            opened = self._jobs.get(job)
            if opened is not None and opened.session is session:
                self._forget(job)

    def drop_session(self, session: GatewaySession) -> None:
        """Cancel and drop all jobs of a session that has ended."""
        for opened in [o for o in self._jobs.values() if o.session is session]:
            if opened.leg is not None:
                opened.leg.stop(Failure(code=Code.CANCELLED, reason=Reason.CANCELLED, message="the session has ended"))
            self._forget(opened.id)

    # -- called by the worker ----------------------------------------------------------------------

    def refuse(self, failure: Failure) -> None:
        """Answer every new job with `failure`. Open jobs continue."""
        self._refusal = failure

    def stop_all(self, failure: Failure) -> None:
        """End every open job with `failure`."""
        for opened in tuple(self._jobs.values()):
            if opened.leg is not None:
                opened.leg.stop(failure)

    def open_jobs(self) -> Iterator[JobId]:
        """Yield the ids of all jobs that have not ended."""
        return (opened.id for opened in self._jobs.values() if not opened.has_ended)

    def open_samples(self) -> Iterator[OpenSamples]:
        """Yield the samples that still run, by job, for checks of cancels."""
        for opened in self._jobs.values():
            if opened.leg is not None and not opened.has_ended:
                yield OpenSamples(
                    job=opened.id,
                    gateway_id=opened.session.gateway_id,
                    session_id=opened.session.session_id,
                    sample_indices=opened.leg.open_samples,
                )

    def counted_decisions(self) -> Iterator[DecisionId]:
        """Yield the decisions of running jobs that this worker's numbers contain, for the first report on a
        stream."""
        return (o.decision_id for o in self._jobs.values() if o.is_counted and not o.has_ended and o.decision_id)

    @property
    def num_open(self) -> int:
        """Number of jobs whose leg has not ended."""
        return len(self._legs)

    @property
    def num_preparing(self) -> int:
        """Number of jobs that are not in the engine yet.

        A decode leg waits for the first blocks of its prompt, other legs wait for a prefix of a peer or of a
        slower tier, or until their grammar is compiled.
        """
        return sum(leg.is_preparing for leg in self._legs.values())

    @property
    def num_following(self) -> int:
        """Number of those that wait for another worker's KV."""
        return sum(leg.is_preparing and leg.reads_from_peer for leg in self._legs.values())

    # -- internal ----------------------------------------------------------------------------------

    def _reserve(self, job: PrefillJob | DecodeJob) -> Reservation:
        """Reserve the memory of a job until it is forgotten. Raises Refused; another worker may take it."""
        try:
            return self._budget.reserve(Account.JOBS, job_bytes(job, self._max_model_len), "the job")
        except OverBudget as error:
            raise Refused(replace(error.failure, retriable=error.fits_later)) from error

    def _build_leg(self, job: PrefillJob | DecodeJob, opened: OpenJob) -> Leg:
        seq_id = next(self._seq_ids)
        follows = job.prefix_source if isinstance(job, PrefillJob) else job.owner or job.prefix_source
        if follows is not None and self.num_following >= self._max_following:
            raise Refused(
                Failure(
                    code=Code.RESOURCE_EXHAUSTED,
                    reason=Reason.QUEUE_FULL,
                    message=(
                        f"{self._max_following} requests wait here for KV, which is the limit; "
                        "try another worker or retry later"
                    ),
                    retry_after_s=QUEUE_FULL_RETRY_S,
                    retriable=True,
                )
            )
        if isinstance(job, PrefillJob):
            return PrefillLeg(job, seq_id, self._parts, opened)
        if job.owner is None:
            return LocalDecodeLeg(job, seq_id, self._parts, opened)
        return PulledDecodeLeg(job, job.owner, seq_id, self._parts, opened)

    @staticmethod
    def _fail_unstarted(opened: OpenJob, failure: Failure) -> None:
        """End a job whose leg holds no resources yet."""
        if opened.leg is not None:
            opened.leg.has_ended = True
        opened.fail(failure)

    def _drop_lower_attempts(self, job: JobId) -> None:
        """Stop lower attempts of the request. Raises Refused if a higher attempt was received before."""
        highest = self._attempts.get(job.request_id, job.attempt)
        if highest > job.attempt:
            raise Refused(superseded(f"attempt {highest} of this request was received before"))
        self._attempts[job.request_id] = job.attempt
        self._attempts.move_to_end(job.request_id)
        if len(self._attempts) > MAX_REMEMBERED_REQUESTS:
            self._attempts.popitem(last=False)
        for other in tuple(self._by_request[job.request_id]):
            lower = self._jobs[other]
            if other.attempt < job.attempt and lower.leg is not None:
                lower.leg.stop(superseded(f"attempt {job.attempt} of this request was received"))

    def _validate(self, job: PrefillJob | DecodeJob) -> None:
        """Raise Refused for a job that a correct gateway never sends.

        The engine checks its own limits itself.
        """
        samples = job.sample_indices
        if not 0 < len(samples) <= MAX_SAMPLES or len(set(samples)) != len(samples):
            raise invalid(f"sample_indices has {len(samples)} entries; must be 1 to {MAX_SAMPLES} distinct numbers")
        peer = job.reader if isinstance(job, PrefillJob) else job.owner
        if peer is not None and peer.worker_id == self._parts.worker.worker_id:
            raise invalid("reader and owner are the same worker; send one decode job without an owner instead")
        if job.sampling.sampler_version != self._parts.sampler_version:
            raise Refused(other_sampler(job.sampling.sampler_version, self._parts.sampler_version))
        if job.sampling.is_constrained:
            self._parts.constraints.check(job.sampling)
        if len(job.token_ids) >= self._max_model_len:  # checked here because the engine checks only after hashing
            message = (
                f"the prompt has {len(job.token_ids)} tokens; it must be shorter than the model length of "
                f"{self._max_model_len} tokens"
            )
            raise invalid(message, Reason.CONTEXT_LENGTH_EXCEEDED)

    def _on_job_ended(self, opened: OpenJob) -> None:
        if opened.leg is not None:
            self._legs.remove(opened.leg)
            opened.leg.left()

    def _forget(self, job: JobId) -> None:
        opened = self._jobs.pop(job, None)
        if opened is None:
            return
        if opened.reservation is not None:
            opened.reservation.release()
        jobs = self._by_request[job.request_id]
        jobs.discard(job)
        if not jobs:
            del self._by_request[job.request_id]


def other_sampler(requested: int, supported: int) -> Failure:
    """Return the failure for a job with another sampler version.

    Another version draws other tokens from the same seed, so a resumed answer would change.
    """
    return Failure(
        code=Code.UNAVAILABLE,
        reason=Reason.LAYOUT_MISMATCH,
        message=(
            f"sampler_version is {requested}; this worker supports {supported}. Use a worker of the gateway's release"
        ),
        retry_after_s=1.0,
        retriable=True,
    )


def superseded(message: str) -> Failure:
    """Return the failure for a job that a higher attempt or another session replaces."""
    return Failure(code=Code.CANCELLED, reason=Reason.SUPERSEDED, message=message)


def _deadline_exceeded(job: Job) -> Failure:
    return Failure(
        code=Code.DEADLINE_EXCEEDED,
        reason=Reason.DEADLINE,
        message=f"the request did not finish within its deadline of {job.deadline_s:g} s",
    )
