"""Structured output: fields that become a grammar, and texts that the grammar's masks allow."""

import json
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex

from baton.core.client_api import Caller
from baton.core.errors import Reason, Refused
from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.engine.constraints.compiled_grammar import CompiledGrammar
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer, read_grammar_tokenizer
from baton.engine.constraints.matcher_executor import MatcherExecutor
from baton.gateway.constraints.answer_constraint import ChoiceRule, GrammarRule, JsonRule, RegexRule, TagsRule
from baton.gateway.constraints.gbnf import GrammarTextError, gbnf_to_lark
from baton.gateway.constraints.message_grammar import CallableTool, MessageGrammar, content_grammar
from baton.gateway.input.answers.answer_grammar import AnswerGrammar, answer_grammar
from baton.gateway.input.answers.constraint_fields import AnswerConstraint, parse_constraint
from baton.gateway.input.chat.chat_request import parse_chat
from baton.gateway.input.client_call import Endpoint, InvalidField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.response_size import call_bytes
from baton.gateway.output import builtin_formats as formats
from baton.gateway.output.formats import OutputFormat
from baton.gateway.text.tokenizer import ByteTokenizer
from baton.model.loading.model_source import DEMO_DIR
from tests.demo_vocabulary import DEMO_EOS_TOKEN_IDS, DEMO_VOCAB_SIZE, demo_text, demo_tokens
from tests.unit.gateway.grammar_cases import IDS, accepts
from tests.unit.gateway.grammar_cases import parsed as parsed_calls
from tests.unit.gateway.validator_calls import at_once, call, chat, completion, refusal, validator

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def sampling(**body: Any) -> Sampling:
    return completion(**body).requests[0].sampling


def grammar(**body: Any) -> str:
    return sampling(**body).grammar


def response_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}}


# Fields


def test_old_and_new_names_of_a_constraint_have_one_canonical_grammar() -> None:
    written = grammar(**response_format(OBJECT))
    assert written == grammar(structured_outputs={"json": OBJECT})
    assert written == grammar(guided_json=OBJECT)
    assert written == grammar(guided_json=json.dumps(OBJECT))
    assert written == chat(**response_format(OBJECT)).requests[0].sampling.grammar
    over_grpc = call({"prompt": "x", "structured_outputs": {"json": OBJECT}}, Endpoint.GRPC)
    assert written == over_grpc.requests[0].sampling.grammar
    for name, value in {"regex": "a+", "choice": ["a", "b"], "grammar": 'start: "a"'}.items():
        assert grammar(structured_outputs={name: value}) == grammar(**{f"guided_{name}": value})
    assert grammar(response_format={"type": "json_object"}) == grammar(structured_outputs={"json_object": True})
    assert grammar(guided_grammar=' start: "a"\n') == 'start: "a"\n'


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"guided_json": None},
        {"guided_decoding_backend": "xgrammar"},
        {"allowed_token_ids": None},
    ],
)
def test_free_text_has_no_grammar(body: dict[str, Any]) -> None:
    assert not sampling(**body).is_constrained


REF = {"type": "object", "properties": {"a/b": {"$ref": "#/$defs/x"}}}
TAG = {"begin": "<f>", "schema": {}, "end": ""}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
    (response_format(None), "response_format.json_schema.schema", "is missing"),
    (response_format(OBJECT, strict=1), "response_format.json_schema.strict", "true or false"),
    (response_format(REF), "response_format.json_schema.schema", "/properties/a~1b/$ref is '#/$defs/x'"),
    (response_format({"$ref": "https://x/y"}), "response_format.json_schema.schema", "not fetched"),
    (response_format({"anyOf": [{}, {"$ref": 7}]}), "response_format.json_schema.schema", "at /anyOf/1/$ref is 7"),
    (response_format({"enum": ["x" * MAX_GRAMMAR_BYTES]}), "response_format.json_schema.schema", "65,536 characters"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_json": "[" * 20_000}, "guided_json", "nested too deeply"),
    ({"guided_json": '{"not":' * 40 + "{}" + "}" * 40}, "guided_json", "32 levels"),
    ({"guided_json": "[]"}, "guided_json", "must be an object"),
    ({"structured_outputs": {}}, "structured_outputs", "no constraint"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "send only one"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "send only one"),
    ({"guided_regex": "a" * 20_000}, "guided_regex", "at most 16,384"),
    ({"guided_regex": ""}, "guided_regex", "at least one character"),
    ({"guided_regex": "a\0"}, "guided_regex", "NUL"),
    ({"guided_choice": []}, "guided_choice", "empty list"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]", "must be a string"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "at most 1,024"),
    ({"guided_regex": "a\\\\\\"}, "guided_regex", "single backslash"),
    ({"guided_json": '{"const": NaN}'}, "guided_json", "NaN"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", "'x', which is not defined"),
    ({"guided_grammar": 'root ::= "a" )'}, "guided_grammar", "line 1"),
    ({"guided_whitespace_pattern": " " * 300}, "guided_whitespace_pattern", "at most 256"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "structured_outputs.disable", "set"),
    ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern", "no regular expression"),
    ({"guided_json": {}, "guided_whitespace_pattern": "[a ]"}, "guided_whitespace_pattern", "answers are JSON"),
    ({"guided_json": '{"minimum": 1e999}'}, "guided_json", "1e999 is too large"),
    ({"guided_json": "[" * 900 + "]" * 900}, "guided_json", "must be an object"),
    ({"guided_json": '{"a":' * 900 + "1" + "}" * 900}, "guided_json", "32 levels"),
    ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "response_format.schema", "/type is 'x'"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.triggers", "list"),
    (
        {"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<g"]}},
        "response_format.structures[0].begin",
        "one of the triggers",
    ),
    ({"structured_outputs": {"structural_tag": {"format": {"type": "or"}}}}, "structured_outputs.structural", "only"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids", "between 0 and 299"),
    ({"bad_words": ["x" * 65]}, "bad_words", "at most 64"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_invalid_constraints_are_refused_with_their_place(body: dict[str, Any], param: str, words: str) -> None:
    error = refusal({"prompt": "x"} | body)
    assert error.param.startswith(param)
    assert words in str(error)


async def test_grammar_above_its_size_is_refused() -> None:
    constraint = parse_constraint(response_format({"enum": ["\u20ac" * 30_000]}), UnknownFields())
    with pytest.raises(InvalidField, match="at most 65,536 are allowed") as refused:
        await answer_grammar(constraint, None, None, OutputFormat(), ByteTokenizer())
    assert refused.value.failure.reason is Reason.INVALID_GRAMMAR


def test_references_that_are_names_or_values_are_not_followed() -> None:
    schema = {
        "type": "object",
        "properties": {"$ref": {"type": "string"}, "a": {"$ref": "#/definitions/x~1y/items"}, "b": {"$ref": "#"}},
        "definitions": {"x/y": {"type": "array", "items": {"enum": [{"$ref": "gone"}]}}},
    }
    assert grammar(**response_format(schema))


def test_strict_false_ignores_what_is_not_supported() -> None:
    unsupported = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    compiled(grammar(**response_format(unsupported, strict=False)))
    with pytest.raises(Refused, match="uniqueItems"):
        compiled(grammar(**response_format(unsupported)))


def test_token_rules_reach_the_sampling() -> None:
    rules = sampling(allowed_token_ids=[7, 3, 7], bad_words=["ab", " ab", "c"])
    assert rules.allowed_token_ids == (3, 7)
    assert rules.bad_words == ((97, 98), (32, 97, 98), (99,), (32, 99))
    assert sampling(allowed_token_ids=list(range(1, 300)) * 3).allowed_token_ids == tuple(range(1, 300))


async def test_bad_words_are_bounded_after_they_are_tokenized() -> None:
    body = {"prompt": "x", "bad_words": [str(number) for number in range(600)]}
    with pytest.raises(InvalidField, match="at most 1024"):
        await validator().call(Endpoint.COMPLETIONS, body, Caller(), received_s=0.0)


def test_the_grammar_counts_in_the_memory_of_a_request() -> None:
    free, bound = completion(), completion(guided_regex="a" * 3000)
    assert call_bytes(bound) - call_bytes(free) > 2900


class _Refusing:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    async def check(self, grammar: AnswerGrammar, tenant: str) -> None:
        self.seen.append((grammar.field, tenant))
        raise InvalidField(grammar.field, "too expensive", Reason.INVALID_GRAMMAR)


def test_every_grammar_is_checked() -> None:
    checked, check = validator(), _Refusing()
    checked._grammar_check = check
    with pytest.raises(InvalidField, match="too expensive"):
        at_once(checked.call(Endpoint.COMPLETIONS, {"prompt": "x", "guided_regex": "a"}, Caller(), received_s=0.0))
    at_once(checked.call(Endpoint.COMPLETIONS, {"prompt": "x"}, Caller(), received_s=0.0))
    assert check.seen == [("guided_regex", "default")]


# What the grammars accept


def content(rule: Any, output_format: OutputFormat | None = None, prompt: str | None = None) -> str:
    return content_grammar(output_format or OutputFormat(), IDS, prompt, rule).text


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (RegexRule(r"^a/[/b]\n$"), ["a//\n", "a/b\n"], ["a/", "^a/b\n", "ab\n"]),
        (RegexRule(r"a\/\$"), ["a/$"], ["a/"]),
        (RegexRule("^a|b$"), ["a", "b"], ["ab", "^a"]),
        (RegexRule("a\nb"), ["a\nb"], ["ab"]),
        (RegexRule("(a|b)*"), ["", "abba"], ["c"]),
        (ChoiceRule(("a", "ab", 'q"\n\\', "é😀", "<think>x")), ["a", "ab", 'q"\n\\', "é😀"], ["", "b", "abc"]),
        (GrammarRule('start: "a" b\nb: "c" | "d"'), ["ac", "ad"], ["a"]),
        (
            GrammarRule('root ::= "a" b+ # x\nb ::= [c-e] | "\\u00e9" | ( "x"{2,3} )'),
            ["ac", "aeé", "axxd"],
            ["a", "ax"],
        ),
        (GrammarRule('root ::= "(" root ")" | '), ["", "(())"], ["(()"]),
        (GrammarRule("root ::= [^\\n\\]a-]+"), ["b[c"], ["a", "-", "]", "x\n"]),
        (GrammarRule('root ::= ("a" | ) "-"? .'), ["x", "a-x", "-x"], ["axy"]),
    ],
)
def test_text_is_accepted_only_if_its_rule_allows_it(rule: Any, right: list[str], wrong: list[str]) -> None:
    written = content(rule)
    assert [accepts(written, text) for text in right] == [True] * len(right)
    assert [accepts(written, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "",
        'x ::= "a"',
        "root ::= (a",
        "root ::= *",
        "root ::= []",
        'root ::= "\\ud800"',
        'root ::= "\\x1"',
        '"a"',
        'root ::= "a"\nroot ::= "b"',
        'root ::= "a"{20000}',
        "root ::= " + "(" * 65,
        "root ::= ?",
        "root ::= §",
    ],
)
def test_invalid_gbnf_is_refused(text: str) -> None:
    with pytest.raises(GrammarTextError):
        gbnf_to_lark(text)


def test_rules_in_reverse_order_become_terminals_in_linear_time() -> None:
    names = [f"r{number}" for number in range(3000)]
    text = "root ::= r0\n" + "".join(f"{a} ::= {b}\n" for a, b in pairwise(names))
    assert gbnf_to_lark(text + 'r2999 ::= "a"').count("T") > 5000


def test_white_space_in_json_is_bounded() -> None:
    written = content(parsed(guided_json=OBJECT).rule)
    for space, is_accepted in ((" ", True), ("  ", True), ("\n" + " " * 30, True), (" " * 3, False), ("\n\n", False)):
        assert accepts(written, f'{{{space}"a":{space}1{space}}}') is is_accepted, repr(space)
    tight = content(parsed(structured_outputs={"json": OBJECT, "disable_any_whitespace": True}).rule)
    assert accepts(tight, '{"a":1}')
    assert not accepts(tight, '{"a": 1}')
    own = content(parsed(guided_json=OBJECT, guided_whitespace_pattern="[ ]{0,5}").rule)
    assert accepts(own, '{"a":     1}')
    odd = content(parsed(guided_json=OBJECT, guided_whitespace_pattern=r"(?:[\s]{0,2}|\s{4})").rule)
    for space in ("", "\t\n", " \r\n\t"):
        assert accepts(odd, f'{{"a":{space}1}}'), repr(space)
    assert not accepts(odd, '{"a":\u00a01}')


def parsed(**body: Any) -> AnswerConstraint:
    constraint = parse_constraint(body, UnknownFields())
    assert constraint is not None
    return constraint


TAGS = {
    "triggers": ["<f", "<tool_call>"],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "<tool_call>x", "schema": {"type": "null"}, "end": "</tool_call>"},
    ],
}


@pytest.mark.parametrize("form", ["older", "newer"])
def test_structural_tags_constrain_only_what_their_triggers_begin(form: str) -> None:
    tags = [
        {"begin": item["begin"], "content": {"type": "json_schema", "json_schema": item["schema"]}, "end": item["end"]}
        for item in TAGS["structures"]
        if isinstance(item, dict)
    ]
    newer = {"format": {"type": "triggered_tags", "triggers": TAGS["triggers"], "tags": tags}}
    value = TAGS if form == "older" else newer
    rule = parsed(structured_outputs={"structural_tag": json.dumps(value)}).rule
    assert isinstance(rule, TagsRule)
    written = content(rule)
    for text in ("", "free <", "x <f=a>12</f> y <f=b>true</f>", "<tool_call>xnull</tool_call><f=a>1</f>"):
        assert accepts(written, text), text
    for text in ("x <f", "<f=a>true</f>", "<f=b>1</f>", "a <f=a>1</f> <f=c>", "<tool_call>y", "<f=c><tool_call>xnull"):
        assert not accepts(written, text), text


# Chats


@pytest.mark.parametrize(
    ("prompt", "right", "wrong"),
    [
        ("x<|im_end|>", ["yes", "<think>so</think>\n\nyes"], ["so</think>yes", "<think>yes", "maybe", "\n\nyes"]),
        ("<think>\n", ["so</think>\nyes"], ["yes", "so yes"]),
        ("<think>\n\n</think>\n\n", ["yes"], ["<think>so</think>yes"]),
    ],
)
@pytest.mark.parametrize("rule", [ChoiceRule(("yes",)), GrammarRule('start: "yes"')])
def test_reasoning_stands_before_constrained_content(
    rule: Any, prompt: str, right: list[str], wrong: list[str]
) -> None:
    """White space stands between them only if it cannot be content."""
    written = content(rule, OutputFormat(reasoning=formats.THINK), prompt)
    is_spaced = isinstance(rule, ChoiceRule)
    assert [accepts(written, text) for text in right] == [is_spaced or "\n" not in text for text in right]
    assert accepts(written, right[-1].replace("\n", ""))
    assert [accepts(written, text) for text in wrong] == [False] * len(wrong)


def test_tags_can_be_required_and_can_end_the_text() -> None:
    tags = [{"begin": "<f>", "content": {"type": "regex", "pattern": "a+"}, "end": "</f>"}]

    def written(**flags: bool) -> str:
        tag_format = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags, **flags}
        return content(parsed(structured_outputs={"structural_tag": {"format": tag_format}}).rule)

    texts = ("x", "x<f>a</f>", "<f>a</f>y", "<f>a</f><f>aa</f>")
    accepted = {
        (least, ends): [accepts(written(at_least_one=least, stop_after_first=ends), text) for text in texts]
        for least in (False, True)
        for ends in (False, True)
    }
    assert accepted == {
        (False, False): [True, True, True, True],
        (True, False): [False, True, True, True],
        (False, True): [True, True, False, False],
        (True, True): [False, True, False, False],
    }


NEW_TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "regex", "pattern": "a", "flags": "i"},
    "end": "",
    "id": 1,
}
TAG_FORMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "older": (
        {
            "triggers": ["<f"],
            "structures": [{"begin": "<f>", "schema": {}, "end": "", "name": "n"}],
            "at_least_one": True,
        },
        ["at_least_one", "structures[].name"],
    ),
    "newer": (
        {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [NEW_TAG], "stop": True}, "version": 2},
        ["version", "format.stop", "format.tags[].id", "format.tags[].content.flags"],
    ),
}


@pytest.mark.parametrize("form", TAG_FORMS)
@pytest.mark.parametrize("field", ["response_format", "structured_outputs.structural_tag"])
def test_unknown_fields_of_structural_tags_are_named(form: str, field: str) -> None:
    tag, names = TAG_FORMS[form]
    is_format = field == "response_format"
    body = {field: {"type": "structural_tag", **tag}} if is_format else {"structured_outputs": {"structural_tag": tag}}
    unknown = UnknownFields()
    assert parse_constraint(body, unknown) is not None
    assert unknown.names == [f"{field}.{name}" for name in names]
    error = refusal({"prompt": "x"} | body, strict_fields=True)
    assert (error.param, error.failure.reason) == (f"{field}.{names[0]}", Reason.UNSUPPORTED_FIELD)


def test_fields_of_structural_tags_that_would_change_the_answer_are_refused() -> None:
    place = "structured_outputs.structural_tag.format"

    def param(content: dict[str, Any], **more: Any) -> str:
        tags = [{"begin": "<f>", "content": content, "end": ""}]
        tag_format = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags, **more}
        return refusal({"prompt": "x", "structured_outputs": {"structural_tag": {"format": tag_format}}}).param

    schema = {"type": "json_schema", "json_schema": {}}
    assert param(schema | {"style": "qwen_xml"}) == f"{place}.tags[0].content.style"
    assert param(schema, excludes=["x"]) == f"{place}.excludes"
    assert param({"type": "regex", "pattern": "a", "excludes": ["x"]}) == f"{place}.tags[0].content.excludes"


def test_many_tags_without_an_end_compile() -> None:
    names = [f"<f{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(128)]
    tags = [{"begin": name, "schema": {}, "end": ""} for name in names]
    compiled(content(parsed(structured_outputs={"structural_tag": {"triggers": names, "structures": tags}}).rule))


def test_harmony_has_constrained_content_in_its_final_message() -> None:
    harmony = OutputFormat(tools=formats.GPT_OSS, reasoning=formats.HARMONY_ANALYSIS)
    written = content(ChoiceRule(("{}",)), harmony, "<|start|>assistant")
    analysis = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    for text in ("<|channel|>final<|message|>{}", f"{analysis}<|channel|>final <|constrain|>json<|message|>{{}}"):
        assert accepts(written, text), text
    assert not accepts(written, "{}")


def test_constrained_answer_with_tools_is_content_or_calls() -> None:
    mixed = MessageGrammar(OutputFormat(tools=formats.HERMES), formats.HERMES, IDS, "")
    written = mixed.content(ChoiceRule(("yes",)), [CallableTool(name="ping")], parallel=True)
    assert written is not None
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    assert accepts(written, "yes")
    assert accepts(written, call)
    assert not accepts(written, f"yes{call}")
    assert not accepts(written, "no")


def test_constrained_harmony_answer_is_content_or_a_call() -> None:
    harmony = OutputFormat(tools=formats.GPT_OSS, reasoning=formats.HARMONY_ANALYSIS)
    mixed = MessageGrammar(harmony, formats.GPT_OSS, IDS, "<|start|>assistant")
    written = mixed.content(ChoiceRule(("yes",)), [CallableTool(name="ping")], parallel=True)
    assert written is not None
    analysis = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    for text in (
        "<|channel|>final<|message|>yes",
        "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}",
    ):
        assert accepts(written, text), text
        assert accepts(written, analysis + text), text
    assert not accepts(written, "<|channel|>final<|message|>no")


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        (formats.HERMES, '<tool_call>\n{"name": "ping", "arguments": {"a": 3}}\n</tool_call>'),
        (formats.LLAMA3_JSON, '{"name": "ping", "parameters": {"a": 3}}'),
        (formats.JAMBA, '<tool_calls>[{"name": "ping", "arguments": {"a": 3}}]</tool_calls>'),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_json_or_calls_whose_delimiters_are_text(tools: Any, call: str) -> None:
    """The demo model and Llama are such models."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    schema |= {"additionalProperties": False}
    tool = CallableTool(name="ping", parameters={**OBJECT, "additionalProperties": False}, strict=True)
    mixed = MessageGrammar(OutputFormat(tools=tools), tools, {}, "")
    written = mixed.content(JsonRule(schema=schema), [tool], parallel=True)
    assert written is not None
    content = '{"name": "<tool_call>{\\"name\\": \\"ping\\"}</tool_call>"}'
    for text, is_accepted in ((content, True), (call, True), (call.replace("3", '"x"'), False), ("text", False)):
        assert accepts(written, text, special=False) is is_accepted, text
    messages = [parsed_calls(tools, text, [tool], special=False) for text in (content, call)]
    assert [(message.content, len(message.tool_calls)) for message in messages] == [(content, 0), ("", 1)]


TOOLS = [{"type": "function", "function": {"name": "ping"}}]


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [(formats.HERMES, "required", "tool_choice"), (formats.LLAMA3_JSON, "auto", "no special token")],
)
async def test_tools_that_cannot_be_combined_are_refused(tools: Any, choice: str, words: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": choice}
    constraint = parsed(guided_regex="a")
    with pytest.raises(InvalidField, match=words) as refused:
        await answer_grammar(
            constraint, parse_chat(body, UnknownFields()), "", OutputFormat(tools=tools), ByteTokenizer()
        )
    assert refused.value.param == "guided_regex"


async def test_response_format_has_no_effect_if_a_call_is_required() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required"}
    chat_request, output = parse_chat(body, UnknownFields()), OutputFormat(tools=formats.HERMES)
    written = [
        await answer_grammar(constraint, chat_request, "", output, ByteTokenizer())
        for constraint in (None, parsed(response_format={"type": "json_object"}))
    ]
    assert written[0] == written[1]
    assert written[0].field == "tools"


async def test_schemas_of_tools_are_read_like_others() -> None:
    function = {"name": "ping", "parameters": {"properties": {"a": {"format": "password", "uniqueItems": True}}}}
    output, tokenizer = OutputFormat(tools=formats.HERMES), ByteTokenizer()

    async def written(**more: Any) -> str:
        tools = [{"type": "function", "function": function | more}]
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
        grammar = await answer_grammar(None, parse_chat(body, UnknownFields()), "", output, tokenizer)
        assert grammar.written.places == {"r0": "the parameters of the tool 'ping'"}
        return grammar.written.text

    assert '"properties":{"a":{}}' in await written()
    with pytest.raises(InvalidField, match=r"tools\[0\].function.parameters at /properties/a/uniqueItems"):
        await written(strict=True)


# Random walks through the masks over the demo model's vocabulary


@cache
def demo_tokenizer() -> GrammarTokenizer:
    build = read_grammar_tokenizer(DEMO_DIR, vocab_size=DEMO_VOCAB_SIZE, eos_token_ids=DEMO_EOS_TOKEN_IDS)
    return build()


def compiled(written: str) -> CompiledGrammar:
    return CompiledGrammar(written, demo_tokenizer())


def random_text(written: str, rng: Random, max_tokens: int = 300) -> str:
    """Return a text of random tokens that the masks allow, which prefers to end strings and lists."""
    executor = MatcherExecutor(demo_tokenizer().table)
    matcher, outputs = compiled(written).start.copy(), token_ids()
    masks = np.zeros((1, demo_tokenizer().num_words), dtype=np.uint32)
    closing = [token for token, text in enumerate(demo_tokens()) if text in CLOSING]
    for _ in range(max_tokens):
        executor.fill([matcher.matcher], masks)
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        ends = [token for token in DEMO_EOS_TOKEN_IDS if token in allowed]
        if ends and (len(allowed) == len(ends) or rng.random() < 0.4):
            return demo_text(list(outputs)).decode()
        texts = [int(token) for token in allowed if token not in ends]
        short = [token for token in closing if token in set(texts)] if rng.random() < 0.6 else []
        outputs = outputs + token_ids([rng.choice(short or texts)])
        matcher.follow(outputs, executor)
    raise AssertionError(f"no end: {demo_text(list(outputs))!r}")


CLOSING = {b'"', b"}", b"]", b",", b":", b"1", b"0"}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    OBJECT,
    {"type": "integer", "minimum": -3, "maximum": 40},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 9},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"enum": ["a", 1, None, {"b": [2]}]},
    {"const": {"x": "y"}},
    {"type": ["integer", "null"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"], "additionalProperties": False}
            for kind in ("cat", "dog")
        ]
    },
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"$ref": "#/$defs/b"}},
        "required": ["b"],
        "additionalProperties": False,
        "$defs": {"b": {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}},
    },
    {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "maxItems": 2},
]
REGEXES = [
    "[a-f0-9]{4}",
    r"\d{3}-\d{4}",
    "(yes|no)( sir)?",
    "a*b+",
    "[^x\n]{1,5}",
    r"\w{1,8}@\w{1,8}\.com",
    "(?i:abc)",
    "x{3,}",
]
REGEXES += [r"^(0|[1-9]\d{0,3})(\.\d{1,2})?$", "[äöü]{2}"]


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_random_answers_match_their_schema(number: int) -> None:
    written = grammar(**response_format(SCHEMAS[number]))
    for seed in range(2):
        text = random_text(written, Random(seed))
        jsonschema.validate(json.loads(text), SCHEMAS[number])
        assert not regex.search(r'[ \t]{3,}(?=["}\]:,])(?<!\n[ \t]*)', regex.sub(r'"(\\.|[^"\\])*"', '""', text))


@pytest.mark.parametrize("pattern", REGEXES)
def test_random_answers_match_their_regex(pattern: str) -> None:
    written = grammar(guided_regex=pattern)
    for seed in range(3):
        assert regex.fullmatch(pattern, random_text(written, Random(seed)))
