"""Chooses how the answers of a chat are parsed."""

import sys

from baton.gateway.constraints.answer_constraint import ContentRule
from baton.gateway.input.chat.chat_request import ChatRequest
from baton.gateway.input.chat.tool_fields import ToolMode
from baton.gateway.input.client_call import MessageOptions
from baton.gateway.output.formats import ContentForm, OutputFormat, ParserOptions

PROMPT_END_CHARACTERS = 64 * 1024
"""Characters at the end of the prompt that are kept for the parser. They may begin answer and reasoning."""

TOOL_CHARACTER_BYTES = 20
"""Memory per counted character of the tools, in bytes. Their schemas are held as small Python objects."""


def message_options(
    chat: ChatRequest,
    prompt: str,
    output_format: OutputFormat,
    special_tokens: frozenset[str],
    rule: ContentRule | None = None,
) -> MessageOptions | None:
    """Return how the answers to `prompt` are parsed; None if their text is the content.

    special_tokens: texts of the tokenizer's added tokens.
    rule: the rule for the content, if there is one.

    Calls are only parsed if the request allows them.
    """
    parses_calls = chat.tools.mode is not ToolMode.NONE
    is_parsed = output_format.reasoning or output_format.template or output_format.is_harmony
    if not (is_parsed or (output_format.tools and parses_calls)):
        return None
    parser = ParserOptions(
        prompt=prompt[-PROMPT_END_CHARACTERS:],
        tools={tool.name: tool.parameters or {} for tool in chat.tools.tools},
        special_tokens=special_tokens,
        parse_tools=parses_calls,
        single_call=parses_calls and not chat.tools.parallel,
        content=_content_form(chat, rule),
    )
    return MessageOptions(
        output_format=output_format,
        parser=parser,
        include_reasoning=chat.include_reasoning,
        legacy_calls=chat.tools.is_legacy,
        num_bytes=sys.getsizeof(parser.prompt) + TOOL_CHARACTER_BYTES * chat.tools.num_characters,
    )


def _content_form(chat: ChatRequest, rule: ContentRule | None) -> ContentForm:
    if chat.tools.mode is ToolMode.REQUIRED:
        return ContentForm.NONE
    return ContentForm.FREE if rule is None else rule.form
