"""Writes the events and bodies of OpenAI's API into an `Exchange`. Nothing that a server sends makes it
raise."""

from __future__ import annotations

import contextlib
import email.utils
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from loadgen.send.client import Exchange

# `scan_once` is what `JSONDecoder.decode` calls.
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_SHOWN_CHARS = 300


def take_event(exchange: Exchange, at_s: float, name: bytes, data: bytes) -> None:
    """Process one event of a stream.

    It is about twice as fast as `json.loads`, because events are most of a client's work.
    """
    if data == b"[DONE]":
        exchange.is_complete = bool(exchange.finish_reason)
        exchange.end(at_s)
        return
    try:
        event = _parsed(data)
        if event.get("error"):
            _fail(exchange, at_s, event)
        else:
            _take_chunk(exchange, at_s, event)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        exchange.fail(at_s, f"the server sent an invalid completion event: {shown(data)}")
    if name == b"error" and not exchange.is_over:
        exchange.fail(at_s, f"the server sent an error: {shown(data)}")


def _parsed(data: bytes) -> Any:
    """Return the JSON value of an event. Raises ValueError."""
    text = data.decode()
    with contextlib.suppress(StopIteration):
        value, end = _scan(text, 0)
        if end == len(text):
            return value
    return json.loads(text)


def _take_chunk(exchange: Exchange, at_s: float, event: dict[str, Any]) -> None:
    if not exchange.request_id:
        exchange.request_id = str(event.get("id") or "")
    usage = event.get("usage")
    if usage:
        _take_usage(exchange, usage)
    if "baton" in event and isinstance(event["baton"], dict):
        exchange.timeline = event["baton"]
    choices = event["choices"] if not usage else event.get("choices")
    if not choices:
        return
    choice = choices[0]
    finish = choice.get("finish_reason")
    if finish:
        exchange.finish_reason = str(finish)
    text = choice.get("text")
    if text is None:
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    ids = choice.get("token_ids")
    if text:
        exchange.texts.append(_checked(text, str))
    if ids:
        if set(map(type, _checked(ids, list))) != {int}:
            raise TypeError("token ids are integers")
        exchange.token_ids += ids
        exchange.add_tokens(at_s, len(ids))
    elif text and ids is None:  # with token ids, a text without an id belongs to earlier tokens
        exchange.add_tokens(at_s, 1)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _take_usage(exchange: Exchange, usage: Mapping[str, Any]) -> None:
    exchange.num_prompt_tokens = _count(usage.get("prompt_tokens"))
    exchange.num_output_tokens = _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    if details:
        exchange.num_cached_tokens = _count(details.get("cached_tokens"))


def take_body(exchange: Exchange, at_s: float, body: bytes) -> None:
    """Process a response body that is not a stream: an error, or something unexpected."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if exchange.status == 200 and not (isinstance(value, dict) and _has_error(value)):
        what = (
            "a complete response instead of a stream"
            if isinstance(value, dict) and "choices" in value
            else f"no event stream: {shown(body)}"
        )
        exchange.fail(at_s, f"the server sent {what}" if body else "the server sent an empty response")
    elif isinstance(value, dict):
        _fail(exchange, at_s, value)
    else:
        exchange.fail(at_s, shown(body) if body else f"status {exchange.status} without a body")


def _has_error(value: Mapping[str, Any]) -> bool:
    return bool(value.get("error")) or value.get("object") == "error"


def _fail(exchange: Exchange, at_s: float, value: Mapping[str, Any]) -> None:
    """Record an error body.

    Known forms are OpenAI's `{"error": {message, type, code}}`, vLLM's older `{"object": "error", message,
    …}` and FastAPI's `{"detail": …}`. An error within a stream, or with status 200, may contain the status it
    would have had.
    """
    error = value.get("error") or value
    if not isinstance(error, dict):
        error = {"message": error}
    message = error.get("message") or error.get("detail") or error.get("msg")
    code, kind = error.get("code"), error.get("type")
    status = next((s for s in (error.get("status"), code) if type(s) is int and 400 <= s <= 599), None)
    reason = next((word for word in (code, kind) if isinstance(word, str) and word), "")
    after_s = error.get("retry_after_s")
    if exchange.retry_after_s is None and isinstance(after_s, int | float):
        exchange.retry_after_s = float(after_s)
    exchange.fail(
        at_s,
        shown(message if isinstance(message, str) else json.dumps(message or value)),
        reason=reason,
        status=status if exchange.status in (None, 200) else None,
    )


def retry_after_s(value: str) -> float | None:
    """Return the seconds of a `Retry-After` header (seconds or a date), or None if it is invalid."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except (ValueError, TypeError):
            return None
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def shown(value: bytes | str) -> str:
    """Return server output in a printable form of limited length, for messages."""
    text = value[: 4 * _SHOWN_CHARS].decode(errors="replace") if isinstance(value, bytes) else value
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _SHOWN_CHARS]).split())
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
