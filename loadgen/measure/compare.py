"""Compares two runs, request by request if both ran the same plan.

Pairing by request index removes the plan's own influence: a long prompt is long in both runs. Latencies are
compared over requests with a complete response in both runs. Attainment shows how many are missing; its
denominator is all requests that both runs offered. Intervals describe other requests of these two runs, not
other runs: on a machine whose speed drifts, alternate the systems and repeat.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from loadgen.loadgen_errors import LoadgenError
from loadgen.measure.measures import Measures
from loadgen.measure.prefix_hits import CacheVerdict
from loadgen.measure.records_file import Result
from loadgen.measure.request_metrics import OutcomeRules, why_invalid
from loadgen.measure.stats import Floats, Interval, difference_interval, independent_difference_interval, percentile
from loadgen.measure.summary import rate

LATENCIES = ("ttft", "tpot", "e2e")
STATISTICS = {"mean": None, "p50": 50.0, "p99": 99.0}
METRICS = (*(f"{metric}_{statistic}" for metric in LATENCIES for statistic in STATISTICS), "attainment", "goodput")
HIGHER_IS_BETTER = ("attainment", "goodput")


class NotComparable(LoadgenError):
    """Two results cannot be compared, or a threshold is invalid."""


class ComparisonVerdict(StrEnum):
    """Result of comparing one metric.

    UNKNOWN means too few values. WARM means that a warm cache favours the better run, so nothing is decided.
    """

    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference"
    UNKNOWN = "unknown"
    WARM = "warm cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSides:
    """Flags of the runs that began with a warm cache. A warm run is never called the better one."""

    before: bool = False
    after: bool = False

    def forbids(self, *, is_worse: bool) -> bool:
        """True if the second run must not be called worse (`is_worse`), or not better."""
        return self.before if is_worse else self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric of both runs, in seconds, as a share or in requests/s.

    NaN means no values. `interval` is that of `difference`. `count` is the number of compared requests.
    `warm` withholds verdicts that a warm cache favours.
    """

    metric: str
    before: float
    after: float
    interval: Interval | None
    count: int
    warm: WarmSides = WarmSides()

    @property
    def difference(self) -> float:
        """The change from the first run to the second."""
        return self.after - self.before

    @property
    def relative(self) -> float:
        """The difference relative to the first run; NaN or infinite if that is zero."""
        if self.before == 0:
            return 0.0 if self.difference == 0 else math.copysign(math.inf, self.difference)
        return self.difference / self.before

    @property
    def verdict(self) -> ComparisonVerdict:
        """Better or worse if the interval excludes zero."""
        if self.interval is None or math.isnan(self.difference):
            return ComparisonVerdict.UNKNOWN
        if not self.interval.excludes_zero:
            return ComparisonVerdict.SAME
        is_worse = (self.interval.low > 0) != (self.metric in HIGHER_IS_BETTER)
        if self.warm.forbids(is_worse=is_worse):
            return ComparisonVerdict.WARM
        return ComparisonVerdict.WORSE if is_worse else ComparisonVerdict.BETTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The changes between two runs.

    - `before`, `after`: names of the runs
    - `invalid`: reasons why a run is invalid, with its name; nothing is decided then
    - `warm`: which runs must not be called better, because their cache was warm
    - `warm_texts`: statements about warm caches, with the run's name, also if they are allowed
    - `notes`: limitations of the comparison
    """

    before: str
    after: str
    is_paired: bool
    changes: tuple[Change, ...]
    invalid: tuple[str, ...] = ()
    warm: WarmSides = WarmSides()
    warm_texts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def is_withheld(self, allowed: float) -> bool:
        """True if a warm cache hides whether the second run is worse by more than the share `allowed`.

        It does if the second run is warm, or if it is that much worse only than a warm first run.
        """
        return self.warm.after or any(
            change.verdict is ComparisonVerdict.WARM and abs(change.relative) > allowed for change in self.changes
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form in seconds, shares and requests/s. Missing values are null."""
        return {
            "loadgen_compare": 1,
            "before": self.before,
            "after": self.after,
            "paired": self.is_paired,
            "invalid": list(self.invalid),
            "warm": list(self.warm_texts),
            "notes": list(self.notes),
            "changes": [
                {
                    "metric": change.metric,
                    "before": _finite(change.before),
                    "after": _finite(change.after),
                    "difference": _finite(change.difference),
                    "low": change.interval.low if change.interval else None,
                    "high": change.interval.high if change.interval else None,
                    "relative": _finite(change.relative),
                    "verdict": str(change.verdict),
                    "count": change.count,
                }
                for change in self.changes
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionBound:
    """A limit for one change, such as `ttft_p50 > +5%`. `amount` is relative or in the metric's own unit."""

    text: str
    metric: str
    is_above: bool
    amount: float
    is_relative: bool

    @classmethod
    def parse(cls, text: str) -> RegressionBound:
        """Return the bound for a text. Raises NotComparable."""
        match = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*(%|us|ms|s|pp|rps)\s*", text)
        if match is None:
            raise NotComparable(
                f"`{text}` is not a threshold; write METRIC > +5%, METRIC > 20ms, attainment < -1pp or goodput < "
                "-0.5rps"
            )
        metric, sign, number, unit = match.groups()
        if metric not in METRICS:
            raise NotComparable(f"`{metric}` is not a metric of a comparison; known are {', '.join(METRICS)}")
        units = {"attainment": ("pp",), "goodput": ("rps",)}.get(metric, ("us", "ms", "s"))
        if unit not in ("%", *units):
            raise NotComparable(f"`{text}`: the unit of {metric} must be % or {' or '.join(units)}")
        scale = {"%": 0.01, "pp": 0.01, "us": 1e-6, "ms": 1e-3, "s": 1.0, "rps": 1.0}[unit]
        return cls(
            text=text.strip(),
            metric=metric,
            is_above=sign == ">",
            amount=float(number) * scale,
            is_relative=unit == "%",
        )

    def has_value(self, comparison: Comparison) -> bool:
        """Return True if both runs have a value of the metric."""
        return not math.isnan(self._seen(comparison))

    def _seen(self, comparison: Comparison) -> float:
        change = next(change for change in comparison.changes if change.metric == self.metric)
        return change.relative if self.is_relative else change.difference

    def is_crossed(self, comparison: Comparison) -> bool | None:
        """True if the observed change crosses the bound, whatever its interval.

        None if a run has no value, or if the answer favours a run with a warm cache.
        """
        seen = self._seen(comparison)
        if math.isnan(seen):
            return None
        is_crossed = seen > self.amount if self.is_above else seen < self.amount
        bounds_worse = self.is_above != (self.metric in HIGHER_IS_BETTER)
        return None if comparison.warm.forbids(is_worse=is_crossed == bounds_worse) else is_crossed


def compare(
    before: Result,
    after: Result,
    *,
    caches: tuple[CacheVerdict, CacheVerdict] | None = None,
    allow_warm: bool = False,
    unpaired: bool = False,
    rules: OutcomeRules | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare two results. A run whose cache was warm (`caches`) is not called better, unless `allow_warm`.

    Raises NotComparable for different plans, unless `unpaired` treats them as two independent samples.
    `rules` replaces the first run's SLOs.
    """
    notes = [*_named(before, before.notes), *_named(after, after.notes)]
    caches = caches or (CacheVerdict(), CacheVerdict())
    notes += _unknown_caches((before, after), caches)
    warm = WarmSides() if allow_warm else WarmSides(before=caches[0].is_warm, after=caches[1].is_warm)
    is_named_alike = before.name == after.name
    names = [f"{one.name} ({one.path.resolve().name})" if is_named_alike else one.name for one in (before, after)]
    is_paired = not unpaired
    if is_paired and before.run.plan_hash != after.run.plan_hash:
        run_again = f"run {before.plan_path} on both servers, or " if before.plan_path is not None else ""
        raise NotComparable(
            f"{before.name} and {after.name} ran different plans ({before.run.plan_hash[:12]}, "
            f"{after.run.plan_hash[:12]}); {run_again}use --unpaired"
        )
    if rules is None and dict(before.run.slos) != dict(after.run.slos):
        notes.append(f"the runs have different SLOs; both are evaluated against {before.name}'s")
    rules = rules or OutcomeRules(slos=before.run.slos, ignore_eos=before.run.ignore_eos)
    sides = [
        Measures.of(result.records, replace(rules, ignore_eos=result.run.ignore_eos)) for result in (before, after)
    ]
    full = [len(side) for side in sides]
    if is_paired:
        sides = _common(sides[0], sides[1])
        if any(len(side) < size for side, size in zip(sides, full, strict=True)):
            notes.append(
                f"only the {len(sides[0])} requests that both runs offered are compared, of {full[0]} and {full[1]}"
            )
    find = difference_interval if is_paired else independent_difference_interval
    changes = [
        _latency(sides, metric, statistic, is_paired, find, seed) for metric in LATENCIES for statistic in STATISTICS
    ]
    changes += _shares(sides, find, seed)
    return Comparison(
        before=names[0],
        after=names[1],
        is_paired=is_paired,
        changes=tuple(replace(change, warm=warm) for change in changes),
        warm=warm,
        warm_texts=_warm_texts((before, after), caches),
        invalid=tuple(
            reason
            for result in (before, after)
            for reason in _named(result, why_invalid(result.run, result.records, rules))
        ),
        notes=tuple(notes),
    )


def regressions(comparison: Comparison, allowed: float) -> list[Change]:
    """Return the changes that are worse by more than the share `allowed`.

    Their interval must exclude zero.
    """
    return [
        change
        for change in comparison.changes
        if change.verdict is ComparisonVerdict.WORSE and abs(change.relative) > allowed
    ]


def _named(result: Result, texts: Sequence[str]) -> list[str]:
    return [f"{result.name}: {text}" for text in texts]


def _warm_texts(results: tuple[Result, Result], caches: tuple[CacheVerdict, CacheVerdict]) -> tuple[str, ...]:
    pairs = zip(results, caches, strict=True)
    return tuple(text for result, cache in pairs if cache.is_warm for text in _named(result, [cache.text]))


def _unknown_caches(results: tuple[Result, Result], caches: tuple[CacheVerdict, CacheVerdict]) -> list[str]:
    """Return a note about each run whose cache state is unknown; one note if the reason is the same."""
    reasons: dict[str, list[str]] = {}
    for result, cache in zip(results, caches, strict=True):
        if cache.why:
            reasons.setdefault(cache.text, []).append(result.name)
    return [f"{' and '.join(names)}: {text}" for text, names in reasons.items()]


def _common(before: Measures, after: Measures) -> list[Measures]:
    """Return both runs restricted to the requests that both offered.

    Both are in the first run's order of intended times.
    """
    rows = {record.index: row for row, record in enumerate(after.records)}
    pairs = [(row, rows[record.index]) for row, record in enumerate(before.records) if record.index in rows]
    if not pairs:
        raise NotComparable("the two runs have no request in common")
    return [before.select([row for row, _ in pairs]), after.select([row for _, row in pairs])]


Find = Callable[..., Interval | None]


def _latency(sides: list[Measures], metric: str, statistic: str, is_paired: bool, find: Find, seed: int) -> Change:
    values = [np.where(side.complete, side.columns[metric], math.nan) for side in sides]
    if is_paired:
        both = ~np.isnan(values[0]) & ~np.isnan(values[1])
        values = [side[both] for side in values]
    else:
        values = [side[~np.isnan(side)] for side in values]
    return _change(f"{metric}_{statistic}", values, STATISTICS[statistic], find, seed)


def _shares(sides: list[Measures], find: Find, seed: int) -> list[Change]:
    """Return the changes of attainment and goodput."""
    goods = [side.good.astype(np.float64) for side in sides]
    rates = [rate(side.columns["intended"]) or math.nan for side in sides]
    goodputs = [good * per_s for good, per_s in zip(goods, rates, strict=True)]
    return [_change("attainment", goods, None, find, seed), _change("goodput", goodputs, None, find, seed)]


def _change(metric: str, sides: list[Floats], q: float | None, find: Find, seed: int) -> Change:
    before, after = (
        (float(side.mean()) if q is None else percentile(side, q))
        if side.size and not np.isnan(side).any()
        else math.nan
        for side in sides
    )
    interval = None if math.isnan(before) or math.isnan(after) else find(sides[0], sides[1], q=q, seed=seed)
    return Change(metric=metric, before=before, after=after, interval=interval, count=min(side.size for side in sides))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
