"""Response templates of tokenizer configurations, compared with the interpreter of `transformers`."""

import json
import logging
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser

from baton.core.errors import ModelError
from baton.gateway.output.formats import OutputFormat, ParserOptions, SpecialToken
from baton.gateway.output.special_text import SpecialText
from baton.gateway.output.templates.pattern import Pattern
from baton.gateway.output.templates.pattern_scan import MatchFinder, PatternScan
from baton.gateway.output.templates.response_template import load_response_template
from baton.gateway.output.templates.template_parser import TemplateFormat
from tests.unit.gateway.output.output_cases import divisions, parsed

CALL = '{"name": "now", "arguments": {"a": "x", "b": [1]}}'
FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>"}


@dataclass(frozen=True)
class Case:
    """A response template, and texts of which its messages consist."""

    template: dict[str, Any]
    texts: tuple[str, ...]


def template(anchor: str, **fields: dict[str, Any]) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


CASES = {
    "json": Case(
        template(
            "<|im_start|>assistant\n",
            reasoning_content=THINK,
            tool_calls={
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": FUNCTION,
            },
            content={"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
        ),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", "é", "<|im_end|>", "<tool"),
    ),
    "xml": Case(
        template(
            "<|im_start|>assistant\n",
            thinking=THINK,
            tool_calls={
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
                "transform": NAMED,
            },
            content={"close": "<|im_end|>"},
        ),
        (
            "<think>",
            "</think>",
            "<tool_call>\n<function=now>",
            "<parameter=a>",
            "3",
            "x",
            "</parameter>",
            "\n",
            "</function>\n</tool_call>",
            "<|im_end|>",
            "<tool_call>",
        ),
    ),
    "dialect": Case(
        template(
            "<|turn>model\n",
            thinking={"open": "<|channel>thought\n", "close": "<channel|>"},
            tool_calls={
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": NAMED,
            },
            content={"close": ["<turn|>", "<turn|><eos>"]},
        ),
        (
            "<|channel>thought\n",
            "<channel|>",
            "<|tool_call>call:now",
            '{a:<|"|>x"<|"|>,b:{c:3}}',
            "<tool_call|>",
            "\n",
            "a",
            "<turn|>",
            "<eos>",
            "{}",
        ),
    ),
    "list": Case(
        template(
            "<BOT>",
            content={"open": "<R>", "close": "</R>"},
            thinking={"open": "<T>", "close": "</T>"},
            tool_calls={
                "open": "<A>",
                "close": "</A>",
                "content": "json",
                "transform_each": True,
                "transform": {"function": {"name": "{tool}", "arguments": "{args}"}},
            },
            score={"open": "<S>", "close": "</S>", "content": "float"},
        ),
        ("<R>", "</R>", "<T>", "</T>", "<A>", '[{"tool": "now", "args": {"a": 1}}]', "</A>", "x", " ", "<S>", "</S>"),
    ),
    "joined": Case(
        template(
            "<|m|>",
            thinking={
                "open_pattern": r"(?:<\|m\|>)?[^<]*<\|think\|>",
                "close": "<|e|>",
                "repeats": True,
                "join": "",
                "content_args": {"strip": False},
            },
            content={"open_pattern": r"(?:<\|m\|>)?[^<]*<\|text\|>", "close": "<|e|>", "repeats": True, "join": "+"},
            tool_calls={
                "open_pattern": r"(?:^|<\|m\|>)[^<]*<\|json\|>",
                "close": "<|e|>",
                "repeats": True,
                "content": "json",
                "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
            },
        ),
        ("<|m|>", "<|think|>", "<|text|>", "<|json|>", "<|e|>", CALL, "a", " "),
    ),
    "opened": Case(
        template(
            "Assistant:",
            thinking={"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            content={"open": "<response>\n", "close_pattern": r"\n?</response>"},
            tool_calls={
                "open_pattern": r"<call (?P<name>\w+).*?>",
                "close": "</call>",
                "repeats": True,
                "content": "kv-lines",
                "transform": NAMED,
            },
        ),
        (
            "<think>",
            "</think>",
            "<response>\n",
            "\n</response>",
            "<call now x>",
            "a: 1\n",
            "b:c",
            "</call>",
            "hi",
            "\n",
        ),
    ),
}


def format_of(value: dict[str, Any]) -> OutputFormat:
    return OutputFormat(template=TemplateFormat(load_response_template(value)))


def reference(
    value: dict[str, Any], text: str, prefix: str = "", tools: list[dict[str, Any]] | None = None
) -> dict[str, list[Any]] | None:
    """Return the values of all regions that the model closed; None if the interpreter refuses the text."""
    try:
        parser = ResponseParser(value, prefix=prefix, tools=tools)
        events = [*parser.feed(text), *parser.finalize()[1]]
    except (ValueError, KeyError):
        return None
    values: dict[str, list[Any]] = {}
    for event in events:
        if event["type"] == "region_close":
            values.setdefault(event["field"], []).append(event["value"])
    return values


def assert_text(field: dict[str, Any] | None, values: list[str], got: str) -> None:
    """Compare a text that may come from several regions.

    Parts cannot be retracted, so the texts are joined where the reference keeps the last one.
    """
    if len(values) < 2 or (field is not None and "join" in field):
        assert got == (field or {}).get("join", "").join(values)
    else:
        assert re.sub(r"\s", "", got) == re.sub(r"\s", "", "".join(values))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, str, list[int]]:
    case = CASES[draw(st.sampled_from(sorted(CASES)))]
    text = "".join(draw(st.lists(st.sampled_from(case.texts), max_size=9)))
    return case, text, draw(st.lists(st.integers(1, 60), max_size=4))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(cases())
def test_messages_equal_those_of_transformers(drawn: tuple[Case, str, list[int]]) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    case, text, cuts = drawn
    output_format, options = format_of(case.template), ParserOptions()
    whole, *others = (parsed(output_format, pieces, options) for pieces in divisions(text, (), [cuts]))
    assert all(other == whole for other in others)
    expected = reference(case.template, text)
    if expected is None:
        return
    fields = case.template["fields"]
    reasoning = "thinking" if "thinking" in fields else "reasoning_content"
    assert_text(fields["content"], expected.get("content", []), whole.content)
    assert_text(fields[reasoning], expected.get(reasoning, []), whole.reasoning)
    calls = [
        call for value in expected.get("tool_calls", []) for call in (value if isinstance(value, list) else [value])
    ]
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in whole.tool_calls] == [
        call["function"] for call in calls
    ]


@pytest.mark.parametrize("name", sorted(CASES))
def test_reasoning_that_the_prompt_opens_is_continued(name: str) -> None:
    """The text of the prompt is not part of the output; the field that it opens is."""
    case = CASES[name]
    openings = {"json": "<think>\n", "xml": "<think>", "dialect": "<|channel>thought\n", "list": "<T>", "opened": ""}
    prompt = "x" + case.template["start_anchor"] + openings.get(name, "a<|think|>")
    close = case.template["fields"]["thinking" if name != "json" else "reasoning_content"]["close"]
    message = parsed(format_of(case.template), ["Hm.", close, "b"], ParserOptions(prompt=prompt))
    expected = reference(case.template, f"Hm.{close}b", prefix=prompt)
    assert expected is not None
    assert message.reasoning == "Hm."
    assert message.content == "".join(expected.get("content", []))


def test_call_that_the_prompt_begins_is_part_of_the_message() -> None:
    prompt = "<|im_start|>assistant\nYes.\n<tool_call>" + CALL[:40]
    message = parsed(format_of(CASES["json"].template), [CALL[40:], "</tool_call>"], ParserOptions(prompt=prompt))
    assert message.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("now", {"a": "x", "b": [1]})]


def test_malformed_call_is_content_as_it_was_written() -> None:
    for name, text in (
        ("json", "<tool_call>nothing</tool_call>"),
        ("list", '<A>{"no": "list"}</A>'),
        ("xml", "<tool_call><function=a b></function></tool_call>"),
        ("dialect", "<|tool_call>call:now soon<tool_call|>"),
    ):
        message = parsed(format_of(CASES[name].template), [text], ParserOptions())
        assert (message.content, message.tool_calls) == (text, ())


def test_calls_are_content_if_they_are_not_to_be_parsed() -> None:
    text = f"a<tool_call>{CALL}</tool_call>b"
    message = parsed(format_of(CASES["json"].template), [text], ParserOptions(parse_tools=False))
    assert (message.content, message.tool_calls) == (text, ())


def test_arguments_are_streamed_and_converted() -> None:
    pieces = ["<tool_call>", '{"name": "now", ', '"arguments": {"a"', ": 1}}</tool_call>"]
    parser = format_of(CASES["json"].template).template
    assert parser is not None
    steps = [[part.text for part in parser.parser(ParserOptions()).put("".join(pieces[:end]))] for end in range(1, 5)]
    assert steps == [[], [], ["now", '{"a"'], ["now", '{"a": 1}']]
    tools = {"now": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}
    text = "<tool_call><function=now><parameter=n>7</parameter><parameter=a>7</parameter></function></tool_call>"
    value = {**CASES["xml"].template}
    del (tool_calls := dict(value["fields"]["tool_calls"]))["content_args"]
    tool_calls["content_args"] = {"tag_pattern": r"<parameter=(?P<key>\w+)>(?P<value>.*?)</parameter>"}
    value["fields"] = {**value["fields"], "tool_calls": tool_calls}
    assert parsed(format_of(value), [text], ParserOptions(tools=tools)).tool_calls[0].arguments == '{"n": 7, "a": "7"}'


def test_special_tokens_in_literals_and_patterns_count_only_as_tokens() -> None:
    names = ("<tool_call>", "</tool_call>", "<|im_end|>", "<|endoftext|>")
    options = ParserOptions(special_tokens=frozenset(names))
    call, end = SpecialToken("<tool_call>"), SpecialToken("</tool_call>")
    message = parsed(
        format_of(CASES["json"].template), ["a<|im_end|>\n", call, CALL, end, SpecialToken("<|endoftext|>")], options
    )
    assert (message.content, len(message.tool_calls)) == ("a<|im_end|>", 1)
    assert not parsed(format_of(CASES["json"].template), ["<tool_call>" + CALL + "</tool_call>"], options).tool_calls


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"fields": {}}, "no `fields`"),
        ({"surprise": 1}, "unknown keys surprise"),
        ({"start_anchor": ""}, "`start_anchor`"),
        ({"fields": {"content": {"opened": "<"}}}, "unknown keys opened"),
        ({"fields": {"content": {"content": "yaml"}}}, "content parser 'yaml'"),
        ({"fields": {"content": {"open": "<", "open_pattern": "<"}}}, "both"),
        ({"fields": {"content": {"open_pattern": "(<"}}}, "invalid pattern"),
        ({"fields": {"content": {"open": "<", "close_pattern": "x*"}}}, "matches empty text"),
        ({"fields": {"content": {"open_pattern": "(?=<)x"}}}, "not supported"),
        ({"fields": {"content": {"open_pattern": "x{99999}"}}}, "not supported"),
        ({"fields": {"content": {}, "thinking": {}}}, "more than one field"),
        ({"fields": {"content": {"join": ","}}}, "`join`"),
        ({"fields": {"tool_calls": {"transform": "a {content}"}}}, "mixes a placeholder"),
        ({"fields": {"tool_calls": {"open": "<", "content": "xml-inline"}}}, "tag_pattern"),
    ],
)
def test_invalid_template_is_refused_with_the_problem(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=re.escape(problem)):
        load_response_template({**template("<", content={}), **change})


PATTERNS = (
    r"\s*<t>",
    r"<a\s*(?P<n>\w+).*?>",
    r"(?:^|<t>\s*)b",
    r"ab*?c|b",
    r"(?P<k>a|ab)(c|bcd)(?P<r>d*)",
    r"a{2,4}?b?c",
)
PATTERNS += (r"[^<]*<t>", r"\s*(?:<a>|b)\Z", r"(a*)*b", r"(?P<x>a+?)(?P<y>a*)b", r"[\W]b|\d[a-c]+")


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.sampled_from(PATTERNS),
    st.lists(st.sampled_from(["a", "b", "c", "d", "<", "<t>", ">", " "]), max_size=12),
    st.booleans(),
)
def test_pattern_matches_what_re_matches(source: str, texts: list[str], in_pieces: bool) -> None:
    text = "".join(texts)
    pattern = Pattern(source, SpecialText((), ()))
    expected = list(re.finditer(source, text, re.DOTALL))
    finder = MatchFinder(pattern)
    for piece in text if in_pieces else [text]:
        finder.put(piece)
    assert [found.end - found.start for found in finder.finish()] == [len(match.group()) for match in expected]
    scan = PatternScan(pattern)
    for end in range(1, len(text)) if in_pieces else ():
        scan.run(text[:end], begins=True, final=False)
    scan.run(text, begins=True, final=True)
    assert (scan.match is None) == (not expected)
    if scan.match is not None:
        groups = expected[0].groupdict()
        assert scan.match.groups == {name: value for name, value in groups.items() if value is not None}
