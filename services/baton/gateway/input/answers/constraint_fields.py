"""Reads the fields that constrain an answer: OpenAI's `response_format`, and vLLM's `structured_outputs` and
`guided_*`."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import MAX_GRAMMAR_BYTES, printable
from baton.gateway.constraints.answer_constraint import AnswerRule, ChoiceRule, GrammarRule, JsonRule, RegexRule
from baton.gateway.constraints.lark_writer import WHITESPACE
from baton.gateway.input import field_policy
from baton.gateway.input.answers.structural_tags import parse_tags
from baton.gateway.input.chat.plain_values import ValueBudget
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import FieldReader, as_object, check_fields, check_text
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS
from baton.gateway.input.schemas.schema_reader import MAX_PATTERN_CHARACTERS, read_schema
from baton.runtime.process import loop_time

MAX_WHITESPACE_CHARACTERS = 256
"""Longest regular expression for white space."""
MAX_CHOICES = 1024
"""Most texts of a choice."""
_CONSTRAINTS = ("response_format", "structured_outputs", "guided_json", "guided_choice")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_SPACE = r"(?:[ \t\r\n]|\\[nrts])"
_SPACES = re.compile(rf"(?:{_SPACE}|\[{_SPACE}+\]|\(\?:|[(|)*+?]|\{{\d{{1,4}}(?:,\d{{0,4}})?\}})*")
_CLASS_OR_SPACE = re.compile(r"\[[^]]*\]|\\s")
_FORMATS = "must be 'text', 'json_object', 'json_schema' or 'structural_tag'"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConstraint:
    """A rule for the answer.

    field: the request field that has the rule, for errors.
    num_characters: size of the field's value.
    """

    rule: AnswerRule
    field: str
    num_characters: int = 0


def is_read_in_thread(num_bytes: int, body: Mapping[str, Any]) -> bool:
    """True if a body of this size takes more than a few milliseconds to validate. Schemas take longest."""
    return num_bytes > loop_time.JSON_BYTES or (
        num_bytes > loop_time.SCHEMA_BYTES and any(body.get(name) is not None for name in _CONSTRAINTS)
    )


def parse_constraint(body: Mapping[str, Any], unknown: UnknownFields) -> AnswerConstraint | None:
    """Return the constraint of a request, and report unknown fields; None if its text is free.

    Raises InvalidField if there are several, or if one is invalid or too large.
    """
    found = [*_response_format(body, unknown), *_structured_outputs(body, unknown), *_guided(body)]
    if len(found) > 1:
        message = f"{found[1].field} and {found[0].field} both constrain the answer; send only one"
        raise InvalidField(found[1].field, message)
    return found[0] if found else None


def _response_format(body: Mapping[str, Any], unknown: UnknownFields) -> Iterator[AnswerConstraint]:
    if body.get("response_format") is None:
        return
    value = as_object("response_format", body["response_format"])
    check_fields(value, field_policy.RESPONSE_FORMAT, unknown, "response_format.")
    kind = value.get("type")
    if kind == "json_object":
        if value.get("schema") is not None:  # as llama.cpp's server has it
            yield _json("response_format.schema", value["schema"], WHITESPACE)
        else:
            yield AnswerConstraint(rule=JsonRule(schema=_ANY_OBJECT), field="response_format")
    elif kind == "json_schema":
        yield _json_schema(value.get("json_schema"), unknown)
    elif kind == "structural_tag":
        yield _tags("response_format", value, unknown)
    elif kind != "text":
        raise InvalidField("response_format.type", f"response_format.type is {printable(kind)}; {_FORMATS}")


def _json_schema(value: object, unknown: UnknownFields) -> AnswerConstraint:
    place = "response_format.json_schema"
    named = as_object(place, value)
    check_fields(named, field_policy.JSON_SCHEMA, unknown, f"{place}.")
    for name in ("name", "description"):
        if not isinstance(named.get(name), str | None):
            raise InvalidField(f"{place}.{name}", f"{place}.{name} is {printable(named[name])}; must be a string")
    if named.get("schema") is None:
        raise InvalidField(f"{place}.schema", f"{place}.schema is missing; send one, or the type json_object")
    strict = named.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidField(f"{place}.strict", f"{place}.strict is {printable(strict)}; must be true or false")
    return _json(f"{place}.schema", named.get("schema"), WHITESPACE, lenient=strict is False)


def _structured_outputs(body: Mapping[str, Any], unknown: UnknownFields) -> Iterator[AnswerConstraint]:
    if body.get("structured_outputs") is None:
        return
    value = as_object("structured_outputs", body["structured_outputs"])
    check_fields(value, field_policy.STRUCTURED_OUTPUTS, unknown, "structured_outputs.")
    read = FieldReader(value)
    whitespace: str | None = _whitespace("structured_outputs.whitespace_pattern", value.get("whitespace_pattern"))
    if read.flag("disable_any_whitespace"):
        whitespace = None
    found = list(_rules("structured_outputs.", value, whitespace))
    if read.flag("json_object"):
        field = "structured_outputs.json_object"
        found.append(AnswerConstraint(rule=JsonRule(schema=_ANY_OBJECT, whitespace=whitespace), field=field))
    if value.get("structural_tag") is not None:
        place = "structured_outputs.structural_tag"
        tag = as_object(place, _decoded(place, value["structural_tag"]))
        check_fields(tag, field_policy.STRUCTURAL_TAG, unknown, f"{place}.")
        found.append(_tags(place, tag, unknown))
    if not found:
        raise InvalidField(
            "structured_outputs",
            "structured_outputs has no constraint; set json, json_object, regex, choice, grammar or structural_tag",
        )
    yield from found


def _guided(body: Mapping[str, Any]) -> Iterator[AnswerConstraint]:
    whitespace = _whitespace("guided_whitespace_pattern", body.get("guided_whitespace_pattern"))
    yield from _rules("guided_", body, whitespace)


def _rules(prefix: str, fields: Mapping[str, Any], whitespace: str | None) -> Iterator[AnswerConstraint]:
    """Yield the constraints that `structured_outputs` and `guided_*` have in common."""
    names = {name: name if prefix.endswith(".") else prefix + name for name in ("json", "regex", "choice", "grammar")}
    values = {name: fields.get(key) for name, key in names.items()}
    if (value := values["json"]) is not None:
        yield _json(f"{prefix}json", value, whitespace)
    if (value := values["regex"]) is not None:
        pattern = _text(f"{prefix}regex", value, MAX_PATTERN_CHARACTERS)
        yield AnswerConstraint(rule=RegexRule(pattern), field=f"{prefix}regex", num_characters=len(pattern))
    if (value := values["choice"]) is not None:
        yield _choice(f"{prefix}choice", value)
    if (value := values["grammar"]) is not None:
        grammar = _text(f"{prefix}grammar", value, MAX_GRAMMAR_BYTES)
        yield AnswerConstraint(rule=GrammarRule(grammar), field=f"{prefix}grammar", num_characters=len(grammar))


def _json(place: str, value: object, whitespace: str | None, *, lenient: bool = False) -> AnswerConstraint:
    budget = ValueBudget(place, MAX_GRAMMAR_BYTES)
    schema = read_schema(place, budget.plain_object(place, _decoded(place, value)), lenient=lenient)
    rule = JsonRule(schema=schema, whitespace=whitespace, lenient=lenient)
    return AnswerConstraint(rule=rule, field=place, num_characters=budget.num_characters)


def _choice(place: str, value: object) -> AnswerConstraint:
    if not isinstance(value, JSON_LISTS) or not value:
        what = "an empty list" if value == [] else printable(value)
        raise InvalidField(place, f"{place} is {what}; must be a list of strings")
    if len(value) > MAX_CHOICES:
        raise InvalidField(place, f"{place} has {len(value):,} items; at most {MAX_CHOICES:,} are allowed")
    budget = ValueBudget(place, MAX_GRAMMAR_BYTES)
    for number, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            at = f"{place}[{number}]"
            what = "empty" if choice == "" else printable(choice)
            raise InvalidField(at, f"{at} is {what}; must be a string of at least one character")
        budget.plain(f"{place}[{number}]", choice)
    rule = ChoiceRule(tuple(dict.fromkeys(value)))
    return AnswerConstraint(rule=rule, field=place, num_characters=budget.num_characters)


def _tags(place: str, value: Mapping[str, Any], unknown: UnknownFields) -> AnswerConstraint:
    budget = ValueBudget(place, MAX_GRAMMAR_BYTES)
    rule = parse_tags(place, budget.plain_object(place, value), unknown)
    return AnswerConstraint(rule=rule, field=place, num_characters=budget.num_characters)


def _whitespace(place: str, value: object) -> str:
    """Return a regular expression for white space, which must not match anything else."""
    if value is None:
        return WHITESPACE
    text = _text(place, value, MAX_WHITESPACE_CHARACTERS)
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        message = f"{place} is no regular expression: {error}"
        raise InvalidField(place, message, Reason.INVALID_GRAMMAR) from error
    if not _SPACES.fullmatch(text):
        message = (
            f"{place} is {printable(text)}; may have spaces, \\n, \\r, \\t, \\s, classes of these, groups, '|' and "
            "repetitions only, so that answers are JSON"
        )
        raise InvalidField(place, message, Reason.INVALID_GRAMMAR)
    return _CLASS_OR_SPACE.sub(
        lambda found: found[0].replace(r"\s", r" \t\n\r") if found[0][0] == "[" else r"[ \t\n\r]", text
    )


def _text(place: str, value: object, max_characters: int) -> str:
    """Return a text of at least one character. Raises InvalidField."""
    if not isinstance(value, str) or not value:
        raise InvalidField(place, f"{place} is {printable(value)}; must be a string of at least one character")
    if len(value) > max_characters:
        raise InvalidField(place, f"{place} has {len(value):,} characters; at most {max_characters:,} are allowed")
    check_text(place, value)
    return value


def _decoded(place: str, value: object) -> object:
    """Return a value that clients may also send as JSON in a string. Raises InvalidField if it is none."""
    if not isinstance(value, str):
        return value
    text = _text(place, value, MAX_GRAMMAR_BYTES)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise InvalidField(place, f"{place} is not JSON: {why}", Reason.INVALID_GRAMMAR) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object has a key twice; keys must be unique")
    return value


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large")
    return number
