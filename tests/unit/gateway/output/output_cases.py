"""Helpers for the tests of output formats: parsing a text in several divisions into pieces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.core.client_api import MessagePart, PartKind
from baton.core.request import FinishReason
from baton.gateway.output.builtin_formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTION_GEMMA,
    GEMMA4,
    GEMMA4_THOUGHT,
    GLM45,
    GPT_OSS,
    HARMONY_ANALYSIS,
    HERMES,
    LLAMA3_JSON,
    MAGISTRAL,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_LIST,
    QWEN3_CODER,
    THINK,
)
from baton.gateway.output.formats import OutputFormat, ParserOptions, Piece, SpecialToken
from baton.gateway.output.parsing import message_parser
from baton.gateway.output.special_text import split_special

FORMATS = {
    "hermes": OutputFormat(tools=HERMES, reasoning=THINK),
    "qwen3_coder": OutputFormat(tools=QWEN3_CODER, reasoning=THINK),
    "glm45": OutputFormat(tools=GLM45, reasoning=THINK),
    "minimax_m2": OutputFormat(tools=MINIMAX_M2, reasoning=THINK),
    "mistral": OutputFormat(tools=MISTRAL, reasoning=MAGISTRAL),
    "mistral_list": OutputFormat(tools=MISTRAL_LIST),
    "llama3_json": OutputFormat(tools=LLAMA3_JSON),
    "deepseek_v3": OutputFormat(tools=DEEPSEEK_V3, reasoning=THINK),
    "deepseek_v31": OutputFormat(tools=DEEPSEEK_V31, reasoning=THINK),
    "gpt_oss": OutputFormat(tools=GPT_OSS, reasoning=HARMONY_ANALYSIS),
    "gemma4": OutputFormat(tools=GEMMA4, reasoning=GEMMA4_THOUGHT),
    "functiongemma": OutputFormat(tools=FUNCTION_GEMMA),
}

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
