"""Resolves the unions and references at the top of a JSON schema, at a bounded cost."""

from collections.abc import Mapping
from typing import Any

MAX_ALTERNATIVES = 64
"""Largest number of schemas in which a schema is resolved."""
_MAX_STEPS = 2 * MAX_ALTERNATIVES
"""Number of schemas that are looked at."""
_MAX_KEYS = 64
"""Rules beside a union or a reference are taken into account up to this number."""

_UNIONS = ("allOf", "anyOf", "oneOf")


def alternatives(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """Return the schemas of which one applies to a value, in the order of the schema.

    Unions (`anyOf`, `oneOf`, lists of types, `nullable`), references within `root` and an `allOf` of one
    schema are resolved. Each reference is followed once, so recursive schemas end. What remains is returned
    as it is; a schema without any rule allows everything.
    """
    found: list[Mapping[str, Any]] = []
    followed: set[str] = set()
    waiting: list[Any] = [schema]
    steps = 0
    while waiting and len(found) < MAX_ALTERNATIVES and steps < _MAX_STEPS:
        steps += 1
        current = waiting.pop()
        if not isinstance(current, Mapping):
            if current is True:
                found.append({})
            continue
        if isinstance(reference := current.get("$ref"), str):
            if reference not in followed:
                followed.add(reference)
                waiting.append(merged(rest_of(current, "$ref"), resolve_reference(reference, root)))
            continue
        parts = _parts(current)
        if parts is None:
            found.append(current)
        else:
            waiting.extend(reversed(parts))
    return found


def parts_of_object(schema: Any) -> list[Mapping[str, Any]]:
    """Return the schemas that may have members of an object: a schema, its unions, `allOf` and references."""
    found: list[Mapping[str, Any]] = []
    followed: set[str] = set()
    waiting: list[Any] = [schema]
    steps = 0
    while waiting and len(found) < MAX_ALTERNATIVES and steps < _MAX_STEPS:
        steps += 1
        current = waiting.pop()
        if not isinstance(current, Mapping):
            continue
        if not {"properties", "additionalProperties"}.isdisjoint(current):
            found.append(current)
        inner: list[Any] = []
        for name in _UNIONS:
            schemas = current.get(name)
            inner += schemas[:MAX_ALTERNATIVES] if isinstance(schemas, list) else []
        reference = current.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            inner.insert(0, resolve_reference(reference, schema))
        waiting.extend(reversed(inner))
    return found


def _parts(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the schemas of a union; None if it is none."""
    every = schema.get("allOf")
    if isinstance(every, list) and len(every) == 1 and isinstance(every[0], Mapping):
        return [merged(rest_of(schema, "allOf"), every[0])]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        if isinstance(choices, list) and choices:
            rest = rest_of(schema, union)
            return [merged(rest, choice) for choice in choices[:MAX_ALTERNATIVES]]
    if schema.get("nullable"):
        return [rest_of(schema, "nullable"), {"type": "null"}]
    kinds = schema.get("type")
    if isinstance(kinds, list) and "enum" not in schema and "const" not in schema:
        rest = rest_of(schema, "type")
        return [{**rest, "type": kind} for kind in kinds[:MAX_ALTERNATIVES] if isinstance(kind, str)]
    return None


def merged(rest: Mapping[str, Any], schema: Any) -> Any:
    """Return a schema with the rules that stand beside it."""
    if not rest or not isinstance(schema, Mapping) or len(schema) > _MAX_KEYS:
        return schema
    return {**rest, **schema}


def rest_of(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the rules beside a keyword; nothing if there are too many to be copied."""
    if len(schema) > _MAX_KEYS:
        return {}
    return {key: value for key, value in schema.items() if key != name}


def types_of(schema: Mapping[str, Any], root: Any) -> list[str]:
    """Return the types of one of the alternatives; none if it does not tell."""
    if isinstance(kind := schema.get("type"), str):
        return [kind]
    if (values := constants(schema)) is not None:
        return [_type_of(value) for value in values[:MAX_ALTERNATIVES]]
    every = schema.get("allOf")
    for part in every[:MAX_ALTERNATIVES] if isinstance(every, list) else ():
        kinds = [
            kind
            for each in alternatives(part, root)
            if isinstance(each.get("type"), str) or constants(each) is not None
            for kind in types_of(each, root)
        ]
        if kinds:
            return kinds
    return []


def constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema allows; None if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def resolve_reference(reference: str, root: Any) -> Any:
    """Return the schema at a local reference such as `#/$defs/Place`; None if there is none."""
    if not reference.startswith("#"):
        return None
    for key in reference[1:].split("/")[1:]:
        if not isinstance(root, Mapping):
            return None
        root = root.get(key.replace("~1", "/").replace("~0", "~"))
    return root


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")
