"""Stub workers and a stub scheduler for gateway tests. They exchange real messages over an in-process
network.

A stub worker's tokens depend only on the prompt, the sample and the position. A test therefore knows the
expected response, no matter how many workers took part.
"""

import asyncio
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from baton.core.client_api import Caller, Timeline
from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport, WorkerRole
from baton.core.errors import Code, Failure, Reason, StreamBroken
from baton.core.ids import DecisionId, JobId, WorkerRef
from baton.core.interfaces import Duplex, Source
from baton.core.messages.jobs import (
    Ack,
    Cancel,
    DecodeJob,
    Heartbeat,
    JobFailure,
    PrefillJob,
    ReceivedGatewayMessage,
    SessionHello,
    SessionHelloReply,
    Step,
    WorkerMessage,
)
from baton.core.request import (
    FinishReason,
    LegTimeline,
    PromptLogprobs,
    RequestActuals,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from baton.gateway.auth.api_keys import KeyRing
from baton.gateway.gateway_budget import gateway_budget
from baton.gateway.gateway_rules import GatewayRules
from baton.gateway.gateway_service import GatewayService
from baton.gateway.input.answers.answer_grammar import GrammarCheck
from baton.gateway.input.client_call import ClientCall, Endpoint
from baton.gateway.request.request_observer import NO_REQUEST_OBSERVER, RequestObserver
from baton.gateway.text.tokenizer import ByteTokenizer, Tokenizer
from baton.runtime.network.in_process_network import InProcessDuplex, InProcessNetwork
from baton.runtime.network.mailbox import Mailbox
from baton.runtime.observability.metrics import GatewayMetrics
from baton.runtime.observability.tracing import OFF, Tracing
from baton.runtime.process.byte_budget import Account
from tests import builders
from tests.times import TEST_TIMES

ALPHABET = b"abcdefghijklmnopqrstuvwxyz "
ANONYMOUS = Caller()
PROMPT = "hello"
LONG_LIMITS: dict[str, Any] = {"detection_s": 30.0, "scheduler_wait_s": 60.0}
"""Rules for gateways in real time: no peer counts as lost because this process was stalled."""


def token_at(prompt: Sequence[int], sample: int, index: int) -> int:
    """Return a stub worker's token, which is a letter."""
    return ALPHABET[zlib.crc32(bytes(str((list(prompt), sample, index)), "ascii")) % len(ALPHABET)]


def answer_to(prompt: Sequence[int] | bytes, num_tokens: int, sample: int = 0) -> bytes:
    """Return the response that a client gets without faults."""
    return bytes(token_at(list(prompt), sample, index) for index in range(num_tokens))


async def until(happened: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Poll until `happened()` is true. Raises TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


Hook = Callable[["StubWorker", JobId, int, int], None]
"""Called with (worker, job, sample, output index) before a stub worker sends that token."""


class StubWorker:
    """One incarnation of a worker. Everything that it received is in `jobs` and `cancels`."""

    def __init__(self, network: InProcessNetwork, worker_id: str, role: str = "hybrid", *, epoch: int = 1) -> None:
        """Register the worker in `network`. Tests over sockets serve it themselves and pass an unused
        network."""
        self.network = network
        self.ref = builders.worker_ref(worker_id, epoch)
        self.report = replace(
            builders.worker_report(worker_id, role, epoch=epoch),
            layout=replace(builders.layout(), tokenizer_fingerprint="bytes"),
        )
        self.prefill_s = 0.02
        self.step_s = 0.01
        self.heartbeat_s = TEST_TIMES["heartbeat_s"]
        self.step_age_s = 0.0
        self.token_at: Callable[[Sequence[int], int, int], int] = token_at
        self.tokens_a_step = 1
        self.before_token: Hook = lambda *_: None
        self.fail_job: Callable[[PrefillJob | DecodeJob], Failure | None] = lambda _: None
        self.finish_at: int | None = None
        self.sample_finish_at: dict[int, int] = {}
        self.loses_cancels = False
        self.jobs: list[PrefillJob | DecodeJob] = []
        self.cancels: list[Cancel] = []
        self.hellos: list[SessionHello] = []
        self.is_dead = False
        self.is_paused = False
        self.forgets_sessions = False
        self.loses_first_of_every_stream = False
        self._sessions: dict[str, _StubSession] = {}
        self._running: dict[JobId, asyncio.Task[None]] = {}
        network.add_worker(self.ref.address, self)

    def first_index(self, job: JobId) -> int:
        """Return the output index of the first token that a received job asks for."""
        sent = next(each for each in self.jobs if each.job == job)
        return len(sent.token_ids) - sent.num_prompt_tokens

    @property
    def open_jobs(self) -> list[JobId]:
        return list(self._running)

    def die(self) -> None:
        """Die as after kill -9: streams break, and dials are refused."""
        self.is_dead = True
        for task in self._running.values():
            task.cancel()
        self._running.clear()
        self.network.remove(self.ref.address)

    def cut(self) -> None:
        """Break every session's stream. The worker stays alive."""
        for session in self._sessions.values():
            if session.stream is not None:
                session.stream.break_("cut")

    def send_twice(self) -> None:
        """Send every unacknowledged message again."""
        for session in self._sessions.values():
            for message in session.kept:
                session.send(message)

    def lose_next(self) -> None:
        """Lose the next message of each session, but send it again on request."""
        for session in self._sessions.values():
            session.num_to_lose = 1

    def send_delta(self, *deltas: TokenDelta) -> None:
        for session in self._sessions.values():
            session.put(Step(seq=session.next_seq, deltas=deltas))

    def fail_now(self, job: JobId, failure: Failure) -> None:
        """Fail a running job."""
        if task := self._running.pop(job, None):
            task.cancel()
            for session in self._sessions.values():
                session.put(Step(seq=session.next_seq, failures=(JobFailure(job=job, failure=failure),)))

    async def session(self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage]) -> None:
        hello = await stream.receive()
        assert isinstance(hello, SessionHello)
        self.hellos.append(hello)
        known = None if self.forgets_sessions else self._sessions.get(hello.session_id)
        session = known or _StubSession()
        self._sessions[hello.session_id] = session
        session.stream = stream
        resumed = known is not None
        oldest = session.kept[0].seq if session.kept else session.next_seq
        stream.send(SessionHelloReply(worker=self.ref, layout=self.report.layout, resumed=resumed, oldest_seq=oldest))
        session.num_to_lose = int(self.loses_first_of_every_stream)
        for message in session.kept:
            if message.seq > hello.last_seq:
                session.send(message)
        beat = asyncio.create_task(self._beat(session, stream))
        try:
            while True:
                self._take(await stream.receive(), session)
        finally:
            beat.cancel()

    async def peer(self, stream: Any) -> None:
        raise AssertionError("stub workers serve no pulls")

    async def copy_prefix(self, stream: Any) -> None:
        raise AssertionError("stub workers export no prefix")

    async def _beat(self, session: "_StubSession", stream: Any) -> None:
        while session.stream is stream:
            await asyncio.sleep(self.heartbeat_s)
            if not self.is_paused:
                session.put(Heartbeat(seq=session.next_seq, steps_done=0, step_age_s=self.step_age_s, draining=False))

    def _take(self, message: ReceivedGatewayMessage, session: "_StubSession") -> None:
        if isinstance(message, PrefillJob | DecodeJob):
            if message.job not in {job.job for job in self.jobs}:
                self.jobs.append(message)
                self._running[message.job] = asyncio.create_task(self._run(message, session))
        elif isinstance(message, Cancel):
            if self.loses_cancels:
                return
            self.cancels.append(message)
            if not message.sample_indices and (task := self._running.pop(message.job, None)):
                task.cancel()
                failure = Failure(code=Code.CANCELLED, reason=message.reason, message="cancelled")
                session.put(Step(seq=session.next_seq, failures=(JobFailure(job=message.job, failure=failure),)))
        elif isinstance(message, Ack):
            session.kept = [kept for kept in session.kept if kept.seq > message.seq]

    async def _run(self, job: PrefillJob | DecodeJob, session: "_StubSession") -> None:
        failure = self.fail_job(job)
        if failure is None:
            await asyncio.sleep(self.prefill_s)
            await (self._prefill(job, session) if isinstance(job, PrefillJob) else self._decode(job, session))
        else:
            session.put(Step(seq=session.next_seq, failures=(JobFailure(job=job.job, failure=failure),)))
        self._running.pop(job.job, None)

    async def _prefill(self, job: PrefillJob, session: "_StubSession") -> None:
        begin = len(job.token_ids) - job.num_prompt_tokens
        deltas = [self._delta(job, sample, begin, 1) for sample in job.sample_indices]
        timeline = LegTimeline(
            worker_id=self.ref.worker_id, pid=1, compute_s=self.prefill_s, num_computed_tokens=len(job.token_ids)
        )
        usage = Usage(num_prompt_tokens=job.num_prompt_tokens, num_cached_tokens={"device": 4})
        deltas[-1] = replace(deltas[-1], usage=usage, timeline=timeline, is_last=True)
        await self._wait_paused()
        session.put(Step(seq=session.next_seq, deltas=tuple(deltas)))

    async def _decode(self, job: DecodeJob, session: "_StubSession") -> None:
        at = len(job.token_ids) - job.num_prompt_tokens
        going = set(job.sample_indices)
        while going:
            await asyncio.sleep(self.step_s)
            going -= {i for cancel in self.cancels if cancel.job == job.job for i in cancel.sample_indices}
            await self._wait_paused()
            deltas = [self._delta(job, sample, at, self.tokens_a_step) for sample in sorted(going)]
            going -= {delta.sample_index for delta in deltas if delta.finish}
            if deltas and not going:
                timeline = LegTimeline(
                    worker_id=self.ref.worker_id, pid=2, decode_s=1.0, kv_bytes=640, transport="shared-memory"
                )
                deltas[-1] = replace(deltas[-1], timeline=timeline, is_last=True)
            if not deltas:
                failure = Failure(code=Code.CANCELLED, reason=Reason.CANCELLED, message="cancelled")
                session.put(Step(seq=session.next_seq, failures=(JobFailure(job=job.job, failure=failure),)))
                return
            session.put(Step(seq=session.next_seq, deltas=tuple(deltas)))
            at += self.tokens_a_step

    def _delta(self, job: PrefillJob | DecodeJob, sample: int, begin: int, count: int) -> TokenDelta:
        prompt = job.token_ids[: job.num_prompt_tokens]
        finish_at = self.sample_finish_at.get(sample, self.finish_at)
        end = min(job.sampling.max_tokens, finish_at or job.sampling.max_tokens)
        tokens = []
        for index in range(begin, min(begin + count, end)):
            self.before_token(self, job.job, sample, index)
            if job.job not in self._running:
                raise asyncio.CancelledError
            tokens.append(self.token_at(prompt, sample, index))
        finish = None
        if begin + len(tokens) >= end:
            finish = FinishReason.STOP if finish_at == end else FinishReason.LENGTH
        num_logprobs = job.sampling.num_logprobs
        logprobs = () if num_logprobs is None else tuple(logprobs_of(token, num_logprobs) for token in tokens)
        return TokenDelta(
            job=job.job,
            sample_index=sample,
            output_index=begin,
            token_ids=tuple(tokens),
            logprobs=logprobs,
            finish=finish,
            prompt_logprobs=None if begin or sample != job.sample_indices[0] else prompt_logprobs_of(job),
        )

    async def _wait_paused(self) -> None:
        await until(lambda: not self.is_paused, timeout_s=1e6)


def kill_at(index: int, sample: int = 0) -> Hook:
    """Return a hook that kills the worker before it sends this token."""

    def hook(worker: StubWorker, job: JobId, at_sample: int, at_index: int) -> None:
        if (at_sample, at_index) == (sample, index):
            worker.die()

    return hook


def logprobs_of(token: int, num_logprobs: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-0.5, top=tuple((token + rank, -0.5 - rank) for rank in range(num_logprobs)))


def prompt_logprobs_of(job: PrefillJob | DecodeJob) -> PromptLogprobs | None:
    """Return a stub worker's logprobs of a prompt: that of a token is minus its id."""
    num_top, targets = job.sampling.num_prompt_logprobs, job.token_ids[1 : job.num_prompt_tokens]
    if num_top is None:
        return None
    top = [(token + rank, -0.5 - rank) for token in targets for rank in range(num_top)]
    return PromptLogprobs(
        num_top=num_top,
        chosen=array("f", [-token for token in targets]),
        ranks=array("I", [3] * len(targets)),
        top_ids=array("I", [token for token, _ in top]),
        top_values=array("f", [logprob for _, logprob in top]),
    )


class _StubSession:
    def __init__(self) -> None:
        self.next_seq = 1
        self.kept: list[Step | Heartbeat] = []
        self.stream: Any = None
        self.num_to_lose = 0

    def put(self, message: Step | Heartbeat) -> None:
        self.kept.append(message)
        self.next_seq += 1
        self.send(message)

    def send(self, message: WorkerMessage) -> None:
        if self.num_to_lose:
            self.num_to_lose -= 1
        elif self.stream is not None:
            try:
                self.stream.send(message)
            except StreamBroken:
                self.stream = None


class StubScheduler:
    """Places each attempt on the first living workers that it need not avoid, unless `answer` decides
    otherwise."""

    def __init__(self, network: InProcessNetwork, address: str = "scheduler:1") -> None:
        self.network = network
        self.address = address
        self.workers: list[StubWorker] = []
        self.queries: list[PlacementQuery] = []
        self.actuals: list[RequestActuals] = []
        self.num_outcomes_per_call: list[int] = []
        self.drained: list[tuple[str, bool]] = []
        self.cleared: list[bytes] = []
        self.records: tuple[DecisionRecord, ...] = ()
        self.answer: Callable[[PlacementQuery], Placement | Rejection | StillWaiting | None] = lambda _: None
        self.hangs = False
        self._watchers: list[Mailbox[ClusterUpdate]] = []
        network.add_scheduler(address, self)

    def add(self, *workers: StubWorker) -> None:
        self.workers.extend(workers)
        self.publish()

    def remove(self, worker: StubWorker) -> None:
        self.workers.remove(worker)
        self.publish()

    def publish(self) -> None:
        for watcher in self._watchers:
            watcher.put(self._update())

    def die(self) -> None:
        self.network.remove(self.address)

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        self.queries.append(query)
        if self.hangs:
            await asyncio.sleep(1e6)
        answer = self.answer(query)
        if answer is not None:
            return answer
        return self.place_by_role(query)

    def place_by_role(self, query: PlacementQuery) -> Placement | Rejection:
        living = [w for w in self.workers if not w.is_dead]
        kept = [w for w in living if w.ref not in query.avoid] or living
        decode = next((w for w in kept if w.report.role.can_decode), None)
        prefill = next((w for w in kept if w.report.role.can_prefill and w is not decode), None)
        if query.max_tokens - query.num_output_tokens <= 1 and prefill is not None:
            decode = None
        elif decode is not None and decode.report.role is WorkerRole.HYBRID:
            prefill = None
        if decode is None and (prefill is None or query.max_tokens - query.num_output_tokens > 1):
            return Rejection(reason=Reason.NO_WORKERS, message="no ready decode worker", retry_after_s=1.0)
        return placement(
            prefill.ref if prefill else None,
            decode.ref if decode else None,
            decision_id=f"decision-{len(self.queries)}",
        )

    async def finished(self, *actuals: RequestActuals) -> None:
        self.actuals += actuals
        self.num_outcomes_per_call.append(len(actuals))

    async def watch(self) -> Source[ClusterUpdate]:
        inbox: Mailbox[ClusterUpdate] = Mailbox(1000)
        inbox.put(self._update())
        self._watchers.append(inbox)
        return InProcessDuplex(inbox, Mailbox[Any](1))

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        return self.records

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        self.drained.append((worker_id, node_shutting_down))
        return any(w.ref.worker_id == worker_id for w in self.workers)

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        self.cleared.append(tenant_salt)
        return tuple(w.ref.worker_id for w in self.workers)

    async def cache_stats(self) -> CacheStats:
        return CacheStats(total=TokenReuse(num_requests=1))

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        raise AssertionError("stub workers do not report")

    def _update(self) -> ClusterUpdate:
        live_workers = [w for w in self.workers if not w.is_dead]
        sources = [w for w in live_workers if w.report.role.can_prefill]
        reports = [
            replace(w.report, links=tuple(builders.link(s.ref.worker_id) for s in sources if s is not w))
            for w in live_workers
        ]
        return ClusterUpdate(scheduler_id="stub", reports=tuple(reports), pid=6, host="there")


def placement(prefill: WorkerRef | None, decode: WorkerRef | None, decision_id: str = "decision") -> Placement:
    return Placement(
        decision_id=DecisionId(decision_id), scheduler_id="stub", policy="first", prefill=prefill, decode=decode
    )


@dataclass(slots=True)
class OutputCollector:
    """A sink that stores all output."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, list[FinishReason]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[PromptLogprobs]] = field(default_factory=dict)

    async def begin(self) -> None:
        """Prepare nothing."""

    def put(self, choice: Any) -> None:
        assert choice.index not in self.finishes, "a choice went on after its end"
        self.texts[choice.index] = self.texts.get(choice.index, "") + choice.text
        self.token_ids.setdefault(choice.index, []).extend(choice.token_ids)
        if choice.prompt_logprobs is not None:
            self.prompt_logprobs.setdefault(choice.index, []).append(choice.prompt_logprobs)
        if choice.finish is not None:
            self.finishes.setdefault(choice.index, []).append(choice.finish)


@dataclass(slots=True, kw_only=True)
class Cluster:
    network: InProcessNetwork
    scheduler: StubScheduler
    gateway: GatewayService
    registry: CollectorRegistry

    def worker(self, worker_id: str, role: str = "hybrid", *, epoch: int = 1) -> StubWorker:
        worker = StubWorker(self.network, worker_id, role, epoch=epoch)
        self.scheduler.add(worker)
        return worker

    async def call(self, prompt: Any = "hello", **body: Any) -> ClientCall:
        received_s = asyncio.get_running_loop().time()
        return await self.gateway.validator.call(
            Endpoint.COMPLETIONS, {"prompt": prompt, "max_tokens": 8} | body, ANONYMOUS, received_s=received_s
        )

    async def complete(self, prompt: Any = "hello", **body: Any) -> OutputCollector:
        """Run one call to its end."""
        output = OutputCollector()
        await self.gateway.run(await self.call(prompt, **body), output)
        return output

    async def timeline(self, prompt: Any = "hello", **body: Any) -> Timeline:
        """Run one call to its end, and return its timeline."""
        ending = await self.gateway.run(await self.call(prompt, timeline=True, **body), OutputCollector())
        return ending.timeline[0]


def rules(**changes: Any) -> GatewayRules:
    fields: dict[str, Any] = {
        "gateway_id": "gateway-0",
        "model": "demo",
        "heartbeat_s": TEST_TIMES["heartbeat_s"],
        "detection_s": TEST_TIMES["detection_s"],
        "scheduler_wait_s": TEST_TIMES["scheduler_wait_s"],
        "request_timeout_s": 60.0,
        "max_open_requests": 256,
        "max_attempts": 8,
        "stream_buffer_bytes": 256 * 1024,
        "max_response_bytes": 128 * 2**20,
    }
    return GatewayRules(**(fields | changes))


@asynccontextmanager
async def cluster(
    *workers: tuple[str, str],
    tokenizer: Tokenizer | None = None,
    keys: KeyRing | None = None,
    tracing: Tracing = OFF,
    awake_clock: Callable[[], float] | None = None,
    memory_limits: Mapping[Account, int] | None = None,
    observer: RequestObserver = NO_REQUEST_OBSERVER,
    grammar_check: GrammarCheck | None = None,
    **changes: Any,
) -> AsyncIterator[Cluster]:
    """Start a gateway with these (id, role) stub workers and wait until it is ready.

    Afterwards it checks that no task is left.
    """
    before = asyncio.all_tasks()
    network = InProcessNetwork()
    scheduler = StubScheduler(network)
    registry = CollectorRegistry()
    async with GatewayService(
        rules(**changes),
        network=network,
        tokenizer=tokenizer or ByteTokenizer(),
        metrics=GatewayMetrics(registry),
        rng=Random(7),
        budget=builders.with_limits(gateway_budget(2**30), memory_limits),
        schedulers=(scheduler.address,),
        keys=keys,
        tracing=tracing,
        awake_clock=awake_clock,
        observer=observer,
        grammar_check=grammar_check,
    ) as gateway:
        running = Cluster(network=network, scheduler=scheduler, gateway=gateway, registry=registry)
        for worker_id, role in workers:
            running.worker(worker_id, role)
        await until(lambda: not workers or gateway.health.is_ready)
        yield running
    await network.aclose()
    for worker in scheduler.workers:
        worker.die()

    def left() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - before - {asyncio.current_task()}

    with suppress(TimeoutError):
        await until(lambda: not left())
    assert not left(), left()
