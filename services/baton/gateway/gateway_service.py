"""The gateway's core, independent of HTTP and gRPC: admits validated calls, runs them, counts them, and
drains."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Self

from baton.core.client_api import ModelInfo, Timeline, TotalUsage
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.interfaces import Membership, Network
from baton.gateway.auth.api_keys import KeyRing
from baton.gateway.cluster.scheduler_pool import SchedulerPool
from baton.gateway.gateway_rules import (
    GatewayRules,
    cluster_view,
    retry_rules,
    scheduler_times,
    validator,
    worker_sessions,
)
from baton.gateway.input.answers.answer_grammar import GrammarCheck
from baton.gateway.input.client_call import ClientCall, Identity
from baton.gateway.input.ignored_fields import IgnoredFieldNames
from baton.gateway.input.response_size import call_bytes, check_response_size
from baton.gateway.request.open_request import PHASES, OpenRequest, phase_times
from baton.gateway.request.output_builder import ChoiceSink
from baton.gateway.request.prefix_relay import PrefixRelay
from baton.gateway.request.request_observer import NO_REQUEST_OBSERVER, RequestObserver
from baton.gateway.request.request_run import RequestServices, run_concurrently
from baton.gateway.request.unread_output import UnreadStreams
from baton.gateway.text.stop_strings import StopPatterns
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.logging import get_logger
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import GatewayMetrics
from baton.runtime.observability.tracing import OFF, Tracing
from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget
from baton.runtime.process.process import Background
from baton.runtime.process.shared_account import Buffer

log = get_logger(__name__)

CLUSTER = "cluster"
"""Name of the health condition that the cluster can serve requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """Result of a call that succeeded. `timeline` has one entry per prompt, or none if it was not
    requested."""

    usage: TotalUsage
    timeline: tuple[Timeline, ...]


class GatewayService:
    """One gateway. Use as `async with`: entering starts the scheduler and worker connections, leaving closes
    them.

    Calls that still run when it closes fail.
    """

    def __init__(
        self,
        rules: GatewayRules,
        *,
        network: Network,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        rng: Random,
        budget: ByteBudget,
        schedulers: tuple[str, ...] = (),
        membership: Membership | None = None,
        keys: KeyRing | None = None,
        tracing: Tracing = OFF,
        awake_clock: Callable[[], float] | None = None,
        observer: RequestObserver = NO_REQUEST_OBSERVER,
        grammar_check: GrammarCheck | None = None,
    ) -> None:
        """Build the gateway's parts. Without `keys`, every caller may do everything.

        `budget` is the memory budget of the process.
        `awake_clock` measures the silence of workers and schedulers, see `AwakeClock`; None uses the event
        loop's clock.
        `observer` is told about requests, for the live view.
        `grammar_check` checks grammars of requests; None leaves that to the workers.
        """
        self.rules = rules
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._observer = observer
        self.keys = keys or KeyRing()
        self.health = Health(CLUSTER)
        self.budget = budget
        self.unread = UnreadStreams(self.budget, max_bytes=rules.stream_buffer_bytes, clock=_loop_time_s)
        self.view = cluster_view(rules, tokenizer)
        self.schedulers = SchedulerPool(
            network,
            self.view,
            addresses=schedulers,
            membership=membership,
            times=scheduler_times(rules),
            rng=rng,
            awake_clock=awake_clock,
        )
        self.workers = worker_sessions(rules, network, tokenizer, rng, awake_clock)
        self.validator = validator(rules, tokenizer, self.view, rng, grammar_check)
        self.prefixes = PrefixRelay(network, self.view, rules.model)
        self._services = self._request_services(rng, tracing)
        self._phases = {phase: metrics.phase_s.labels(phase) for phase in PHASES}
        self._ignored_names = IgnoredFieldNames(lambda name: log.info("field_ignored", field=name))
        self._stack = AsyncExitStack()
        self._none_open = asyncio.Event()
        self.num_open = self._num_incoming = 0

    def _request_services(self, rng: Random, tracing: Tracing) -> RequestServices:
        return RequestServices(
            schedulers=self.schedulers,
            workers=self.workers,
            view=self.view,
            rules=retry_rules(self.rules),
            metrics=self.metrics,
            rng=rng,
            tracing=tracing,
            observer=self._observer,
        )

    async def __aenter__(self) -> Self:
        self.view.on_change(self._cluster_changed)
        self._cluster_changed()
        await self._stack.enter_async_context(Background(self.schedulers.run()))
        self._stack.push_async_callback(self.workers.aclose)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def run(self, call: ClientCall, sink: ChoiceSink) -> CallOutcome:
        """Run a call to its end, and pass its choices to `sink` as they grow.

        Raises Refused if any of its requests fails. Cancelling this coroutine cancels the call.
        """
        check_response_size(call, self.rules.max_response_bytes)
        with self.budget.reserve(Account.REQUESTS, call_bytes(call), "the request"):
            return await self._run(call, sink)

    async def _run(self, call: ClientCall, sink: ChoiceSink) -> CallOutcome:
        num_requests = len(call.requests)
        self.admit(num_requests)
        self.keys.acquire(call.identity, num_requests)
        self.keys.charge(call.identity, num_requests - 1, asyncio.get_running_loop().time())
        self.num_open += num_requests
        self.metrics.open_requests.set(self.num_open)
        requests: list[OpenRequest] = []
        failure: Failure | None = None
        try:
            stops = StopPatterns(call.output_options.stop, is_included=call.output_options.includes_stop)
            requests += [
                OpenRequest(request, call, stops, self.tokenizer, sink, index)
                for index, request in enumerate(call.requests)
            ]
            for request in requests:
                self._observer.opened(request, call.identity)
            await sink.begin()
            await run_concurrently([request.run(self._services) for request in requests])
        except BaseException as error:
            failure = _failure_of(error)
            raise
        finally:
            for request in requests:
                self._observer.closed(request, failure)
            self.num_open -= num_requests
            self.keys.release(call.identity, num_requests)
            self.metrics.open_requests.set(self.num_open)
            if not self.num_open:
                self._none_open.set()
        now_s = asyncio.get_running_loop().time()
        for request in requests:
            self._observe(request, now_s - call.received_s)
        return CallOutcome(
            usage=TotalUsage(
                num_prompt_tokens=sum(each.request.num_prompt_tokens for each in requests),
                num_output_tokens=sum(each.output.num_tokens for each in requests),
                num_cached_tokens=sum(each.num_cached_tokens for each in requests),
                num_reasoning_tokens=sum(each.output.num_reasoning_tokens for each in requests),
            ),
            timeline=tuple(each.timeline(now_s) for each in requests) if call.output_options.timeline else (),
        )

    def admit(self, num_requests: int = 1) -> None:
        """Check that new requests may start. Raises Refused while draining (503) or at `max_open_requests`
        (429)."""
        if self.health.is_draining:
            message = "this gateway is shutting down; send the request again, to another gateway"
            raise Refused(Failure(code=Code.UNAVAILABLE, reason=Reason.DRAINING, message=message, retry_after_s=1.0))
        if self.num_open + self._num_incoming + num_requests > self.rules.max_open_requests:
            message = (
                f"{self.num_open} requests are open; at most {self.rules.max_open_requests} are allowed; retry later"
            )
            raise Refused(
                Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message=message, retry_after_s=1.0)
            )

    def admit_caller(self, authorization: str) -> Identity:
        """Identify a caller and admit a call of it, before the call is received.

        `authorization` is the value of the header. Raises Refused as `admit` and the methods of `KeyRing` do.
        """
        identity = self.keys.identify(authorization)
        self.admit()
        self.keys.admit(identity, asyncio.get_running_loop().time())
        return identity

    @contextmanager
    def hold_slot(self, identity: Identity) -> Iterator[None]:
        """Count a call as one open request while it is received and validated.

        This bounds the memory of request bodies. Raises Refused if the key has too many open requests.
        """
        self.keys.acquire(identity, 1)
        self._num_incoming += 1
        try:
            yield
        finally:
            self._num_incoming -= 1
            self.keys.release(identity, 1)

    @contextmanager
    def unsent_answer(self, num_bytes: int, on_cut: Callable[[OverBudget], None]) -> Iterator[Buffer]:
        """Count an answer without a run as unsent. `on_cut` is called if a smaller one needs its memory.

        Raises OverBudget if there is too little.
        """
        answer = self.unread.buffers.open(on_cut)
        try:
            answer.add(num_bytes)
            yield answer
        finally:
            answer.close()

    def count_ignored(self, names: Sequence[str]) -> None:
        """Count unknown request fields that were ignored, by name."""
        for name in names:
            self.metrics.ignored_fields.labels(self._ignored_names.label(name)).inc()

    def count_result(self, endpoint: str, failure: Failure | None) -> None:
        """Count a call's result by endpoint, status and reason. `failure` None means success."""
        code, reason = (str(failure.code.http), failure.reason.value) if failure else ("200", "")
        self.metrics.requests.labels(endpoint, code, reason).inc()
        self._observer.counted(endpoint, failure)

    @property
    def models(self) -> tuple[ModelInfo, ...]:
        """The served models. There is exactly one."""
        return (ModelInfo(model_id=self.rules.model, max_model_len=self.view.max_model_len),)

    async def drain(self, drain_s: float) -> None:
        """Reject new calls, and wait up to `drain_s` seconds until the open requests have ended.

        Requests that are still open then are not cancelled here.
        """
        self.health.drain()
        log.info("gateway_drain_started", open_requests=self.num_open)
        self._none_open.clear()
        if self.num_open:
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._none_open.wait()

    def _cluster_changed(self) -> None:
        problem = self.view.problem
        if problem:
            self.health.not_ready(CLUSTER, problem)
        else:
            self.health.ready(CLUSTER)
        if self.view.scheduler is not None:
            self.workers.update_workers(
                report.worker for report in self.view.reports if report.model == self.rules.model
            )

    def _observe(self, request: OpenRequest, request_s: float) -> None:
        """Add an ended request to the metrics."""
        metrics, latency, slo = self.metrics, request.delivery.latency, request.request.slo
        ttft_s, tpot_s = latency.ttft_s(request.received_s), latency.tpot_s
        metrics.request_s.observe(request_s)
        if ttft_s is not None:
            metrics.ttft_s.observe(ttft_s)
        if tpot_s is not None:
            metrics.tpot_s.observe(tpot_s)
        for term, slo_s, actual_s in (("ttft", slo.ttft_s, ttft_s), ("tpot", slo.tpot_s, tpot_s)):
            if slo_s is not None and actual_s is not None:
                metrics.slo_attainment.labels(term, "met" if actual_s <= slo_s else "missed").inc()
        for phase, phase_s in phase_times(request.record, request.delivery, request.received_s):
            self._phases[phase].observe(phase_s)
        metrics.prompt_tokens.inc(request.request.num_prompt_tokens)
        metrics.cached_tokens.inc(request.num_cached_tokens)
        metrics.output_tokens.inc(request.output.num_tokens)
        metrics.request_prompt_tokens.observe(request.request.num_prompt_tokens)
        metrics.request_output_tokens.observe(request.output.num_tokens)
        metrics.longest_sample_tokens.observe(request.output.num_longest_sample_tokens)
        metrics.request_max_tokens.observe(request.request.sampling.max_tokens)
        metrics.request_n.observe(len(request.request.sample_indices))
        for finish in request.output.finishes:
            metrics.finished_samples.labels(finish.value).inc()


def _failure_of(error: BaseException) -> Failure:
    """Return why a call ended without a result."""
    if isinstance(error, Refused):
        return error.failure
    if isinstance(error, asyncio.CancelledError):
        return Failure(code=Code.CANCELLED, reason=Reason.CANCELLED, message="the client has disconnected")
    return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=type(error).__name__)


def _loop_time_s() -> float:
    return asyncio.get_running_loop().time()
