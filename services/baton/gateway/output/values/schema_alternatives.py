"""Resolves the unions, conjunctions and references at the top of a JSON schema, at a bounded cost."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from baton.gateway.output.values.schema_document import SchemaDocument

MAX_ALTERNATIVES = 64
"""Largest number of schemas in which a schema is resolved."""
_MAX_STEPS = 4 * MAX_ALTERNATIVES
"""Number of schemas that are looked at."""
_MAX_KEYS = 64
"""Rules beside a union or a reference are taken into account up to this number."""
_MAX_HOPS = 8

_UNIONS = ("allOf", "anyOf", "oneOf")
_NUMBERS = frozenset(("integer", "number"))
_RESOLVED = frozenset((*_UNIONS, "$ref", "nullable"))
_MEMBERS = frozenset(("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"))
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "$defs", "definitions")
)
"""Keywords that allow every value."""
_DEPENDENT = (
    _MEMBERS,
    frozenset(("items", "prefixItems", "additionalItems", "unevaluatedItems")),
    frozenset(("contains", "minContains", "maxContains")),
    frozenset(("if", "then", "else")),
)
"""Keywords whose meaning depends on others that stand in the same schema."""


class Alternatives(NamedTuple):
    """The schemas of which one applies to a value.

    is_complete: these are all.
    num_steps: schemas that were looked at.
    """

    schemas: list[Mapping[str, Any]]
    is_complete: bool
    num_steps: int


def alternatives(schema: Any, document: SchemaDocument) -> Alternatives:
    """Return the schemas of which one applies to a value, in the order of the schema.

    Unions (`anyOf`, `oneOf`, lists of types, `nullable`) are resolved, also those in an `allOf`, and
    references within `document`. A reference to a schema from itself is not followed again. Where several
    schemas apply, they are joined; rules that cannot be joined remain as an `allOf` of schemas without
    unions. A schema without any rule allows everything.
    """
    found: list[Mapping[str, Any]] = []
    states = [_State((schema,), (), frozenset())]
    steps = 0
    is_complete = True
    while states:
        steps += 1
        if len(found) == MAX_ALTERNATIVES or steps > _MAX_STEPS:
            is_complete = False
            break
        state = states.pop()
        if state.open:
            is_complete = is_complete and not _is_cut(state.open[0])
            states += reversed(_next_states(state, document))
        elif (joined := _joined(state.parts)) is not None:
            found.append(joined)
    return Alternatives(found, is_complete, steps)


def followed(schema: Any, document: SchemaDocument) -> Any:
    """Return the schema that a chain of references without rules beside them ends with."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        if len(schema) > _MAX_KEYS or not rest_of(schema, "$ref").keys() <= ANNOTATIONS:
            break
        schema = document.resolve(reference)
    return schema


def _is_cut(schema: Any) -> bool:
    """True if a schema has so many rules that those beside a union or a reference are not looked at."""
    if not isinstance(schema, Mapping) or len(schema) <= _MAX_KEYS:
        return False
    return not _RESOLVED.isdisjoint(schema) or isinstance(schema.get("type"), list)


class _State(NamedTuple):
    """Schemas that all apply to a value: those that are still to be resolved, and those without unions.

    followed: references on the way.
    """

    open: tuple[Any, ...]
    parts: tuple[Mapping[str, Any], ...]
    followed: frozenset[str]


def _next_states(state: _State, document: SchemaDocument) -> list[_State]:
    """Return what becomes of a state when its first open schema is resolved by one level."""
    (current, *others), parts, followed = state
    if not isinstance(current, Mapping):
        return [] if current is False or current is None else [_State(tuple(others), parts, followed)]
    if current.get("nullable"):
        return [
            _State((rest_of(current, "nullable"), *others), parts, followed),
            _State(({"type": "null"}, *others), parts, followed),
        ]
    if isinstance(reference := current.get("$ref"), str):
        inner = [rest_of(current, "$ref")]
        if reference not in followed:
            inner.append(document.resolve(reference))
        elif not inner[0]:
            return []
        return [_State((*inner, *others), parts, followed | {reference})]
    every = current.get("allOf")
    if isinstance(every, list) and len(every) <= MAX_ALTERNATIVES:
        return [_State((rest_of(current, "allOf"), *every, *others), parts, followed)]
    choices = _choices(current)
    if choices is None:
        return [_State(tuple(others), (*parts, current) if current else parts, followed)]
    return [_State((*choice, *others), parts, followed) for choice in choices]


def _choices(schema: Mapping[str, Any]) -> list[tuple[Any, ...]] | None:
    """Return the schemas of a union, each with the rules beside it; None if it is none."""
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        if isinstance(choices, list) and choices:
            rest = rest_of(schema, union)
            return [(rest, choice) for choice in choices[: MAX_ALTERNATIVES + 1]]
    kinds = schema.get("type")
    if isinstance(kinds, list) and "enum" not in schema and "const" not in schema:
        rest = rest_of(schema, "type")
        return [({**rest, "type": kind},) for kind in kinds[:MAX_ALTERNATIVES] if isinstance(kind, str)]
    return None


def _joined(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return one schema for schemas without unions that all apply; None if their types exclude each other."""
    ruled = [part for part in parts if not part.keys() <= ANNOTATIONS]
    if len(ruled) < 2:
        return ruled[0] if ruled else {}
    kinds: frozenset[str] | None = None
    for part in ruled:
        if (own := _kinds_of(part)) is not None:
            kinds = own if kinds is None else _common_kinds(kinds, own)
    if kinds is not None and not kinds:
        return None
    joined: dict[str, Any] = {}
    for part in ruled:
        rules = {name: rule for name, rule in part.items() if name != "type" and name not in ANNOTATIONS}
        if rules.keys() & joined.keys() or _depend(joined, rules):
            joined = {"allOf": [dict(part) for part in ruled]}
            break
        joined |= rules
    if kinds is not None:
        joined["type"] = next(iter(kinds)) if len(kinds) == 1 else sorted(kinds)
    return joined


def _kinds_of(schema: Mapping[str, Any]) -> frozenset[str] | None:
    return frozenset(kinds_of(schema)) if isinstance(schema.get("type"), str | list) else None


def _common_kinds(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Return the types that are among both. An integer is a number, too."""
    common = one & other
    if ("integer" in one and "number" in other) or ("integer" in other and "number" in one):
        common |= {"integer"}
    return common - {"integer"} if "number" in common else common


def _depend(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if a keyword of one schema would change the meaning of the other, were they one schema."""
    return any(not group.isdisjoint(one) and not group.isdisjoint(other) for group in _DEPENDENT)


def parts_of_object(document: SchemaDocument) -> list[Mapping[str, Any]]:
    """Return the schemas that may have members of an object: a schema, and those of the same value."""
    found: list[Mapping[str, Any]] = []
    followed: set[str] = set()
    waiting: list[Any] = [document.schema]
    steps = 0
    while waiting and len(found) < MAX_ALTERNATIVES and steps < _MAX_STEPS:
        steps += 1
        current = waiting.pop()
        if not isinstance(current, Mapping):
            continue
        if not _MEMBERS.isdisjoint(current):
            found.append(current)
        values = current.get("enum")
        found += [
            {"properties": {name: {"const": item} for name, item in value.items()}}
            for value in (current.get("const"), *(values[:MAX_ALTERNATIVES] if isinstance(values, list) else ()))
            if isinstance(value, Mapping)
        ]
        inner: list[Any] = [current.get(name) for name in ("then", "else")]
        for name in _UNIONS:
            schemas = current.get(name)
            inner += schemas[:MAX_ALTERNATIVES] if isinstance(schemas, list) else []
        for name in ("dependentSchemas", "dependencies"):
            named = current.get(name)
            inner += islice(named.values(), MAX_ALTERNATIVES) if isinstance(named, Mapping) else []
        reference = current.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            inner.insert(0, document.resolve(reference))
        waiting.extend(reversed(inner))
    return found


def rest_of(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the rules beside a keyword; nothing if there are too many to be copied."""
    if len(schema) > _MAX_KEYS:
        return {}
    return {key: value for key, value in schema.items() if key != name}


def types_of(schema: Mapping[str, Any], known: dict[int, list[str]]) -> list[str]:
    """Return the types of one of the alternatives; none if it does not tell.

    known: types of each `enum` by the identity of its list, to which new ones are added.
    """
    found: list[str] | None = None
    for part in parts_of(schema):
        if "const" in part:
            found = _common_types(found, [type_of(part["const"])])
        if isinstance(values := part.get("enum"), list) and values:
            if id(values) not in known:
                known[id(values)] = list(dict.fromkeys(map(type_of, values)))
            found = _common_types(found, known[id(values)])
    kinds = kinds_of(schema)
    if found is None:
        return kinds
    numbers = not _NUMBERS.isdisjoint(kinds)
    return [kind for kind in found if not kinds or kind in kinds or (kind in _NUMBERS and numbers)]


def _common_types(known: list[str] | None, kinds: list[str]) -> list[str]:
    return kinds if known is None else [kind for kind in known if kind in kinds]


def kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that the keyword `type` names; none if there is none."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return [kinds]
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []


def parts_of(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas without unions that one of the alternatives consists of."""
    every = schema.get("allOf")
    if not isinstance(every, list):
        return [schema]
    return [rest_of(schema, "allOf"), *(part for part in every if isinstance(part, Mapping))]


def constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values, of its types, that an alternative allows; None if they are not listed."""
    found: list[Any] | None = None
    parts = parts_of(schema)
    for part in parts:
        if "const" in part:
            found = _common(found, [part["const"]])
        if isinstance(values := part.get("enum"), list) and values:
            found = _common(found, values)
    if found is None:
        return None
    for part in parts:
        if (kinds := _kinds_of(part)) is not None:
            found = [value for value in found if _has_type(value, kinds)]
    return found


def _common(known: list[Any] | None, values: list[Any]) -> list[Any]:
    if known is None:
        return values
    texts = set(map(value_key, values))
    return [value for value in known if value_key(value) in texts]


def value_key(value: Any) -> str:
    """Return a text that is equal for values that JSON schemas take for equal, such as 1 and 1.0."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else _scalar_key(value)


def _scalar_key(value: Any) -> str:
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _has_type(value: Any, kinds: frozenset[str]) -> bool:
    kind = type_of(value)
    if kind == "integer":
        return not kinds.isdisjoint(("integer", "number"))
    return kind in kinds or (kind == "number" and "integer" in kinds and value.is_integer())


def type_of(value: Any) -> str:
    """Return the JSON type of a value; `number` only if it has a fraction or an exponent."""
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def is_nothing(schema: Any) -> bool:
    """True if a schema obviously matches no value."""
    return schema is False or (isinstance(schema, Mapping) and schema.get("allOf") == [False])


def has_rules(schema: Mapping[str, Any]) -> bool:
    """True if a schema has more than annotations."""
    return not schema.keys() <= ANNOTATIONS
