"""Grammars of the JSON-Schema-Test-Suite: no value that a schema forbids, nearly all that it allows."""

import contextlib
import json
from random import Random
from typing import Any

import jsonschema

from baton.gateway.grammar_checks.grammar_compiler import problem_of
from baton.gateway.input.client_call import InvalidField
from tests.json_schema_suite import SuiteCase, suite
from tests.random_schemas import random_schema
from tests.scale import sized
from tests.unit.gateway.test_structured_output import content, demo_tokenizer, parsed, random_text
from tests.unit.gateway.test_tool_grammar import accepts

NARROWER = {
    "allOf.json": "properties have the order of the schema",
    "const.json": "an integer is written without a fraction, properties in the order of the schema",
    "dependentRequired.json": "properties have the order of the schema",
    "enum.json": "an integer is written without a fraction",
    "format.json": "known formats are enforced",
    "type.json": "an integer is written without a fraction",
    "vocabulary.json": "keywords are known whatever the meta schema says",
}
"""Files with allowed values that the grammars refuse, and why."""
MIN_COMPILED = 238
"""Of 362 schemas. The others have keywords that are refused, or no value."""


def grammar_of(case: SuiteCase) -> str | None:
    """Return the grammar of a case; None if it is refused with its place."""
    field, written = "response_format.json_schema.schema", ""
    try:
        body: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": case.schema}}
        written = content(parsed(response_format=body).rule)
    except InvalidField as error:
        message = str(error)
    if not written:
        assert message.startswith(field)
        return None
    problem = problem_of(written, demo_tokenizer())
    if problem is not None:
        assert "%json" not in problem.message
        assert problem.rule == "r0"
        return None
    return written


def test_grammars_allow_only_what_their_schemas_allow() -> None:
    cases = suite()[:: sized(4, 1)]
    num_compiled = num_walks = 0
    for case in cases:
        if (written := grammar_of(case)) is None:
            continue
        num_compiled += 1
        for value in case.invalid:
            assert not accepts(written, json.dumps(value, ensure_ascii=False)), (case, value)
        for value in case.valid:
            if case.file not in NARROWER:
                assert accepts(written, json.dumps(value, ensure_ascii=False)), (case, value)
        validator = jsonschema.Draft202012Validator(case.schema)
        for seed in range(sized(1, 4)):
            try:
                text = random_text(written, Random(seed), 150)
            except AssertionError:
                continue  # no end
            validator.validate(json.loads(text))
            num_walks += 1
    assert num_compiled >= MIN_COMPILED * len(cases) // len(suite()) - sized(5, 0)
    assert num_walks > num_compiled // 2


def test_answers_match_random_schemas() -> None:
    served = 0
    for number in range(sized(60, 1000)):
        schema = random_schema(number)
        case = SuiteCase("", str(number), schema, (), ())
        if (written := grammar_of(case)) is not None:
            with contextlib.suppress(AssertionError):  # no end
                text = random_text(written, Random(number), 200)
                served += 1
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert served >= sized(54, 915)


def test_values_that_are_refused_have_a_known_reason() -> None:
    """A file leaves the list when its values are accepted."""
    refused = set()
    for case in suite():
        if case.file in NARROWER and (written := grammar_of(case)) is not None:
            refused |= {
                case.file for value in case.valid if not accepts(written, json.dumps(value, ensure_ascii=False))
            }
    assert refused == NARROWER.keys()
