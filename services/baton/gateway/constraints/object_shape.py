"""Reads the rules for the members of an object from a JSON schema."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

from baton.gateway.constraints.name_pattern import name_matches
from baton.gateway.constraints.text_pattern import whole_text_pattern
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.output.values.schema_alternatives import constants, is_nothing, parts_of, value_key
from baton.gateway.output.values.schema_document import SchemaDocument

MAX_SHAPES = 64
"""Largest number of kinds of objects that one schema allows."""
_MAX_STEPS = 20_000
"""Schemas and members that are looked at, some of them several times."""
_MAX_DEPTH = 32
_MAX_PATTERNS = 8
_MATCH_STEPS = 8
_VALUES_PER_STEP = 8
ONE_OF = (
    "this model's calls cannot enforce oneOf, unless its schemas differ in their type, or in the constant value of a "
    "property; use anyOf instead"
)
_WITH_NAMES = (
    "this model's calls cannot enforce patternProperties beside properties, unless the patterns have at most one "
    "repetition, of a character; use simpler ones"
)
_PATTERN = (
    f"this model's calls can enforce at most {_MAX_PATTERNS} patterns, without look-around, references, flags, or ^ "
    "and $ inside of them; write simpler ones"
)
NO_OBJECT = "no object matches the schema; allow all properties that it requires, and as many as it requires"
_TOO_MANY = f"the schema has too many alternatives; at most {MAX_SHAPES} are supported"
_TOO_LARGE = "the schemas of the tools have too many alternatives, properties or values of enum; use fewer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectShape:
    """Members of an object.

    patterns: schemas of further members whose names match one of these patterns. A name that matches two of
        them is not written. None stands for no member.
    properties: schemas of the members that are named; also of those that are only required.
    required: names of members that must be there.
    others: schema of further members; None if there are none.
    least, most: bounds for the number of members.
    excluded: names that further members do not have, besides those of `properties`.
    """

    patterns: Mapping[str, Any] = field(default_factory=dict)
    properties: Mapping[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: Any = field(default_factory=dict)
    least: int = 0
    most: int | None = None
    excluded: frozenset[str] = frozenset()


_ANY = ObjectShape()


class ShapeReader:
    """Finds the kinds of objects that schemas allow, at a bounded cost for all schemas of one grammar."""

    def __init__(self) -> None:
        self._num_steps = self._num_alternatives = 0
        self._lenient = False

    def shapes(self, schema: Any, document: SchemaDocument, *, lenient: bool) -> list[ObjectShape]:
        """Return the kinds of objects that a schema allows. References within `document` are followed.

        lenient: a schema with too many kinds allows any object, and unsupported rules are ignored.

        Raises UnsupportedSchema if there are too many, or none.
        """
        self._lenient = lenient
        try:
            found = self._kinds(schema, document, frozenset())
        except UnsupportedSchema:
            if not lenient:
                raise
            return [_ANY]
        shapes = [possible for each in found if (possible := self._possible(each)) is not None]
        if not shapes:
            raise UnsupportedSchema(NO_OBJECT)
        return shapes

    def _kinds(
        self, schema: Any, document: SchemaDocument, followed: frozenset[str], depth: int = 0
    ) -> list[ObjectShape]:
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
        found = [self._own(schema)]
        self._spend(_num_value_steps(schema))
        if (values := constants(schema)) is not None:
            found = self._both(found, [_constant(value) for value in values if isinstance(value, Mapping)])
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            target = document.resolve(reference)
            found = self._both(found, self._kinds(target, document, followed | {reference}, depth + 1))
        every = schema.get("allOf")
        for each in every if isinstance(every, list) else ():
            found = self._both(found, self._kinds(each, document, followed, depth + 1))
        for name in ("anyOf", "oneOf"):
            choices = schema.get(name)
            if isinstance(choices, list) and choices:
                several = [self._kinds(each, document, followed, depth + 1) for each in choices]
                if name == "oneOf" and not self._lenient and not self._are_exclusive(several):
                    raise UnsupportedSchema(ONE_OF, "oneOf", choices)
                found = self._both(found, [kind for kinds in several for kind in kinds])
        return found

    def _are_exclusive(self, several: Sequence[Sequence[ObjectShape]]) -> bool:
        """True if no object has several of some kinds."""
        for one_kind, other_kind in combinations(several, 2):
            for one, other in product(one_kind, other_kind):
                self._spend(len(one.required) + len(other.required) + 1)
                if not (_excludes(one, other) or _excludes(other, one)):
                    return False
        return True

    def _both(self, some: Iterable[ObjectShape], others: Iterable[ObjectShape]) -> list[ObjectShape]:
        """Return the kinds of objects that are among both."""
        found: list[ObjectShape] = []
        others = list(others)
        for one in some:
            for other in others:
                patterns = len(one.patterns) + len(other.patterns) + 1
                self._spend((len(one.properties) + len(other.properties) + 1) * patterns)
                if len(found) == MAX_SHAPES:
                    raise UnsupportedSchema(_TOO_MANY)
                found.append(self._joined_shape(one, other))
        return found

    @property
    def is_exhausted(self) -> bool:
        """True if so many alternatives were looked at that there may be no more."""
        return self._num_alternatives > _MAX_STEPS

    def spend_alternatives(self, num_steps: int, schemas: Sequence[Mapping[str, Any]] = ()) -> None:
        """Count schemas that were looked at, and the values that some alternatives list.

        Raises UnsupportedSchema if they are too many, unless `lenient`.
        """
        self._num_alternatives += num_steps + sum(map(_num_value_steps, schemas))
        if self.is_exhausted and not self._lenient:
            raise UnsupportedSchema(_TOO_LARGE)

    def _spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise UnsupportedSchema(_TOO_LARGE)

    def _own(self, schema: Mapping[str, Any]) -> ObjectShape:
        """Return the rules that stand in a schema itself."""
        properties, required = schema.get("properties"), schema.get("required")
        extra = schema.get("additionalProperties", True)
        patterns: dict[str, Any] = {}
        named = schema.get("patternProperties")
        for pattern, rule in named.items() if isinstance(named, Mapping) else ():
            if whole_text_pattern(pattern) is not None and len(patterns) < _MAX_PATTERNS:
                patterns[pattern] = rule
            elif not self._lenient:
                raise UnsupportedSchema(_PATTERN, "patternProperties", named)
        properties = properties if isinstance(properties, Mapping) else {}
        least, most = schema.get("minProperties"), schema.get("maxProperties")
        shape = ObjectShape(
            patterns={pattern: None if is_nothing(rule) else rule for pattern, rule in patterns.items()},
            required=frozenset(name for name in required if isinstance(name, str))
            if isinstance(required, list)
            else frozenset(),
            others=None if is_nothing(extra) else extra if isinstance(extra, Mapping) else {},
            least=least if isinstance(least, int) else 0,
            most=most if isinstance(most, int) else None,
        )
        if not patterns:
            return replace(shape, properties=properties)
        known = {name: _joined_rules(rule, self._rule(shape, name, True)) for name, rule in properties.items()}
        return replace(shape, properties=known)

    def _rule(self, shape: ObjectShape, name: str, others: Any) -> Any:
        """Return the schema of a member of the name that is not in `properties`.

        others: its schema if no pattern matches.
        """
        if name in shape.properties:
            return shape.properties[name]
        rule: Any = None
        for pattern, schema in shape.patterns.items():
            self._spend(_MATCH_STEPS)
            matches = name_matches(pattern, name)
            if matches is None and not self._lenient:
                raise UnsupportedSchema(_WITH_NAMES)
            if matches:
                rule = _joined_rules(True if rule is None else rule, schema)
        return others if rule is None else rule

    def _joined_shape(self, one: ObjectShape, other: ObjectShape) -> ObjectShape:
        if one == _ANY or other == _ANY:
            return other if one == _ANY else one
        names = dict.fromkeys((*one.properties, *other.properties))
        patterns = dict.fromkeys((*one.patterns, *other.patterns))
        if len(patterns) > _MAX_PATTERNS:
            raise UnsupportedSchema(f"the schema has more than {_MAX_PATTERNS} patterns of names; use fewer")
        bounds = [most for most in (one.most, other.most) if most is not None]
        return ObjectShape(
            patterns={
                pattern: _or_none(
                    _joined_rules(one.patterns.get(pattern, one.others), other.patterns.get(pattern, other.others))
                )
                for pattern in patterns
            },
            properties={
                name: _joined_rules(self._rule(one, name, one.others), self._rule(other, name, other.others))
                for name in names
            },
            required=one.required | other.required,
            others=_or_none(_joined_rules(one.others, other.others)),
            least=max(one.least, other.least),
            most=min(bounds, default=None),
        )

    def _possible(self, shape: ObjectShape) -> ObjectShape | None:
        """Return a shape without members that nothing matches; None if they are required."""
        known = dict(shape.properties)
        for name in sorted(shape.required - known.keys()):
            known[name] = self._rule(shape, name, shape.others)
        allowed = {name: rule for name, rule in known.items() if _or_none(rule) is not None}
        if not shape.required <= allowed.keys() or (shape.most is not None and shape.most < len(shape.required)):
            return None
        return replace(shape, properties=allowed, excluded=frozenset(known.keys() - allowed.keys()))


def _num_value_steps(schema: Mapping[str, Any]) -> int:
    """Return the number of steps that comparing the values of an alternative takes."""
    lists = (part.get("enum") for part in parts_of(schema))
    return sum(len(values) for values in lists if isinstance(values, list)) // _VALUES_PER_STEP


def _excludes(one: ObjectShape, other: ObjectShape) -> bool:
    """True if a shape requires a member whose value another does not allow."""
    for name in one.required:
        if not other.patterns and _or_none(other.properties.get(name, other.others)) is None:
            return True
        values, others = (_constants_of(shape.properties.get(name)) for shape in (one, other))
        if values is not None and others is not None and values.isdisjoint(others):
            return True
    return False


def _constants_of(schema: Any) -> set[str] | None:
    """Return the only values of a schema as JSON; None if they are not listed."""
    values = constants(schema) if isinstance(schema, Mapping) else None
    return None if values is None else set(map(value_key, values))


def _constant(value: Mapping[str, Any]) -> ObjectShape:
    """Return the shape of one object."""
    properties = {name: {"const": item} for name, item in value.items()}
    return ObjectShape(properties=properties, required=frozenset(value), others=None)


def _joined_rules(one: Any, other: Any) -> Any:
    """Return a schema for what both allow. None stands for no member."""
    if one is None or other is None or is_nothing(one) or is_nothing(other):
        return False
    if one is True or not one or one == other:
        return other
    return one if other is True or not other else {"allOf": [one, other]}


def _or_none(schema: Any) -> Any:
    return None if schema is None or is_nothing(schema) else schema
