"""Makes the grammar of a chat's answers, if calls are required, or if tools are strict."""

import asyncio
from collections.abc import Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.gateway.constraints.gbnf import GrammarTextError
from baton.gateway.constraints.lark_writer import WrittenGrammar
from baton.gateway.constraints.message_grammar import CallableTool, MessageGrammar
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.input.chat.chat_request import ChatRequest
from baton.gateway.input.chat.tool_fields import Tool, ToolMode
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.schemas.schema_reader import read_schema
from baton.gateway.output.formats import OutputFormat
from baton.gateway.text.tokenizer import Tokenizer


async def tool_grammar(
    chat: ChatRequest, prompt: str, output_format: OutputFormat, tokenizer: Tokenizer
) -> WrittenGrammar | None:
    """Return the grammar of the answers to `prompt`; None if they need none.

    It is written in a thread. Raises InvalidField if it cannot be written, or if it is too large.
    """
    use = chat.tools
    has_strict = use.mode is ToolMode.AUTO and any(tool.strict for tool in use.tools)
    if use.mode is not ToolMode.REQUIRED and not has_strict:
        return None
    return await asyncio.to_thread(_written, chat, prompt, output_format, tokenizer)


def callable_tools(chat: ChatRequest, *, has_free_arguments: bool) -> list[CallableTool]:
    """Return the tools that an answer may call. Raises InvalidField if a schema is invalid.

    has_free_arguments: arguments may be any object, except those of strict tools.
    """
    return [
        CallableTool(
            name=tool.name,
            parameters={} if has_free_arguments and not tool.strict else _schema(tool),
            strict=tool.strict,
            sent=tool.parameters,
        )
        for tool in chat.tools.tools
        if chat.tools.only in (None, tool.name)
    ]


def _written(
    chat: ChatRequest, prompt: str, output_format: OutputFormat, tokenizer: Tokenizer
) -> WrittenGrammar | None:
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
    tools = callable_tools(chat, has_free_arguments=not is_required)
    try:
        if is_required:
            grammar = writer.required(tools, parallel=use.parallel and use.only is None)
        else:
            grammar = writer.automatic(tools, parallel=use.parallel)
    except UnsupportedSchema as error:
        raise InvalidField("tools", f"tools: {error}", Reason.INVALID_GRAMMAR) from error
    except GrammarTextError:
        grammar = None
    if grammar is None or len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        message = f"the grammar of the tools has more than {MAX_GRAMMAR_BYTES:,} bytes; send fewer or smaller schemas"
        raise InvalidField("tools", message, Reason.INVALID_GRAMMAR)
    return grammar


def _schema(tool: Tool) -> Mapping[str, Any] | None:
    if tool.parameters is None:
        return None
    return read_schema(f"{tool.place}.parameters", tool.parameters, lenient=not tool.strict)
