"""Bounds and multiples of numbers in JSON schemas, narrowed to what llguidance counts exactly."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

LARGEST = 2**63 - 1024
"""Largest bound: the largest double below 2**63."""
_EXACT = 2**53
"""Integers up to this are exact. llguidance reads doubles."""
_SMALLEST = 1e-15
"""Smallest positive bound. Smaller ones make long regular expressions."""
MAX_MULTIPLE = 20_000
"""Largest `multipleOf`, without its decimal point and trailing zeros. Its automaton has as many states."""
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = _LOWER + _UPPER


class NumberRuleError(Exception):
    """A keyword for numbers cannot be used. `keyword` is its name, and the message gives the rule."""

    def __init__(self, keyword: str, message: str) -> None:
        super().__init__(message)
        self.keyword = keyword


def narrowed_bounds(schema: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the bounds of a schema, narrowed so that no number outside the given ones is allowed.

    In the form of draft 4, `exclusiveMinimum: true` applies to `minimum`. Raises NumberRuleError.
    """
    found: dict[str, int | float] = {}
    for name in BOUNDS:
        value = schema.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    for plain, exclusive in zip(("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), strict=True):
        if schema.get(exclusive) is True and plain in found:
            found[exclusive] = found.pop(plain)
    for plain, exclusive in zip(("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), strict=True):
        if abs(found.get(exclusive, 0)) > _EXACT:
            sign = 1 if plain == "minimum" else -1
            bound = sign * _above(sign * found.pop(exclusive))
            found[plain] = sign * max(sign * found.get(plain, bound), sign * bound)
    return {name: _lower(name, value) if name in _LOWER else -_lower(name, -value) for name, value in found.items()}


def _above(value: int | float) -> int | float:
    """Return the next double above a large value, as an integer."""
    if abs(value) > LARGEST:
        return value
    rounded = float(value)
    return int(rounded if rounded > value else math.nextafter(rounded, math.inf))


def _lower(name: str, value: int | float) -> int | float:
    """Return the smallest usable bound that is not below `value`, a lower bound."""
    if value > LARGEST:
        raise NumberRuleError(name, f"must be between -{LARGEST} and {LARGEST}")
    if value < -LARGEST:
        return -LARGEST
    if 0 < abs(value) < _SMALLEST:
        return _SMALLEST if value > 0 else 0
    if isinstance(value, int) and abs(value) > _EXACT:
        rounded = float(value)
        return int(rounded if rounded >= value else math.nextafter(rounded, math.inf))
    return value


def check_multiple(value: int | float) -> int:
    """Return the digits of `multipleOf` without decimal point and trailing zeros. Raises NumberRuleError."""
    if value <= 0:
        raise NumberRuleError("multipleOf", "must be above 0")
    digits = int(f"{Decimal(repr(value)):f}".replace(".", "").strip("0"))
    if digits > MAX_MULTIPLE:
        raise NumberRuleError(
            "multipleOf", f"must be at most {MAX_MULTIPLE:,} without its decimal point and trailing zeros"
        )
    return digits


def check_multiples(multiples: Iterable[int], *, may_combine: bool) -> None:
    """Check all multiples of a schema together. Raises NumberRuleError.

    may_combine: a number may have to be a multiple of several of them.
    """
    distinct = set(multiples)
    together = math.lcm(*distinct) if may_combine else sum(distinct)
    if len(distinct) > 1 and together > MAX_MULTIPLE:
        raise NumberRuleError(
            "multipleOf", f"with the others of the schema is {together:,}; must be at most {MAX_MULTIPLE:,}"
        )
