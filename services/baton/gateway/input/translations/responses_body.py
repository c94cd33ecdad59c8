"""Translates the body of `/v1/responses` to a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.gateway.input.field_policy import FUNCTIONS
from baton.gateway.input.field_reader import check_fields
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS
from baton.gateway.input.responses_fields import (
    ALLOWED_TOOL,
    FORMAT,
    PASSED,
    REASONING,
    RESPONSES,
    STREAM_OPTIONS,
    TEXT,
    TOOL_CHOICE,
    TOOLS,
)
from baton.gateway.input.translations.checked_values import object_of, objects_of, text_of, unsupported
from baton.gateway.input.translations.responses_items import InputMessages
from baton.gateway.input.translations.translated_body import ListPlaces, TranslatedBody

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Known additions. All but the first concern items that no response here has."""
_NAMES: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "messages[].tool_call_id": ".call_id",
    "tools[].function": "",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_logprobs": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "metadata": {},
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
}
"""Fields that the response repeats, with the values that stand for an omitted field."""
_FIXED: Mapping[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
"""Fields of the response that have one value."""


def translate_responses(body: Mapping[str, Any], unknown: UnknownFields) -> TranslatedBody:
    """Translate a body with the fields of OpenAI's responses API. Raises InvalidField."""
    check_fields(body, RESPONSES, unknown)
    messages = InputMessages(unknown)
    if body.get("instructions") is not None:
        messages.add_instructions(text_of("instructions", body["instructions"]))
    messages.add_input(body.get("input"))
    tools = _tools(body.get("tools"), unknown)
    chat: dict[str, Any] = {name: body[name] for name in PASSED if body.get(name) is not None}
    chat["messages"] = messages.items
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if tools.items:
        chat["tools"] = tools.items
    chat |= _choice(body.get("tool_choice"), unknown)
    chat |= _format(body.get("text"), unknown)
    reasoning = object_of("reasoning", body.get("reasoning"), REASONING, unknown)
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    chat |= _logprobs(body)
    object_of("stream_options", body.get("stream_options"), STREAM_OPTIONS, unknown)
    echo = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
    echo["text"] = {"format": {"type": "text"}, **echo["text"]}
    echo["tools"] = [{"parameters": None, "strict": False, **tool} for tool in echo["tools"]]
    return TranslatedBody(
        chat=chat,
        echo={**echo, **_FIXED},
        names=_NAMES,
        places={"messages": messages.places, "tools": tools.places},
    )


def _tools(value: object, unknown: UnknownFields) -> ListPlaces:
    tools = ListPlaces()
    if value is None:
        return tools
    for place, tool in objects_of("tools", value, "tools"):
        if tool.get("type") != "function":
            raise unsupported(f"{place}.type", tool.get("type"), "only function tools are implemented")
        check_fields(tool, TOOLS, unknown, f"{place}.")
        tools.add(
            place,
            {"type": "function", "function": {name: tool[name] for name in FUNCTIONS if name in tool}},
        )
    return tools


def _choice(value: object, unknown: UnknownFields) -> dict[str, Any]:
    """Return the fields of a chat for `tool_choice`."""
    if value is None or isinstance(value, str):
        return {} if value is None else {"tool_choice": value}
    choice = object_of("tool_choice", value, TOOL_CHOICE, unknown)
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = {"mode": choice.get("mode"), "tools": _allowed(choice.get("tools"), unknown)}
        return {"tool_choice": {"type": kind, kind: allowed}}
    if kind != "function":
        raise unsupported("tool_choice.type", kind, "must be 'function' or 'allowed_tools'")
    name = text_of("tool_choice.name", choice.get("name"))
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def _allowed(value: object, unknown: UnknownFields) -> list[dict[str, Any]]:
    """Return the allowed tools, each in the form of a chat."""
    tools = []
    for place, tool in objects_of("tool_choice.tools", value, "tools"):
        check_fields(tool, ALLOWED_TOOL, unknown, f"{place}.")
        tools.append({"type": tool.get("type"), "function": {"name": tool.get("name")}})
    return tools


def _format(value: object, unknown: UnknownFields) -> dict[str, Any]:
    """Return the fields of a chat for `text`."""
    text = object_of("text", value, TEXT, unknown)
    fields = object_of("text.format", text.get("format"), FORMAT, unknown)
    kind = fields.get("type")
    if not fields or kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind != "json_schema":
        raise unsupported("text.format.type", kind, "must be 'text', 'json_object' or 'json_schema'")
    schema = {name: fields[name] for name in FORMAT if name != "type" and fields.get(name) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat for `include` and `top_logprobs`, each of which asks for logprobs."""
    include: Sequence[object] = body.get("include") or ()
    if not isinstance(include, JSON_LISTS):
        raise unsupported("include", include, "must be a list")
    for index, name in enumerate(include):
        if name not in _INCLUDED:
            raise unsupported(f"include[{index}]", name, f"must be one of {', '.join(_INCLUDED)}")
    top = body.get("top_logprobs")
    if LOGPROBS not in include and not top:
        return {}
    return {"logprobs": True, "top_logprobs": top or 0}
