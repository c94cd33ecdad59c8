"""Writes regular expressions for numbers between two bounds.

llguidance has them for JSON, but not for text in which a number may stand in place of a string.
"""

from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import lru_cache
from itertools import groupby
from typing import Any

from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.output.values.schema_alternatives import parts_of

_MAX_PLACES = 6
"""Digits after the decimal point of a bound. Bounds with more are narrowed."""
_LARGEST = 10**18 - 1
_MORE = "[0-9]{1,15}"
_DIGIT = "[0-9]"


def number_pattern(schema: Mapping[str, Any], *, integer: bool) -> str:
    """Return a regular expression for the numbers of a schema without unions, written without exponent.

    Raises UnsupportedSchema if it has `multipleOf`, or if no number matches.
    """
    found = _pattern(*_bounds(schema, integer=integer), integer=integer)
    if not found:
        raise UnsupportedSchema("no number matches its bounds; widen them", *_keyword(schema))
    return found


@lru_cache(maxsize=64)
def _pattern(least: int, most: int, places: int, *, integer: bool) -> str:
    """Return the regular expression for the scaled numbers between two; empty if there are none."""
    found = list(_between(least, most, places, more=False))
    if not integer:
        found += _between(least, most, places, more=True)
        if places:
            scale = 10**places
            found += _between(-(-least // scale), most // scale, 0, more=False)
    return f"(?:{'|'.join(dict.fromkeys(found))})" if found else ""


def _bounds(schema: Mapping[str, Any], *, integer: bool) -> tuple[int, int, int]:
    """Return the smallest and the largest number, times a power of ten, and the power."""
    parts = parts_of(schema)
    for part in parts:
        if "multipleOf" in part:
            message = "this model's calls cannot enforce multipleOf where a string is allowed, too; leave it out"
            raise UnsupportedSchema(message, "multipleOf", part["multipleOf"])
    lower = [(part[name], name) for part in parts for name in ("minimum", "exclusiveMinimum") if _is_number(part, name)]
    upper = [(part[name], name) for part in parts for name in ("maximum", "exclusiveMaximum") if _is_number(part, name)]
    values = [Decimal(repr(value)) for value, _ in (*lower, *upper)]
    exponents = [exponent for value in values if isinstance(exponent := value.as_tuple().exponent, int)]
    places = max((0, *(-exponent for exponent in exponents))) + any(
        name.startswith("excl") for _, name in lower + upper
    )
    places = 0 if integer else min(_MAX_PLACES, places)
    least, most = -_LARGEST * 10**places, _LARGEST * 10**places
    for value, name in lower:
        scaled = Decimal(repr(value)).scaleb(places)
        bound = int(scaled.to_integral_value(ROUND_CEILING))
        least = max(least, bound + (name == "exclusiveMinimum" and bound == scaled))
    for value, name in upper:
        scaled = Decimal(repr(value)).scaleb(places)
        bound = int(scaled.to_integral_value(ROUND_FLOOR))
        most = min(most, bound - (name == "exclusiveMaximum" and bound == scaled))
    return least, most, places


def _is_number(schema: Mapping[str, Any], name: str) -> bool:
    return isinstance(schema.get(name), int | float) and not isinstance(schema[name], bool)


def _keyword(schema: Mapping[str, Any]) -> tuple[str, Any]:
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    return next(((name, part[name]) for part in parts_of(schema) for name in names if name in part), ("", None))


def _between(least: int, most: int, places: int, *, more: bool) -> Iterator[str]:
    """Yield regular expressions for the numbers between two, which are scaled by 10**places.

    more: with further digits after those places.
    """
    end = _MORE if more else ""
    for begin, last, sign in ((max(least, 0), most, ""), (max(-most, 0 if more else 1), -least, "-")):
        for digits in _ranges(begin, last - more, places):
            whole, fraction = digits[: len(digits) - places], digits[len(digits) - places :]
            point = r"\." if places or more else ""
            yield f"{sign}{_written(whole)}{point}{_written(fraction)}{end}"


def _ranges(least: int, most: int, places: int) -> Iterator[list[str]]:
    """Yield the digits of the numbers between two that are not negative, as classes of characters."""
    shortest = places + 1
    for length in range(shortest, len(str(max(most, 0))) + 1 if most >= 10**shortest else shortest + 1):
        low = max(least, 10 ** (length - 1) if length > shortest else 0)
        high = min(most, 10**length - 1)
        if low <= high:
            yield from _same_length(f"{low:0{length}}", f"{high:0{length}}")


def _same_length(low: str, high: str) -> Iterator[list[str]]:
    if not low:
        yield []
    elif not low.strip("0") and not high.strip("9"):
        yield [_DIGIT] * len(low)
    elif low[0] == high[0]:
        yield from ([low[0], *rest] for rest in _same_length(low[1:], high[1:]))
    else:
        rest = len(low) - 1
        first, last = int(low[0]), int(high[0])
        if low[1:].strip("0"):
            yield from ([low[0], *more] for more in _same_length(low[1:], "9" * rest))
            first += 1
        if high[1:].strip("9"):
            yield from ([high[0], *more] for more in _same_length("0" * rest, high[1:]))
            last -= 1
        if first <= last:
            yield [f"[{first}-{last}]" if first < last else str(first), *[_DIGIT] * rest]


def _written(digits: list[str]) -> str:
    groups = [(digit, len(list(group))) for digit, group in groupby(digits)]
    return "".join(digit if count == 1 else f"{digit}{{{count}}}" for digit, count in groups)
