"""Formats failures as OpenAI error objects, for HTTP responses and for streams."""

import json
import math
from collections.abc import Mapping

from baton.core.errors import Code, Failure, Reason, Refused
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

_FINAL = frozenset((Reason.POISON, Reason.NUMERICAL_ERROR, Reason.MEMORY_BUDGET, Reason.NO_CAPACITY))
"""Reasons for which the same request fails again, unless the failure says when to retry."""


def error_body(failure: Failure, param: str | None = None, status: int | None = None) -> bytes:
    """Return the JSON error object of a failure. `param` names the invalid request field.

    In the object, `code` is the reason code. `status` is the HTTP status, by default that of the failure,
    because an error within a stream cannot set the status of its response.
    """
    error = {
        "message": failure.message,
        "type": _TYPES.get(failure.code, "invalid_request_error"),
        "param": param,
        "code": failure.reason.value,
        "status": status or failure.code.http,
    }
    return json.dumps({"error": error}).encode()


def error_event(failure: Failure) -> bytes:
    """Return the last event of a stream that failed."""
    return b"event: error\ndata: " + error_body(failure) + b"\n\n"


def error_headers(failure: Failure) -> Headers:
    """Return the headers of an error.

    They are `www-authenticate` (RFC 6750), `retry-after` in whole seconds, and `x-should-retry`. Clients of
    OpenAI and Anthropic send any request with status 429 or 5xx again without this last one.
    """
    headers: Headers = [(b"www-authenticate", b"Bearer")] if failure.code is Code.UNAUTHENTICATED else []
    if failure.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(failure.retry_after_s))))
    elif failure.reason in _FINAL:
        headers.append((b"x-should-retry", b"false"))
    return headers


def param_of(refused: Refused) -> str | None:
    """Return the name of the invalid request field; None if the failure concerns no field."""
    return refused.param if isinstance(refused, InvalidField) else None
