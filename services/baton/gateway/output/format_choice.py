"""Chooses the format of a model's messages by its chat template, its response template, or by name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from baton.core.errors import ModelError
from baton.gateway.output import builtin_formats as builtin
from baton.gateway.output.formats import OutputFormat, ReasoningFormat, ToolFormat
from baton.gateway.output.templates.response_template import load_response_template
from baton.gateway.output.templates.template_parser import TemplateFormat

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

_TOOL_MARKS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>", "functions"), builtin.GPT_OSS),
    (("<seed:tool_call>",), builtin.SEED_OSS),
    (("<function=", "<parameter="), builtin.QWEN3_CODER),
    (("</arg_key><arg_value>",), builtin.GLM47),
    (("<arg_key>", "<arg_value>"), builtin.GLM45),
    (("<minimax:tool_call>",), builtin.MINIMAX_M2),
    (("<|tool_calls_section_begin|>",), builtin.KIMI_K2),
    (("｜DSML｜", "function_calls>"), builtin.DEEPSEEK_V32),
    (("｜DSML｜", "tool_calls>"), builtin.DEEPSEEK_V4),
    (("<｜tool▁calls▁begin｜>", "```json"), builtin.DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), builtin.DEEPSEEK_V31),
    (("[TOOL_CALLS]", "[ARGS]"), builtin.MISTRAL),
    (("[TOOL_CALLS]",), builtin.MISTRAL_LIST),
    (("<|tool_call>", '<|"|>'), builtin.GEMMA4),
    (("<start_function_call>",), builtin.FUNCTION_GEMMA),
    (("<TOOLCALL>",), builtin.NEMOTRON),
    (("<tool_call>",), builtin.HERMES),
    (("<tool_calls>",), builtin.JAMBA),
    (("<|tool_call|>",), builtin.GRANITE),
    (("functools[",), builtin.PHI4_MINI),
    (("<|/tool|>",), builtin.PHI4_MINI),
    (("<|python_tag|>",), builtin.LLAMA3_JSON),
    (("<|start_header_id|>", '"parameters": '), builtin.LLAMA3_JSON),
    (("<|header_start|>", '"parameters": '), builtin.LLAMA3_JSON),
)
"""Texts that a chat template of a format contains, all of them. The first entry that fits counts."""

_REASONING_MARKS: tuple[tuple[tuple[str, ...], ReasoningFormat], ...] = (
    (("<|channel|>", "<|message|>", "analysis"), builtin.HARMONY_ANALYSIS),
    (("<|channel>thought",), builtin.GEMMA4_THOUGHT),
    (("[THINK]",), builtin.MAGISTRAL),
    (("<seed:think>",), builtin.SEED_THINK),
    (("</think>",), builtin.THINK),
    (("<think>",), builtin.THINK),
)


def choose_format(
    chat_template: str,
    response_template: Mapping[str, Any] | None = None,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> OutputFormat:
    """Return the format of a model's messages.

    chat_template: source of the chat template; its delimiters tell the family. Empty if there is none.
    response_template: `response_template` of tokenizer_config.json. It describes whole messages, so it counts
        only if neither parser is chosen by name.
    tool_parser, reasoning_parser: names from `TOOL_FORMATS` and `REASONING_FORMATS`, which override the
        choice. None chooses by the templates.

    Raises ModelError if a name is unknown, if the two formats exclude each other, or if the response template
    is invalid.
    """
    tools = _detected(chat_template, _TOOL_MARKS)
    reasoning = _detected(chat_template, _REASONING_MARKS)
    if tool_parser is not None:
        tools = _named(tool_parser, builtin.TOOL_FORMATS, "--tool-parser")
    if reasoning_parser is not None:
        reasoning = _named(reasoning_parser, builtin.REASONING_FORMATS, "--reasoning-parser")
    _check_harmony(tools, reasoning)
    if response_template is None or tool_parser is not None or reasoning_parser is not None:
        return OutputFormat(tools=tools, reasoning=reasoning)
    template = TemplateFormat(load_response_template(response_template))
    return OutputFormat(tools=tools, reasoning=reasoning, template=template)


def _check_harmony(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> None:
    """Raise ModelError if only one of the two is harmony, whose messages no other parser can read."""
    if tools is None or reasoning is None:
        return
    if OutputFormat(tools=tools).is_harmony is not OutputFormat(reasoning=reasoning).is_harmony:
        raise ModelError(
            f"calls in the format {tools.name} and reasoning in the format {reasoning.name} cannot stand in one "
            "message; set --tool-parser and --reasoning-parser both to gpt_oss, or one of them to none"
        )


def _detected(chat_template: str, marks: tuple[tuple[tuple[str, ...], Format], ...]) -> Format | None:
    return next((found for texts, found in marks if all(text in chat_template for text in texts)), None)


def _named(name: str, formats: Mapping[str, Format | None], option: str) -> Format | None:
    if name not in formats:
        raise ModelError(f"{option} is {name!r}; must be one of {', '.join(sorted(formats))}")
    return formats[name]
