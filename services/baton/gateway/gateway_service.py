"""The gateway as one object: takes validated calls, carries them, counts them, and drains. Knows neither HTTP
nor gRPC."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Self

from baton.core.client_api import ModelInfo, Timeline, TotalUsage
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.interfaces import Membership, Network
from baton.core.request import NO_SLO, GenerateRequest, Slo
from baton.gateway.auth.api_keys import KeyRing
from baton.gateway.cluster.cluster_view import ClusterView
from baton.gateway.cluster.scheduler_pool import SchedulerPool, SchedulerPoolTimes
from baton.gateway.cluster.worker_session import SessionTimes
from baton.gateway.input.client_call import ClientCall, Identity
from baton.gateway.input.validation import Validator
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.gateway_spans import FINISHED, end_request_span
from baton.gateway.request.output_builder import OutputBuilder, Receiver
from baton.gateway.request.phase_times import PHASES, phases
from baton.gateway.request.request_run import RelayParts, RequestRecord, RequestRun, RetryRules
from baton.gateway.request.run_all import run_all
from baton.gateway.request.worker_sessions import WorkerSessions
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.logging import get_logger
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import GatewayMetrics
from baton.runtime.observability.tracing import OFF, Tracing, reason_of
from baton.runtime.process.process import Background

log = get_logger(__name__)

CLUSTER = "cluster"
"""The part of the gateway's health that waits for workers."""
STUCK_DETECTIONS = 24
"""A worker whose step runs for so many detection times is lost, though it talks; it ought to have seen that
itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRules:
    """The numbers that a gateway runs by; see the settings of the same names."""

    gateway_id: str
    model: str
    heartbeat_s: float
    detection_s: float
    scheduler_wait_s: float
    request_timeout_s: float
    default_slo: Slo = NO_SLO
    max_open_requests: int
    max_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """How a call ended that did not fail."""

    usage: TotalUsage
    timeline: tuple[Timeline, ...]


class GatewayService:
    """Use as `async with`: inside, sessions and the scheduler's Watch stream are kept; leaving ends them, and
    calls that still run fail."""

    def __init__(
        self,
        rules: GatewayRules,
        *,
        network: Network,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        rng: Random,
        schedulers: tuple[str, ...] = (),
        membership: Membership | None = None,
        keys: KeyRing | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        """`keys`: without them everybody may do everything."""
        self.rules = rules
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._phases = {phase: metrics.phase_s.labels(phase) for phase in PHASES}
        self.keys = keys or KeyRing()
        self.health = Health(CLUSTER)
        self.view = ClusterView(
            model=rules.model, tokenizer_fingerprint=tokenizer.fingerprint, model_max_len=tokenizer.max_model_len
        )
        self.schedulers = SchedulerPool(
            network,
            self.view,
            addresses=schedulers,
            membership=membership,
            times=SchedulerPoolTimes(
                heartbeat_s=rules.heartbeat_s, call_s=rules.detection_s, wait_s=rules.scheduler_wait_s
            ),
            rng=rng,
        )
        self.workers = WorkerSessions(
            network,
            gateway_id=rules.gateway_id,
            tokenizer_fingerprint=tokenizer.fingerprint,
            times=SessionTimes(
                heartbeat_s=rules.heartbeat_s,
                detection_s=rules.detection_s,
                stuck_s=rules.detection_s * STUCK_DETECTIONS,
            ),
            rng=rng,
        )
        self.validator = Validator(
            tokenizer=tokenizer,
            model=rules.model,
            facts=lambda: self.view.facts,
            rng=rng,
            request_timeout_s=rules.request_timeout_s,
            default_slo=rules.default_slo,
        )
        self._parts = RelayParts(
            schedulers=self.schedulers,
            workers=self.workers,
            view=self.view,
            rules=RetryRules(
                max_attempts=rules.max_attempts,
                pause_s=rules.heartbeat_s / 20,
                max_pause_s=rules.detection_s,
                ask_again_s=rules.heartbeat_s,
                dead_s=2 * rules.detection_s,
            ),
            metrics=metrics,
            rng=rng,
            tracing=tracing,
        )
        self._stack = AsyncExitStack()
        self._none_open = asyncio.Event()
        self.num_open = 0
        self._num_arriving = 0

    async def __aenter__(self) -> Self:
        self.view.on_change(self._cluster_changed)
        self._cluster_changed()
        await self._stack.enter_async_context(Background(self.schedulers.run()))
        self._stack.push_async_callback(self.workers.aclose)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def run(self, call: ClientCall, receiver: Receiver) -> CallOutcome:
        """Carry a call to its end; its choices go to `receiver` as they grow. Cancelling cancels the call.
        Raises Refused."""
        self.admit(len(call.requests))
        self.keys.opened(call.identity, len(call.requests))
        self.keys.charge(call.identity, len(call.requests) - 1, asyncio.get_running_loop().time())
        self.num_open += len(call.requests)
        self.metrics.open_requests.set(self.num_open)
        try:
            carried = [
                _Carried(request, call, self.tokenizer, receiver, index) for index, request in enumerate(call.requests)
            ]
            await run_all([one.run(self._parts) for one in carried])
        finally:
            self.num_open -= len(call.requests)
            self.keys.closed(call.identity, len(call.requests))
            self.metrics.open_requests.set(self.num_open)
            if not self.num_open:
                self._none_open.set()
        now_s = asyncio.get_running_loop().time()
        for one in carried:
            self._observe(one, now_s - call.received_s)
        return CallOutcome(
            usage=TotalUsage(
                num_prompt_tokens=sum(one.request.num_prompt_tokens for one in carried),
                num_output_tokens=sum(one.answer.num_tokens for one in carried),
                num_cached_tokens=sum(one.num_cached_tokens for one in carried),
            ),
            timeline=tuple(one.timeline(now_s) for one in carried) if call.shape.timeline else (),
        )

    def admit(self, num_requests: int = 1) -> None:
        """Raises Refused while draining (503), or when as many requests as allowed are open (429)."""
        if self.health.is_draining:
            message = "this gateway is about to stop; send the request again, to another one"
            raise Refused(Failure(code=Code.UNAVAILABLE, reason=Reason.DRAINING, message=message, retry_after_s=1.0))
        if self.num_open + self._num_arriving + num_requests > self.rules.max_open_requests:
            message = f"{self.num_open} requests are open, {self.rules.max_open_requests} are allowed; retry later"
            raise Refused(
                Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message=message, retry_after_s=1.0)
            )

    def admitted(self, authorization: str) -> Identity:
        """Whose call this is, before anything is done for it. Raises Refused as `admit` and the methods of
        `KeyRing` do."""
        identity = self.keys.identify(authorization)
        self.admit()
        self.keys.admit(identity, asyncio.get_running_loop().time())
        return identity

    @contextmanager
    def arriving(self, identity: Identity) -> Iterator[None]:
        """While a call is received and validated it counts as one open request, so that bodies in memory are
        bounded, too. Raises Refused where the key has too much open."""
        self.keys.opened(identity, 1)
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1
            self.keys.closed(identity, 1)

    def ended(self, endpoint: str, failure: Failure | None) -> None:
        """Count how a call ended, as the client was told."""
        code, reason = (str(failure.code.http), failure.reason.value) if failure else ("200", "")
        self.metrics.requests.labels(endpoint, code, reason).inc()

    @property
    def models(self) -> tuple[ModelInfo, ...]:
        return (ModelInfo(model_id=self.rules.model, max_model_len=self.view.max_model_len),)

    async def drain(self, drain_s: float) -> None:
        """Take no new calls, and wait until the open ones have ended, for at most `drain_s`."""
        self.health.drain()
        log.info("gateway_draining", open_requests=self.num_open)
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
            self.workers.keep(report.worker for report in self.view.reports if report.model == self.rules.model)

    def _observe(self, one: "_Carried", request_s: float) -> None:
        metrics, progress = self.metrics, one.progress
        metrics.request_s.observe(request_s)
        ttft_s, tpot_s, slo = progress.pace.ttft_s(one.received_s), progress.pace.tpot_s, one.request.slo
        if ttft_s is not None:
            metrics.ttft_s.observe(ttft_s)
        if tpot_s is not None:
            metrics.tpot_s.observe(tpot_s)
        for term, promised_s, actual_s in (("ttft", slo.ttft_s, ttft_s), ("tpot", slo.tpot_s, tpot_s)):
            if promised_s is not None and actual_s is not None:
                metrics.slo_attainment.labels(term, "met" if actual_s <= promised_s else "missed").inc()
        for phase, phase_s in phases(one.record, progress, one.received_s):
            self._phases[phase].observe(phase_s)
        metrics.prompt_tokens.inc(one.request.num_prompt_tokens)
        metrics.cached_tokens.inc(one.num_cached_tokens)
        metrics.output_tokens.inc(one.answer.num_tokens)


class _Carried:
    """One request of a call, with all that is kept of it while it runs."""

    def __init__(
        self, request: GenerateRequest, call: ClientCall, tokenizer: Tokenizer, receiver: Receiver, prompt_index: int
    ) -> None:
        self.request = request
        self.received_s = call.received_s
        self.progress = Delivery(request.sample_indices)
        self.record = RequestRecord()
        self.answer = OutputBuilder(request, call.shape, tokenizer, receiver, prompt_index * call.n)

    async def run(self, parts: RelayParts) -> None:
        if parts.tracing.is_on:
            await self._run_traced(parts)
        else:
            await RequestRun(self.request, self.progress, self.record, self.answer, parts).run()

    async def _run_traced(self, parts: RelayParts) -> None:
        """Whatever is done for the request from here on is done below its span."""
        span = self.record.span = parts.tracing.start("request", self.request.trace_context, at_s=self.received_s)
        outcome = FINISHED
        try:
            await RequestRun(
                replace(self.request, trace_context=span.context), self.progress, self.record, self.answer, parts
            ).run()
        except BaseException as error:
            outcome = reason_of(error).value
            raise
        finally:
            if span.is_recorded:
                end_request_span(
                    self.record, self.request, self.progress, outcome, num_output_tokens=self.answer.num_tokens
                )

    @property
    def num_cached_tokens(self) -> int:
        return min(self.request.num_prompt_tokens, self.progress.num_cached_tokens)

    def timeline(self, now_s: float) -> Timeline:
        progress, record, placement = self.progress, self.record, self.record.placement
        return Timeline(
            request_id=self.request.request_id.hex(),
            attempts=record.num_attempts,
            policy=record.policy,
            placed_s=(now_s if record.placed_s is None else record.placed_s) - self.received_s,
            ttft_s=progress.pace.ttft_s(self.received_s),
            tpot_s=progress.pace.tpot_s,
            total_s=now_s - self.received_s,
            cached_tokens_by_tier=progress.cached_tokens_by_tier,
            waiting_s=placement.waiting_s if placement else None,
            predicted_ttft_s=placement.ttft_s if placement else None,
            predicted_tpot_s=placement.tpot_s if placement else None,
            legs=tuple(chain.from_iterable(progress.legs.values())),
        )
