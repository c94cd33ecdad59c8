"""Core values as plain JSON values and back: what is stored, shown to people, and written to logs for later.

Bytes are hex, enums their word, whole numbers that JSON readers would round and numbers that JSON lacks are
text. Reading ignores fields it does not know and fills in defaults, so that values written by another release
can be read.
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
"""Up to here every reader of JSON keeps a whole number as it is."""

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Raises TypeError for what has no plain form."""
    match value:
        case None | bool() | str():
            return value
        case Enum():
            return _word(value)
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
    if is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _hints(type(value))}
    raise TypeError(f"{type(value).__name__} has no plain form")


def from_plain(kind: type[T], plain: object) -> T:
    """The `kind` (a dataclass) that `to_plain` made `plain` of. Raises ValueError, naming the field, where it
    cannot be that."""
    made: T = _read(kind, plain, kind.__name__)
    return made


def _word(member: Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


@cache
def _required(kind: type) -> frozenset[str]:
    return frozenset(
        field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING
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
    raise TypeError(f"{at}: {kind} cannot be read from a plain form")


def _read_optional(kinds: tuple[Any, ...], plain: Any, at: str) -> Any:
    if plain is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    if len(others) != 1:
        raise TypeError(f"{at}: a union of {len(others)} kinds cannot be read from a plain form")
    return _read(others[0], plain, at)


def _read_tuple(kinds: tuple[Any, ...], plain: Any, at: str) -> tuple[Any, ...]:
    items = _expect(list, plain, at)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_read(kinds[0], item, f"{at}[{i}]") for i, item in enumerate(items))
    if len(items) != len(kinds):
        raise ValueError(f"{at} has {len(items)} items, not {len(kinds)}")
    return tuple(_read(kind, item, f"{at}[{i}]") for i, (kind, item) in enumerate(zip(kinds, items, strict=True)))


def _read_dataclass(kind: type, plain: Any, at: str) -> Any:
    values = _expect(dict, plain, at)
    missing = _required(kind) - values.keys()
    if missing:
        raise ValueError(f"{at} lacks {', '.join(sorted(missing))}")
    return kind(
        **{name: _read(hint, values[name], f"{at}.{name}") for name, hint in _hints(kind).items() if name in values}
    )


def _read_enum(kind: type[Enum], plain: Any, at: str) -> Enum:
    for member in kind:
        if _word(member) == plain:
            return member
    raise ValueError(f"{at}: {plain!r} is no {kind.__name__}")


def _read_int(plain: Any, at: str) -> int:
    if isinstance(plain, float) and plain.is_integer():  # some readers of JSON know only one kind of number
        return int(plain)
    if isinstance(plain, str):
        try:
            return int(plain, 0)
        except ValueError:
            raise ValueError(f"{at}: {plain!r} is no whole number") from None
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise ValueError(f"{at}: {plain!r} is no whole number")
    return plain


def _read_float(plain: Any, at: str) -> float:
    if isinstance(plain, bool) or not isinstance(plain, int | float | str):
        raise ValueError(f"{at}: {plain!r} is no number")
    try:
        return float(plain)
    except (ValueError, OverflowError):
        raise ValueError(f"{at}: {plain!r} is no number") from None


def _read_bytes(plain: Any, at: str) -> bytes:
    try:
        return bytes.fromhex(_expect(str, plain, at))
    except ValueError:
        raise ValueError(f"{at}: {plain!r} is not hex") from None


def _expect(kind: type[T], plain: Any, at: str) -> T:
    if not isinstance(plain, kind):
        raise ValueError(f"{at} is {type(plain).__name__}, not {kind.__name__}")
    return plain


_SCALARS: dict[type, Any] = {
    bool: lambda plain, at: _expect(bool, plain, at),
    int: _read_int,
    float: _read_float,
    str: lambda plain, at: _expect(str, plain, at),
    bytes: _read_bytes,
}
