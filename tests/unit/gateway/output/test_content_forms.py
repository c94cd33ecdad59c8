"""Content of messages by its form: none beside required calls, and constrained content as it is."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.core.client_api import MessagePart
from baton.core.request import FinishReason
from baton.gateway.constraints.answer_constraint import ChoiceRule, GrammarRule, JsonRule, RegexRule
from baton.gateway.constraints.message_grammar import content_grammar
from baton.gateway.output.formats import ContentForm, OutputFormat, ParserOptions, Piece
from baton.gateway.output.parsing import message_parser
from baton.gateway.output.special_text import split_special
from tests.unit.gateway.grammar_cases import IDS, SPECIAL, accepts
from tests.unit.gateway.output.output_cases import FORMATS, TOOLS, ParsedMessage, join_parts, parsed, written
from tests.unit.gateway.output.test_response_templates import CASES, format_of

ARGUMENTS = {"city": "a <b>", "days": 3}


def answer_of(name: str, num_calls: int) -> str:
    """Return reasoning and calls in a format."""
    reasoning, tools = FORMATS[name].reasoning, FORMATS[name].tools
    assert tools is not None
    syntax = tools.syntax
    call = syntax.before_name + tools.id_prefix + "get_weather" + (":0" if tools.id_prefix else "")
    call += syntax.after_name + written(tools, ARGUMENTS) + syntax.after_arguments
    calls = syntax.section_begin + syntax.separator.join([call] * num_calls) + syntax.section_end
    if reasoning is None:
        return calls
    if FORMATS[name].is_harmony:
        return f"{reasoning.open}so{reasoning.close}<|start|>assistant{calls}"
    return f"{reasoning.open}so{reasoning.close}\n\n{calls}"


def special_tokens_of(name: str) -> frozenset[str]:
    """Return delimiters of a format that are special tokens in the tokenizers of its models."""
    tools = FORMATS[name].tools
    assert tools is not None
    if FORMATS[name].is_harmony:
        return frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"))
    return frozenset({*tools.triggers, tools.close, tools.syntax.string_delimiter} - {"", "functools"})


def cut_answers(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the answer cut behind every character and special token."""
    atoms: list[Piece] = [atom for piece in pieces for atom in (piece if isinstance(piece, str) else [piece])]
    return [atoms[:end] for end in range(len(atoms))]


def check_cut(output_format: OutputFormat, pieces: list[Piece], options: ParserOptions, whole: ParsedMessage) -> None:
    """Check that a cut message has no content, and a beginning of each call of the whole one."""
    message = parsed(output_format, pieces, options, FinishReason.LENGTH)
    assert message.content == ""
    assert len(message.tool_calls) <= len(whole.tool_calls)
    for call, expected in zip(message.tool_calls, whole.tool_calls, strict=False):
        assert call.name == expected.name
        assert expected.arguments.startswith(call.arguments), (pieces, call.arguments)
    text = "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)
    special = tuple(options.special_tokens)
    assert parsed(output_format, split_special(text, special), options, FinishReason.LENGTH) == message


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", FORMATS)
def test_required_call_that_is_cut_has_no_delimiters_as_content(name: str, is_special: bool) -> None:
    num_calls = 2 if is_special else 1
    text = answer_of(name, num_calls)
    special = special_tokens_of(name) if is_special else frozenset[str]()
    options = ParserOptions(tools=TOOLS, special_tokens=special, content=ContentForm.NONE)
    pieces = list(split_special(text, special))
    whole = parsed(FORMATS[name], pieces, options)
    assert [json.loads(call.arguments) for call in whole.tool_calls] == [ARGUMENTS] * num_calls
    for cut in cut_answers(pieces):
        check_cut(FORMATS[name], cut, options, whole)


TEMPLATE_CALLS = {
    "json": '\n<tool_call>{"name": "now", "arguments": {"a": "x"}}</tool_call>',
    "xml": "\n<tool_call>\n<function=now><parameter=a>3</parameter></function>\n</tool_call>",
    "dialect": '<|tool_call>call:now{a:<|"|>x<|"|>}<tool_call|>',
    "list": '<A>[{"tool": "now", "args": {"a": 1}}]</A>',
    "opened": "</think><call now x>a: 1\n</call>",
}


@pytest.mark.parametrize("name", TEMPLATE_CALLS)
def test_required_call_of_a_response_template_is_no_content_if_it_is_cut(name: str) -> None:
    options = ParserOptions(content=ContentForm.NONE)
    output_format = format_of(CASES[name].template)
    whole = parsed(output_format, [TEMPLATE_CALLS[name]], options)
    assert [call.name for call in whole.tool_calls] == ["now"]
    for cut in cut_answers([TEMPLATE_CALLS[name]]):
        check_cut(output_format, cut, options, whole)


def answers_with_content(name: str, content: str) -> list[str]:
    """Return constrained answers in a format, without and with reasoning before the content."""
    output_format = FORMATS[name]
    if output_format.is_harmony:
        final = f"<|channel|>final<|message|>{content}"
        return [final, f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{final}"]
    reasoning = output_format.reasoning
    return [content, f"{reasoning.open}so{reasoning.close}{content}"] if reasoning else [content]


CONTENTS = ["\n\n x \n", " ", "<", "<think>a</think> <tool_call>{}</tool_call> [TOOL_CALLS]"]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FORMATS)
def test_constrained_content_arrives_as_it_was_written(name: str, content: str) -> None:
    options = ParserOptions(tools=TOOLS, parse_tools=False, content=ContentForm.EXACT)
    for text, reasoning in zip(answers_with_content(name, content), ("", "so"), strict=False):
        if text.startswith("<think>a"):  # reasoning in most formats
            continue
        for pieces in ([text], list(text)):
            message = parsed(FORMATS[name], pieces, options)
            assert (message.content, message.reasoning) == (content, reasoning)


@pytest.mark.parametrize("rule", [RegexRule(r"\s*x\s*"), GrammarRule("start: /\\s*x\\s*/"), ChoiceRule((" x ", "y"))])
@pytest.mark.parametrize("name", ["hermes", "gpt_oss", "gemma4", "mistral"])
def test_grammar_and_parser_agree_where_the_content_begins(name: str, rule: Any) -> None:
    options = ParserOptions(special_tokens=frozenset(SPECIAL), content=rule.form)
    grammar = content_grammar(FORMATS[name], IDS, "", rule)
    for text in answers_with_content(name, " x "):
        assert accepts(grammar, text)
        assert parsed(FORMATS[name], split_special(text, SPECIAL), options).content == " x "


@pytest.mark.parametrize("rule", [JsonRule(schema={"const": "x "}), ChoiceRule(('"x "',))])
def test_space_before_content_that_has_none_is_dropped(rule: Any) -> None:
    text = '<think>so</think>\n\n"x "'
    assert accepts(content_grammar(FORMATS["hermes"], IDS, "", rule), text)
    for name in ("hermes", "template json"):
        output_format = format_of(CASES["json"].template) if name.startswith("template") else FORMATS[name]
        for pieces in ([text], list(text)):
            assert parsed(output_format, pieces, ParserOptions(content=rule.form)).content == '"x "'


@pytest.mark.parametrize("name", ["hermes", "template json"])
def test_choice_that_ends_with_space_keeps_it(name: str) -> None:
    output_format = format_of(CASES["json"].template) if name.startswith("template") else FORMATS[name]
    options = ParserOptions(content=ChoiceRule(("x ", "y")).form)
    for text in ("x ", "<think>so</think>\n\nx "):
        for pieces in ([text], list(text)):
            assert parsed(output_format, pieces, options).content == "x "


def test_constrained_content_of_a_response_template_arrives_as_it_was_written() -> None:
    for content in ("\n\n x \n", " "):
        for text in (content, f"<think>so</think>{content}"):
            message = parsed(format_of(CASES["json"].template), list(text), ParserOptions(content=ContentForm.EXACT))
            assert message.content == content


@pytest.mark.parametrize("form", [ContentForm.SPACED, ContentForm.EXACT])
@pytest.mark.parametrize("name", ["json", "xml"])
def test_constrained_content_of_a_response_template_is_not_searched_for_regions(name: str, form: ContentForm) -> None:
    content = '{"a": "<think>b</think>\\n<tool_call>{}</tool_call>"}'
    options = ParserOptions(tools=TOOLS, content=form)
    for begin in ("", "<think>so</think>"):
        for pieces in ([begin + content], list(begin + content)):
            for end in ("", "<|im_end|>"):
                message = parsed(format_of(CASES[name].template), [*pieces, end], options)
                assert (message.content, message.reasoning) == (content, "so" if begin else "")
        message = parsed(format_of(CASES[name].template), list(begin + TEMPLATE_CALLS[name]), options)
        assert (message.content.strip(), [call.name for call in message.tool_calls]) == ("", ["now"])


def test_answer_that_may_be_constrained_content_or_calls() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = '{"a": "<tool_call>"}'
    options = ParserOptions(tools=TOOLS, content=ContentForm.SPACED)
    for begin in ("", "<think>so</think>\n\n"):
        for pieces in ([begin + text], list(begin + text)):
            assert parsed(FORMATS["hermes"], pieces, options).content == text
        message = parsed(FORMATS["hermes"], list(f"{begin}{call}\n{call}"), options)
        assert (message.content, [each.name for each in message.tool_calls]) == ("", ["now", "now"])
    text = "<f=a> 1</f> x "
    tagged = replace(options, content=ContentForm.TAGGED)
    message = parsed(FORMATS["hermes"], list(f"<think>so</think>\n\n{text}{call}"), tagged)
    assert (message.content, len(message.tool_calls)) == (f"\n\n{text}", 1)


def test_constrained_json_next_to_bare_calls_has_delimiters_in_its_strings() -> None:
    output_format = replace(FORMATS["llama3_json"], reasoning=FORMATS["hermes"].reasoning)
    text = '{"a": "<think>b</think> <|python_tag|>"}'
    call = '{"name": "now", "parameters": {}}'
    options = ParserOptions(tools=TOOLS, content=ContentForm.SPACED)
    for begin in ("", "<think>so</think>\n\n"):
        for pieces in ([begin + text], list(begin + text)):
            message = parsed(output_format, pieces, options)
            assert (message.content, message.reasoning) == (text, "so" if begin else "")
        for calls in (call, f"<|python_tag|>{call}"):
            message = parsed(output_format, list(begin + calls), options)
            assert (message.content, [each.name for each in message.tool_calls]) == ("", ["now"])


@pytest.mark.parametrize("name", FORMATS)
def test_parser_is_complete_once_the_only_call_is(name: str) -> None:
    text = answer_of(name, 2)
    first = parsed(FORMATS[name], [answer_of(name, 1)]).tool_calls[0]
    options = ParserOptions(tools=TOOLS, single_call=True)
    assert parsed(FORMATS[name], [f"{text} more"], options).tool_calls == (first,)
    parser = message_parser(FORMATS[name], options)
    parts: list[MessagePart] = []
    num_read = 0
    while not parser.is_complete:
        parts += parser.put(text[num_read])
        num_read += 1
    assert join_parts(parts).tool_calls == (first,)
    assert num_read <= len(answer_of(name, 1))
