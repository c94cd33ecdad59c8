"""Parses and formats durations such as `500ms`, and lists of named ones such as `ttft=500ms,tpot=50ms`."""

import math
import re
from collections.abc import Collection, Mapping

_UNITS: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(?P<unit>[a-zµ]+)")


def parse_durations(text: str, names: Collection[str]) -> dict[str, float]:
    """Parse `NAME=DURATION,…` into seconds by name, in any order and each at most once.

    Raises ValueError naming the wrong term.
    """
    seconds: dict[str, float] = {}
    for term in filter(None, (term.strip() for term in text.split(","))):
        name, equals, duration = (item.strip() for item in term.partition("="))
        if not equals or name not in names:
            raise ValueError(f"expected TERM=DURATION with a term of {', '.join(names)}, got {term!r}")
        if name in seconds:
            raise ValueError(f"{name} is given twice")
        seconds[name] = _parse_duration(name, duration)
    return seconds


def format_duration(duration_s: float) -> str:
    """Format seconds with three significant digits in a suitable unit: 0.008 is `8ms`."""
    unit = next((unit for unit in ("s", "ms", "us") if duration_s >= _UNITS[unit] * (1 - 1e-9)), "ns")
    return f"{duration_s / _UNITS[unit]:.3g}{unit}"


def _parse_duration(name: str, text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None or match["unit"] not in _UNITS:
        raise ValueError(f"{name}: expected a duration such as 4ms, 50us or 2ns, got {text!r}")
    seconds = float(match["number"]) * _UNITS[match["unit"]]
    if not math.isfinite(seconds):
        raise ValueError(f"{name}: {text} is not a finite duration")
    return seconds
