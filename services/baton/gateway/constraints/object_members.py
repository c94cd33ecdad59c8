"""Writes the members of an object in an order, with bounds for their number."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from baton.gateway.constraints.lark_writer import LarkWriter, escaped
from baton.gateway.constraints.object_shape import NO_OBJECT, ObjectShape
from baton.gateway.constraints.text_pattern import whole_text_pattern
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema

_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
"""A key that the schema does not name, as a terminal."""
_PATTERN_KEY = r"/[\w.$@\/+*()!?&%#=~;^-]{1,64}/"
"""A key that has to match a pattern. All formats can write it."""
_MAX_STATES = 4096
"""Members, times the numbers of members before them that matter."""
_MAX_OTHERS = 256
"""Largest bound for the number of members that are not named."""


def further_members(shape: ObjectShape) -> Iterator[tuple[str | None, Any]]:
    """Yield the patterns of the names of further members, and their schemas; None for no pattern."""
    if shape.others is not None:
        yield None, shape.others
    yield from ((pattern, schema) for pattern, schema in shape.patterns.items() if schema is not None)


def further_key(writer: LarkWriter, shape: ObjectShape, pattern: str | None) -> str:
    """Return an expression for the name of a further member, which matches this pattern and no other one."""
    known = {*shape.properties, *shape.excluded}
    names = [f"(?:{'|'.join(map(escaped, sorted(known)))})"] if known else []
    matching = [] if pattern is None else [_whole(pattern)]
    others = [_whole(other) for other in shape.patterns if other != pattern]
    return writer.key(_KEY if pattern is None else _PATTERN_KEY, matching, [*others, *names])


def _whole(pattern: str) -> str:
    whole = whole_text_pattern(pattern)
    assert whole is not None  # `ShapeReader` refuses others
    return whole


def has_others(shape: ObjectShape, num_names: int) -> bool:
    """True if members without a name are written: if no others can be, or if patterns name them."""
    return not num_names or bool(shape.patterns) or shape.least > num_names


def members(
    writer: LarkWriter,
    shape: ObjectShape,
    names: Sequence[str],
    member: Callable[[str], str],
    further: str,
    comma: str = "",
) -> str:
    """Return an expression for the members of an object.

    names: names of the members that can be written, in their order.
    member: returns the expression of a member; empty if no value matches.
    further: expression of a member that is not named; empty if there is none.

    Raises UnsupportedSchema if the number of members cannot be enforced, or if no object matches.
    """
    has_bounds = shape.least > len(shape.required) or shape.most is not None
    least = shape.least if has_bounds else 0
    most = None if shape.most is None else min(shape.most, len(names) + _MAX_OTHERS)
    largest = min(max(least, int(bool(comma))) if most is None else most, len(names))
    if (largest + 1) * len(names) > _MAX_STATES:
        raise UnsupportedSchema("the schema has too many properties beside minProperties or maxProperties; use fewer")
    tails = [
        _further(further, comma if count else "", comma, least - count, None if most is None else most - count)
        for count in range(largest + 1)
    ]
    for name in reversed(names):
        written = member(name)
        written = writer.rule(written) if written else ""
        is_optional = name not in shape.required
        before = []
        for count, skipped in enumerate(tails):
            following = count + 1 if most is not None else min(count + 1, largest)
            options = []
            if written and following <= largest and tails[following]:
                options.append(f"{comma if count else ''} {written} {tails[following]}".strip())
            if is_optional and skipped:
                options.append(skipped)
            before.append(writer.rule(" | ".join(options)) if options else "")
        tails = before
    if not tails[0]:
        raise UnsupportedSchema(NO_OBJECT)
    return tails[0]


def _further(further: str, first_comma: str, comma: str, least: int, most: int | None) -> str:
    """Return an expression for members that are not named; empty if there cannot be so many.

    Their keys may be equal, so that two of them may be one member.
    """
    if not further or most == 0:
        return '""' if least <= 0 else ""
    if least > 1:
        return ""
    more = "" if most == 1 else f" ({comma} {further}){{0,{'' if most is None else most - 1}}}"
    repeated = f"({first_comma} {further}{more})"
    return repeated if least == 1 else f"{repeated}?"
