"""Reads the rules of strings from a JSON schema, for text without quotes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.gateway.constraints.string_formats import FORMAT_LENGTHS, FORMAT_PATTERNS
from baton.gateway.constraints.text_pattern import whole_text_pattern
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.output.values.schema_alternatives import parts_of

MAX_LENGTH = 10_000
"""Longest string, in characters, whose length the schema bounds. Larger bounds are narrowed to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StringRules:
    """Rules for a string.

    least, most: bounds for the number of its characters.
    patterns: regular expressions that match it as a whole.
    """

    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()


NO_RULES = StringRules()


def string_rules(schema: Mapping[str, Any], *, lenient: bool) -> StringRules:
    """Return the rules of a schema without unions. Raises UnsupportedSchema if one cannot be enforced.

    lenient: such rules are left out.
    """
    least, most = 0, None
    patterns: dict[str, None] = {}
    for part in parts_of(schema):
        shortest, longest = part.get("minLength"), part.get("maxLength")
        if isinstance(shortest, int) and shortest > MAX_LENGTH and not lenient:
            message = f"this model's calls cannot enforce a minLength above {MAX_LENGTH:,}; lower it"
            raise UnsupportedSchema(message, "minLength", shortest)
        if isinstance(shortest, int) and shortest <= MAX_LENGTH:
            least = max(least, shortest)
        if isinstance(longest, int):
            most = min(MAX_LENGTH if most is None else most, longest)
        pattern = part.get("pattern")
        whole = whole_text_pattern(pattern) if isinstance(pattern, str) else None
        if isinstance(pattern, str) and whole is None and not lenient:
            message = (
                "this model's calls cannot enforce a pattern with look-around, references, flags, word boundaries, or "
                "^ and $ inside of it; write it without these, or leave it out"
            )
            raise UnsupportedSchema(message, "pattern", pattern)
        if whole is not None:
            patterns[whole] = None
        if (named := FORMAT_PATTERNS.get(str(part.get("format")))) is not None:
            patterns[named] = None
    shortest, longest = _lengths_of_formats(schema)
    if most is not None and most < max(least, shortest):
        if not lenient:
            message = f"no string matches; minLength or the format needs a maxLength of at least {max(least, shortest)}"
            raise UnsupportedSchema(message, "maxLength", most)
        most = None
    if longest is not None and longest < least:
        if not lenient:
            message = f"no string matches; the format has at most {longest} characters"
            raise UnsupportedSchema(message, "minLength", least)
        least = 0
    return StringRules(least=least, most=most, patterns=tuple(patterns))


def _lengths_of_formats(schema: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the bounds for the lengths of strings that have the formats of a schema."""
    found = [FORMAT_LENGTHS[name] for part in parts_of(schema) if (name := str(part.get("format"))) in FORMAT_LENGTHS]
    return max((least for least, _ in found), default=0), min((most for _, most in found if most), default=None)
