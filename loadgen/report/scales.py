"""Axis scales, tick values and number formatting of figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps [low, high] to [start, end] of the drawing, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 6) -> list[float]:
        """Return about this many round values for axis labels."""
        return _log_ticks(self.low, self.high, about) if self.is_log else linear_ticks(self.low, self.high, about)


def extent(values: Sequence[float], *, is_log: bool = False, from_zero: bool = False) -> tuple[float, float]:
    """Return (low, high) that contain all values, never equal, and positive for a log scale."""
    usable = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    if not usable:
        return (1.0, 10.0) if is_log else (0.0, 1.0)
    low, high = min(usable), max(usable)
    if is_log:
        return (low / 1.5, high * 1.5) if high / low < 1.2 else (low / 1.05, high * 1.05)
    if from_zero:
        low = min(0.0, low)
    if high <= low:
        return (low - 0.5, high + 0.5) if low and not from_zero else (low, low + 1.0)
    return low, high


def linear_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return round values in [low, high], with steps of 1, 2 or 5 times a power of ten."""
    step = nice((high - low) / max(about, 1))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def nice(value: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * (1 - 1e-9))


def _log_ticks(low: float, high: float, about: int) -> list[float]:
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [
            value
            for decade in decades
            for step in steps
            if low * 0.999 <= (value := step * 10.0**decade) <= high * 1.001
        ]
        if len(ticks) <= about + 1:
            break
    return ticks


def format_number(value: float | None) -> str:
    """Return a number with three significant digits, thousands as k and millions as M."""
    if value is None or not math.isfinite(value):
        return "–"
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{_digits(value / (1e3 if unit == 'k' else bound))}{unit}"
    return _digits(value)


def format_ms(value: float | None) -> str:
    """Return a duration such as `0.42 ms`, `38.1 ms` or `1.25 s`."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{_digits(value / 1000)} s"
    return f"{_digits(value)} ms"


def format_percent(share: float | None, digits: int = 1) -> str:
    """Return a share in [0, 1] as a percentage. 100 % and 0 % are shown only if exact."""
    if share is None or not math.isfinite(share):
        return "–"
    text = f"{100 * share:.{digits}f}"
    if share < 1 and float(text) >= 100:
        text = f"{100 - 10.0**-digits:.{digits}f}"
    if share > 0 and float(text) <= 0:
        return f"<{10.0**-digits:.{digits}f} %"
    return f"{text} %" if share not in (0, 1) else f"{100 * share:.0f} %"


def _digits(value: float) -> str:
    size = abs(value)
    if size == 0:
        return "0"
    places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else min(2 - math.floor(math.log10(size)), 4)
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_value(value: float | None, unit: str) -> str:
    """Return a value with the unit of an axis: `ms`, `share`, none, or a suffix."""
    if unit == "ms":
        return format_ms(value)
    if unit == "share":
        return format_percent(value).replace(".0 %", " %")
    return f"{format_number(value)} {unit}" if unit else format_number(value)
