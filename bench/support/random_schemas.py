"""Draws JSON schemas as applications write them, for benchmarks."""

from random import Random
from typing import Any

_FORMATS = ("date", "date-time", "email", "uuid", "ipv4", "uri")
_PATTERNS = ("^[A-Z]{2}[0-9]{6}$", "^\\+?[0-9 ]{6,20}$", "^[a-z0-9-]{1,40}$", "^(low|medium|high)$")
_WORDS = ("id", "name", "email", "age", "items", "price", "status", "address", "city", "tags", "owner", "notes")


def random_schema(rng: Random, depth: int = 3) -> dict[str, Any]:
    """Return the schema of an object with up to 8 properties and `depth` levels."""
    names = rng.sample(_WORDS, rng.randint(1, 8))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: Random, depth: int) -> dict[str, Any]:
    if depth and rng.random() < 0.25:
        return random_schema(rng, depth)
    if depth and rng.random() < 0.25:
        return {"type": "array", "items": _value(rng, depth - 1), "maxItems": rng.randint(1, 20)}
    if depth and rng.random() < 0.1:
        return {"anyOf": [_value(rng, 0), {"type": "null"}]}
    return rng.choice(
        (
            {"type": "string"},
            {"type": "string", "maxLength": rng.randint(1, 200)},
            {"type": "string", "format": rng.choice(_FORMATS)},
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "integer", "minimum": 0, "maximum": rng.randint(1, 10**6)},
            {"type": "number"},
            {"type": "boolean"},
            {"enum": rng.sample(_WORDS, rng.randint(2, 10))},
        )
    )
