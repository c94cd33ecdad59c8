"""Declarative mapping between a core dataclass and its protobuf message.

Fields are matched by name, and both sides must have the same fields, which is checked at import: a field that
is added to one side only cannot be lost silently. Fields that need validation or conversion have a converter;
all others are copied. As `dataclasses` does, each mapping generates the source of its two functions, so that
they are as fast as handwritten ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import FieldDescriptor

CoreT = TypeVar("CoreT")
MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldConverter:
    """Converts one field.

    to_wire: core value to protobuf value; None copies it.
    from_wire: protobuf value to core value, and with `has_name` also the name of the field. Raises Refused if
        the value is invalid.
    optional: True if an unset field of message type is None in the core.
    repeated: True if the functions convert the items of a repeated field, which is a tuple in the core.
    """

    to_wire: Callable[[Any], Any] | None = None
    from_wire: Callable[..., Any]
    has_name: bool = False
    optional: bool = False
    repeated: bool = False


def checked(check: Callable[[Any, str], Any]) -> FieldConverter:
    """Return the converter of a field that `check(value, name)` validates on receipt."""
    return FieldConverter(from_wire=check, has_name=True)


def nested(to_wire: Callable[[Any], Any], from_wire: Callable[[Any], Any], *, optional: bool = False) -> FieldConverter:
    """Return the converter of a field with its own conversions, such as a nested message or an enum."""
    return FieldConverter(to_wire=to_wire, from_wire=from_wire, optional=optional)


def repeated(to_wire: Callable[[Any], Any], from_wire: Callable[[Any], Any]) -> FieldConverter:
    """Return the converter of a repeated field, whose items are converted one by one."""
    return FieldConverter(to_wire=to_wire, from_wire=from_wire, repeated=True)


class MessageMapping(Generic[CoreT, MessageT]):
    """Pair of functions that convert between a core dataclass and a protobuf message with the same fields.

    to_wire: converts a core value to a message.
    from_wire: converts a received message to a core value. Raises Refused naming an invalid field.
    """

    to_wire: Callable[[CoreT], MessageT]
    from_wire: Callable[[MessageT], CoreT]

    def __init__(
        self,
        core: type[CoreT],
        message: Callable[..., MessageT],
        converters: Mapping[str, FieldConverter] | None = None,
        *,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Generate the functions; `renamed` maps core fields to protobuf fields with another name.

        Raises TypeError if the two sides have different fields, or a converter names an unknown field.
        """
        converters, renamed = converters or {}, renamed or {}
        names = [field.name for field in fields(core)]  # type: ignore[arg-type]
        wire: Mapping[str, FieldDescriptor] = message.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]
        if {renamed.get(name, name) for name in names} != set(wire):
            raise TypeError(f"{core.__name__} has the fields {sorted(names)}, but its message has {sorted(wire)}")
        if unknown := (converters.keys() | renamed.keys()) - set(names):
            raise TypeError(f"{core.__name__} has no fields {sorted(unknown)}")
        scope: dict[str, Any] = {"core": core, "message": message}
        to_wire, from_wire = [], []
        for name in names:
            field = wire[renamed.get(name, name)]
            to, back = _expressions(name, field, converters.get(name), scope)
            to_wire.append(f"{field.name}={to}")
            from_wire.append(f"{name}={back}")
        self.to_wire = eval(f"lambda v: message({', '.join(to_wire)})", scope)
        self.from_wire = eval(f"lambda m: core({', '.join(from_wire)})", scope)


def _expressions(
    name: str, field: FieldDescriptor, converter: FieldConverter | None, scope: dict[str, Any]
) -> tuple[str, str]:
    """Return the source that converts one field to protobuf and back; add its functions to `scope`."""
    to_wire, from_wire = f"v.{name}", f"m.{field.name}"
    is_optional = field.has_presence and field.message_type is None
    if converter is not None:
        is_optional = is_optional or converter.optional
        scope |= {f"to_{name}": converter.to_wire, f"from_{name}": converter.from_wire}
        if converter.repeated:
            return f"[to_{name}(x) for x in {to_wire}]", f"tuple([from_{name}(x) for x in {from_wire}])"
        if converter.to_wire is not None:
            convert = f"to_{name}({to_wire})"
            to_wire = f"None if {to_wire} is None else {convert}" if is_optional else convert
        from_wire = f"from_{name}({from_wire}, {field.name!r})" if converter.has_name else f"from_{name}({from_wire})"
    if is_optional:
        from_wire = f"{from_wire} if m.HasField({field.name!r}) else None"
    return to_wire, from_wire
