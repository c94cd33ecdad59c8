"""Writes keywords of JSON schemas that llguidance does not have with others that mean the same, or less."""

from collections.abc import Iterator, Mapping
from typing import Any

from baton.core.request_limits import printable
from baton.gateway.input.schemas.schema_context import SchemaContext
from baton.gateway.input.schemas.schema_references import Path
from baton.gateway.output.values.schema_alternatives import value_key

_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef")
"""Keywords that apply other schemas to the same value."""
MAX_ALTERNATIVES = 256
"""Alternatives of one `oneOf` that are compared."""
NOTHING: dict[str, Any] = {"allOf": [False]}
"""A schema that no value matches."""


def add(result: dict[str, Any], schema: object) -> None:
    """Require that a value matches a schema, too."""
    result["allOf"] = [*result.get("allOf", ()), schema]


def property_names(
    context: SchemaContext, path: Path, source: Mapping[str, Any], names: object, result: dict[str, Any]
) -> None:
    """Apply `propertyNames`, already read as `names`: as properties, or as pattern of properties."""
    if names is False:
        result["maxProperties"] = 0
        return
    rule = {} if names is True or not isinstance(names, dict) else {k: v for k, v in names.items() if k != "type"}
    if not rule:
        return
    values = _texts(rule) if rule.keys() <= {"enum", "const"} else None
    if "patternProperties" in result or (values is None and "properties" in result):
        context.unsupported(path, "cannot be combined with properties or patternProperties")
        return
    others: Any = result.get("additionalProperties", True)
    if isinstance(others, dict):
        keyword = next(name for name in ("additionalProperties", "unevaluatedProperties") if name in source)
        others = context.share((path and path[0], keyword), source[keyword])
    if values is not None:
        known = result.get("properties", {})
        kept = {name: known[name] if name in values else False for name in known}
        result["properties"] = kept | {name: others for name in values if name not in known}
    elif rule.keys() <= {"pattern"}:
        result["patternProperties"] = {rule["pattern"]: others}
    elif rule.keys() <= {"minLength", "maxLength"}:
        length = f"{rule.get('minLength', 0)},{rule.get('maxLength', '')}"
        result["patternProperties"] = {f"^(?s:.{{{length}}})$": others}
    else:
        context.unsupported(path, "is supported with enum, const, pattern, or lengths only")
        return
    result["additionalProperties"] = False


def dependent_required(context: SchemaContext, path: Path, value: object, result: dict[str, Any]) -> None:
    """Apply `dependentRequired`: a property is absent, or others are there. Raises InvalidField."""
    if not isinstance(value, dict):
        raise context.error(path, f"is {printable(value)}; must be an object")
    for name, others in value.items():
        if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
            raise context.error((path, name), f"is {printable(others)}; must be a list of strings")
        if others:
            add(result, {"anyOf": [{"properties": {name: False}}, {"required": list(dict.fromkeys(others))}]})


def dependent_schema(name: str, schema: object, result: dict[str, Any]) -> None:
    """Apply one of `dependentSchemas`: a property is absent, or the value matches a schema."""
    if schema is not True and schema != {}:
        add(result, {"anyOf": [{"properties": {name: False}}, schema]})


def unevaluated(context: SchemaContext, path: Path, source: Mapping[str, Any], name: str, value: object) -> str | None:
    """Return the keyword that means the same as an `unevaluated…` one; None if it has no effect."""
    plain = "additionalProperties" if name == "unevaluatedProperties" else "items"
    if value is True or value == {} or plain in source:
        return None
    if any(keyword in source for keyword in _IN_PLACE):
        context.unsupported(path, f"is not supported beside {', '.join(_IN_PLACE[:4])} and the like")
        return None
    return plain


def property_counts(context: SchemaContext, path: Path, result: dict[str, Any]) -> None:
    """Drop `minProperties` and `maxProperties` where other keywords imply them, and write at least one
    property as alternatives. llguidance counts only properties that are not named, and equal ones as two."""
    names = result.get("properties", {})
    required = [name for name in result.get("required", ()) if name in names]
    if result.get("minProperties", 0) <= len(result.get("required", ())):
        result.pop("minProperties", None)
    if result.get("additionalProperties") is not False or "patternProperties" in result:
        if result.get("minProperties", 0) > len(result.get("required", ())) + 1:
            why = "is larger than the number of required properties plus one, and further properties could be equal"
            context.unsupported((path, "minProperties"), why)
            del result["minProperties"]
        return
    if result.get("maxProperties", len(names)) >= len(names):
        result.pop("maxProperties", None)
    is_object = result.get("type") == "object"
    if result.get("minProperties") == 1 and is_object and not required and 0 < len(names) <= MAX_ALTERNATIVES:
        del result["minProperties"]
        add(result, {"anyOf": [{"required": [name]} for name in names]})


def negation(context: SchemaContext, path: Path, schema: object, result: dict[str, Any]) -> None:
    """Apply `not`, which is supported for a schema that every value matches, or none."""
    if schema is True or schema == {}:
        add(result, False)
    elif schema is not False and schema != NOTHING:
        context.unsupported(path)


def one_of(
    context: SchemaContext, source: Mapping[str, Any], alternatives: list[Any], read: list[Any]
) -> tuple[str, list[Any]]:
    """Return keyword and schemas for `oneOf`: `anyOf` if no value matches two of them.

    source: the schema with the `oneOf`, whose type they all have.
    alternatives: the schemas of the client. read: the same in the form of the result.

    Objects that differ in the value of a property are distinguished by it. They must then have the property,
    also if it is optional in the schema, as it is for a discriminator with a default.
    """
    if len(read) == 1:
        return "anyOf", read
    if len(read) > MAX_ALTERNATIVES:
        return "oneOf", read
    found = [context.followed(alternative) for alternative in alternatives]
    if _list_distinct_values(found):
        return "anyOf", read
    kinds = [_kinds(schema) or _kinds(source) for schema in found]
    objects = [index for index, kind in enumerate(kinds) if "object" in kind]
    seen: set[str] = set()
    for index, kind in enumerate(kinds):
        if index not in objects and (not kind or kind & seen):
            return "oneOf", read
        seen |= kind if index not in objects else set()
    if any(kinds[index] != {"object"} for index in objects):
        return "oneOf", read
    if len(objects) < 2:
        return ("anyOf", read)
    name = next(_discriminators(context, [found[index] for index in objects]), None)
    if name is None:
        return "oneOf", read
    distinct = list(read)
    for index in objects:
        distinct[index] = _requiring(read[index], name)
    return "anyOf", distinct


def _list_distinct_values(schemas: list[Any]) -> bool:
    """True if all schemas list their values, and no value is in two lists."""
    seen: set[str] = set()
    for schema in schemas:
        values = None
        if isinstance(schema, dict):
            values = [schema["const"]] if "const" in schema else schema.get("enum")
        texts = set(map(value_key, values)) if isinstance(values, list) else set()
        if not texts or not seen.isdisjoint(texts):
            return False
        seen |= texts
    return True


def _discriminators(context: SchemaContext, objects: list[Any]) -> Iterator[str]:
    """Yield the properties whose values differ between all of some object schemas."""
    for name in objects[0].get("properties", {}):
        seen: set[str] = set()
        for schema in objects:
            properties = schema.get("properties")
            value = context.followed(properties.get(name)) if isinstance(properties, dict) else None
            texts = _texts(value) if isinstance(value, dict) else None
            if not texts or not seen.isdisjoint(texts):
                break
            seen.update(texts)
        else:
            yield name


def _requiring(schema: Any, name: str) -> dict[str, Any]:
    required = schema.get("required", ())
    return {**schema, "type": "object", "required": [*required, *([] if name in required else [name])]}


def _kinds(schema: object) -> set[str]:
    """Return the JSON types that a schema allows, with numbers as one type; empty if all are possible."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    names = (
        {kinds}
        if isinstance(kinds, str)
        else {k for k in kinds if isinstance(k, str)}
        if isinstance(kinds, list)
        else set()
    )
    return {"number" if name == "integer" else name for name in names}


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the only values of a schema if all of them are strings; None otherwise."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return list(dict.fromkeys(values))
