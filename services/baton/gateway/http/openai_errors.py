"""Errors in OpenAI's shape, over HTTP and in the middle of a stream."""

import json
import math
from collections.abc import Mapping

from baton.core.errors import Code, Failure, Refused
from baton.gateway.input.client_call import InvalidField

Headers = list[tuple[bytes, bytes]]

_TYPES: Mapping[Code, str] = {
    Code.UNAUTHENTICATED: "authentication_error",
    Code.PERMISSION_DENIED: "permission_error",
    Code.RECEIVE_TIMEOUT: "timeout_error",
    Code.RESOURCE_EXHAUSTED: "rate_limit_error",
    Code.CANCELLED: "cancelled",
    Code.INTERNAL: "server_error",
    Code.UNAVAILABLE: "server_error",
    Code.DEADLINE_EXCEEDED: "timeout_error",
}


def error_body(failure: Failure, param: str | None = None) -> bytes:
    """`code` is the machine-readable reason, `status` the HTTP status, which an error in mid-stream has no
    other place for."""
    error = {
        "message": failure.message,
        "type": _TYPES.get(failure.code, "invalid_request_error"),
        "param": param,
        "code": failure.reason.value,
        "status": failure.code.http,
    }
    return json.dumps({"error": error}).encode()


def error_event(failure: Failure) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + error_body(failure) + b"\n\n"


def error_headers(failure: Failure) -> Headers:
    """When to come back, in whole seconds, and what a caller has to show (RFC 6750, section 3)."""
    challenge: Headers = [(b"www-authenticate", b"Bearer")] if failure.code is Code.UNAUTHENTICATED else []
    if failure.retry_after_s is None:
        return challenge
    return [*challenge, (b"retry-after", b"%d" % max(1, math.ceil(failure.retry_after_s)))]


def param_of(refused: Refused) -> str | None:
    return refused.param if isinstance(refused, InvalidField) else None
