"""The one table of limits: what each field of a request may be. HTTP and gRPC are checked against it by the
same code.

A name with a dot is a field of a nested object; one that begins with `x-` is an HTTP header.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from baton.core.errors import BatonError

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
I64_MIN = -(2**63)
I32_MAX = 2**31 - 1


class ValueKind(Enum):
    """What a value is. A boolean is no integer, an integer is a number, and a number is finite."""

    INTEGER = "an integer"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    STRING = "a string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """`minimum` and `maximum` are allowed, `above` is not; of a string they bound its characters.
    `max_items`: the field is a list or map of at most that many such values. `default` None: the field may be
    left out and then means nothing."""

    kind: ValueKind
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    max_items: int | None = None
    default: object = None

    def check(self, name: str, value: object) -> None:
        """Raises OutOfLimits unless `value`, one item where the field is a list, is of the right kind and in
        range."""
        if not _is_kind(self.kind, value):
            raise OutOfLimits(name, f"{name} must be {self.kind.value}, not {shown(value)}")
        if self.kind is ValueKind.BOOLEAN:
            return
        measure = len(value) if isinstance(value, str) else value
        assert isinstance(measure, int | float)  # what _is_kind has just said, for the type checker
        if (
            (self.minimum is not None and measure < self.minimum)
            or (self.above is not None and measure <= self.above)
            or (self.maximum is not None and measure > self.maximum)
        ):
            what = f"{measure} characters" if isinstance(value, str) else shown(value)
            raise OutOfLimits(name, f"{name} must be {self.range}, not {what}")

    def check_count(self, name: str, count: int) -> None:
        """Raises OutOfLimits when a list or map has more items than it may."""
        if self.max_items is not None and count > self.max_items:
            raise OutOfLimits(name, f"{name} must have at most {self.max_items} items, not {count}")

    @property
    def range(self) -> str:
        """The bounds in words."""
        unit = " characters long" if self.kind is ValueKind.STRING else ""
        low = (
            f"at least {self.minimum}"
            if self.minimum is not None
            else f"above {self.above}"
            if self.above is not None
            else ""
        )
        high = f"at most {self.maximum}" if self.maximum is not None else ""
        return " and ".join(filter(None, (low, high))) + unit


class OutOfLimits(BatonError):
    """A field's value is not what the table allows. `name` is the field's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def shown(value: object) -> str:
    """A client's value as an error message may show it: short, and in ASCII."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > U64_MAX:
        return "a number that large"
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


MAX_PROMPT_TOKENS = 2**20
"""Of one prompt, whatever the model: more than any takes, and what messages between services have room
for."""

LIMITS: Mapping[str, Limit] = {
    "model": Limit(kind=ValueKind.STRING, minimum=1, maximum=256),
    "prompt": Limit(kind=ValueKind.STRING, minimum=1, max_items=256),
    "token_ids": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=U32_MAX, max_items=MAX_PROMPT_TOKENS),
    "messages": Limit(kind=ValueKind.STRING, max_items=4096),
    "messages.name": Limit(kind=ValueKind.STRING, maximum=256),
    "choices": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=1024),
    "n": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=128, default=1),
    "max_tokens": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=I32_MAX),
    "max_completion_tokens": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=I32_MAX),
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
    "logprobs": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=20),
    "top_logprobs": Limit(kind=ValueKind.INTEGER, minimum=0, maximum=20),
    "ignore_eos": _flag(),
    "skip_special_tokens": _flag(True),
    "stream": _flag(),
    "stream_options.include_usage": _flag(),
    "return_token_ids": _flag(),
    "timeline": _flag(),
    "priority": Limit(kind=ValueKind.INTEGER, minimum=-I32_MAX, maximum=I32_MAX, default=0),
    "slo.ttft_ms": Limit(kind=ValueKind.NUMBER, above=0, maximum=86_400_000),
    "slo.tpot_ms": Limit(kind=ValueKind.NUMBER, above=0, maximum=86_400_000),
    "x-baton-timeout-ms": Limit(kind=ValueKind.INTEGER, minimum=1, maximum=86_400_000),
    "metadata": Limit(kind=ValueKind.STRING, maximum=512, max_items=16),
    "label": Limit(kind=ValueKind.STRING, maximum=512),
}
"""`choices` bounds prompts times `n`; `label` is any other field that is accepted and has no effect. The
model's own length bounds `max_tokens` and prompts further."""

MAX_JSON_DEPTH = 32
"""Objects and lists inside one another; the deepest request that means anything needs 5."""

MAX_HEAD_BYTES = 64 * 1024
"""An HTTP request's line and headers."""


def check(name: str, value: object) -> None:
    """Raises OutOfLimits when `value` is nothing that field `name` may be."""
    LIMITS[name].check(name, value)
