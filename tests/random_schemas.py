"""Random JSON schemas of the kinds that applications send, which all have an answer of bounded length."""

from random import Random
from typing import Any

_NAMES = ("id", "name", "items", "a/b", "~x", "na\u00efve", "$ref", "type", "with space", 'q"uote', "")
_PATTERNS = ("^[a-z]{1,4}$", "[0-9]{2}$", "^x|y$", r"^\w{1,3}(-\w{1,3})?$", "^[^a-z]{1,2}$", r"^(\d|[A-F]){2}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "duration", "password", "int64", "color")
_VALUES = ("a", "\u00e9\U0001f600", "", 'quo"te\n', 0, -1, 2.5, True, None, [1, "x"], {"k": [None]})


def random_schema(seed: int) -> dict[str, Any]:
    """Return the schema of a number."""
    rng = Random(seed)
    shared = {f"d{number}": _schema(rng, 1, {}) for number in range(rng.randrange(3))}
    schema = _schema(rng, 3, shared)
    return {**schema, "$defs": shared} if shared else schema


def _schema(rng: Random, depth: int, shared: dict[str, Any]) -> dict[str, Any]:
    if shared and rng.random() < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(list(shared))}"}
    kinds = [_string, _string, _number, _number, _values, _simple]
    if depth > 0:
        kinds += [_object, _object, _array, _any_of, _all_of, _one_of]
    found = rng.choice(kinds)(rng, depth, shared)
    if rng.random() < 0.2:
        found |= rng.choice([{"description": "x"}, {"default": 1}, {"title": "T"}, {"examples": [1]}, {"x-a": {}}])
    return found


def _string(rng: Random, _: int, __: dict[str, Any]) -> dict[str, Any]:
    least = rng.randrange(4)
    bounds: dict[str, Any] = {"type": "string", "maxLength": least + rng.randrange(6)}
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_FORMATS), "maxLength": 40}
    return bounds | ({"minLength": least} if kind == 2 else {})


def _number(rng: Random, _: int, __: dict[str, Any]) -> dict[str, Any]:
    low = rng.choice((-(10**6), -17, -1, 0, 3, 2**53 + 1, -0.5, 1e-7))
    high = low + rng.choice((1, 7.5, 1000, 10**9))
    exclusive = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
    found = {"type": rng.choice(("integer", "number", "number")), exclusive[0]: low, exclusive[1]: high}
    if rng.random() < 0.2:
        found = {"type": found["type"], "multipleOf": rng.choice((2, 5, 0.25, 60)), "minimum": 0, "maximum": 10**4}
    return found


def _values(rng: Random, _: int, __: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": rng.choice(_VALUES)}
    return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}


def _simple(rng: Random, _: int, __: dict[str, Any]) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}


def _object(rng: Random, depth: int, shared: dict[str, Any]) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randrange(5))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1, shared) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    kind = rng.randrange(8)
    if kind == 0:
        found |= {"additionalProperties": _schema(rng, 0, {}), "maxProperties": 2}
        del found["properties"], found["required"]
    elif kind == 1:
        found |= {"patternProperties": {"^p[0-9]$": _schema(rng, 0, {})}, "minProperties": 1}
    elif kind == 2:
        found |= {"propertyNames": {"enum": [*names, "more"]}, "additionalProperties": _schema(rng, 0, {})}
    elif kind == 3 and len(names) > 1:
        found |= {"dependentRequired": {names[0]: [names[1]]}}
    return found


def _array(rng: Random, depth: int, shared: dict[str, Any]) -> dict[str, Any]:
    least = rng.randrange(3)
    found: dict[str, Any] = {
        "type": "array",
        "items": _schema(rng, depth - 1, shared),
        "minItems": least,
        "maxItems": least + rng.randrange(3),
    }
    if rng.random() < 0.3:
        found |= {"prefixItems": [_schema(rng, depth - 1, shared) for _ in range(2)], "items": False, "maxItems": 2}
        found["minItems"] = min(least, 2)
    return found


def _any_of(rng: Random, depth: int, shared: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1, shared) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: Random, depth: int, shared: dict[str, Any]) -> dict[str, Any]:
    first, second = _object(rng, depth, shared), _object(rng, 0 if depth == 0 else depth - 1, shared)
    first.pop("additionalProperties")
    second.pop("additionalProperties")
    return {"allOf": [first, second]}


def _one_of(rng: Random, depth: int, shared: dict[str, Any]) -> dict[str, Any]:
    kinds = rng.sample(("cat", "dog", "cow"), 2)
    objects = [_object(rng, depth - 1, shared) if depth else {"type": "object"} for _ in kinds]
    for kind, each in zip(kinds, objects, strict=True):
        each["properties"] = {"kind": {"const": kind}, **each.get("properties", {})}
        each.pop("propertyNames", None)
        each.pop("additionalProperties", None)
    return {"oneOf": objects, "discriminator": {"propertyName": "kind"}}
