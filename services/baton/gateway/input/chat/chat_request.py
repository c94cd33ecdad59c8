"""Reads the fields that only chats have: those of the chat template, and those of tools."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.gateway.input.chat.chat_messages import parse_messages
from baton.gateway.input.chat.template_fields import parse_template_fields
from baton.gateway.input.chat.tool_fields import NO_TOOLS, ToolUse, parse_tools
from baton.gateway.input.field_reader import FieldReader
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.text.chat_prompt import ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat whose fields are valid by themselves.

    include_reasoning: the response has the reasoning.
    """

    prompt: ChatPrompt
    tools: ToolUse = NO_TOOLS
    include_reasoning: bool = True


def parse_chat(body: Mapping[str, Any], unknown: UnknownFields) -> ChatRequest:
    """Return the chat of a request, and report unknown fields. Raises InvalidField."""
    messages, num_characters = parse_messages(body, unknown)
    tools = parse_tools(body, unknown)
    fields = parse_template_fields(body)
    includes = body.get("include_reasoning") is None or FieldReader(body).flag("include_reasoning")
    prompt = ChatPrompt(
        messages=messages,
        tools=tools.schemas,
        documents=fields.documents,
        variables=fields.variables,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        template=fields.template,
        num_characters=num_characters + tools.use.num_characters + fields.num_characters,
    )
    return ChatRequest(prompt=prompt, tools=tools.use, include_reasoning=includes)
