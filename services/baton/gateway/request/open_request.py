"""One prompt's request while it is open, with the timeline, phase times and trace span that describe it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from baton.core.client_api import Timeline
from baton.core.errors import Reason
from baton.core.request import GenerateRequest
from baton.gateway.input.client_call import ClientCall
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.output_builder import ChoiceSink, OutputBuilder
from baton.gateway.request.request_run import RequestRecord, RequestRun, RequestServices
from baton.gateway.text.stop_strings import StopPatterns
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.observability.tracing import reason_of

FINISHED = "finished"
PHASES = ("placement", "queue", "prefill", "kv_exposed", "admission", "decode")
"""Phases of a request; the values are metric labels."""


class OpenRequest:
    """One request of a client's call, and everything that is recorded about it while it runs."""

    def __init__(
        self,
        request: GenerateRequest,
        call: ClientCall,
        stops: StopPatterns,
        tokenizer: Tokenizer,
        sink: ChoiceSink,
        prompt_index: int,
    ) -> None:
        self.request = request
        self.received_s = call.received_s
        self.delivery = Delivery(request.sample_indices)
        self.record = RequestRecord()
        self.output = OutputBuilder(request, call.output_options, stops, tokenizer, sink, prompt_index * call.n)

    async def run(self, services: RequestServices) -> None:
        """Run the request until every sample has ended. Raises Refused if it fails."""
        try:
            if services.tracing.is_on:
                await self._run_traced(services)
            else:
                await RequestRun(self.request, self.delivery, self.record, self.output, services).run()
        finally:
            self.output.close()

    async def _run_traced(self, services: RequestServices) -> None:
        """Run the request inside a span. All other spans of the request are descendants of this span."""
        span = self.record.span = services.tracing.start("request", self.request.trace_context, at_s=self.received_s)
        outcome = FINISHED
        try:
            request = replace(self.request, trace_context=span.context)
            await RequestRun(request, self.delivery, self.record, self.output, services).run()
        except BaseException as error:
            outcome = reason_of(error).value
            raise
        finally:
            if span.is_recorded:
                self._end_span(outcome)

    def _end_span(self, outcome: str) -> None:
        """End the request's span. Attribute names follow OpenTelemetry's conventions for generative AI.

        A request that its client cancelled is not marked as an error.
        """
        record, latency = self.record, self.delivery.latency
        if record.placed_s is not None:
            record.span.event("placed", record.placed_s)
        if latency.first_s is not None:
            record.span.event("first token", latency.first_s)
        record.span.end(
            {
                "gen_ai.request.model": self.request.model,
                "gen_ai.usage.input_tokens": self.request.num_prompt_tokens,
                "gen_ai.usage.output_tokens": self.output.num_tokens,
                "baton.request_id": self.request.request_id.hex(),
                "baton.outcome": outcome,
                "baton.attempts": record.num_attempts,
                "baton.policy": record.policy or None,
                "baton.cached_tokens": self.num_cached_tokens,
                "baton.ttft_s": latency.ttft_s(self.request.received_s),
                "baton.tpot_s": latency.tpot_s,
            },
            problem="" if outcome in (FINISHED, Reason.CANCELLED.value) else outcome,
        )

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens whose KV was reused from a cache."""
        return min(self.request.num_prompt_tokens, self.delivery.num_cached_tokens)

    def timeline(self, now_s: float) -> Timeline:
        """Return the timeline of this request, which ended at `now_s`."""
        latency, record, placement = self.delivery.latency, self.record, self.record.placement
        return Timeline(
            request_id=self.request.request_id.hex(),
            attempts=record.num_attempts,
            policy=record.policy,
            placed_s=(now_s if record.placed_s is None else record.placed_s) - self.received_s,
            ttft_s=latency.ttft_s(self.received_s),
            tpot_s=latency.tpot_s,
            total_s=now_s - self.received_s,
            cached_tokens_by_tier=self.delivery.cached_tokens_by_tier,
            waiting_s=placement.waiting_s if placement else None,
            predicted_ttft_s=placement.ttft_s if placement else None,
            predicted_tpot_s=placement.tpot_s if placement else None,
            legs=tuple(chain.from_iterable(self.delivery.legs.values())),
        )


def phase_times(record: RequestRecord, delivery: Delivery, received_s: float) -> Iterator[tuple[str, float]]:
    """Yield (phase, seconds) for all attempts, as far as the workers reported them.

    The phase "placement" lasts from receipt to the first placement, including the wait in the scheduler's
    queue.
    """
    if record.placed_s is not None:
        yield "placement", record.placed_s - received_s
    for legs in delivery.legs.values():
        for leg in legs:
            reported = (leg.queue_s, leg.compute_s, leg.kv_exposed_s, leg.kv_admission_s, leg.decode_s)
            yield from (
                (phase, seconds) for phase, seconds in zip(PHASES[1:], reported, strict=True) if seconds is not None
            )
