"""Properties that the parsers of all formats have for any text."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.request import FinishReason
from baton.gateway.output.formats import CallLayout, OutputFormat, ParserOptions
from tests.unit.gateway.output.output_cases import FORMATS, TOOLS, divisions, parsed, written

NOISE = (
    "\n",
    " ",
    "x",
    "é",
    "get_weather",
    '{"city": "a"}',
    '{"name": "now", "arguments": {}}',
    "{",
    "}",
    '"',
    ",",
    ":",
)
NOISE += ('{"name": "', '", "arguments": ', "[", "]", "null", "; ", "\\", "<", "</", "3", "now")


def delimiters(output_format: OutputFormat) -> tuple[str, ...]:
    tools, reasoning = output_format.tools, output_format.reasoning
    assert tools is not None
    syntax, parameters = tools.syntax, tools.syntax.parameters
    texts = [*tools.triggers, tools.close, tools.id_delimiter, syntax.section_begin, syntax.section_end]
    texts += [syntax.before_name, syntax.after_name, syntax.after_arguments, syntax.string_delimiter]
    texts += [reasoning.open, reasoning.close] if reasoning else []
    texts += [parameters.before_key, parameters.after_key, parameters.after_value] if parameters else []
    texts += ["<|start|>assistant", "<|end|>", "<|message|>"] if tools.layout is CallLayout.HARMONY else []
    return tuple(dict.fromkeys(text for text in texts if text))


@st.composite
def cases(draw: st.DrawFn) -> tuple[OutputFormat, str, tuple[str, ...], list[int]]:
    output_format = draw(st.sampled_from(sorted(FORMATS)))
    known = delimiters(FORMATS[output_format])
    text = "".join(draw(st.lists(st.sampled_from((*known, *known, *NOISE)), max_size=14)))
    special = draw(st.sampled_from(((), tuple(text for text in known if text == text.strip() and text[0] in "<["))))
    return FORMATS[output_format], text, special, draw(st.lists(st.integers(1, 40), max_size=5))


@settings(derandomize=True, deadline=None)
@given(cases(), st.sampled_from((FinishReason.STOP, FinishReason.LENGTH)), st.booleans())
def test_result_does_not_depend_on_the_pieces(
    case: tuple[OutputFormat, str, tuple[str, ...], list[int]], reason: FinishReason, with_tools: bool
) -> None:
    output_format, text, special, cuts = case
    options = ParserOptions(tools=TOOLS if with_tools else {}, special_tokens=frozenset(special), call_id_seed="s")
    whole, *others = [parsed(output_format, pieces, options, reason) for pieces in divisions(text, special, [cuts])]
    assert all(other == whole for other in others)


@settings(derandomize=True, deadline=None)
@given(cases())
def test_text_without_calls_and_reasoning_is_content_as_it_is(
    case: tuple[OutputFormat, str, tuple[str, ...], list[int]],
) -> None:
    output_format, text, _, _ = case
    if output_format.tools is not None and output_format.tools.layout is CallLayout.HARMONY:
        return  # the headers of harmony's messages are no content
    message = parsed(OutputFormat(tools=output_format.tools), [text])
    if not message.tool_calls:
        assert message.content == text


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[str, str, list[dict[str, Any]], list[int]]:
    """A format, and calls as a grammar builder would write them from the format's description."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    tools = FORMATS[name].tools
    assert tools is not None
    text = st.text(st.sampled_from('ab"\\\n\té{}[]<>&: '), max_size=12)
    scalars = st.none() | st.booleans() | st.integers() | text
    keys = st.sampled_from("abc")
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
    )
    schema = {"city": text, "days": st.integers(), "metric": st.booleans(), "tags": st.lists(values, max_size=3)}
    arguments = draw(st.lists(st.fixed_dictionaries({}, optional=schema), min_size=1, max_size=3))
    syntax = tools.syntax
    calls = [
        f"{syntax.before_name}get_weather{syntax.after_name}{written(tools, each)}{syntax.after_arguments}"
        for each in arguments
    ]
    whole = syntax.section_begin + syntax.separator.join(calls) + syntax.section_end
    return name, whole, arguments, draw(st.lists(st.integers(1, 200), max_size=4))


@settings(derandomize=True, deadline=None)
@given(written_calls())
def test_calls_written_in_a_format_are_read_back(case: tuple[str, str, list[dict[str, Any]], list[int]]) -> None:
    name, text, arguments, cuts = case
    for pieces in divisions(text, (), [cuts]):
        message = parsed(FORMATS[name], pieces)
        assert (message.content, message.reasoning) == ("", "")
        assert [json.loads(call.arguments) for call in message.tool_calls] == arguments
        assert {call.name for call in message.tool_calls} == {"get_weather"}
