"""Writes the members of an object in an order, with bounds for their number."""

from collections.abc import Callable, Sequence

from baton.gateway.constraints.lark_writer import LarkWriter, escaped
from baton.gateway.constraints.object_shape import NO_OBJECT, ObjectShape
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema

_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
"""A key that the schema does not name, as a terminal."""
_PATTERN_KEY = r"""/[^\s<>\[\]{}"':,|\\]{1,64}/"""
"""A key that has to match a pattern. All formats can write it."""
_MAX_STATES = 4096
"""Members, times the numbers of members before them that matter."""
_MAX_OTHERS = 256
"""Largest bound for the number of members that are not named."""


def further_key(writer: LarkWriter, shape: ObjectShape, case: int) -> str:
    """Return an expression for the key of a member that is not named, in one of the cases of its rule."""
    known = {*shape.properties, *shape.excluded}
    names = [f"(?:{'|'.join(map(escaped, sorted(known)))})"] if known else []
    matching, others = _patterns(shape, case)
    return writer.key(_PATTERN_KEY if case else _KEY, matching, [*others, *names])


def named_key(writer: LarkWriter, shape: ObjectShape, case: int, literal: str) -> str:
    """Return an expression for a key that is named, which is empty if the case does not apply to it."""
    return writer.key(literal, *_patterns(shape, case))


def _patterns(shape: ObjectShape, case: int) -> tuple[list[str], list[str]]:
    """Return the patterns that keys of a case match, and those that they do not match."""
    matching = [shape.patterns[case - 1]] if case else []
    return matching, [pattern for pattern in shape.patterns if pattern not in matching]


def has_others(shape: ObjectShape, num_names: int) -> bool:
    """True if members that are not named are written: if no other members can be, or if patterns name them."""
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
    more = "" if most is None else most - 1
    repeated = f"({first_comma} {further} ({comma} {further}){{0,{more}}})"
    return repeated if least == 1 else f"{repeated}?"
