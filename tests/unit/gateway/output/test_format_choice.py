"""Choice of the output format, the end of the prompt, and types of arguments."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_parser import _coerce

from baton.core.errors import ModelError
from baton.gateway.output.builtin_formats import REASONING_FORMATS, TOOL_FORMATS
from baton.gateway.output.format_choice import choose_format
from baton.gateway.output.formats import ReasoningFormat
from baton.gateway.output.prompt_end import opens_reasoning
from baton.gateway.output.special_text import split_special
from baton.gateway.output.values.typed_values import ToolTypes, to_json
from tests.cpu_time import CpuTime
from tests.scripted_chats import TEMPLATES as CHAT_TEMPLATES

QWEN3 = "{% if tools %}<tool_call></tool_call>{% endif %}{{ content.split('</think>')[-1] }}<think>\n\n</think>\n\n"
TEMPLATES = {
    "Qwen2.5, Hermes 2 Pro, Granite 4": ('{% if tools %}<tool_call>\n{"name": <name>}\n</tool_call>', "hermes", ""),
    "Qwen3, Hermes 4": (QWEN3, "hermes", "qwen3"),
    "QwQ": ("{% if tools %}<tool_call></tool_call>{% endif %}assistant\n<think>\n", "hermes", "qwen3"),
    "Qwen3-Coder": ("{% if tools %}<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>", "qwen3_coder", ""),
    "Qwen3.5, Nemotron 3": (QWEN3 + "<function=f>\n<parameter=a>\n1\n</parameter>", "qwen3_coder", "qwen3"),
    "GLM-4.5": ("<tool_call>{f}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value><think></think>", "glm45", "qwen3"),
    "GLM-4.7": ("<tool_call>{f}<arg_key>{k}</arg_key><arg_value>{v}</arg_value><think></think>", "glm47", "qwen3"),
    "MiniMax-M2": ("{% set begin = '<minimax:tool_call>' %}{{ tools }}ai\n<think>\n", "minimax_m2", "qwen3"),
    "Seed-OSS": (
        "{% set begin, think = '<seed:tool_call>', '<seed:think>' %}{{ tools }}<function=f>\n<parameter=a>",
        "seed_oss",
        "seed_oss",
    ),
    "DeepSeek V3": (
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n```json' }}",
        "deepseek_v3",
        "",
    ),
    "DeepSeek R1, its distilled Llama": (
        "'<｜tool▁calls▁begin｜>' '```json' {{ content.split('</think>')[-1] }}<｜Assistant｜><think>\n",
        "deepseek_v3",
        "qwen3",
    ),
    "DeepSeek V3.1": ("'<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>' '</think>'", "deepseek_v31", "qwen3"),
    "DeepSeek V3.2": (
        "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}{{ tools }}</think>",
        "deepseek_v32",
        "qwen3",
    ),
    "DeepSeek V4": ("{{ '<｜DSML｜tool_calls>' }}{{ tools }}</think>", "deepseek_v4", "qwen3"),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_begin|>{{ call['id'] }}", "kimi_k2", ""),
    "Kimi K2 Thinking": ("<think>{{ r }}</think><|tool_calls_section_begin|>{{ call['id'] }}", "kimi_k2", "qwen3"),
    "Mistral 7B v0.3, Small 3.1": ("{{ '[TOOL_CALLS] [' }}[AVAILABLE_TOOLS]{{ tools }}", "mistral_list", ""),
    "Mistral Small 3.2, Devstral": ("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments }}", "mistral", ""),
    "Magistral, Ministral 3": ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}[THINK][/THINK]", "mistral", "mistral"),
    "Llama 3.1": ("<|start_header_id|>{% if builtin_tools %}<|python_tag|>", "llama3_json", ""),
    "Llama 3.2": ("<|start_header_id|>{{ '\"parameters\": ' }}{{ tool_call.arguments | tojson }}", "llama3_json", ""),
    "Llama 4": ("<|header_start|><|python_start|>{{ '\"parameters\": ' }}{{ tools }}", "llama3_json", ""),
    "gpt-oss": ("namespace functions{{ tools }}<|channel|>analysis<|message|>", "gpt_oss", "gpt_oss"),
    "Gemma 4": ("{{ tools }}<|tool_call>call:<|\"|>{{ '<|channel>thought\\n<channel|>' }}", "gemma4", "gemma4"),
    "FunctionGemma": ("{{ tools }}<start_function_call>call:<escape>", "functiongemma", ""),
    "Granite 3": ("<|start_of_role|>respond only with <|tool_call|> and a JSON list of {{ tools }}", "granite", ""),
    "Phi-4-mini": ("<|{{ role }}|>{% if tools %}<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json", ""),
    "Phi-4-mini, of vLLM": ("formatted as functools[{{ tools }}]", "phi4_mini_json", ""),
    "Jamba, Hunyuan": ("<tool_calls>[{{ calls }}]</tool_calls>", "jamba", ""),
    "Nemotron Nano 2": (
        "<AVAILABLE_TOOLS>{{ tools }}<TOOLCALL>[{}]</TOOLCALL><think></think>",
        "nemotron_json",
        "qwen3",
    ),
    "OLMo 3 Think": ("{{ '<|im_start|>assistant\\n<think>' }}", "", "qwen3"),
    "Gemma 3": ("<start_of_turn>{{ message.role }}\n{{ message.content | trim }}<end_of_turn>", "", ""),
    "Llama 3.2 and 4, Python": ("<|start_header_id|>{{ tools }}[{{ name }}({{ key }}={{ value }})]", "", ""),
    "LFM2": ("List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>", "", ""),
}
"""What distinguishes the chat templates of these models, and the names of their formats."""


@pytest.mark.parametrize("models", TEMPLATES)
def test_format_is_chosen_by_the_chat_template(models: str) -> None:
    template, tools, reasoning = TEMPLATES[models]
    chosen = choose_format(template)
    assert (chosen.tools.name if chosen.tools else "") == tools
    assert (chosen.reasoning.name if chosen.reasoning else "") == reasoning
    assert bool(chosen) == bool(tools or reasoning)


@pytest.mark.parametrize(
    ("file", "tools", "reasoning"),
    [
        ("deepseek", "deepseek_v31", "qwen3"),
        ("gemma", "gemma4", "gemma4"),
        ("glm", "glm45", "qwen3"),
        ("gpt_oss", "gpt_oss", "gpt_oss"),
        ("hermes", "hermes", ""),
        ("llama31", "llama3_json", ""),
        ("mistral", "mistral_list", ""),
        ("qwen3", "hermes", "qwen3"),
        ("training", "", ""),
    ],
)
def test_format_of_whole_chat_templates(file: str, tools: str, reasoning: str) -> None:
    chosen = choose_format((CHAT_TEMPLATES / f"{file}.jinja").read_text("utf-8"))
    assert (chosen.tools.name if chosen.tools else "", chosen.reasoning.name if chosen.reasoning else "") == (
        tools,
        reasoning,
    )


def test_harmony_cannot_be_mixed_with_another_format() -> None:
    harmony = TEMPLATES["gpt-oss"][0]
    for names in ({"tool_parser": "hermes"}, {"reasoning_parser": "qwen3"}):
        with pytest.raises(ModelError, match="both to gpt_oss, or one of them to none"):
            choose_format(harmony, **names)
    assert choose_format(harmony, tool_parser="none").is_harmony
    assert choose_format(harmony, reasoning_parser="none").is_harmony


def test_names_override_the_templates() -> None:
    response_template = {"start_anchor": "<", "fields": {"content": {}}}
    qwen = QWEN3
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
        ("<|im_start|>assistant\n<think>\nx</think>\n\nIt is", "deepseek_r1", False),
        ("<|im_start|>assistant\n<think>\nx</think>\n\nIt is", "qwen3", False),
        ("x</think>y<|im_end|>\n<|im_start|>assistant\n", "deepseek_r1", True),
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


def schema_types(schema: Any, root: Mapping[str, Any]) -> tuple[str, ...]:
    return ToolTypes({"f": {**root, "properties": {"a": schema}}}).of("f", "a")


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
def test_types_are_read_from_every_keyword_of_a_schema(schema: Any, types: tuple[str, ...]) -> None:
    root = {"$defs": {"a/b": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert schema_types(schema, root) == types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {}}}]}, ("integer",)),
        ({"properties": {"a": {"type": "integer"}}, "anyOf": [{"properties": {"b": {}}}]}, ("integer",)),
        ({"anyOf": [{"properties": {"a": {"type": kind}}} for kind in ("integer", "null")]}, ("integer", "null")),
        ({"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"a": {"type": "boolean"}}}}}, ("boolean",)),
        ({"properties": {"b": {}}, "additionalProperties": {"type": "number"}}, ("number",)),
        ({"properties": {"a": False}, "additionalProperties": False}, ()),
        ({"properties": 3, "allOf": 3, "$ref": 3}, ()),
        ({"$ref": "#"}, ()),
    ],
)
def test_types_of_a_parameter_are_found_in_all_parts_of_the_schema(schema: Any, types: tuple[str, ...]) -> None:
    found = ToolTypes({"f": schema})
    assert found.of("f", "a") == types
    assert found.of("f", "a") == types  # from the cache


def test_schema_with_many_references_to_itself_is_cheap() -> None:
    root = {"$defs": {name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in "abcd" * 60]} for name in "abcd"}}
    root["$defs"]["d"] = {"type": "integer"}
    with CpuTime() as cpu:
        assert schema_types({"$ref": "#/$defs/a"}, root) == ("integer",)
        assert schema_types({"anyOf": [{"type": "integer"}] * 100_000}, {}) == ("integer",)
        assert ToolTypes({"f": {"anyOf": [{"$ref": "#/$defs/a"}] * 100_000, **root}}).of("f", "x") == ()
    assert cpu.spent_s < 0.02


def test_cost_of_hostile_schemas_is_bounded() -> None:
    """It takes 0.05 s of CPU; without bounds it is minutes."""
    anchors = {f"p{n}": {"$ref": f"#unknown{n}"} for n in range(1000)}
    numbers = {"anyOf": [{"enum": list(range(5000)), "const": 3}] * 64}
    unions = {"anyOf": [{"type": ["string", "null"]}] * 64}
    patterns = [{"patternProperties": {f"{k}{n}": {"$ref": "#/$defs/a", "title": ""} for n in range(60)}} for k in "ab"]
    schemas: list[dict[str, Any]] = [
        {"properties": anchors, "$defs": {f"{n}": {} for n in range(3000)}},
        {"properties": {"p0": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/" + "%41" * 9000}] * 64}}},
        {"properties": {f"p{n}": {"$ref": "#/$defs/a", "minimum": n} for n in range(9)}, "$defs": {"a": numbers}},
        {"allOf": [{"properties": {"p0": {"allOf": [{"enum": list(range(3000))}] * 64}}}]},
        {"allOf": patterns * 30, "$defs": {"a": unions}},
    ]
    with CpuTime() as cpu:
        for schema in schemas:
            types = ToolTypes({"f": schema})
            for number in range(1000):
                types.of("f", f"p{number}")
    assert cpu.spent_s < 0.25


def test_anchor_is_resolved_to_the_schema_that_has_it() -> None:
    root = {"$defs": {"b": {"$anchor": "Day", "enum": [1, 2]}, "c": {"$dynamicAnchor": "Name", "type": "string"}}}
    assert schema_types({"anyOf": [{"$ref": "#Day"}, {"$ref": "#Name"}, {"$ref": "#Other"}]}, root) == (
        "integer",
        "string",
    )
