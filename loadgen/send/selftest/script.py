"""What the scripted server is to do with a request, and what it has seen of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ScriptedEnd(Enum):
    """How an answer ends, after its tokens."""

    DONE = "done"
    NO_DONE = "no_done"  # the response ends properly, without `[DONE]`
    CLOSE = "close"  # the server closes the connection
    RESET = "reset"  # … with a reset
    NOTHING = "nothing"  # it closes the connection instead of answering
    SILENCE = "silence"  # nothing comes any more
    ERROR = "error"  # an error event
    GARBAGE = "garbage"  # an event that is no JSON
    LONG_LINE = "long_line"  # a line that does not end


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What becomes of one request. `gaps_s`: after each token but the last, the last entry again and again.
    `num_tokens` None: as many as asked for. With a `status` other than 200 the answer is `body`, after
    `ttft_s`."""

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
    """Another salt, other tokens."""


@dataclass(slots=True)
class ServedRequest:
    """One request as the server saw it; `sent_s` of each event with tokens. Times are `now_s()`."""

    number: int
    body: dict[str, Any]
    headers: dict[str, str]
    received_s: float
    sent_s: list[float] = field(default_factory=list)
    hung_up_s: float | None = None
