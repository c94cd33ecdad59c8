"""Parsers for text forms that several options share: `name:key=value,key=value`, `100-800` and durations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from loadgen.loadgen_errors import BadPlan

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+"
T = TypeVar("T")


def number(text: str) -> float:
    """Return a finite number of 0 or more. Raises BadPlan."""
    if not re.fullmatch(_NUMBER, text.strip(), re.IGNORECASE) or not math.isfinite(value := float(text)):
        raise BadPlan(f"`{text}` is not a number of 0 or more")
    return value


def seconds(text: str) -> float:
    """Return the seconds in a duration such as `1.5`, `300ms`, `2m` or `1h`. Raises BadPlan."""
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if match is None or match[2].lower() not in _SECONDS:
        raise BadPlan(f"`{text}` is not a duration; write 300ms, 5s, 2m or 1h")
    return float(match[1]) * _SECONDS[match[2].lower()]


def split_kind(text: str) -> tuple[str, str]:
    """Split `kind:rest` into its two parts. A text without a colon has an empty rest."""
    kind, _, rest = text.strip().partition(":")
    return kind.strip().lower(), rest.strip()


def pairs(
    text: str, full_text: str, known: Mapping[str, Callable[[str], float]], needed: tuple[str, ...] = ()
) -> dict[str, float]:
    """Parse `key=value,key=value` into numbers by key.

    - `full_text`: the user's full text, for error messages
    - `known`: the value parser of each allowed key
    - `needed`: keys that must be present

    Raises BadPlan for an unknown, duplicate or missing key.
    """
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            raise BadPlan(
                f"`{full_text}`: `{part}` is not a known setting; write {', '.join(f'{name}=…' for name in known)}"
            )
        if key in values:
            raise BadPlan(f"`{full_text}` contains `{key}` twice; give it once")
        values[key] = known[key](value)
    missing = [name for name in needed if name not in values]
    if missing:
        raise BadPlan(f"`{full_text}`: `{missing[0]}=…` is missing")
    return values


def span(text: str, full_text: str, read: Callable[[str], float]) -> tuple[float, float]:
    """Parse `low-high` into two numbers. Raises BadPlan."""
    low, dash, high = text.partition("-")
    if not dash:
        raise BadPlan(f"`{full_text}`: write two numbers, such as 100-800")
    return read(low), read(high)
