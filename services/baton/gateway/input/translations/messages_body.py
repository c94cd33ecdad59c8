"""Translates the bodies of `/v1/messages` and `/v1/messages/count_tokens` to chats."""

from collections.abc import Mapping
from typing import Any

from baton.core.request_limits import printable
from baton.gateway.input.chat.template_fields import THINKING_VARIABLES
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_policy import TOKENIZE
from baton.gateway.input.field_reader import as_object, check_fields
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.messages_fields import (
    COUNT_TOKENS,
    FORMAT,
    MESSAGES,
    METADATA,
    OUTPUT_CONFIG,
    PASSED,
    THINKING,
    TOOL_CHOICE,
    TOOLS,
)
from baton.gateway.input.translations.checked_values import flag_of, object_of, objects_of, text_of, unsupported
from baton.gateway.input.translations.message_blocks import BlockMessages
from baton.gateway.input.translations.translated_body import ListPlaces, TranslatedBody

_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "messages[].tool_call_id": ".tool_use_id",
    "tools[].function.parameters": ".input_schema",
    "tools[].function": "",
    "tool_choice.function": "tool_choice",
}
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_FUNCTION = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}


def translate_messages(body: Mapping[str, Any], unknown: UnknownFields) -> TranslatedBody:
    """Translate a body with the fields of Anthropic's messages API. Raises InvalidField."""
    check_fields(body, MESSAGES, unknown)
    if body.get("max_tokens") is None:
        raise InvalidField("max_tokens", "max_tokens is missing; send the most tokens to generate")
    object_of("metadata", body.get("metadata"), METADATA, unknown)
    chat: dict[str, Any] = {name: body[name] for name in PASSED if body.get(name) is not None}
    chat["max_tokens"] = body["max_tokens"]
    if body.get("stop_sequences") is not None:
        chat["stop"] = _stops(body["stop_sequences"])
    return _translated(chat, body, unknown)


def translate_count(body: Mapping[str, Any], unknown: UnknownFields) -> TranslatedBody:
    """Translate a body that counts tokens to one of `/tokenize`. Raises InvalidField."""
    check_fields(body, COUNT_TOKENS, unknown)
    chat = {name: body[name] for name in PASSED if name in COUNT_TOKENS and body.get(name) is not None}
    translated = _translated(chat, body, unknown)
    fields = {name: value for name, value in chat.items() if name in TOKENIZE}
    return TranslatedBody(chat=fields, names=translated.names, places=translated.places)


def _translated(chat: dict[str, Any], body: Mapping[str, Any], unknown: UnknownFields) -> TranslatedBody:
    """Add the fields that both endpoints have."""
    messages = BlockMessages(unknown)
    if body.get("system") is not None:
        messages.add_system(body["system"])
    messages.add_messages(body.get("messages"))
    chat["messages"] = messages.items
    if messages.continues:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = _tools(body.get("tools"), unknown)
    if tools.items:
        chat["tools"] = tools.items
    choice = _choice(body.get("tool_choice"), unknown)
    if choice.get("tool_choice") == "required" and not tools.items:
        raise InvalidField("tool_choice", "tool_choice.type is 'any', but there are no tools; send tools")
    chat |= choice
    chat |= _output_config(body, unknown)
    variables = chat.get("chat_template_kwargs") or {}
    thinks = _thinks(body.get("thinking"), unknown)
    chat["chat_template_kwargs"] = {
        **dict.fromkeys(THINKING_VARIABLES, thinks),
        **as_object("chat_template_kwargs", variables),
    }
    return TranslatedBody(chat=chat, names=_NAMES, places={"messages": messages.places, "tools": tools.places})


def _stops(value: object) -> object:
    if isinstance(value, str):
        raise InvalidField("stop_sequences", f"stop_sequences is {printable(value)}; must be a list")
    return value


def _thinks(value: object, unknown: UnknownFields) -> bool:
    """Return True if the model may reason. Without the field it may not."""
    if value is None:
        return False
    thinking = object_of("thinking", value, THINKING, unknown)
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise unsupported("thinking.type", kind, "must be 'enabled', 'disabled' or 'adaptive'")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise InvalidField(
            "thinking.budget_tokens", f"thinking.budget_tokens is {printable(budget)}; must be an integer of at least 1"
        )
    return kind != "disabled"


def _tools(value: object, unknown: UnknownFields) -> ListPlaces:
    tools = ListPlaces()
    if value is None:
        return tools
    for place, tool in objects_of("tools", value, "tools"):
        if tool.get("type") not in (None, "custom"):
            raise unsupported(f"{place}.type", tool["type"], "only tools with an input_schema are implemented")
        check_fields(tool, TOOLS, unknown, f"{place}.")
        if tool.get("input_schema") is None:
            raise InvalidField(f"{place}.input_schema", f"{place}.input_schema is missing; send a JSON schema")
        function = {_FUNCTION[name]: item for name, item in tool.items() if name in _FUNCTION and item is not None}
        tools.add(place, {"type": "function", "function": function})
    return tools


def _choice(value: object, unknown: UnknownFields) -> dict[str, Any]:
    """Return the fields of a chat for `tool_choice`."""
    if value is None:
        return {}
    choice = object_of("tool_choice", value, TOOL_CHOICE, unknown)
    kind = choice.get("type")
    parallel: dict[str, Any] = {}
    if flag_of("tool_choice.disable_parallel_tool_use", choice.get("disable_parallel_tool_use")):
        parallel = {"parallel_tool_calls": False}
    if kind == "tool":
        name = text_of("tool_choice.name", choice.get("name"))
        return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise unsupported("tool_choice.type", kind, "must be 'auto', 'any', 'tool' or 'none'")
    return {"tool_choice": _CHOICES[kind], **parallel}


def _output_config(body: Mapping[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    """Return the fields of a chat for `output_config`, and for its older form `output_format`."""
    config = object_of("output_config", body.get("output_config"), OUTPUT_CONFIG, unknown)
    chat: dict[str, Any] = {}
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    place, value = "output_config.format", config.get("format")
    if body.get("output_format") is not None:
        if value is not None:
            raise InvalidField("output_format", f"output_format and {place} are both set; send only {place}")
        place, value = "output_format", body["output_format"]
    if value is not None:
        fields = object_of(place, value, FORMAT, unknown)
        if fields.get("type") != "json_schema":
            raise unsupported(f"{place}.type", fields.get("type"), "must be 'json_schema'")
        schema = {"name": "answer", "schema": fields.get("schema"), "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat
