"""Validates the messages of a chat request and converts them to the form that chat templates get.

Text parts are joined. Tool calls get their arguments as objects. Legacy `function_call` and messages of role
`function` become tool calls and their results.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import Reason, Refused
from baton.core.request_limits import MAX_JSON_VALUES, printable
from baton.gateway.input import field_policy
from baton.gateway.input.chat.plain_values import ValueBudget
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import as_object, check, check_count, check_fields, check_text
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS
from baton.gateway.input.strict_json import parse_object

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ANSWERS = ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning")
"""Fields that only messages of the assistant have."""


@dataclass(slots=True)
class _Chat:
    """Facts of earlier messages that later ones are checked against.

    names: name of the tool by the id of its call.
    function_ids: id of the last legacy call of each function.
    arguments: budget of the values in arguments of all calls.
    num_characters: size of all messages.
    unknown: collects unknown fields.
    """

    unknown: UnknownFields
    names: dict[str, str] = field(default_factory=dict)
    function_ids: dict[str, str] = field(default_factory=dict)
    arguments: ValueBudget = field(default_factory=lambda: ValueBudget("messages", 2**62, MAX_JSON_VALUES))
    num_characters: int = 0

    def text(self, place: str, value: object, what: str = "a string") -> str:
        """Return a text and count it. Raises InvalidField."""
        if not isinstance(value, str):
            raise InvalidField(place, f"{place} is {printable(value)}; must be {what}")
        check_text(place, value)
        self.num_characters += len(value)
        return value


def parse_messages(body: Mapping[str, Any], unknown: UnknownFields) -> tuple[tuple[dict[str, Any], ...], int]:
    """Return the `messages` of a chat request, and the number of their characters. Raises InvalidField."""
    messages = body.get("messages")
    if not isinstance(messages, JSON_LISTS):
        what = "is missing" if messages is None else f"is {printable(messages)}; must be a list"
        raise InvalidField("messages", f"messages {what}; send at least one message with a role and a content")
    if not messages:
        raise InvalidField("messages", "messages is empty; send at least one message")
    check_count("messages", len(messages))
    chat = _Chat(unknown)
    return tuple(_message(f"messages[{n}]", message, chat) for n, message in enumerate(messages)), chat.num_characters


def _message(place: str, value: object, chat: _Chat) -> dict[str, Any]:
    message = as_object(place, value)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{place}.role", f"{place}.role is {printable(role)}; must be one of {', '.join(ROLES)}")
    check_fields(message, field_policy.MESSAGES, chat.unknown, f"{place}.")
    for fields, roles in ((_ANSWERS, ("assistant",)), (("tool_call_id",), ("tool", "function"))):
        for name in fields if role not in roles else ():
            if message.get(name) not in (None, []):
                raise InvalidField(
                    f"{place}.{name}", f"{place}.{name} is set, but only messages of role {roles[0]} have it; remove it"
                )
    if role == "assistant":
        return _answer(place, message, chat)
    result: dict[str, Any] = {"role": role, "content": _content(f"{place}.content", message.get("content"), chat)}
    author = _name(place, message)
    if author is not None:
        result["name"] = author
    if role == "tool":
        _add_call_id(place, message, result, chat)
    elif role == "function":
        if author is None:
            raise InvalidField(f"{place}.name", f"{place}.name is missing; name the function whose result this is")
        result |= {"role": "tool", "tool_call_id": chat.function_ids.get(author, f"call_{author}")}
    return result


def _name(place: str, message: Mapping[str, Any]) -> str | None:
    name: str | None = message.get("name")
    if name is not None:
        check("messages.name", name, f"{place}.name")
    return name


def _add_call_id(place: str, message: Mapping[str, Any], result: dict[str, Any], chat: _Chat) -> None:
    """Add the id of the call whose result the message has, and the name of its tool, which some templates
    need."""
    call_id = message.get("tool_call_id")
    if call_id is None:
        raise InvalidField(f"{place}.tool_call_id", f"{place}.tool_call_id is missing; send the id of the tool call")
    check("messages.tool_call_id", call_id, f"{place}.tool_call_id")
    if call_id not in chat.names:
        raise InvalidField(
            f"{place}.tool_call_id",
            f"{place}.tool_call_id is {printable(call_id)}; no message before has a tool call of this id; send the "
            "assistant's message with the call, too",
        )
    result["tool_call_id"] = call_id
    result.setdefault("name", chat.names[call_id])


def _answer(place: str, message: Mapping[str, Any], chat: _Chat) -> dict[str, Any]:
    """Return a message of the assistant. It needs no content if it has anything else."""
    calls = _calls(place, message, chat)
    reasoning = next((key for key in ("reasoning_content", "reasoning") if message.get(key) is not None), None)
    refusal = message.get("refusal")
    content = message.get("content")
    if (content is None and (calls or reasoning or refusal is not None)) or (
        calls and isinstance(content, JSON_LISTS) and not content
    ):
        text = None
    else:
        text = _content(f"{place}.content", content, chat, is_answer=True)
    if refusal is not None:
        text = "\n".join(filter(None, (text, chat.text(f"{place}.refusal", refusal))))
    result: dict[str, Any] = {"role": "assistant", "content": text}
    if (name := _name(place, message)) is not None:
        result["name"] = name
    if reasoning is not None:
        result["reasoning_content"] = chat.text(f"{place}.{reasoning}", message[reasoning])
    if calls:
        result["tool_calls"] = calls
    return result


def _calls(place: str, message: Mapping[str, Any], chat: _Chat) -> list[dict[str, Any]]:
    """Return the tool calls of an answer, or its legacy function call as one."""
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if legacy is not None:
        if calls:
            raise InvalidField(
                f"{place}.function_call", f"{place} has both tool_calls and function_call; send only tool_calls"
            )
        call = _function(f"{place}.function_call", legacy, chat)
        name = call["function"]["name"]
        chat.function_ids[name] = call_id = f"call_{name}_{len(chat.function_ids)}"
        chat.names[call_id] = name
        return [{"id": call_id, "type": "function", **call}]
    if calls is None:
        return []
    if not isinstance(calls, JSON_LISTS):
        raise InvalidField(f"{place}.tool_calls", f"{place}.tool_calls is {printable(calls)}; must be a list")
    check_count("messages.tool_calls", len(calls), f"{place}.tool_calls")
    return [_call(f"{place}.tool_calls[{n}]", call, chat) for n, call in enumerate(calls)]


def _call(place: str, value: object, chat: _Chat) -> dict[str, Any]:
    call = as_object(place, value)
    check_fields(call, field_policy.TOOL_CALLS, chat.unknown, f"{place}.")
    if (kind := call.get("type", "function")) != "function":
        message = f"{place}.type is {printable(kind)}; must be 'function', because only function tools are implemented"
        raise InvalidField(f"{place}.type", message, Reason.UNSUPPORTED_FIELD)
    call_id = call.get("id")
    if call_id is None:
        raise InvalidField(f"{place}.id", f"{place}.id is missing; send the id of the tool call")
    check("messages.tool_call_id", call_id, f"{place}.id")
    result = {"id": call_id, "type": "function", **_function(f"{place}.function", call.get("function"), chat)}
    chat.names[call_id] = result["function"]["name"]
    return result


def _function(place: str, value: object, chat: _Chat) -> dict[str, Any]:
    """Return the called function with its arguments, and the arguments as they were sent."""
    function = as_object(place, value)
    check_fields(function, field_policy.CALLED_FUNCTION, chat.unknown, f"{place}.")
    name = function.get("name")
    check("messages.function_name", name, f"{place}.name")
    given = function.get("arguments")
    if isinstance(given, Mapping):  # not OpenAI's form, but templates and other servers have it
        arguments = chat.arguments.plain(f"{place}.arguments", given)
        chat.num_characters += chat.arguments.num_characters
        text = json.dumps(arguments, ensure_ascii=False)
        return {"function": {"name": name, "arguments": arguments}, "arguments_text": text}
    text = "{}" if given is None else chat.text(f"{place}.arguments", given, "a JSON object in a string")
    return {"function": {"name": name, "arguments": _arguments(place, text, chat)}, "arguments_text": text}


def _arguments(place: str, text: str, chat: _Chat) -> dict[str, Any] | str:
    """Return the arguments as an object; as they are if they are no JSON object, because models make
    mistakes."""
    if not text.strip():
        return {}
    # Each value but the first has one of these before it, so that the memory is bounded before it is taken.
    chat.arguments.take(0, sum(map(text.count, ",:[{")))
    try:
        return ValueBudget("messages", 2**62).plain_object(f"{place}.arguments", parse_object(text.encode()))
    except Refused:
        return text


def _content(place: str, content: object, chat: _Chat, *, is_answer: bool = False) -> str:
    """Return the text of a message. A list of text parts is joined with newlines."""
    if isinstance(content, str):
        return chat.text(place, content)
    if not isinstance(content, JSON_LISTS) or not content:
        given = "an empty list" if content == [] or content == () else printable(content)
        raise InvalidField(place, f"{place} is {given}; must be a string or a list of text parts")
    kinds: Sequence[str] = ("text", "refusal") if is_answer else ("text",)
    return "\n".join(_part(f"{place}[{index}]", part, chat, kinds) for index, part in enumerate(content))


def _part(place: str, value: object, chat: _Chat, kinds: Sequence[str]) -> str:
    part = as_object(place, value)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        allowed = " or ".join(map(repr, kinds))
        message = f"{place}.type is {printable(kind)}; must be {allowed}, because only text is implemented"
        raise InvalidField(f"{place}.type", message, Reason.UNSUPPORTED_FIELD)
    check_fields(part, field_policy.MESSAGE_PARTS, chat.unknown, f"{place}.")
    return chat.text(f"{place}.{kind}", part.get(kind))
