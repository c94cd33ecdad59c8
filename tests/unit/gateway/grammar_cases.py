"""Helpers for the tests of grammars: a vocabulary of bytes and special tokens, and what a grammar accepts."""

import re
from collections.abc import Sequence
from functools import cache
from random import Random

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from baton.gateway.constraints.lark_writer import WrittenGrammar
from baton.gateway.constraints.message_grammar import CallableTool, MessageGrammar
from baton.gateway.output.formats import OutputFormat, ParserOptions, ReasoningFormat, ToolFormat
from baton.gateway.output.special_text import split_special
from tests.unit.gateway.output.output_cases import ParsedMessage, join_parts, parts_of

SPECIAL = (
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|constrain|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "｜DSML｜",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_call|>",
    "<|python_tag|>",
)
IDS = {text: 256 + number for number, text in enumerate(SPECIAL)}
WEATHER = CallableTool(
    name="get_weather",
    parameters={
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
PING = CallableTool(name="ping")
FREE = CallableTool(name="free", parameters={"type": "object"})


class _Vocabulary:
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = tuple(bytes((byte,)) for byte in range(256)) + tuple(text.encode() for text in SPECIAL)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary()), n_vocab=len(_Vocabulary.tokens), slices=[])


def ids_of(text: str) -> list[int]:
    ids: list[int] = []
    for piece in split_special(text, SPECIAL):
        ids += list(piece.encode()) if isinstance(piece, str) else [IDS[piece.text]]
    return ids


def accepts(grammar: WrittenGrammar | str, text: str, *, special: bool = True) -> bool:
    """True if a message may be this text and end there.

    special: delimiters are written with their special tokens, and not with ordinary ones.
    """
    grammar = text_of(grammar)
    assert LLMatcher.validate_grammar(grammar, None) == ""
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = ids_of(text) if special else list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_of(
    tools: ToolFormat, reasoning: ReasoningFormat | None = None, prompt: str = "", *, special: bool = True
) -> MessageGrammar:
    return MessageGrammar(OutputFormat(tools=tools, reasoning=reasoning), tools, IDS if special else {}, prompt)


def parsed(tools: ToolFormat, text: str, schemas: Sequence[CallableTool], *, special: bool = True) -> ParsedMessage:
    tokens = SPECIAL if special else ()
    options = ParserOptions(
        tools={tool.name: tool.schema for tool in schemas}, special_tokens=frozenset(tokens), call_id_seed="x"
    )
    parts = parts_of(OutputFormat(tools=tools), split_special(text, tokens), options)
    return join_parts(part for some in parts for part in some)


ENDINGS = frozenset(b'"{}[]<>/\n,:0123456789') | set(IDS.values())
"""Tokens that bring a message to its end."""


def text_of(grammar: WrittenGrammar | str) -> str:
    return grammar if isinstance(grammar, str) else grammar.text


def random_message(grammar: WrittenGrammar | str, rng: Random, closing: str, max_tokens: int = 2000) -> str:
    """Return a message of random tokens that the grammar allows, mostly of those that end it.

    closing: text that ends a long value, which random tokens would hardly hit.
    """
    matcher = LLMatcher(vocabulary(), text_of(grammar), log_level=0)
    delimiters = [int(found) for found in re.findall(r"<\[([0-9]+)\]>", text_of(grammar))]  # others are no text
    text = bytearray()
    for _ in range(max_tokens):
        if matcher.is_accepting() and rng.random() < 0.5:
            return text.decode()
        if (
            closing
            and rng.random() < 0.1
            and matcher.deep_copy().try_consume_tokens(ids_of(closing)) == len(ids_of(closing))
        ):
            assert matcher.consume_tokens(ids_of(closing))
            text += closing.encode()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [id_ for id_ in sorted({*delimiters}) if mask >> id_ & 1]
        if closing and 2 < len(allowed) == len({*delimiters}):  # text, which has no delimiters but the one that ends it
            allowed = []
        allowed += [byte for byte in range(9, 127) if mask >> byte & 1]
        if not allowed and matcher.is_accepting():
            return text.decode()
        allowed = allowed or [byte for byte in range(127, 256) if mask >> byte & 1]
        endings = [id_ for id_ in allowed if id_ in ENDINGS]
        id_ = rng.choice(endings if endings and rng.random() < 0.7 else allowed)
        assert matcher.consume_token(id_)
        text += _Vocabulary.tokens[id_]
    raise AssertionError(f"the message does not end: {bytes(text[:200])!r}")
