"""Chooses the format of a model's messages by its chat template, its response template, or by name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from baton.core.errors import ModelError
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
    REASONING_FORMATS,
    THINK,
    TOOL_FORMATS,
)
from baton.gateway.output.formats import OutputFormat, ReasoningFormat, ToolFormat
from baton.gateway.output.templates.response_template import load_response_template
from baton.gateway.output.templates.template_parser import TemplateFormat

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

_TOOL_MARKS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>", "functions"), GPT_OSS),
    (("<function=", "<parameter="), QWEN3_CODER),
    (("<arg_key>", "<arg_value>"), GLM45),
    (("<minimax:tool_call>",), MINIMAX_M2),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<|tool_call>", '<|"|>'), GEMMA4),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA3_JSON),
    (("<|start_header_id|>", '"parameters": '), LLAMA3_JSON),
    (("<|header_start|>", '"parameters": '), LLAMA3_JSON),
)
"""Texts that a chat template of a format contains, all of them. The first entry that fits counts."""

_REASONING_MARKS: tuple[tuple[tuple[str, ...], ReasoningFormat], ...] = (
    (("<|channel|>", "<|message|>", "analysis"), HARMONY_ANALYSIS),
    (("<|channel>thought",), GEMMA4_THOUGHT),
    (("[THINK]",), MAGISTRAL),
    (("</think>",), THINK),
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

    Raises ModelError if a name is unknown, or if the response template is invalid.
    """
    tools = _detected(chat_template, _TOOL_MARKS) if "tool" in chat_template else None
    reasoning = _detected(chat_template, _REASONING_MARKS)
    if tool_parser is not None:
        tools = _named(tool_parser, TOOL_FORMATS, "--tool-parser")
    if reasoning_parser is not None:
        reasoning = _named(reasoning_parser, REASONING_FORMATS, "--reasoning-parser")
    if response_template is None or tool_parser is not None or reasoning_parser is not None:
        return OutputFormat(tools=tools, reasoning=reasoning)
    template = TemplateFormat(load_response_template(response_template))
    return OutputFormat(tools=tools, reasoning=reasoning, template=template)


def _detected(chat_template: str, marks: tuple[tuple[tuple[str, ...], Format], ...]) -> Format | None:
    return next((found for texts, found in marks if all(text in chat_template for text in texts)), None)


def _named(name: str, formats: Mapping[str, Format | None], option: str) -> Format | None:
    if name not in formats:
        raise ModelError(f"{option} is {name!r}; must be one of {', '.join(sorted(formats))}")
    return formats[name]
