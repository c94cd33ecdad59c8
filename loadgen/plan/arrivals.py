"""Arrival times of requests: absolute seconds from the start of the run, ascending, never rescaled.

Every process is a renewal process of rate 1 in *operational time*, mapped to a rate that may vary: with
`L(t)` = integral of `rate` from 0 to t, the arrival at operational time x happens at `t = L⁻¹(x)`. So the gap
process (Poisson, gamma, Weibull, constant) and the rate (constant, ramp, steps, on/off) are independent
choices. A Poisson process with a varying rate is the non-homogeneous Poisson process of that rate.

Gap processes start in equilibrium: the first gap is the time from a random moment to the next arrival, with
density `(1 - F(x)) / mean`. So the expected number of arrivals in any window of length T is `rate T`, from
the start on. Starting with a full gap would add `(cv² - 1) / 2` arrivals to every window, 22 of them at cv =
6.8.

Arrivals end before `until_s`, after `count`, or at whichever comes first. Raising either only appends
arrivals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen import text_forms
from loadgen.loadgen_errors import BadPlan
from loadgen.plan import draws
from loadgen.plan.draws import Floats
from loadgen.user_files import numbered_lines

BATCH = 1024
"""Gaps drawn at a time. It is fixed, because `draws.gamma` is reproducible only for equal counts."""

MAX_ARRIVALS = 5_000_000
"""Most arrivals of one call, so that a mistyped rate ends with an error."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A time span over which the rate changes linearly from `start_rps` to `end_rps`."""

    duration_s: float
    start_rps: float
    end_rps: float

    @property
    def area(self) -> float:
        """Expected number of arrivals."""
        return 0.0 if self.start_rps == self.end_rps == 0 else self.duration_s * (self.start_rps + self.end_rps) / 2


Rate = Callable[[np.random.Generator], Iterable[Piece]]
"""Generates the pieces of a rate, possibly without end. The generator is for random rates."""

Gaps = Callable[[np.random.Generator], Iterator[Floats]]
"""Generates batches of gaps with mean 1, the first one in equilibrium."""


def constant(*, rate_rps: float, until_s: float | None = None, count: int | None = None) -> Floats:
    """Return `0, 1/rate, 2/rate, …`."""
    return arrivals(_unused(), constant_gaps, steady(rate_rps), until_s=until_s, count=count)


def poisson(
    rng: np.random.Generator, *, rate_rps: float, until_s: float | None = None, count: int | None = None
) -> Floats:
    """Return Poisson arrivals: gaps are exponential with mean `1/rate` (cv 1)."""
    return arrivals(rng, poisson_gaps, steady(rate_rps), until_s=until_s, count=count)


def gamma(
    rng: np.random.Generator, *, rate_rps: float, cv: float, until_s: float | None = None, count: int | None = None
) -> Floats:
    """Return arrivals with gamma gaps of shape `1/cv²` and mean `1/rate`.

    A cv above 1 is burstier than Poisson, one below 1 more regular.
    """
    return arrivals(rng, gamma_gaps(1 / cv**2), steady(rate_rps), until_s=until_s, count=count)


def weibull(
    rng: np.random.Generator, *, rate_rps: float, shape: float, until_s: float | None = None, count: int | None = None
) -> Floats:
    """Return arrivals with Weibull gaps of this shape and mean `1/rate`.

    The scale is `1 / (rate Γ(1 + 1/shape))`. `weibull_shape(cv)` gives the shape for a cv.
    """
    return arrivals(rng, weibull_gaps(shape), steady(rate_rps), until_s=until_s, count=count)


def ramp(
    rng: np.random.Generator, *, start_rps: float, end_rps: float, duration_s: float, count: int | None = None
) -> Floats:
    """Return Poisson arrivals with `rate(t) = start + (end - start) t / duration`."""
    return arrivals(rng, poisson_gaps, steps([Piece(duration_s, start_rps, end_rps)]), count=count)


def trace_times(
    times_s: Sequence[float], *, time_scale: float = 1.0, start_s: float = 0.0, until_s: float | None = None
) -> Floats:
    """Return `(t - start) time_scale` for the times from `start` on, sorted, and below `until`."""
    times = np.sort(np.asarray(times_s, np.float64))
    times = (times[times >= start_s] - start_s) * time_scale
    return times if until_s is None else times[times < until_s]


def arrivals(
    rng: np.random.Generator,
    gaps: Gaps,
    rate: Rate,
    *,
    until_s: float | None = None,
    count: int | None = None,
    max_arrivals: int = MAX_ARRIVALS,
) -> Floats:
    """Return the arrivals of any gap process with any rate, rounded to microseconds.

    Raises BadPlan if there are more than `max_arrivals`.
    """
    source = iter(rate(rng.spawn(1)[0]))
    pieces: list[Piece] = []
    end_s, area = 0.0, 0.0  # of `pieces`
    times: list[Floats] = []
    num_times, position = 0, 0.0  # in operational time
    for gap in gaps(rng):
        points = position + np.cumsum(gap)
        position = float(points[-1])
        while area <= position and (until_s is None or end_s < until_s) and (piece := next(source, None)):
            pieces.append(piece)
            end_s += piece.duration_s
            area += piece.area
        found = _locate(points, pieces)
        if until_s is not None:
            found = found[found < until_s]
        times.append(found)
        num_times += len(found)
        if len(found) < len(points) or (count is not None and num_times >= count):
            break
        if num_times > max_arrivals:
            raise BadPlan(f"more than {max_arrivals} arrivals; give a lower rate, a duration or a count")
    return np.round(np.concatenate(times)[:count], 6)


def _locate(points: Floats, pieces: Sequence[Piece]) -> Floats:
    """Return `L⁻¹` of each point; those beyond the last piece are left out.

    In a piece from rate a to b over duration D, at y within the piece: `a t + (b - a) t² / 2D = y`, so `t = 2
    y / (a + √(a² + 2 y (b - a) / D))`.
    """
    ends = np.cumsum([piece.area for piece in pieces])
    begins = np.concatenate([[0.0], ends])
    starts_s = np.concatenate([[0.0], np.cumsum([piece.duration_s for piece in pieces])])
    points = points[points < ends[-1]]
    which = np.searchsorted(ends, points, side="right")
    y = points - begins[which]
    a = np.array([piece.start_rps for piece in pieces])[which]
    slope = np.array([(piece.end_rps - piece.start_rps) / piece.duration_s for piece in pieces])[which]
    root = a + np.sqrt(np.maximum(a * a + 2 * y * slope, 0.0))
    return starts_s[which] + np.divide(2 * y, root, out=np.zeros_like(y), where=root > 0)


# Gap processes with mean 1.


def constant_gaps(rng: np.random.Generator) -> Iterator[Floats]:
    """Gaps of 1 each; the first arrival is at time 0."""
    yield np.zeros(1)
    while True:
        yield np.ones(BATCH)


def poisson_gaps(rng: np.random.Generator) -> Iterator[Floats]:
    """Exponential gaps, including the first one, because the process is memoryless."""
    while True:
        yield draws.exponential(rng, BATCH)


def gamma_gaps(shape: float) -> Gaps:
    """Gaps `Γ(shape) / shape`.

    The gap around a random moment is longer, `Γ(shape + 1) / shape`, and a uniform fraction of it has passed.
    """

    def gaps(rng: np.random.Generator) -> Iterator[Floats]:
        yield rng.random(1) * draws.gamma(rng, shape + 1, 1) / shape
        while True:
            yield draws.gamma(rng, shape, BATCH) / shape

    return gaps


def weibull_gaps(shape: float) -> Gaps:
    """Gaps `s W(shape)` with `s = 1 / Γ(1 + 1/shape)`.

    The gap around a random moment is `s G^(1/shape)` with G of gamma(1 + 1/shape), and a uniform fraction has
    passed.
    """
    scale = math.exp(-math.lgamma(1 + 1 / shape))

    def gaps(rng: np.random.Generator) -> Iterator[Floats]:
        yield rng.random(1) * scale * draws.gamma(rng, 1 + 1 / shape, 1) ** (1 / shape)
        while True:
            yield scale * draws.weibull(rng, shape, BATCH)

    return gaps


def weibull_cv(shape: float) -> float:
    """Return `√(Γ(1 + 2/shape) / Γ(1 + 1/shape)² - 1)`."""
    return math.sqrt(math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)))


def weibull_shape(cv: float) -> float:
    """Return the shape for a cv, by bisection. Raises BadPlan outside of shapes 0.1 to 100 (cv 0.013 to
    430)."""
    low, high = 0.1, 100.0
    if not weibull_cv(high) <= cv <= weibull_cv(low):
        raise BadPlan(
            f"Weibull gaps cannot have cv {cv:g}; it must be between {weibull_cv(high):.2g} and {weibull_cv(low):.3g}"
        )
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if weibull_cv(middle) > cv else (low, middle)
    return low


# Rates.


def steady(rate_rps: float) -> Rate:
    """Return the rate of a workload that is constant and never ends. Raises BadPlan if it is not above 0."""
    if not rate_rps > 0:
        raise BadPlan(f"the rate is {rate_rps:g} requests/s; it must be above 0")
    return lambda rng: [Piece(math.inf, rate_rps, rate_rps)]


def steps(pieces: Sequence[Piece]) -> Rate:
    """Return a rate of these pieces. Nothing arrives after the last one. Raises BadPlan."""
    if not any(piece.area > 0 for piece in pieces) or any(piece.duration_s <= 0 for piece in pieces):
        raise BadPlan("a stepwise rate needs a rate above 0 in at least one step and a duration above 0 in each")
    return lambda rng: pieces


def alternating(on: tuple[float, float], off: tuple[float, float], *, is_random: bool = False) -> Rate:
    """Return a rate that alternates between two (seconds, requests per second) without end.

    With `is_random`, the seconds are exponential with these means. The first span is then either one, with
    its probability at a random moment. Raises BadPlan.
    """
    if not (on[0] > 0 and off[0] > 0 and max(on[1], off[1]) > 0):
        raise BadPlan("an on/off rate needs two durations above 0 and a rate above 0")

    def pieces(rng: np.random.Generator) -> Iterator[Piece]:
        starts_off = is_random and rng.random() * (on[0] + off[0]) >= on[0]
        for seconds, rps in itertools.cycle((off, on) if starts_off else (on, off)):
            duration_s = seconds * float(draws.exponential(rng, 1)[0]) if is_random else seconds
            if duration_s > 0:
                yield Piece(duration_s, rps, rps)

    return pieces


# Text forms.


def parse_gaps(text: str) -> Gaps:
    """Parse `poisson`, `constant`, `gamma:cv=2`, `weibull:cv=2` or `weibull:shape=0.5`. Raises BadPlan."""
    kind, rest = text_forms.split_kind(text)
    match kind:
        case "poisson" | "constant" if not rest:
            return poisson_gaps if kind == "poisson" else constant_gaps
        case "gamma":
            cv = text_forms.pairs(rest, text, {"cv": text_forms.number}, needed=("cv",))["cv"]
            if cv == 0:
                raise BadPlan(f"`{text}`: cv must be above 0; write constant for equal gaps")
            return gamma_gaps(1 / cv**2)
        case "weibull":
            values = text_forms.pairs(rest, text, {"cv": text_forms.number, "shape": text_forms.number})
            if len(values) != 1 or 0 in values.values():
                raise BadPlan(f"`{text}`: give either cv=… or shape=…, and a value above 0")
            return weibull_gaps(values["shape"] if "shape" in values else weibull_shape(values["cv"]))
    raise BadPlan(
        f"`{text}` is not an arrival process; write poisson, constant, gamma:cv=2, weibull:cv=2, "
        "weibull:shape=0.5 or file:PATH"
    )


def parse_rate(text: str) -> Rate:
    """Parse a rate in requests per second. Raises BadPlan.

    Forms: `5`, `ramp:1-10@60s`, `steps:2@60s,4@30s`, `onoff:10@5s,0@15s`, `onoff:10@5s,0@15s,random`.
    """
    kind, rest = text_forms.split_kind(text)
    parts = [part.strip() for part in rest.split(",")]
    match kind:
        case "ramp":
            rates, at, duration = rest.partition("@")
            if not at:
                raise BadPlan(f"`{text}`: write ramp:1-10@60s")
            start_rps, end_rps = text_forms.span(rates, text, text_forms.number)
            return steps([Piece(text_forms.seconds(duration), start_rps, end_rps)])
        case "steps":
            return steps([Piece(seconds, rps, rps) for seconds, rps in (_stretch(part, text) for part in parts)])
        case "onoff":
            is_random = parts[-1] == "random"
            stretches = [_stretch(part, text) for part in parts[: -1 if is_random else None]]
            if len(stretches) != 2:
                raise BadPlan(f"`{text}`: write two stretches, such as onoff:10@5s,0@15s")
            return alternating(stretches[0], stretches[1], is_random=is_random)
    if rest or not kind[:1].isdigit():
        raise BadPlan(f"`{text}` is not a rate; write 5, ramp:1-10@60s, steps:2@60s,4@30s or onoff:10@5s,0@15s")
    return steady(text_forms.number(text))


def read_times(path: str) -> Floats:
    """Read arrival times from a file with one number of seconds per line. Raises BadPlan."""
    times = []
    for line_number, line in numbered_lines(path):
        try:
            times.append(text_forms.number(line))
        except BadPlan as error:
            raise BadPlan(f"{path}:{line_number}: {error}") from None
        if len(times) > 1 and times[-1] < times[-2]:
            raise BadPlan(
                f"{path}:{line_number}: {line} is before {times[-2]} in the previous line; sort the file by time"
            )
    if not times:
        raise BadPlan(f"{path}: the file has no times")
    return np.round(np.asarray(times), 6)


def _stretch(text: str, full_text: str) -> tuple[float, float]:
    rps, at, duration = text.partition("@")
    if not at:
        raise BadPlan(f"`{full_text}`: write rate@duration, such as 2@60s")
    return text_forms.seconds(duration), text_forms.number(rps)


def _unused() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(0))
