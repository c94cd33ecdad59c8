"""Validates the messages of a chat request and converts them to roles and texts for the chat template."""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_policy import Unimplemented
from baton.gateway.input.field_reader import as_object, check, check_count, check_text, refuse_unknown_fields
from baton.gateway.input.json_pieces import JSON_LISTS
from baton.gateway.text.chat_template import Message

ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in a request → role in the template. Templates do not know `developer`, OpenAI's newer name of
`system`."""

_KNOWN = frozenset(("role", "content", "name"))
_TOOLS = "tools are not implemented; put calls and results into the message content"
_NOT_IN_MESSAGES: Mapping[str, Unimplemented] = {
    "annotations": Unimplemented(advice="leave them out", defaults=([],)),
    "audio": Unimplemented(advice="only text is implemented"),
    "function_call": Unimplemented(advice=_TOOLS),
    "refusal": Unimplemented(advice="put the text into the message content"),
    "tool_call_id": Unimplemented(advice=_TOOLS),
    "tool_calls": Unimplemented(advice=_TOOLS, defaults=([],)),
}


def parse_messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the validated `messages` of a chat request. Raises InvalidField."""
    messages = body.get("messages")
    if not isinstance(messages, JSON_LISTS):
        what = "is missing" if messages is None else f"is {printable(messages)}; must be a list"
        raise InvalidField("messages", f"messages {what}; send at least one message with a role and a content")
    if not messages:
        raise InvalidField("messages", "messages is empty; send at least one message")
    check_count("messages", len(messages))
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))


def _message(place: str, value: object) -> Message:
    message = as_object(place, value)
    refuse_unknown_fields(message, _KNOWN, _NOT_IN_MESSAGES, f"{place}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        if role in ("tool", "function"):
            raise InvalidField(f"{place}.role", f"{place}.role is {role!r}: {_TOOLS}", Reason.UNSUPPORTED_FIELD)
        raise InvalidField(f"{place}.role", f"{place}.role is {printable(role)}; must be one of {', '.join(ROLES)}")
    result = {"role": ROLES[role], "content": _content(f"{place}.content", message.get("content"))}
    name = message.get("name")
    if name is not None:
        check("messages.name", name, f"{place}.name")
        result["name"] = name
    return result


def _content(place: str, content: object) -> str:
    """Return the text of a message. A list of text parts is joined with newlines."""
    if isinstance(content, str):
        check_text(place, content)
        return content
    if not isinstance(content, JSON_LISTS) or not content:
        given = "an empty list" if content == [] or content == () else printable(content)
        raise InvalidField(place, f"{place} is {given}; must be a string or a list of text parts")
    return "\n".join(_part(f"{place}[{index}]", part) for index, part in enumerate(content))


def _part(place: str, value: object) -> str:
    part = as_object(place, value)
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        message = f"{place}.type is {printable(kind)}; must be 'text', because only text is implemented"
        raise InvalidField(f"{place}.type", message, Reason.UNSUPPORTED_FIELD)
    refuse_unknown_fields(part, frozenset(("type", "text")), {}, f"{place}.")
    if not isinstance(text, str):
        raise InvalidField(f"{place}.text", f"{place}.text is {printable(text)}; must be a string")
    check_text(f"{place}.text", text)
    return text
