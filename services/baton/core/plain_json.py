"""Converts core dataclasses to plain JSON values and back, for storage, logs and people.

Bytes become hex strings and enums become their names or string values. Integers above 2^53 become hex
strings, because some JSON readers round them. Infinity and NaN become strings, because JSON has no such
numbers. Fields that a dataclass derives itself are left out. Reading ignores unknown fields and fills in
defaults, so that values written by another release can be read.
"""

import math
import types
from array import array
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

EXACT_INT_MAX = 2**53
"""Largest integer that every JSON reader represents exactly."""

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Convert a value to JSON-compatible types. Raises TypeError if its type is not supported."""
    if value is None or isinstance(value, (str, bool)):
        return value
    kind: type = type(value)
    names = _field_names(kind)  # most other values are dataclasses, and the patterns below take longer
    if names is not None:
        return {name: to_plain(getattr(value, name)) for name in names}
    match value:
        case Enum():
            return _enum_text(value)
        case int():
            return value if abs(value) <= EXACT_INT_MAX else hex(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return value.hex()
        case list() | tuple() | array():
            return [to_plain(item) for item in value]
        case Mapping():
            return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    raise TypeError(f"{kind.__name__} cannot be converted to JSON")


def from_plain(kind: type[T], plain: object) -> T:
    """Build a `kind` (a dataclass) from the result of `to_plain`. Raises ValueError, naming the field, if a
    value does not fit."""
    value: T = _read(kind, plain, kind.__name__)
    return value


def _enum_text(member: Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass that are converted; None for another type."""
    return tuple(_hints(kind)) if is_dataclass(kind) else None


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


@cache
def _required(kind: type) -> frozenset[str]:
    return frozenset(
        field.name
        for field in fields(kind)
        if field.init and field.default is MISSING and field.default_factory is MISSING
    )


def _read(kind: Any, plain: Any, at: str) -> Any:
    if isinstance(kind, NewType):
        return _read(kind.__supertype__, plain, at)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_optional(arguments, plain, at)
    if origin is tuple:
        return _read_tuple(arguments, plain, at)
    if origin is dict:
        return {str(key): _read(arguments[1], item, f"{at}.{key}") for key, item in _expect(dict, plain, at).items()}
    if kind in (object, Any):
        return plain
    if isinstance(kind, type):
        if is_dataclass(kind):
            return _read_dataclass(kind, plain, at)
        if issubclass(kind, Enum):
            return _read_enum(kind, plain, at)
        if kind in _SCALARS:
            return _SCALARS[kind](plain, at)
    raise TypeError(f"{at}: {kind} cannot be read from JSON")


def _read_optional(kinds: tuple[Any, ...], plain: Any, at: str) -> Any:
    if plain is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    if len(others) != 1:
        raise TypeError(f"{at}: a union of {len(others)} types cannot be read from JSON; only `T | None` is supported")
    return _read(others[0], plain, at)


def _read_tuple(kinds: tuple[Any, ...], plain: Any, at: str) -> tuple[Any, ...]:
    items = _expect(list, plain, at)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_read(kinds[0], item, f"{at}[{i}]") for i, item in enumerate(items))
    if len(items) != len(kinds):
        raise ValueError(f"{at} has {len(items)} items; must have {len(kinds)}")
    return tuple(_read(kind, item, f"{at}[{i}]") for i, (kind, item) in enumerate(zip(kinds, items, strict=True)))


def _read_dataclass(kind: type, plain: Any, at: str) -> Any:
    values = _expect(dict, plain, at)
    missing = _required(kind) - values.keys()
    if missing:
        raise ValueError(f"{at} has no {', '.join(sorted(missing))}")
    return kind(
        **{name: _read(hint, values[name], f"{at}.{name}") for name, hint in _hints(kind).items() if name in values}
    )


def _read_enum(kind: type[Enum], plain: Any, at: str) -> Enum:
    for member in kind:
        if _enum_text(member) == plain:
            return member
    raise ValueError(f"{at} is {plain!r}; must be one of {', '.join(map(_enum_text, kind))}")


def _read_int(plain: Any, at: str) -> int:
    if isinstance(plain, float) and plain.is_integer():  # some JSON tools turn every number into a float
        return int(plain)
    if isinstance(plain, str):
        try:
            return int(plain, 0)
        except ValueError:
            raise ValueError(f"{at} is {plain!r}; must be an integer") from None
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise ValueError(f"{at} is {plain!r}; must be an integer")
    return plain


def _read_float(plain: Any, at: str) -> float:
    if isinstance(plain, bool) or not isinstance(plain, int | float | str):
        raise ValueError(f"{at} is {plain!r}; must be a number")
    try:
        return float(plain)
    except (ValueError, OverflowError):
        raise ValueError(f"{at} is {plain!r}; must be a number") from None


def _read_bytes(plain: Any, at: str) -> bytes:
    try:
        return bytes.fromhex(_expect(str, plain, at))
    except ValueError:
        raise ValueError(f"{at} is {plain!r}; must be hex digits") from None


def _expect(kind: type[T], plain: Any, at: str) -> T:
    if not isinstance(plain, kind):
        raise ValueError(f"{at} is a value of type {type(plain).__name__}; must be {kind.__name__}")
    return plain


_SCALARS: dict[type, Any] = {
    bool: lambda plain, at: _expect(bool, plain, at),
    int: _read_int,
    float: _read_float,
    str: lambda plain, at: _expect(str, plain, at),
    bytes: _read_bytes,
}
