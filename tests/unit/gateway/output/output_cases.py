"""Helpers for the tests of output formats: parsing a text in several divisions into pieces."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from baton.core.client_api import MessagePart, PartKind
from baton.core.request import FinishReason
from baton.gateway.output import builtin_formats as builtin
from baton.gateway.output.formats import CallLayout, OutputFormat, ParserOptions, Piece, SpecialToken, ToolFormat
from baton.gateway.output.parsing import message_parser
from baton.gateway.output.special_text import split_special

FORMATS = {
    name: OutputFormat(tools=builtin.TOOL_FORMATS[name], reasoning=reasoning)
    for name, reasoning in (
        ("hermes", builtin.THINK),
        ("qwen3_coder", builtin.THINK),
        ("glm45", builtin.THINK),
        ("glm47", builtin.THINK),
        ("minimax_m2", builtin.THINK),
        ("seed_oss", builtin.SEED_THINK),
        ("mistral", builtin.MAGISTRAL),
        ("mistral_list", None),
        ("llama3_json", None),
        ("granite", None),
        ("phi4_mini_json", None),
        ("jamba", None),
        ("nemotron_json", builtin.THINK),
        ("deepseek_v3", builtin.THINK),
        ("deepseek_v31", builtin.THINK),
        ("deepseek_v32", builtin.THINK),
        ("deepseek_v4", builtin.THINK),
        ("kimi_k2", builtin.THINK),
        ("gpt_oss", builtin.HARMONY_ANALYSIS),
        ("gemma4", builtin.GEMMA4_THOUGHT),
        ("functiongemma", None),
    )
}
"""One format of each family that is built in."""

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array"},
            "where": {"$ref": "#/$defs/Place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"Place": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A complete tool call. `arguments` is JSON, unless the model wrote something else."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage:
    """A complete message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def join_parts(parts: Iterable[MessagePart]) -> ParsedMessage:
    """Join the parts of one message."""
    texts: dict[PartKind, list[str]] = {PartKind.CONTENT: [], PartKind.REASONING: []}
    calls: list[tuple[str, str, list[str]]] = []
    for part in parts:
        if part.kind is PartKind.TOOL_CALL:
            calls.append((part.call_id, part.text, []))
        elif part.kind is PartKind.TOOL_ARGUMENTS:
            calls[part.call_index][2].append(part.text)
        else:
            texts[part.kind].append(part.text)
    return ParsedMessage(
        content="".join(texts[PartKind.CONTENT]),
        reasoning="".join(texts[PartKind.REASONING]),
        tool_calls=tuple(
            ToolCall(call_id=call_id, name=name, arguments="".join(arguments)) for call_id, name, arguments in calls
        ),
    )


def parts_of(
    output_format: OutputFormat,
    pieces: Iterable[Piece],
    options: ParserOptions | None = None,
    reason: FinishReason = FinishReason.STOP,
) -> list[tuple[MessagePart, ...]]:
    """Return the parts after each piece, and those at the end."""
    parser = message_parser(output_format, options or ParserOptions(tools=TOOLS))
    return [*[parser.put(piece) for piece in pieces], parser.finish(reason)]


def parsed(
    output_format: OutputFormat,
    pieces: Iterable[Piece],
    options: ParserOptions | None = None,
    reason: FinishReason = FinishReason.STOP,
) -> ParsedMessage:
    """Parse the pieces and check that the parts are in order."""
    parts = [part for some in parts_of(output_format, pieces, options, reason) for part in some]
    calls = 0
    for part in parts:
        assert part.text
        calls += part.kind is PartKind.TOOL_CALL
        assert (part.call_id != "") == (part.kind is PartKind.TOOL_CALL)
        if part.kind in (PartKind.TOOL_CALL, PartKind.TOOL_ARGUMENTS):
            assert part.call_index == calls - 1
    message = join_parts(parts)
    assert len({call.call_id for call in message.tool_calls}) == calls
    return message


def divisions(text: str, special_tokens: Sequence[str], cuts: Sequence[Sequence[int]]) -> list[list[Piece]]:
    """Divide a text in one piece, in characters, and at the cuts; special tokens stay whole."""
    pieces = split_special(text, special_tokens)
    return [
        list(pieces),
        [part for piece in pieces for part in ([piece] if isinstance(piece, SpecialToken) else piece)],
        *[[part for piece in pieces for part in _cut(piece, places)] for places in cuts],
    ]


def _cut(piece: Piece, places: Sequence[int]) -> list[Piece]:
    if isinstance(piece, SpecialToken):
        return [piece]
    edges = sorted({0, len(piece), *(place for place in places if place < len(piece))})
    return [piece[begin:end] for begin, end in pairwise(edges)]


def gemma_text(value: Any, quote: str) -> str:
    """Return a value in Gemma's form."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_text(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_text(item, quote) for item in value) + "]"
    return quote + value + quote if isinstance(value, str) else json.dumps(value)


def written_call(tools: ToolFormat, name: str, arguments: str) -> str:
    """Return a message with one call, whose arguments have the form of the family."""
    syntax = tools.syntax
    begin = syntax.section_begin + syntax.before_name + tools.id_prefix + name + (":0" if tools.id_prefix else "")
    end = "" if tools.layout is CallLayout.HARMONY else syntax.after_arguments + syntax.section_end
    return begin + syntax.after_name + arguments + end


def written(tools: ToolFormat, arguments: Mapping[str, Any]) -> str:
    """Return arguments in the form of the family."""
    parameters = tools.syntax.parameters
    if parameters is None:
        delimiter = tools.syntax.string_delimiter
        return gemma_text(arguments, delimiter) if delimiter else json.dumps(arguments)
    texts = [value if isinstance(value, str) else json.dumps(value) for value in arguments.values()]
    keys = [
        parameters.after_string_key if parameters.after_string_key and isinstance(value, str) else parameters.after_key
        for value in arguments.values()
    ]
    return "".join(
        f"{parameters.before_key}{name}{key}{text}{parameters.after_value}"
        for name, key, text in zip(arguments, keys, texts, strict=True)
    )
