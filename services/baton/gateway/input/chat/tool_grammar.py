"""Makes the grammar of a chat's answers, if calls are required, or if tools are strict."""

import asyncio
from collections.abc import Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.gateway.constraints.message_grammar import CallableTool, MessageGrammar
from baton.gateway.input.chat.chat_request import ChatRequest
from baton.gateway.input.chat.tool_fields import Tool, ToolMode
from baton.gateway.input.client_call import InvalidField
from baton.gateway.output.formats import OutputFormat
from baton.gateway.text.tokenizer import Tokenizer


async def tool_grammar(chat: ChatRequest, prompt: str, output_format: OutputFormat, tokenizer: Tokenizer) -> str:
    """Return the grammar of the answers to `prompt`; empty if they need none.

    It is written in a thread. Raises InvalidField if it cannot be written, or if it is too large.
    """
    use = chat.tools
    has_strict = use.mode is ToolMode.AUTO and any(tool.strict for tool in use.tools)
    if use.mode is not ToolMode.REQUIRED and not has_strict:
        return ""
    return await asyncio.to_thread(_written, chat, prompt, output_format, tokenizer) or ""


def callable_tools(chat: ChatRequest) -> list[CallableTool]:
    """Return the tools that an answer may call."""
    is_required = chat.tools.mode is ToolMode.REQUIRED
    return [
        CallableTool(name=tool.name, parameters=_schema(tool, is_required=is_required), strict=tool.strict)
        for tool in chat.tools.tools
        if chat.tools.only in (None, tool.name)
    ]


def _written(chat: ChatRequest, prompt: str, output_format: OutputFormat, tokenizer: Tokenizer) -> str | None:
    use = chat.tools
    is_required = use.mode is ToolMode.REQUIRED
    if output_format.tools is None:
        if not is_required:
            return None
        raise InvalidField(
            "tool_choice",
            "tool_choice asks for a call, but the format of this model's calls is unknown; use auto, or start the "
            "gateway with --tool-parser",
            Reason.UNSUPPORTED_FIELD,
        )
    token_ids = {token.text: id_ for id_, token in tokenizer.added_tokens.items()}
    writer = MessageGrammar(output_format, output_format.tools, token_ids, prompt)
    tools = callable_tools(chat)
    grammar = writer.required(tools, parallel=use.parallel and use.only is None) if is_required else None
    grammar = grammar or writer.automatic(tools, parallel=use.parallel)
    if grammar is not None and len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise _invalid(
            f"the grammar of the tools has more than {MAX_GRAMMAR_BYTES:,} bytes; send fewer or smaller schemas"
        )
    return grammar


def _schema(tool: Tool, *, is_required: bool) -> Mapping[str, Any] | None:
    """Return the schema that the arguments must match. It is free if neither call nor schema is required."""
    return tool.parameters if tool.strict or is_required else {}


def _invalid(message: str) -> InvalidField:
    return InvalidField("tools", message, Reason.INVALID_GRAMMAR)
