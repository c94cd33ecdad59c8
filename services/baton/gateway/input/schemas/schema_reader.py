"""Reads JSON schemas that clients send, and writes them with the keywords that llguidance knows.

The result allows no value that the schema forbids. A subschema keeps its place, so that errors of later steps
have JSON pointers, too; subschemas that are referred to become entries of `$defs` whose `$comment` is their
place. Annotations are dropped. Keywords that cannot be enforced are refused, or dropped in a lenient schema.
"""

from collections.abc import Callable, Mapping
from typing import Any

from baton.core.request_limits import I32_MAX, printable
from baton.gateway.input.schemas import schema_rewrites as rewrites
from baton.gateway.input.schemas.schema_context import SchemaContext, printable_pointer
from baton.gateway.input.schemas.schema_numbers import (
    BOUNDS,
    NumberRuleError,
    check_multiple,
    check_multiples,
    narrowed_bounds,
)
from baton.gateway.input.schemas.schema_pattern import rust_pattern
from baton.gateway.input.schemas.schema_recursion import endless_references
from baton.gateway.input.schemas.schema_references import Path

MAX_PATTERN_CHARACTERS = 16 * 1024
"""Longest regular expression."""
FORMATS = {
    **{name: name for name in ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri")},
    **dict.fromkeys(("uuid", *(f"uuid{version}" for version in range(1, 9))), "uuid"),
    "idn-email": "email",
    "idn-hostname": "hostname",
    **dict.fromkeys(("iri", "uri-reference", "iri-reference"), "uri"),
}
"""Formats that are enforced, and the format of llguidance that each includes. Others are annotations."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_NO_SCHEMA = "must be an object, true or false"
_NOT_FINITE = "matches no finite value, because it always leads to itself; make a property or item on the way optional"


def read_schema(place: str, schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """Return the schema for llguidance. `place` names it in errors.

    lenient: keywords that cannot be enforced are dropped.

    Raises InvalidField, which names the place, the JSON pointer and the rule.
    """
    context = SchemaContext(place, schema, lenient=lenient)
    reader = _SchemaReader(context)
    result: dict[str, Any] = reader.schema(None, schema)
    shared: dict[str, Any] = {}
    while len(shared) < len(context.shared):  # reading one may share others
        path, value = context.shared[len(shared)]
        shared[str(len(shared))] = {"$comment": printable_pointer(path), **reader.schema(path, value)}
    if shared:
        result["$defs"] = shared
        _drop_endless(context, result)
    try:
        check_multiples(context.multiples, may_combine=context.may_combine)
    except NumberRuleError as error:
        raise context.error(None, f"has a {error.keyword} that {error}") from error
    return result


def _drop_endless(context: SchemaContext, result: dict[str, Any]) -> None:
    """Forbid references that no finite value matches. Raises InvalidField if that is the whole schema."""
    endless = endless_references(result)
    if not endless:
        return
    if "#" in endless:
        raise context.error(None, _NOT_FINITE)
    stack: list[Any] = [result]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if value.get("$ref") in endless:
                del value["$ref"]
                rewrites.add(value, False)
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def _what(value: object) -> str:
    return "an empty list" if value == [] else printable(value)


class _SchemaReader:
    """Reads subschemas. A method for a keyword has the result so far, the path and value, and the schema."""

    def __init__(self, context: SchemaContext) -> None:
        self._context = context

    def schema(self, path: Path, value: object) -> Any:
        """Return one schema in the form of the result."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise self._context.error(path, f"is {printable(value)}; {_NO_SCHEMA}")
        result: dict[str, Any] = {}
        for name, item in value.items():
            if (read := _KEYWORDS.get(name)) is not None:
                read(self, result, (path, name), item, value)
        for name, rewrite in _WRITTEN_WITH_OTHERS.items():
            if name in value:
                rewrite(self, result, (path, name), value[name], value)
        rewrites.property_counts(self._context, path, result)
        self._numbers(path, result, value)
        return result

    # -- keywords that llguidance has ----------------------------------------------------------------------------------

    def _type(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        kinds = value if isinstance(value, list) else [value]
        wrong = [kind for kind in kinds if not isinstance(kind, str) or kind not in _TYPES]
        if wrong or not kinds:
            what = printable(wrong[0]) if wrong else _what(value)
            raise self._context.error(path, f"is {what}; must be {', '.join(_TYPES)}, or a list of these")
        result["type"] = value

    def _enum(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        if not isinstance(value, list) or not value:
            raise self._context.error(path, f"is {_what(value)}; must be a list of at least one value")
        result["enum"] = value

    def _const(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        result["const"] = value

    def _count(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0 or value != int(value):
            raise self._context.error(path, f"is {printable(value)}; must be an integer of at least 0")
        assert path is not None
        if value > I32_MAX and path[1].startswith("min"):
            raise self._context.error(path, f"is {printable(value)}; must be at most {I32_MAX}")
        result[path[1]] = min(int(value), I32_MAX)

    def _pattern(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        result["pattern"] = self._regex(path, value)

    def _regex(self, path: Path, value: object) -> str:
        if not isinstance(value, str):
            raise self._context.error(path, f"is {printable(value)}; must be a regular expression")
        if len(value) > MAX_PATTERN_CHARACTERS:
            message = f"has {len(value):,} characters; at most {MAX_PATTERN_CHARACTERS:,} are allowed"
            raise self._context.error(path, message)
        return rust_pattern(value)

    def _format(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        if not isinstance(value, str):
            raise self._context.error(path, f"is {printable(value)}; must be a string")
        if value in FORMATS:
            result["format"] = FORMATS[value]

    def _one(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        assert path is not None
        result[path[1]] = self.schema(path, value)

    def _items(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        if not isinstance(value, list):
            result["items"] = self.schema(path, value)
            return
        if "prefixItems" in source:
            raise self._context.error(path, f"is a list, beside prefixItems; {_NO_SCHEMA}")
        if value:  # the form of draft 7
            result["prefixItems"] = self._schemas(path, value)
        if "additionalItems" in source:
            result["items"] = self.schema((path and path[0], "additionalItems"), source["additionalItems"])

    def _several(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        assert path is not None
        if path[1] == "allOf":
            self._context.may_combine = True
        if found := self._schemas(path, value):
            result[path[1]] = [*result.get(path[1], ()), *found]

    def _schemas(self, path: Path, value: object) -> list[Any]:
        if not isinstance(value, list) or not (value or (path and path[1] == "prefixItems")):
            raise self._context.error(path, f"is {_what(value)}; must be a list of at least one schema")
        return [self.schema((path, str(number)), item) for number, item in enumerate(value)]

    def _one_of(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        read = self._schemas(path, value)
        assert isinstance(value, list)
        keyword, alternatives = rewrites.one_of(self._context, source, value, read)
        if keyword in result:
            rewrites.add(result, {keyword: alternatives})
        else:
            result[keyword] = alternatives

    def _any_of(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        read = self._schemas(path, value)
        if "anyOf" in result:
            rewrites.add(result, {"anyOf": read})
        else:
            result["anyOf"] = read

    def _named(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        assert path is not None
        if not isinstance(value, dict):
            raise self._context.error(path, f"is {printable(value)}; must be an object of schemas")
        is_pattern = path[1] == "patternProperties"
        result[path[1]] = {
            self._regex((path, name), name) if is_pattern else name: self.schema((path, name), item)
            for name, item in value.items()
        }

    def _required(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._context.error(path, f"is {printable(value)}; must be a list of strings")
        result["required"] = list(dict.fromkeys(value))

    def _ref(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        if any(name in _COMBINED for name in source):
            self._context.may_combine = True
        for name, item in self._context.reference(path, source, value).items():
            if name == "$ref":
                result[name] = item
            else:
                rewrites.add(result, False)

    # -- keywords that are written with others -------------------------------------------------------------------------

    def _property_names(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        names = self.schema(path, self._context.followed(value))
        rewrites.property_names(self._context, path, source, names, result)

    def _dependent_required(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        rewrites.dependent_required(self._context, path, value, result)

    def _dependent_schemas(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        if not isinstance(value, dict):
            raise self._context.error(path, f"is {printable(value)}; must be an object of schemas")
        self._context.may_combine = True
        for name, item in value.items():
            if isinstance(item, list) and path and path[1] == "dependencies":
                rewrites.dependent_required(self._context, path, {name: item}, result)
            else:
                rewrites.dependent_schema(name, self.schema((path, name), item), result)

    def _unevaluated(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        assert path is not None
        keyword = rewrites.unevaluated(self._context, path, source, path[1], value)
        if keyword is not None:
            result[keyword] = self.schema(path, value)

    def _not(self, result: dict[str, Any], path: Path, value: object, _: Mapping[str, Any]) -> None:
        rewrites.negation(self._context, path, self.schema(path, value), result)

    def _unique_items(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        if not isinstance(value, bool):
            raise self._context.error(path, f"is {printable(value)}; must be true or false")
        if value and result.get("maxItems", 2) > 1:
            self._context.unsupported(path)

    def _if(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        if "then" in source or "else" in source:
            self._context.unsupported(path)

    def _contains(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        if source.get("minContains") != 0 or "maxContains" in source:
            self._context.unsupported(path)

    def _unsupported(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        self._context.unsupported(path)

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _bound(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        assert path is not None
        if isinstance(value, bool) and path[1].startswith("exclusive"):
            return  # draft 4
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._context.error(path, f"is {printable(value)}; must be a number")

    def _multiple(self, result: dict[str, Any], path: Path, value: object, source: Mapping[str, Any]) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._context.error(path, f"is {printable(value)}; must be a number")
        try:
            self._context.multiples.append(check_multiple(value))
        except NumberRuleError as error:
            raise self._context.error(path, f"is {printable(value)}; {error}") from error
        result["multipleOf"] = value

    def _numbers(self, path: Path, result: dict[str, Any], source: Mapping[str, Any]) -> None:
        if not any(name in source for name in BOUNDS):
            return
        try:
            result.update(narrowed_bounds(source))
        except NumberRuleError as error:
            where = (path, error.keyword)
            raise self._context.error(where, f"is {printable(source[error.keyword])}; {error}") from error


_Read = Callable[[_SchemaReader, dict[str, Any], Path, object, Mapping[str, Any]], None]
_COMBINED = frozenset(("multipleOf", "properties", "items", "prefixItems", "additionalProperties", "allOf", "anyOf"))
_KEYWORDS: Mapping[str, _Read] = {
    "type": _SchemaReader._type,
    "enum": _SchemaReader._enum,
    "const": _SchemaReader._const,
    "pattern": _SchemaReader._pattern,
    "format": _SchemaReader._format,
    "properties": _SchemaReader._named,
    "patternProperties": _SchemaReader._named,
    "additionalProperties": _SchemaReader._one,
    "required": _SchemaReader._required,
    "items": _SchemaReader._items,
    "prefixItems": _SchemaReader._several,
    "allOf": _SchemaReader._several,
    "anyOf": _SchemaReader._any_of,
    "oneOf": _SchemaReader._one_of,
    "$ref": _SchemaReader._ref,
    "multipleOf": _SchemaReader._multiple,
    **dict.fromkeys(BOUNDS, _SchemaReader._bound),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _SchemaReader._count
    ),
}
_WRITTEN_WITH_OTHERS: Mapping[str, _Read] = {
    "unevaluatedProperties": _SchemaReader._unevaluated,
    "unevaluatedItems": _SchemaReader._unevaluated,
    "propertyNames": _SchemaReader._property_names,
    "dependentRequired": _SchemaReader._dependent_required,
    "dependentSchemas": _SchemaReader._dependent_schemas,
    "dependencies": _SchemaReader._dependent_schemas,
    "not": _SchemaReader._not,
    "uniqueItems": _SchemaReader._unique_items,
    "if": _SchemaReader._if,
    "contains": _SchemaReader._contains,
    "$dynamicRef": _SchemaReader._unsupported,
    "$recursiveRef": _SchemaReader._unsupported,
}
"""Keywords that are applied to what the others made."""
