"""Reads the rules for the members of an object from a JSON schema."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.gateway.constraints.gbnf import GrammarTextError
from baton.gateway.constraints.schema_conjunction import ANNOTATIONS, is_nothing
from baton.gateway.output.values.schema_alternatives import resolve_reference

KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
"""A key that the schema does not name, as a terminal."""
MAX_LENGTH = 1000
"""Largest bound of a string's length that is enforced in text without quotes. A larger one is left out."""
MAX_SHAPES = 64
"""Largest number of kinds of objects that one schema allows."""
_MAX_STEPS = 20_000
"""Schemas and members that are looked at, some of them several times."""
_MAX_DEPTH = 32
_TOO_MANY = f"the schema has too many alternatives; at most {MAX_SHAPES} are supported"


class UnsupportedSchema(GrammarTextError):
    """The format of the model's calls cannot enforce a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectShape:
    """Members of an object.

    properties: schemas of the members, by name; also of those that are only required.
    others: schema of further members; None if there are none.
    """

    properties: Mapping[str, Any]
    required: frozenset[str]
    others: Any


_ANY = ObjectShape(properties={}, required=frozenset(), others={})


class ShapeReader:
    """Finds the kinds of objects that schemas allow, at a bounded cost for all schemas of one grammar."""

    def __init__(self) -> None:
        self._num_steps = 0

    def shapes(self, schema: Any, root: Any, *, lenient: bool) -> list[ObjectShape]:
        """Return the kinds of objects that a schema allows. References within `root` are followed.

        lenient: a schema with too many kinds allows any object.

        Raises UnsupportedSchema if there are too many, or none.
        """
        try:
            found = self._kinds(schema, root, frozenset())
        except UnsupportedSchema:
            if not lenient:
                raise
            return [_ANY]
        shapes = [possible for each in found if (possible := _possible(each)) is not None]
        if not shapes:
            raise UnsupportedSchema("no object matches the schema; allow all properties that it requires")
        return shapes

    def _kinds(self, schema: Any, root: Any, followed: frozenset[str], depth: int = 0) -> list[ObjectShape]:
        """Return the kinds of objects of a schema. `followed` are references on the way to it."""
        self._spend(1)
        if is_nothing(schema):
            return []
        if not isinstance(schema, Mapping):
            return [_ANY]
        if depth > _MAX_DEPTH:
            raise UnsupportedSchema("the schema is nested too deeply; use fewer allOf, anyOf and $ref")
        types = schema.get("type", "object")
        if "object" not in (types if isinstance(types, list) else [types]):
            return []
        found = [_own(schema)]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            target = resolve_reference(reference, root)
            found = self._both(found, self._kinds(target, root, followed | {reference}, depth + 1))
        every = schema.get("allOf")
        for each in every if isinstance(every, list) else ():
            found = self._both(found, self._kinds(each, root, followed, depth + 1))
        for name in ("anyOf", "oneOf"):
            choices = schema.get(name)
            if isinstance(choices, list) and choices:
                kinds = [kind for each in choices for kind in self._kinds(each, root, followed, depth + 1)]
                found = self._both(found, kinds)
        return found

    def _both(self, some: Iterable[ObjectShape], others: Iterable[ObjectShape]) -> list[ObjectShape]:
        """Return the kinds of objects that are among both."""
        found: list[ObjectShape] = []
        others = list(others)
        for one in some:
            for other in others:
                self._spend(len(one.properties) + len(other.properties) + 1)
                if len(found) == MAX_SHAPES:
                    raise UnsupportedSchema(_TOO_MANY)
                found.append(_joined_shape(one, other))
        return found

    def _spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise UnsupportedSchema(_TOO_MANY)


def _own(schema: Mapping[str, Any]) -> ObjectShape:
    """Return the rules that stand in a schema itself."""
    properties, required = schema.get("properties"), schema.get("required")
    extra = schema.get("additionalProperties", True)
    if "patternProperties" in schema:  # which of them match a further name is not looked at
        extra = False
    return ObjectShape(
        properties=properties if isinstance(properties, Mapping) else {},
        required=frozenset(name for name in required if isinstance(name, str))
        if isinstance(required, list)
        else frozenset(),
        others=None if is_nothing(extra) else extra if isinstance(extra, Mapping) else {},
    )


def _joined_shape(one: ObjectShape, other: ObjectShape) -> ObjectShape:
    if one == _ANY or other == _ANY:
        return other if one == _ANY else one
    names = dict.fromkeys((*one.properties, *other.properties))
    return ObjectShape(
        properties={
            name: _joined_rules(one.properties.get(name, one.others), other.properties.get(name, other.others))
            for name in names
        },
        required=one.required | other.required,
        others=None if one.others is None or other.others is None else _joined_rules(one.others, other.others),
    )


def _joined_rules(one: Any, other: Any) -> Any:
    """Return a schema for what both allow. None stands for no member."""
    if one is None or other is None or is_nothing(one) or is_nothing(other):
        return False
    if one is True or not one or one == other:
        return other
    return one if other is True or not other else {"allOf": [one, other]}


def _possible(shape: ObjectShape) -> ObjectShape | None:
    """Return a shape without members that nothing matches; None if they are required."""
    known = dict(shape.properties)
    for name in sorted(shape.required - known.keys()):
        known[name] = False if shape.others is None else shape.others
    allowed = {name: schema for name, schema in known.items() if not is_nothing(schema)}
    if not shape.required <= allowed.keys():
        return None
    is_narrowed = len(allowed) < len(known)  # a further member may not have one of these names
    return ObjectShape(properties=allowed, required=shape.required, others=None if is_narrowed else shape.others)


def has_rules(schema: Mapping[str, Any]) -> bool:
    """True if a schema has more than annotations."""
    return not schema.keys() <= ANNOTATIONS


def string_rules(schema: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the bounds for the characters of a string."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    least = least if isinstance(least, int) and 0 <= least <= MAX_LENGTH else 0
    return least, most if isinstance(most, int) and least <= most <= MAX_LENGTH else None
