"""Formats failures as error objects of Anthropic's API."""

import json
from collections.abc import Mapping

from baton.core.errors import Code, Failure

_TYPES: Mapping[Code, str] = {
    Code.UNAUTHENTICATED: "authentication_error",
    Code.PERMISSION_DENIED: "permission_error",
    Code.NOT_FOUND: "not_found_error",
    Code.BODY_TOO_LARGE: "request_too_large",
    Code.RECEIVE_TIMEOUT: "timeout_error",
    Code.DEADLINE_EXCEEDED: "timeout_error",
    Code.RESOURCE_EXHAUSTED: "rate_limit_error",
    Code.UNAVAILABLE: "overloaded_error",
    Code.INTERNAL: "api_error",
    Code.CANCELLED: "api_error",
}


def message_error(failure: Failure, param: str | None = None) -> bytes:
    """Return the JSON error object of a failure. The message names an invalid field, so `param` is unused."""
    error = {"type": _TYPES.get(failure.code, "invalid_request_error"), "message": failure.message}
    return json.dumps({"type": "error", "error": error}).encode()
