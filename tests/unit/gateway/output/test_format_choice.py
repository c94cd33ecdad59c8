"""Choice of the output format, the end of the prompt, and types of arguments."""

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_parser import _coerce

from baton.core.errors import ModelError
from baton.gateway.output.builtin_formats import REASONING_FORMATS, TOOL_FORMATS
from baton.gateway.output.format_choice import choose_format
from baton.gateway.output.formats import ReasoningFormat
from baton.gateway.output.prompt_end import opens_reasoning
from baton.gateway.output.special_text import split_special
from baton.gateway.output.typed_values import schema_types, to_json

TEMPLATES = {
    "hermes": ('{% for tool in tools %}<tool_call>\n{"name": ...}\n</tool_call>', ""),
    "hermes qwen3": (
        "{% if tools %}<tool_call>{% endif %}{{ content.split('</think>')[-1] }}<think>\n\n</think>",
        "qwen3",
    ),
    "qwen3_coder": ("{% if tools %}<tool_call>\n<function=example>\n<parameter=a>{% endif %}", ""),
    "glm45": ("{% if tools %}<tool_call>{f}\n<arg_key>{k}</arg_key>\n<arg_value>{% endif %}<think></think>", "qwen3"),
    "minimax_m2": ("{% if tools %}'<minimax:tool_call>'{% endif %}<think></think>", "qwen3"),
    "deepseek_v3": ("{{ tool['type'] }}'<｜tool▁calls▁begin｜>' '```json' '</think>'", "qwen3"),
    "deepseek_v31": ("{{ tool['function'] }}'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' '</think>'", "qwen3"),
    "mistral": ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS][THINK][/THINK]", "mistral"),
    "mistral_list": ("{{ tools }}'[TOOL_CALLS] ['", ""),
    "llama3_json": ('{% if tools %}<|start_header_id|>{"name": , "parameters": }', ""),
    "llama3_json 3.1": ("{% if tools %}<|python_tag|>", ""),
    "gpt_oss": ("{{ tools }}functions <|channel|>analysis<|message|>", "gpt_oss"),
    "gemma4": ("{{ tools }}<|tool_call>call: <|\"|> '<|channel>thought\\n<channel|>'", "gemma4"),
    "functiongemma": ("{{ tools }}<start_function_call>call:", ""),
    "": ("{{ message.content }}<tool_call>", ""),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_format_is_chosen_by_the_chat_template(name: str) -> None:
    template, reasoning = TEMPLATES[name]
    chosen = choose_format(template.replace("<tool_call>", "") if not name else template)
    assert (chosen.tools.name if chosen.tools else "") == name.split(" ")[0]
    assert (chosen.reasoning.name if chosen.reasoning else "") == reasoning
    assert bool(chosen) == bool(name)


def test_names_override_the_templates() -> None:
    response_template = {"start_anchor": "<", "fields": {"content": {}}}
    qwen = TEMPLATES["hermes qwen3"][0]
    assert choose_format(qwen, response_template).template is not None
    chosen = choose_format(qwen, response_template, tool_parser="mistral")
    assert (chosen.tools, chosen.reasoning, chosen.template) == (
        TOOL_FORMATS["mistral"],
        REASONING_FORMATS["qwen3"],
        None,
    )
    assert not choose_format(qwen, response_template, tool_parser="none", reasoning_parser="none")
    with pytest.raises(ModelError, match="--tool-parser is 'hermess'; must be one of deepseek_r1, "):
        choose_format(qwen, tool_parser="hermess")
    with pytest.raises(ModelError, match="--reasoning-parser"):
        choose_format(qwen, reasoning_parser="thoughts")
    with pytest.raises(ModelError, match="response_template"):
        choose_format(qwen, {"fields": {}})


@pytest.mark.parametrize(
    ("prompt", "reasoning", "expected"),
    [
        ("<|im_start|>assistant\n", "qwen3", False),
        ("<|im_start|>assistant\n<think>\n", "qwen3", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3", False),
        ("<|im_start|>assistant\n<think>\nFirst\n\nI", "qwen3", True),
        ("<|im_start|>user\nwhy <think> ?<|im_end|>\n<|im_start|>assistant\n", "qwen3", False),
        ("<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n<think>\n", "qwen3", True),
        ("<|im_start|>assistant\n", "deepseek_r1", True),
        ("<|im_start|>assistant\n</think>", "deepseek_r1", False),
        ("<|turn>model\n<|channel>thought\n<channel|>", "gemma4", False),
        ("<|turn>model\n<|channel>thought\n", "gemma4", True),
        ("", "qwen3", False),
    ],
)
def test_prompt_opens_the_reasoning(prompt: str, reasoning: str, expected: bool) -> None:
    found = REASONING_FORMATS[reasoning]
    assert isinstance(found, ReasoningFormat)
    assert opens_reasoning(prompt, found, ("<|im_start|>", "<|im_end|>", "<think>", "\n\n", "")) is expected


def test_delimiter_is_split_into_its_special_tokens() -> None:
    pieces = split_special("<|start|>assistant<|channel|>x", {"<|start|>", "<|channel|>", "<|start", "<|call|>"})
    assert [piece if isinstance(piece, str) else (piece.text,) for piece in pieces] == [
        ("<|start|>",),
        "assistant",
        ("<|channel|>",),
        "x",
    ]


RAW = (
    "3",
    "3.0",
    "3.5",
    "-1e3",
    "true",
    "True",
    "0",
    "1",
    "null",
    "None",
    "[1]",
    '{"a": [2]}',
    "x",
    "nan",
    "1e999",
    "",
)


@pytest.mark.parametrize(
    "types", [("integer",), ("number",), ("boolean",), ("null", "string"), ("object",), ("array", "null")]
)
def test_values_are_converted_as_transformers_does(types: tuple[str, ...]) -> None:
    for raw in RAW:
        assert json.loads(to_json(raw, types)) == _coerce(raw, types), raw


def test_value_that_cannot_be_converted_cheaply_stays_text() -> None:
    for raw in ("[" * 100_000, "1" * 100_000, "[" * 1000 + "]" * 1000):
        assert json.loads(to_json(raw, ("array", "integer", "number"))) == raw
        assert json.loads(to_json(raw, (), untyped_json=True)) == raw


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, ("string",)),
        ({"type": ["integer", "null"]}, ("integer", "null")),
        ({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/a~1b"}]}, ("number", "object")),
        ({"allOf": [{"type": "array"}], "nullable": True}, ("array", "null")),
        ({"enum": ["a", 1, True, None]}, ("string", "integer", "boolean", "null")),
        ({"const": 1.5}, ("number",)),
        ({"$ref": "#/$defs/loop"}, ()),
        ({"$ref": "https://example.com/schema"}, ()),
        (True, ()),
    ],
)
def test_types_of_a_schema(schema: Any, types: tuple[str, ...]) -> None:
    root = {"$defs": {"a/b": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert schema_types(schema, root) == types
