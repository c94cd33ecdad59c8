"""Limits of every request field: type, range, number of items and default.

HTTP and gRPC requests are checked against this one table by the same code. A name with a dot is a field of a
nested object. A name that begins with `x-` is an HTTP header.
"""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from baton.core.errors import BatonError

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
I64_MIN = -(2**63)
I32_MAX = 2**31 - 1
MIN_READ_RATE = 16 * 1024
"""Bytes per second that a client must read of a response that is complete."""


class ValueKind(Enum):
    """Type of a value. A boolean does not count as an integer, an integer counts as a number, and a number
    must be finite."""

    INTEGER = "an integer"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    STRING = "a string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limit of one request field.

    kind: type of the value.
    minimum, maximum: inclusive bounds. For a string they bound its length in characters.
    above: exclusive lower bound.
    max_items: the field is a list or map of at most this many values of `kind`.
    default: value used if the field is omitted; None means that omitting it sets nothing.
    """

    kind: ValueKind
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    max_items: int | None = None
    default: object = None

    def check(self, name: str, value: object) -> None:
        """Check one value, or one item if the field is a list. Raises OutOfLimits if its type or range is
        wrong."""
        if not _is_kind(self.kind, value):
            raise OutOfLimits(name, f"{name} is {printable(value)}; must be {self.kind.value}")
        if self.kind is ValueKind.BOOLEAN:
            return
        measure = len(value) if isinstance(value, str) else value
        assert isinstance(measure, int | float)  # already checked by _is_kind; needed by the type checker
        if (
            (self.minimum is not None and measure < self.minimum)
            or (self.above is not None and measure <= self.above)
            or (self.maximum is not None and measure > self.maximum)
        ):
            given = f"{measure} characters long" if isinstance(value, str) else printable(value)
            raise OutOfLimits(name, f"{name} is {given}; must be {self.range}")

    def check_count(self, name: str, count: int) -> None:
        """Check the number of items of a list or map. Raises OutOfLimits if it is above `max_items`."""
        if self.max_items is not None and count > self.max_items:
            raise OutOfLimits(name, f"{name} has {count} items; at most {self.max_items} are allowed")

    @property
    def range(self) -> str:
        """The bounds in words, such as "between 1 and 4096"."""
        unit = " characters" if self.kind is ValueKind.STRING else ""
        if self.minimum is not None and self.maximum is not None:
            return f"between {self.minimum} and {self.maximum}{unit}"
        low = f"at least {self.minimum}" if self.minimum is not None else ""
        low = f"above {self.above}" if self.above is not None else low
        high = f"at most {self.maximum}" if self.maximum is not None else ""
        return " and ".join(filter(None, (low, high))) + unit


class OutOfLimits(BatonError):
    """A field's value violates the table of limits. `name` is the field's name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def printable(value: object) -> str:
    """Format a client's value for an error message: at most 64 characters, ASCII only."""
    if isinstance(value, dict | list | tuple | array):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > U64_MAX:
        return "a number of more than 64 bits"
    text = ascii(value[:64] if isinstance(value, str) else value)
    return text if len(text) <= 64 else f"{text[:60]}…"


def _is_kind(kind: ValueKind, value: object) -> bool:
    if kind is ValueKind.BOOLEAN or kind is ValueKind.STRING:
        return isinstance(value, bool if kind is ValueKind.BOOLEAN else str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or (kind is ValueKind.NUMBER and math.isfinite(value))


def _flag(default: bool = False) -> Limit:
    return Limit(kind=ValueKind.BOOLEAN, default=default)


MAX_GRAMMAR_BYTES = 64 * 1024
"""Maximum size of a request's grammar, in the form that workers compile."""
MAX_BAD_WORD_TOKENS = 64
"""Maximum number of tokens of one bad word."""
MAX_SESSION_CHARACTERS = 128
"""Longest id of a client's session."""
MAX_RETAIN_S = 86_400
"""Longest time for which KV can be retained, and in which the next request of a session can be announced."""
MIN_ARRAY_IDS = 1024
"""A list of this many token ids or more becomes an array. Fields other than prompts have fewer."""
MAX_PROMPT_TOKENS = 2**20
"""Upper bound for one prompt, for any model. It keeps messages between services within their size limit."""

LIMITS: Mapping[str, Limit] = {
    "model": Limit(kind=ValueKind.STRING, minimum=1, maximum=256),
    "prompt": Limit(kind=ValueKind.STRING, minimum=1, max_items=256),
    "token_ids": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=U32_MAX, max_items=MAX_PROMPT_TOKENS),
    "messages": Limit(kind=ValueKind.STRING, max_items=4096),
    "messages.name": Limit(kind=ValueKind.STRING, maximum=256),
    "messages.function_name": Limit(kind=ValueKind.STRING, minimum=1, maximum=256),
    "messages.tool_call_id": Limit(kind=ValueKind.STRING, minimum=1, maximum=256),
    "messages.tool_calls": Limit(kind=ValueKind.STRING, max_items=128),
    "tools": Limit(kind=ValueKind.STRING, max_items=128),
    "documents": Limit(kind=ValueKind.STRING, max_items=1024),
    "chat_template": Limit(kind=ValueKind.STRING, minimum=1, maximum=64 * 1024),
    "chat_template_kwargs": Limit(kind=ValueKind.STRING, max_items=64),
    "reasoning_effort": Limit(kind=ValueKind.STRING, minimum=1, maximum=32),
    "choices": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=1024),
    "n": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=128, default=1),
    "max_tokens": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=I32_MAX),
    "max_completion_tokens": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=I32_MAX),
    "best_of": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=128),
    "min_tokens": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=I32_MAX, default=0),
    "temperature": Limit(kind=ValueKind.NUMBER, minimum=0, maximum=2, default=1.0),
    "top_p": Limit(kind=ValueKind.NUMBER, above=0, maximum=1, default=1.0),
    "top_k": Limit(kind=ValueKind.INTEGER, minimum=-1, maximum=I32_MAX, default=0),
    "min_p": Limit(kind=ValueKind.NUMBER, minimum=0, maximum=1, default=0.0),
    "repetition_penalty": Limit(kind=ValueKind.NUMBER, above=0, maximum=10, default=1.0),
    "presence_penalty": Limit(kind=ValueKind.NUMBER, minimum=-2, maximum=2, default=0.0),
    "frequency_penalty": Limit(kind=ValueKind.NUMBER, minimum=-2, maximum=2, default=0.0),
    "seed": Limit(kind=ValueKind.INTEGER, minimum=I64_MIN, maximum=U64_MAX),
    "stop": Limit(kind=ValueKind.STRING, minimum=1, maximum=1024, max_items=16),
    "stop_token_ids": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=U32_MAX, max_items=128),
    "logit_bias": Limit(kind=ValueKind.NUMBER, minimum=-100, maximum=100, max_items=1024),
    "allowed_token_ids": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=U32_MAX, max_items=1024),
    "bad_words": Limit(kind=ValueKind.STRING, minimum=1, maximum=1024, max_items=1024),
    "logprobs": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=20),
    "prompt_logprobs": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=20),
    "top_logprobs": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=20),
    "ignore_eos": _flag(),
    "skip_special_tokens": _flag(True),
    "stream": _flag(),
    "stream_options.include_usage": _flag(),
    "stream_options.continuous_usage_stats": _flag(),
    "echo": _flag(),
    "add_special_tokens": Limit(kind=ValueKind.BOOLEAN),
    "truncate_prompt_tokens": Limit(kind=ValueKind.INTEGER, minimum=-1, maximum=MAX_PROMPT_TOKENS),
    "include_stop_str_in_output": _flag(),
    "return_token_ids": _flag(),
    "return_tokens_as_token_ids": _flag(),
    "timeline": _flag(),
    "cache_salt": Limit(kind=ValueKind.STRING, minimum=1, maximum=512),
    "session": Limit(kind=ValueKind.STRING, minimum=1, maximum=MAX_SESSION_CHARACTERS),
    "retain_s": Limit(kind=ValueKind.NUMBER, minimum=0, maximum=MAX_RETAIN_S),
    "next_in_s": Limit(kind=ValueKind.NUMBER, minimum=0, maximum=MAX_RETAIN_S),
    "priority": Limit(kind=ValueKind.INTEGER, minimum=-I32_MAX, maximum=I32_MAX, default=0),
    "slo.ttft_ms": Limit(kind=ValueKind.NUMBER, above=0, maximum=86_400_000),
    "slo.tpot_ms": Limit(kind=ValueKind.NUMBER, above=0, maximum=86_400_000),
    "x-baton-timeout-ms": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=86_400_000),
    "metadata": Limit(kind=ValueKind.STRING, maximum=512, max_items=16),
    "label": Limit(kind=ValueKind.STRING, maximum=512),
    "store": _flag(),
}
"""Limits by field name.

`choices` bounds the number of prompts times `n`. `label` applies to every field that is accepted without
effect. The model's context length further bounds `max_tokens` and prompts.
"""

MAX_JSON_DEPTH = 32
"""Maximum nesting depth of objects and lists in a request body. The deepest valid request needs 5."""

MAX_JSON_CONTAINERS = 32 * 1024
"""Maximum number of objects and lists in a request body. 4,096 messages with a list of two parts each have
half of it."""

MAX_JSON_VALUES = 256 * 1024
"""Maximum number of strings, numbers and constants in a request body. Ids in long lists of token ids do not
count."""

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of an HTTP request line and headers."""
