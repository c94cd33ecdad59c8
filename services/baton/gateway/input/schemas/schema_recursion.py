"""Finds references of JSON schemas that no finite value can match, because they always lead to themselves."""

from collections.abc import Iterator, Mapping
from typing import Any

_MAX_ROUNDS = 32
"""Rounds in which the finite schemas are found. A chain of required references in the worst order that is
longer is not examined."""


def endless_references(document: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the references of a document, as `SchemaContext` writes them, that no finite value can match.

    "#" is the document itself. None if that was not found out. The cost is linear in the document's size.
    """
    schemas = {"#": {name: value for name, value in document.items() if name != "$defs"}}
    schemas |= {f"#/$defs/{name}": schema for name, schema in document.get("$defs", {}).items()}
    open_names = dict.fromkeys(reversed(schemas))  # later ones are deeper
    finite: set[str] = set()
    for _ in range(_MAX_ROUNDS):
        num_finite = len(finite)
        for name in list(open_names):
            if _is_finite(schemas[name], finite):
                finite.add(name)
                del open_names[name]
        if len(finite) == num_finite:
            return frozenset(open_names)
    return None


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Return True if a finite value may match, given the references for which that is known."""
    if isinstance(schema, bool):
        return True
    if (reference := schema.get("$ref")) is not None and reference not in finite:
        return False
    if not all(_is_finite(each, finite) for each in schema.get("allOf", ())):
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(_is_finite(each, finite) for each in schema[name]):
            return False
    if "enum" in schema or "const" in schema:
        return True
    return all(_is_finite(each, finite) for each in _parts(schema))


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the parts that each value has."""
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        yield from (properties[name] for name in schema.get("required", ()) if name in properties)
    elif schema.get("type") == "array" and (least := schema.get("minItems", 0)):
        first = schema.get("prefixItems", [])
        yield from first[:least]
        if least > len(first) and "items" in schema:
            yield schema["items"]
