"""Evaluates the part of PromQL that Baton's rules and dashboard use. The package `promql-parser` parses it.

It follows Prometheus's semantics: lookback of five minutes, left-open ranges, staleness, extrapolating
`rate`. Everything else raises Unsupported. `test_promql.py` compares it with cases of Prometheus's own test
suite.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import promql_parser as ast

LOOKBACK_S = 300.0
NAME = "__name__"
STALE = None
"""A sample that marks the end of a series."""

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = float | str | Vector
Samples = list[tuple[float, float | None]]


class Unsupported(Exception):
    """The query uses a part of PromQL that this evaluator does not support."""


@dataclass
class Database:
    """Series by their labels, with samples in order of time."""

    series: dict[Labels, Samples] = field(default_factory=dict)

    def add(self, labels: Mapping[str, str], at_s: float, value: float | None) -> None:
        samples = self.series.setdefault(frozenset(labels.items()), [])
        if samples and samples[-1][0] >= at_s:
            raise ValueError(f"{dict(labels)}: a sample at {at_s} after one at {samples[-1][0]}")
        samples.append((at_s, value))

    def matching(self, selector: ast.VectorSelector) -> Iterable[tuple[Labels, Samples]]:
        if selector.at is not None or selector.matchers.or_matchers:
            raise Unsupported(str(selector))
        checks = [_check(matcher) for matcher in selector.matchers.matchers]
        for labels, samples in self.series.items():
            values = dict(labels)
            if (selector.name is None or values.get(NAME) == selector.name) and all(check(values) for check in checks):
                yield labels, samples

    def evaluate(self, query: str | ast.Expr, at_s: float) -> Value:
        """Evaluate a query at a time.

        Raises ValueError for an invalid query, Unsupported for an unsupported one.
        """
        return _Evaluation(self, at_s).value(ast.parse(query) if isinstance(query, str) else query)

    def vector(self, query: str | ast.Expr, at_s: float) -> Vector:
        value = self.evaluate(query, at_s)
        if not isinstance(value, dict):
            raise Unsupported(f"{query} is no vector")
        return value


@dataclass(frozen=True)
class _Evaluation:
    database: Database
    at_s: float

    def value(self, node: ast.Expr) -> Value:
        match node:
            case ast.NumberLiteral() | ast.StringLiteral():
                return node.val
            case ast.ParenExpr():
                return self.value(node.expr)
            case ast.UnaryExpr():
                return _each(self.value(node.expr), operator.neg)
            case ast.VectorSelector():
                return self._instant(node)
            case ast.AggregateExpr():
                return self._aggregate(node)
            case ast.Call():
                return self._call(node)
            case ast.BinaryExpr():
                return self._binary(node)
        raise Unsupported(type(node).__name__)

    def vector(self, node: ast.Expr) -> Vector:
        value = self.value(node)
        if not isinstance(value, dict):
            raise Unsupported(f"{node} is no vector")
        return value

    def number(self, node: ast.Expr) -> float:
        value = self.value(node)
        if not isinstance(value, float):
            raise Unsupported(f"{node} is no number")
        return value

    def _instant(self, selector: ast.VectorSelector) -> Vector:
        at_s = self.at_s - _seconds(selector.offset)
        found: Vector = {}
        for labels, samples in self.database.matching(selector):
            last = next(((t, v) for t, v in reversed(samples) if t <= at_s), None)
            if last is not None and last[0] > at_s - LOOKBACK_S and last[1] is not STALE:
                found[labels] = last[1]
        return found

    def _call(self, node: ast.Call) -> Value:
        name, arguments = node.func.name, node.args
        if name in _OVER_TIME:
            (matrix,) = arguments
            if not isinstance(matrix, ast.MatrixSelector):
                raise Unsupported(f"{name} of {type(matrix).__name__}")
            return self._over_time(matrix, *_OVER_TIME[name])
        if name == "histogram_quantile":
            return _histogram_quantile(self.number(arguments[0]), self.vector(arguments[1]))
        if name == "clamp_min":
            least = self.number(arguments[1])
            return _each(self.value(arguments[0]), lambda value: max(value, least))
        raise Unsupported(name)

    def _over_time(self, matrix: ast.MatrixSelector, of: "_OfRange", keeps_name: bool) -> Vector:
        selector, range_s = matrix.vector_selector, matrix.range.total_seconds()
        end_s = self.at_s - _seconds(selector.offset)
        found: Vector = {}
        for labels, samples in self.database.matching(selector):
            inside = [(t, v) for t, v in samples if end_s - range_s < t <= end_s and v is not STALE]
            value = of(inside, end_s - range_s, end_s) if inside else None
            if value is not None:
                found[labels if keeps_name else _nameless(labels)] = value
        return found

    def _aggregate(self, node: ast.AggregateExpr) -> Vector:
        if node.param is not None or str(node.op) not in _AGGREGATES:
            raise Unsupported(str(node.op))
        groups: dict[Labels, list[float]] = {}
        for labels, value in self.vector(node.expr).items():
            groups.setdefault(_grouped(_nameless(labels), node.modifier), []).append(value)
        return {labels: _AGGREGATES[str(node.op)](values) for labels, values in groups.items()}

    def _binary(self, node: ast.BinaryExpr) -> Value:
        op, left, right = str(node.op), self.value(node.lhs), self.value(node.rhs)
        if isinstance(left, str) or isinstance(right, str):
            raise Unsupported(f"{op} of texts")
        returns_bool = node.modifier is not None and node.modifier.return_bool
        if isinstance(left, float) and isinstance(right, float):
            return float(_COMPARISONS[op](left, right)) if op in _COMPARISONS else _ARITHMETIC[op](left, right)
        if isinstance(left, dict) and isinstance(right, dict):
            return _of_vectors(op, left, right, node.modifier)
        if isinstance(left, dict):
            assert isinstance(right, float)
            return _with_number(op, left, lambda value: (value, right), returns_bool)
        assert isinstance(right, dict)
        return _with_number(op, right, lambda value: (left, value), returns_bool)


def _of_vectors(op: str, left: Vector, right: Vector, modifier: ast.BinModifier | None) -> Vector:
    key = _key_of(modifier)
    if op in ("and", "or", "unless"):
        there = {key(labels) for labels in right}
        if op == "or":
            here = {key(labels) for labels in left}
            return {**left, **{labels: value for labels, value in right.items() if key(labels) not in here}}
        return {labels: value for labels, value in left.items() if (key(labels) in there) is (op == "and")}
    card = "OneToOne" if modifier is None else str(modifier.card).rpartition(".")[2]
    if card == "OneToMany" or (modifier is not None and (modifier.return_bool or op in _COMPARISONS)):
        raise Unsupported(f"{op} {card}")
    one = _by_key(right, key)
    if card == "OneToOne":
        _by_key(left, key)
    copied = modifier.group_labels or [] if modifier is not None else []
    found: Vector = {}
    for labels, value in left.items():
        partner = one.get(key(labels))
        if partner is None:
            continue
        of_partner = dict(partner[0])
        if card == "ManyToOne":
            kept = {k: v for k, v in _nameless(labels) if k not in copied} | {
                k: of_partner[k] for k in copied if k in of_partner
            }
            result = frozenset(kept.items())
        else:
            result = key(labels)
        if result in found:
            raise ValueError(f"{op}: two results for {dict(result)}")
        found[result] = _ARITHMETIC[op](value, partner[1])
    return found


def _by_key(vector: Vector, key: Callable[[Labels], Labels]) -> dict[Labels, tuple[Labels, float]]:
    found: dict[Labels, tuple[Labels, float]] = {}
    for labels, value in vector.items():
        if key(labels) in found:
            raise ValueError(f"many-to-many matching: {dict(labels)} and {dict(found[key(labels)][0])}")
        found[key(labels)] = (labels, value)
    return found


def _key_of(modifier: ast.BinModifier | None) -> Callable[[Labels], Labels]:
    matching = modifier.matching if modifier is not None else None
    if matching is None:
        return _nameless
    names, is_on = set(matching.labels), str(matching.type).endswith("Include")
    return lambda labels: frozenset((k, v) for k, v in _nameless(labels) if (k in names) is is_on)


def _with_number(op: str, vector: Vector, pair: Callable[[float], tuple[float, float]], returns_bool: bool) -> Vector:
    if op in _ARITHMETIC:
        return {_nameless(labels): _ARITHMETIC[op](*pair(value)) for labels, value in vector.items()}
    compare = _COMPARISONS[op]
    if returns_bool:
        return {_nameless(labels): float(compare(*pair(value))) for labels, value in vector.items()}
    return {labels: value for labels, value in vector.items() if compare(*pair(value))}


def _each(value: Value, function: Callable[[float], float]) -> Value:
    if isinstance(value, str):
        raise Unsupported("a text here")
    return (
        {_nameless(labels): function(v) for labels, v in value.items()} if isinstance(value, dict) else function(value)
    )


def _grouped(labels: Labels, modifier: ast.AggModifier | None) -> Labels:
    if modifier is None:
        return frozenset()
    names, is_by = set(modifier.labels), str(modifier.type).endswith("By")
    return frozenset((k, v) for k, v in labels if (k in names) is is_by)


def _nameless(labels: Labels) -> Labels:
    return frozenset((k, v) for k, v in labels if k != NAME)


def _seconds(offset: timedelta | None) -> float:
    return 0.0 if offset is None else offset.total_seconds()


def _check(matcher: ast.Matcher) -> Callable[[Mapping[str, str]], bool]:
    """A label that is not there is empty; a pattern is for the whole value."""
    kind, name, wanted = str(matcher.op).rpartition(".")[2], matcher.name, matcher.value
    if kind in ("Equal", "NotEqual"):
        return lambda labels: (labels.get(name, "") == wanted) is (kind == "Equal")
    pattern = re.compile(wanted)
    return lambda labels: (pattern.fullmatch(labels.get(name, "")) is not None) is (kind == "Re")


# Over ranges: (samples, start, end) → value.

_OfRange = Callable[[Sequence[tuple[float, float]], float, float], float | None]


def _increase(samples: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float | None:
    """Prometheus's extrapolation: to the range's ends where the samples come near enough, never below
    zero."""
    if len(samples) < 2:
        return None
    (first_s, first), (last_s, last) = samples[0], samples[-1]
    resets = sum(before for (_, before), (_, after) in pairwise(samples) if after < before)
    delta = last - first + resets
    sampled_s = last_s - first_s
    apart_s = sampled_s / (len(samples) - 1)
    to_start_s, to_end_s = first_s - start_s, end_s - last_s
    if to_start_s >= 1.1 * apart_s:
        to_start_s = apart_s / 2
    if delta > 0 and first >= 0:
        to_start_s = min(to_start_s, sampled_s * (first / delta))
    if to_end_s >= 1.1 * apart_s:
        to_end_s = apart_s / 2
    return delta * (sampled_s + to_start_s + to_end_s) / sampled_s


def _rate(samples: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float | None:
    increase = _increase(samples, start_s, end_s)
    return None if increase is None else increase / (end_s - start_s)


_OVER_TIME: Mapping[str, tuple[_OfRange, bool]] = {
    "rate": (_rate, False),
    "increase": (_increase, False),
    "last_over_time": (lambda samples, _start, _end: samples[-1][1], True),
    "max_over_time": (lambda samples, _start, _end: max(v for _, v in samples), False),
    "min_over_time": (lambda samples, _start, _end: min(v for _, v in samples), False),
}
"""And whether the result keeps the metric's name."""

_AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "count": lambda values: float(len(values)),
    "max": max,
    "min": min,
    "avg": lambda values: math.fsum(values) / len(values),
}


def _divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
}
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


def _histogram_quantile(quantile: float, buckets: Vector) -> Vector:
    """Of classic histograms, linear within a bucket."""
    histograms: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = dict(labels).get("le")
        if bound is not None:
            rest = frozenset((k, v) for k, v in _nameless(labels) if k != "le")
            histograms.setdefault(rest, []).append((float(bound), count))
    return {labels: _quantile_of(quantile, sorted(found)) for labels, found in histograms.items()}


def _quantile_of(quantile: float, buckets: Sequence[tuple[float, float]]) -> float:
    if not 0 <= quantile <= 1:
        raise Unsupported(f"the quantile {quantile}")
    if len(buckets) < 2 or not math.isinf(buckets[-1][0]) or not buckets[-1][1]:
        return math.nan
    rank = quantile * buckets[-1][1]
    index = next(i for i, (_, count) in enumerate(buckets) if count >= rank)
    if index == len(buckets) - 1:
        return buckets[-2][0]
    bound, count = buckets[index]
    if index == 0:
        if bound <= 0:
            return bound
        low, below = 0.0, 0.0
    else:
        low, below = buckets[index - 1]
    return low + (bound - low) * (rank - below) / (count - below)
