"""Reads the rules for the members of an object from a JSON schema."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any, TypeAlias

from baton.gateway.constraints.schema_trivia import is_nothing
from baton.gateway.constraints.text_pattern import whole_text_pattern
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.output.values.schema_alternatives import constants, resolve_reference

MAX_SHAPES = 64
"""Largest number of kinds of objects that one schema allows."""
_MAX_STEPS = 20_000
"""Schemas and members that are looked at, some of them several times."""
_MAX_DEPTH = 32
_MAX_PATTERNS = 8
ONE_OF = (
    "this model's calls cannot enforce oneOf, unless its schemas differ in their type, or in the constant value of a "
    "property; use anyOf instead"
)
_PATTERN = (
    f"this model's calls can enforce at most {_MAX_PATTERNS} patterns, without look-around, references, flags, or ^ "
    "and $ inside of them; write simpler ones"
)
NO_OBJECT = "no object matches the schema; allow all properties that it requires, and as many as it requires"
_TOO_MANY = f"the schema has too many alternatives; at most {MAX_SHAPES} are supported"


Rule: TypeAlias = tuple[Any, ...]
"""Schemas for one member: if its name matches none of the shape's patterns, and if it matches only the first,
the second and so on. None stands for no member. A name that matches two patterns is not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectShape:
    """Members of an object.

    patterns: regular expressions for names, of which `Rule` tells the meaning.
    properties: rules of the members that are named; also of those that are only required.
    required: names of members that must be there.
    others: rule of further members.
    least, most: bounds for the number of members.
    excluded: names that further members do not have, besides those of `properties`.
    """

    patterns: tuple[str, ...] = ()
    properties: Mapping[str, Rule] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: Rule = ({},)
    least: int = 0
    most: int | None = None
    excluded: frozenset[str] = frozenset()


_ANY = ObjectShape()


class ShapeReader:
    """Finds the kinds of objects that schemas allow, at a bounded cost for all schemas of one grammar."""

    def __init__(self) -> None:
        self._num_steps = self._num_alternatives = 0
        self._lenient = False

    def shapes(self, schema: Any, root: Any, *, lenient: bool) -> list[ObjectShape]:
        """Return the kinds of objects that a schema allows. References within `root` are followed.

        lenient: a schema with too many kinds allows any object, and rules that cannot be enforced are ignored.

        Raises UnsupportedSchema if there are too many, or none.
        """
        self._lenient = lenient
        try:
            found = self._kinds(schema, root, frozenset())
        except UnsupportedSchema:
            if not lenient:
                raise
            return [_ANY]
        shapes = [possible for each in found if (possible := _possible(each)) is not None]
        if not shapes:
            raise UnsupportedSchema(NO_OBJECT)
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
        found = [self._own(schema)]
        if (values := constants(schema)) is not None:
            found = self._both(found, [_constant(value) for value in values if isinstance(value, Mapping)])
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
                several = [self._kinds(each, root, followed, depth + 1) for each in choices]
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
                found.append(_joined_shape(one, other))
        return found

    @property
    def is_exhausted(self) -> bool:
        """True if so many alternatives were looked at that there may be no more."""
        return self._num_alternatives > _MAX_STEPS

    def spend_alternatives(self, num_steps: int) -> None:
        """Count schemas that were looked at for the alternatives of values. Raises UnsupportedSchema."""
        self._num_alternatives += num_steps
        if self.is_exhausted and not self._lenient:
            raise UnsupportedSchema(_TOO_MANY)

    def _spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise UnsupportedSchema(_TOO_MANY)

    def _own(self, schema: Mapping[str, Any]) -> ObjectShape:
        """Return the rules that stand in a schema itself."""
        properties, required = schema.get("properties"), schema.get("required")
        extra = schema.get("additionalProperties", True)
        patterns: dict[str, Any] = {}
        named = schema.get("patternProperties")
        for pattern, rule in named.items() if isinstance(named, Mapping) else ():
            whole = whole_text_pattern(pattern)
            if whole is None or len(patterns) == _MAX_PATTERNS:
                if not self._lenient:
                    raise UnsupportedSchema(_PATTERN, "patternProperties", named)
                continue
            patterns[whole] = _both_rules(patterns[whole], rule) if whole in patterns else rule
        properties = properties if isinstance(properties, Mapping) else {}
        self._spend(len(properties) * len(patterns))
        least, most = schema.get("minProperties"), schema.get("maxProperties")
        return ObjectShape(
            patterns=tuple(patterns),
            properties={
                name: (rule, *(_both_rules(rule, other) for other in patterns.values()))
                for name, rule in properties.items()
            },
            required=frozenset(name for name in required if isinstance(name, str))
            if isinstance(required, list)
            else frozenset(),
            others=(
                None if is_nothing(extra) else extra if isinstance(extra, Mapping) else {},
                *(None if is_nothing(rule) else {} if rule is True else rule for rule in patterns.values()),
            ),
            least=least if isinstance(least, int) else 0,
            most=most if isinstance(most, int) else None,
        )


def _excludes(one: ObjectShape, other: ObjectShape) -> bool:
    """True if a shape requires a member whose value another does not allow."""
    for name in one.required:
        allowed = other.properties.get(name, other.others)
        if all(map(_is_no_member, allowed)):
            return True
        values, others = (_constants_of(shape.properties.get(name, ())) for shape in (one, other))
        if values is not None and others is not None and values.isdisjoint(others):
            return True
    return False


def _constants_of(rule: Rule) -> set[str] | None:
    """Return the only values of a member as JSON; None if they are not listed, or if the rule has patterns."""
    values = constants(rule[0]) if len(rule) == 1 and isinstance(rule[0], Mapping) else None
    return None if values is None else {json.dumps(value, sort_keys=True) for value in values}


def _constant(value: Mapping[str, Any]) -> ObjectShape:
    """Return the shape of one object."""
    properties = {name: ({"const": item},) for name, item in value.items()}
    return ObjectShape(properties=properties, required=frozenset(value), others=(None,))


def _joined_shape(one: ObjectShape, other: ObjectShape) -> ObjectShape:
    if one == _ANY or other == _ANY:
        return other if one == _ANY else one
    names = dict.fromkeys((*one.properties, *other.properties))
    patterns = tuple(dict.fromkeys((*one.patterns, *other.patterns)))
    if len(patterns) > _MAX_PATTERNS:
        raise UnsupportedSchema(f"the schema has more than {_MAX_PATTERNS} patterns of names; use fewer")

    def rule(shape: ObjectShape, name: str | None) -> Rule:
        known = shape.others if name is None else shape.properties.get(name, shape.others)
        cases = dict(zip(shape.patterns, known[1:], strict=True))
        return (known[0], *(cases.get(pattern, known[0]) for pattern in patterns))

    def both(name: str | None) -> Rule:
        found = map(_both_rules, rule(one, name), rule(other, name))
        return tuple(found) if name is not None else tuple(None if is_nothing(each) else each for each in found)

    bounds = [most for most in (one.most, other.most) if most is not None]
    return ObjectShape(
        patterns=patterns,
        properties={name: both(name) for name in names},
        required=one.required | other.required,
        others=both(None),
        least=max(one.least, other.least),
        most=min(bounds, default=None),
    )


def _both_rules(one: Any, other: Any) -> Any:
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
        known[name] = shape.others
    allowed = {name: rule for name, rule in known.items() if not all(map(_is_no_member, rule))}
    if not shape.required <= allowed.keys() or (shape.most is not None and shape.most < len(shape.required)):
        return None
    return replace(shape, properties=allowed, excluded=frozenset(known.keys() - allowed.keys()))


def _is_no_member(schema: Any) -> bool:
    return schema is None or is_nothing(schema)


def possible_cases(shape: ObjectShape, name: str | None) -> list[tuple[int, Any]]:
    """Return the cases of a member's rule that are possible, by their index, with their schemas.

    name: None for a member that is not named.
    """
    rule = shape.others if name is None else shape.properties[name]
    return [(number, schema) for number, schema in enumerate(rule) if not _is_no_member(schema)]
