"""Cost of hostile outputs: linear in the text, and bounded for each piece."""

import time

import pytest

from baton.core.request import FinishReason
from baton.gateway.output.formats import OutputFormat, ParserOptions
from baton.gateway.output.parsing import message_parser
from tests.unit.gateway.output.output_cases import FORMATS, TOOLS
from tests.unit.gateway.output.test_response_templates import CASES, format_of

SIZE = 6_000
SECONDS_PER_PIECE = 100e-6
"""Several times what a piece costs on a slow core."""

HOSTILE = {
    "delimiters": ("hermes", ["<tool_call>"]),
    "open and close": ("hermes", ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
    "beginnings of a delimiter": ("hermes", ["<", "<t", "<tool_cal"]),
    "spaces": ("hermes", [" "]),
    "deep JSON": ("hermes", ['<tool_call>{"name": "now", "arguments": {"a":', *["["] * 50]),
    "one string": ("hermes", ['<tool_call>{"name": "now", "arguments": {"a": "', *["\\u0041"] * 50]),
    "long name": ("hermes", ['<tool_call>{"name": "', *["x"] * 50]),
    "arguments before the name": ("hermes", ['<tool_call>{"arguments": {"a": [', *["1, "] * 50]),
    "empty calls": ("hermes", ['<tool_call>{"name": "now"}</tool_call>']),
    "values without an end": ("qwen3_coder", ["<function=now><parameter=a>", *["</parameter>", " "] * 50]),
    "keys without an end": ("glm45", ["<tool_call>now<arg_key>", *["x"] * 50]),
    "headers": ("gpt_oss", ["<|channel|>commentary to=functions.now", "<|start|>"]),
    "header without an end": ("gpt_oss", ["<|channel|>", *["x"] * 50]),
    "bare objects": ("llama3_json", ['{"name": "now", "parameters": {}}; ']),
    "sections": ("deepseek_v3", ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function"]),
    "strings": ("gemma4", ["<|tool_call>call:now{a:", *['<|"|>'] * 49]),
    "template, spaces": ("template json", [" "]),
    "template, delimiters": ("template json", ["<tool_call>", "</tool_call>", "<think>", "\n"]),
    "template, patterns without an end": ("template opened", ["<call now", "<response>\n", "\n"]),
    "template, tags without an end": ("template xml", ["<tool_call><function=now>", *["<parameter=a> "] * 200]),
    "template, headers": ("template joined", ["<|m|>", "x", "<|think|>"]),
}


def format_named(name: str) -> OutputFormat:
    kind, _, case = name.rpartition("template ")
    return format_of(CASES[case].template) if name.startswith("template ") else FORMATS[kind or case]


def test_prompt_is_read_once_for_all_samples() -> None:
    options = ParserOptions(
        prompt="<|im_start|>assistant\n<think>" + "<tool" * 8_000,
        special_tokens=frozenset(f"<reserved_{number}>" for number in range(5000)),
    )
    for output_format in (FORMATS["hermes"], format_of(CASES["json"].template)):
        began_s = time.thread_time()
        parsers = [message_parser(output_format, options) for _ in range(128)]
        assert time.thread_time() - began_s < 0.5
        assert all(parser.in_reasoning == parsers[0].in_reasoning for parser in parsers)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_costs_linear_time(name: str) -> None:
    kind, pieces = HOSTILE[name]
    parser = message_parser(format_named(kind), ParserOptions(tools=TOOLS))
    text = (
        [pieces[0], *pieces[1:]] * (1000 // len(pieces))
        if len(pieces) < 50
        else [pieces[0], *pieces[1:] * (SIZE // len(pieces))]
    )
    began_s = time.thread_time()
    for piece in text:
        parser.put(piece)
    parser.finish(FinishReason.LENGTH)
    assert time.thread_time() - began_s < len(text) * SECONDS_PER_PIECE
