"""Distributions of lengths (tokens, 1 or more) and times (seconds), with one text form for all options.

    512                                   constant
    uniform:100-800                       integers from 100 to 800, equally likely (times: real numbers)
    lognormal:mean=512,cv=0.8             mean and coefficient of variation of the lognormal itself
    lognormal:mean=512,cv=0.8,min=16,max=4096     values outside are moved to the bound, which shifts the mean
    exponential:mean=512                  may have min and max, too
    file:lengths.csv:ContextTokens        drawn with replacement from a column of a CSV file or a key of a
                                          JSONL file, either possibly gzipped

Times are written as `300ms`, `5s` or `2m`: `lognormal:mean=5s,cv=1,max=2m`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen import text_forms
from loadgen.loadgen_errors import BadPlan
from loadgen.plan.draws import Floats, exponential, normal
from loadgen.user_files import numbered_lines

MAX_TOKENS = 2**31 - 1


class Distribution(Protocol):
    """A distribution of real numbers of 0 or more."""

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw numbers, [count]. The first ones do not depend on `count`."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant."""

    value: float

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.full(count, self.value)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform numbers `low + (high - low) u`, or integers `floor(low + (high + 1 - low) u)`."""

    low: float
    high: float
    is_integer: bool = True

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        u = rng.random(count)
        if self.is_integer:
            return np.floor(self.low + (self.high + 1 - self.low) * u)
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lognormal numbers with the given mean and coefficient of variation, clipped to [low, high].

    `exp(mu + sigma z)` with `sigma² = ln(1 + cv²)` and `mu = ln(mean) - sigma²/2`.
    """

    mean: float
    cv: float
    low: float = 0.0
    high: float = math.inf

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        variance = math.log1p(self.cv**2)
        values = np.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * normal(rng, count))
        return np.clip(values, self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """Exponential numbers `-mean ln(1 - u)`, clipped to [low, high]."""

    mean: float
    low: float = 0.0
    high: float = math.inf

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.clip(self.mean * exponential(rng, count), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Empirical:
    """One of `values`, with equal probability."""

    values: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.asarray(self.values)[(rng.random(count) * len(self.values)).astype(np.int64)]


def draw_lengths(distribution: Distribution, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Draw numbers rounded to whole tokens, at least 1."""
    return np.clip(np.rint(distribution.draw(rng, count)), 1, MAX_TOKENS).astype(np.int64)


def parse_lengths(text: str) -> Distribution:
    """Parse a distribution of token counts. Raises BadPlan."""
    distribution = _parse(text, text_forms.number, is_integer=True)
    if isinstance(distribution, Fixed) and not (distribution.value >= 1 and distribution.value.is_integer()):
        raise BadPlan(f"`{text}`: a length must be an integer of 1 or more")
    if isinstance(distribution, Uniform) and not (
        distribution.low >= 1 and distribution.low.is_integer() and distribution.high.is_integer()
    ):
        raise BadPlan(f"`{text}`: the bounds must be integers of 1 or more")
    return distribution


def parse_times(text: str) -> Distribution:
    """Parse a distribution of seconds. Raises BadPlan."""
    return _parse(text, text_forms.seconds, is_integer=False)


def _parse(text: str, read: Callable[[str], float], *, is_integer: bool) -> Distribution:
    kind, rest = text_forms.split_kind(text)
    bounds = {"min": read, "max": read}
    match kind:
        case "uniform":
            low, high = text_forms.span(rest, text, read)
            if low > high:
                raise BadPlan(f"`{text}`: the first number must not be larger than the second")
            return Uniform(low, high, is_integer)
        case "lognormal" | "exponential":
            shape: dict[str, Callable[[str], float]] = {"cv": text_forms.number} if kind == "lognormal" else {}
            values = text_forms.pairs(rest, text, {"mean": read, **shape, **bounds}, needed=("mean", *shape))
            if values["mean"] <= 0:
                raise BadPlan(f"`{text}`: the mean must be above 0")
            low, high = values.get("min", 0.0), values.get("max", math.inf)
            if low > high:
                raise BadPlan(f"`{text}`: `min` must not be above `max`")
            if kind == "exponential":
                return Exponential(mean=values["mean"], low=low, high=high)
            return Lognormal(mean=values["mean"], cv=values["cv"], low=low, high=high)
        case "file":
            path, colon, column = rest.rpartition(":")
            if not colon or not path or not column:
                raise BadPlan(f"`{text}`: write file:PATH:COLUMN")
            return Empirical(_column(path, column))
    if rest or not kind[:1].isdigit():
        raise BadPlan(
            f"`{text}` is not a distribution; write 512, uniform:100-800, lognormal:mean=512,cv=0.8, "
            "exponential:mean=512 or file:PATH:COLUMN"
        )
    return Fixed(read(text))


def _column(path: str, column: str) -> tuple[float, ...]:
    """Read the numbers of one column of a CSV or JSONL file. Raises BadPlan with the line."""
    values = []
    header: list[str] | None = None
    for line_number, line in numbered_lines(path):
        where = f"{path}:{line_number}"
        if line_number == 1 and not line.lstrip().startswith("{"):
            header = [name.strip() for name in next(csv.reader([line]), [])]
            if column not in header:
                raise BadPlan(f"{where}: no column `{column}`; the columns are {', '.join(header)}")
            continue
        try:
            cell = json.loads(line)[column] if header is None else next(csv.reader([line]))[header.index(column)]
            values.append(text_forms.number(str(cell)))
        except (ValueError, KeyError, TypeError, IndexError, StopIteration):
            raise BadPlan(f"{where}: no `{column}` in `{line[:60]}`") from None
        except BadPlan as error:
            raise BadPlan(f"{where}: {error}") from None
    if not values:
        raise BadPlan(f"{path}: the file has no rows")
    return tuple(values)
