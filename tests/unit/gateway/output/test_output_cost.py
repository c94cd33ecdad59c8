"""Cost of hostile outputs: linear in the text, and bounded for each piece."""

import gc
import json
import weakref

import pytest

from baton.core.client_api import MessagePart, PartKind
from baton.core.request import FinishReason
from baton.gateway.output.formats import OutputFormat, ParserOptions
from baton.gateway.output.message_json import CollectedMessage
from baton.gateway.output.parsing import message_parser
from tests.cpu_time import CpuTime
from tests.unit.gateway.output.output_cases import FORMATS, TOOLS, join_parts
from tests.unit.gateway.output.test_response_templates import CASES, format_of

SIZE = 6_000
SECONDS_PER_PIECE = 200e-6
"""Twice what a piece of the most expensive text costs, which is `template, tags without an end`."""
NOISE_S = 0.01

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
    "calls in the reasoning": ("qwen3_coder", ["<think>", *["<tool_call>", "\n<function=", "x "] * 17]),
    "marked values without an end": (
        "deepseek_v32",
        [
            '<｜DSML｜function_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="true">',
            *["</｜DSML｜parameter>", " "] * 25,
        ],
    ),
    "ids without an end": ("kimi_k2", ["<|tool_calls_section_begin|><|tool_call_begin|>functions.", *["x:0"] * 50]),
    "escapes that are none": ("hermes", ['<tool_call>{"name": "now", "arguments": {"a": "', *["\\u12"] * 50]),
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
        with CpuTime() as cpu:
            parsers = [message_parser(output_format, options) for _ in range(128)]
        assert cpu.spent_s < 0.5
        assert all(parser.progress == parsers[0].progress for parser in parsers)


@pytest.mark.parametrize("name", [*FORMATS, *(f"template {name}" for name in CASES)])
def test_closed_parser_is_freed_without_a_garbage_collection(name: str) -> None:
    """A request may end inside of a call: it fails, finds a stop string, or its client leaves."""
    gc.disable()
    try:
        parser = message_parser(format_named(name), ParserOptions(tools=TOOLS))
        parser.put(next((texts[0] for kind, texts in HOSTILE.values() if kind == name and "call" in texts[0]), "x"))
        parser.close()
        freed = weakref.ref(parser)
        del parser
        assert freed() is None
    finally:
        gc.enable()


def test_calls_of_a_collected_message_cost_the_same_each() -> None:
    message = CollectedMessage()
    before_bytes = 0
    with CpuTime() as cpu:
        for number in range(4000):
            message.put(MessagePart(kind=PartKind.TOOL_CALL, text="f", call_index=number, call_id=f"call_{number}"))
            message.put(MessagePart(kind=PartKind.TOOL_ARGUMENTS, text='{"a": 1}', call_index=number))
            assert message.num_bytes > before_bytes + 8
            before_bytes = message.num_bytes
    assert cpu.spent_s < 0.15
    assert before_bytes > sum(map(len, message.parts(legacy=False))) * 0.9


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_costs_linear_time(name: str) -> None:
    kind, pieces = HOSTILE[name]
    parser = message_parser(format_named(kind), ParserOptions(tools=TOOLS))
    text = (
        [pieces[0], *pieces[1:]] * (1000 // len(pieces))
        if len(pieces) < 50
        else [pieces[0], *pieces[1:] * (SIZE // len(pieces))]
    )
    spent_s = []
    for half in (text[: len(text) // 2], text[len(text) // 2 :]):
        with CpuTime() as cpu:
            for piece in half:
                parser.put(piece)
        spent_s.append(cpu.spent_s)
    with CpuTime() as cpu:
        parser.finish(FinishReason.LENGTH)
    first_s, second_s = spent_s
    assert first_s + second_s + cpu.spent_s < len(text) * SECONDS_PER_PIECE
    assert second_s < 2 * first_s + NOISE_S, "three times as much if the cost were quadratic"


def test_long_value_costs_little_with_each_piece() -> None:
    """All of it at once would take ten milliseconds."""
    value = json.dumps([[number, {"a": "x"}] for number in range(6_000)])
    text = f"<function=get_weather>\n<parameter=tags>\n{value}\n</parameter>\n</function>"
    parser = message_parser(FORMATS["qwen3_coder"], ParserOptions(tools=TOOLS))
    parts: list[MessagePart] = []
    longest_s = 0.0
    for begin in range(0, len(text), 16):
        with CpuTime() as cpu:
            parts += parser.put(text[begin : begin + 16])
        longest_s = max(longest_s, cpu.spent_s)
    parts += parser.finish(FinishReason.STOP)
    assert join_parts(parts).tool_calls[0].arguments == f'{{"tags": {value}}}'
    assert longest_s < 3e-3
