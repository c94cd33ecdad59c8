"""Durations as people write them: `500ms`, `50us`; and lists of named ones: `ttft=500ms,tpot=50ms`."""

import math
import re
from collections.abc import Collection, Mapping

_UNITS: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(?P<unit>[a-zµ]+)")


def parse_durations(text: str, names: Collection[str]) -> dict[str, float]:
    """Seconds by name, in any order; each at most once. Raises ValueError naming the term that is wrong."""
    seconds: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, duration = (piece.strip() for piece in part.partition("="))
        if not equals or name not in names:
            raise ValueError(f"expected TERM=DURATION with a term of {', '.join(names)}, got {part!r}")
        if name in seconds:
            raise ValueError(f"{name} is there twice")
        seconds[name] = _parse_duration(name, duration)
    return seconds


def format_duration(duration_s: float) -> str:
    """To three digits, in the largest unit of which there is at least one: 0.008 is `8ms`."""
    unit = next((unit for unit in ("s", "ms", "us") if duration_s >= _UNITS[unit] * (1 - 1e-9)), "ns")
    return f"{duration_s / _UNITS[unit]:.3g}{unit}"


def _parse_duration(name: str, text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None or match["unit"] not in _UNITS:
        raise ValueError(f"{name}: expected a duration such as 4ms, 50us or 2ns, got {text!r}")
    seconds = float(match["number"]) * _UNITS[match["unit"]]
    if not math.isfinite(seconds):
        raise ValueError(f"{name}: {text} is no finite time")
    return seconds
