"""JSON objects that streamed and non-streamed OpenAI responses share."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from baton.core.client_api import Timeline, TotalUsage
from baton.gateway.input.client_call import ClientCall, Endpoint


class ObjectFields:
    """Fields with which every JSON object of one response begins."""

    def __init__(self, call: ClientCall) -> None:
        kind = "chat.completion" if call.endpoint is Endpoint.CHAT else "text_completion"
        self.id = f"{'chatcmpl' if call.endpoint is Endpoint.CHAT else 'cmpl'}-{call.request_id.hex()}"
        self.object = kind
        self.chunk_object = f"{kind}.chunk" if call.endpoint is Endpoint.CHAT else kind
        self.created = int(time.time())
        self.model = call.model
        self.system_fingerprint = call.system_fingerprint

    def completion(self) -> dict[str, Any]:
        """Return the fields of a non-streamed response."""
        return self._with_kind(self.object)

    def chunk(self) -> dict[str, Any]:
        """Return the fields of one chunk of a streamed response."""
        return self._with_kind(self.chunk_object)

    def _with_kind(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def usage_object(usage: TotalUsage) -> dict[str, Any]:
    """Return the `usage` object."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


_LAST_ATTEMPT = ("waiting_s", "predicted_ttft_s", "predicted_tpot_s")
"""Optional fields of the timeline that describe the last attempt. They are omitted if unknown."""


def timeline_object(timeline: Sequence[Timeline]) -> dict[str, Any]:
    """Return the `baton` object with the timeline. A call with several prompts has one timeline each in
    `requests`."""
    if len(timeline) > 1:
        return {"requests": [_request_object(each) for each in timeline]}
    return _request_object(timeline[0])


def _request_object(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline of one request.

    `prefill` and `decode` name the workers of the last attempt. `legs` has the reports of all workers,
    including those of failed attempts.
    """
    legs = timeline.legs
    prefill = next((leg for leg in reversed(legs) if leg.num_computed_tokens), None)
    decode = next((leg for leg in reversed(legs) if leg.decode_s is not None), None)
    return {
        "request_id": timeline.request_id,
        "attempts": timeline.attempts,
        "policy": timeline.policy,
        "prefill": {"worker_id": prefill.worker_id, "pid": prefill.pid} if prefill else None,
        "decode": {"worker_id": decode.worker_id, "pid": decode.pid} if decode else None,
        "kv_bytes": sum(leg.kv_bytes for leg in legs),
        "transport": next((leg.transport for leg in reversed(legs) if leg.transport), ""),
        "placed_s": timeline.placed_s,
        "ttft_s": timeline.ttft_s,
        "tpot_s": timeline.tpot_s,
        "total_s": timeline.total_s,
        "cached_tokens_by_tier": timeline.cached_tokens_by_tier,
        **{name: value for name in _LAST_ATTEMPT if (value := getattr(timeline, name)) is not None},
        "legs": [{key: value for key, value in asdict(leg).items() if value is not None} for leg in legs],
    }
