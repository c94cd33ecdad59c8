"""Formats failures as error objects of Anthropic's API."""

import json
from collections.abc import Mapping
from typing import Any

from baton.core.errors import Code, Failure

STATUSES: Mapping[Code, int] = {Code.UNAVAILABLE: 529}
"""HTTP statuses that differ from those of other APIs: Anthropic's API answers 529 to an overload."""
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
_DETAILS: Mapping[str, Mapping[str, Any]] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
"""Details of errors about a field, by its name. Anthropic's tool runner then sends all messages, without a
thread."""


def message_error(failure: Failure, request_id: str, param: str | None = None) -> bytes:
    """Return the JSON error object of a failure. The message names the invalid field `param`."""
    error: dict[str, Any] = {"type": _TYPES.get(failure.code, "invalid_request_error"), "message": failure.message}
    if details := _DETAILS.get(param or ""):
        error["details"] = details
    return json.dumps({"type": "error", "error": error, "request_id": request_id or None}).encode()
