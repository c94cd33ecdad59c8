"""What the span of a request says: from its receipt to its last token, over all its attempts."""

from baton.core.errors import Reason
from baton.core.request import GenerateRequest
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.request_run import RequestRecord

FINISHED = "finished"


def end_request_span(
    record: RequestRecord, request: GenerateRequest, progress: Delivery, outcome: str, *, num_output_tokens: int
) -> None:
    """Names are those of OpenTelemetry's conventions for generative models where these have one. A client
    that leaves is no problem."""
    if record.placed_s is not None:
        record.span.event("placed", record.placed_s)
    if progress.pace.first_s is not None:
        record.span.event("first token", progress.pace.first_s)
    record.span.end(
        {
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": num_output_tokens,
            "baton.request_id": request.request_id.hex(),
            "baton.outcome": outcome,
            "baton.attempts": record.num_attempts,
            "baton.policy": record.policy or None,
            "baton.cached_tokens": min(request.num_prompt_tokens, progress.num_cached_tokens),
            "baton.ttft_s": progress.pace.ttft_s(request.received_s),
            "baton.tpot_s": progress.pace.tpot_s,
        },
        problem="" if outcome in (FINISHED, Reason.CANCELLED.value) else outcome,
    )
