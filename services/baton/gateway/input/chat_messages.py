"""The messages of a chat, as the model's chat template gets them: a role and a text each."""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_policy import Unimplemented
from baton.gateway.input.field_reader import as_object, check, check_count, check_text, refuse_others
from baton.gateway.text.chat_template import Message

ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role of a request → role in the template. OpenAI's newer name of `system` is unknown to templates."""

_KNOWN = frozenset(("role", "content", "name"))
_TOOLS = "tools are not implemented; put calls and results into the content"
_NOT_IN_MESSAGES: Mapping[str, Unimplemented] = {
    "annotations": Unimplemented(advice="leave them out", defaults=([],)),
    "audio": Unimplemented(advice="only text is implemented"),
    "function_call": Unimplemented(advice=_TOOLS),
    "refusal": Unimplemented(advice="put it into the content"),
    "tool_call_id": Unimplemented(advice=_TOOLS),
    "tool_calls": Unimplemented(advice=_TOOLS, defaults=([],)),
}


def messages_of(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """The checked `messages` of a chat's body. Raises InvalidField."""
    messages = body.get("messages")
    if not isinstance(messages, list | tuple):
        what = "is missing" if messages is None else f"must be a list, not {printable(messages)}"
        raise InvalidField("messages", f"messages {what}: send at least one message with a role and a content")
    if not messages:
        raise InvalidField("messages", "messages must not be empty; send at least one message")
    check_count("messages", len(messages))
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))


def _message(place: str, value: object) -> Message:
    message = as_object(place, value)
    refuse_others(message, _KNOWN, _NOT_IN_MESSAGES, f"{place}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        if role in ("tool", "function"):
            raise InvalidField(
                f"{place}.role", f"{place}.role {role!r} is not implemented: {_TOOLS}", Reason.UNSUPPORTED_FIELD
            )
        raise InvalidField(f"{place}.role", f"{place}.role must be one of {', '.join(ROLES)}, not {printable(role)}")
    made = {"role": ROLES[role], "content": _content(f"{place}.content", message.get("content"))}
    name = message.get("name")
    if name is not None:
        check("messages.name", name, f"{place}.name")
        made["name"] = name
    return made


def _content(place: str, content: object) -> str:
    """A text, or a list of text parts, which are joined as lines."""
    if isinstance(content, str):
        check_text(place, content)
        return content
    if not isinstance(content, list | tuple) or not content:
        raise InvalidField(place, f"{place} must be a text or a list of text parts, not {printable(content)}")
    return "\n".join(_part(f"{place}[{index}]", part) for index, part in enumerate(content))


def _part(place: str, value: object) -> str:
    part = as_object(place, value)
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        message = f"{place}.type must be 'text', not {printable(kind)}: only text is implemented"
        raise InvalidField(f"{place}.type", message, Reason.UNSUPPORTED_FIELD)
    refuse_others(part, frozenset(("type", "text")), {}, f"{place}.")
    if not isinstance(text, str):
        raise InvalidField(f"{place}.text", f"{place}.text must be a string, not {printable(text)}")
    check_text(f"{place}.text", text)
    return text
