"""Scripts of the scripted server, and its record of each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ScriptedEnd(Enum):
    """Ways in which a scripted response ends after its tokens."""

    DONE = "done"
    NO_DONE = "no_done"  # the HTTP response ends properly, but without `[DONE]`
    CLOSE = "close"  # the server closes the connection
    RESET = "reset"  # the server resets the connection
    NOTHING = "nothing"  # the server closes the connection instead of responding
    SILENCE = "silence"  # no more data, connection stays open
    ERROR = "error"  # an error event
    GARBAGE = "garbage"  # an event that is not JSON
    LONG_LINE = "long_line"  # a line that does not end


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Scripted behaviour of the server for one request.

    - `gaps_s`: pause after each token but the last; the last entry repeats
    - `num_tokens`: tokens of the response; None means as requested
    - `status`: other than 200, the response is `body` after `ttft_s`
    """

    ttft_s: float = 0.0
    gaps_s: Sequence[float] = (0.0,)
    num_tokens: int | None = None
    tokens_per_event: int = 1
    ending: ScriptedEnd = ScriptedEnd.DONE
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    finish_reason: str = "length"
    usage: bool = True
    token_ids: bool = True
    is_compressed: bool = False
    salt: int = 0
    """Changes the token ids of the response."""


@dataclass(slots=True)
class ServedRequest:
    """One request as the server saw it. Times are `now_s()`; `sent_s` has one for each event with tokens."""

    number: int
    body: dict[str, Any]
    headers: dict[str, str]
    received_s: float
    sent_s: list[float] = field(default_factory=list)
    disconnected_s: float | None = None
