"""What OpenAI's clients read: objects that are common to streamed and whole answers."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from baton.core.client_api import Timeline, TotalUsage
from baton.gateway.input.client_call import ClientCall, Endpoint


class Names:
    """The fields that every object of one answer begins with."""

    def __init__(self, call: ClientCall) -> None:
        kind = "chat.completion" if call.endpoint is Endpoint.CHAT else "text_completion"
        self.id = f"{'chatcmpl' if call.endpoint is Endpoint.CHAT else 'cmpl'}-{call.request_id.hex()}"
        self.object = kind
        self.chunk_object = f"{kind}.chunk" if call.endpoint is Endpoint.CHAT else kind
        self.created = int(time.time())
        self.model = call.model

    def whole(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}

    def chunk(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model}


def usage_object(usage: TotalUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


_LAST_ATTEMPT = ("waiting_s", "predicted_ttft_s", "predicted_tpot_s")
"""Of a timeline; left out where they are not known."""


def timeline_object(timeline: Sequence[Timeline]) -> dict[str, Any]:
    """The object `baton`: of the one prompt's request, or of each under `requests`."""
    if len(timeline) > 1:
        return {"requests": [_request_object(one) for one in timeline]}
    return _request_object(timeline[0])


def _request_object(timeline: Timeline) -> dict[str, Any]:
    """`prefill`: who computed the prompt, `decode`: who went on; `legs` has what every worker reported, also
    of attempts that were lost."""
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
