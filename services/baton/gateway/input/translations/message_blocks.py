"""Translates the messages of Anthropic's API, which are lists of blocks, to messages of a chat.

Results of tools become messages of role `tool`, in their place among the texts of the user.
"""

from collections.abc import Callable, Mapping
from typing import Any

from baton.core.request_limits import printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import as_object, check_fields
from baton.gateway.input.field_table import FieldTable
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS
from baton.gateway.input.messages_fields import (
    MESSAGE,
    REDACTED_BLOCK,
    TEXT_BLOCK,
    THINKING_BLOCK,
    TOOL_RESULT_BLOCK,
    TOOL_USE_BLOCK,
)
from baton.gateway.input.translations.checked_values import call_text_of, flag_of, objects_of, text_of, unsupported
from baton.gateway.input.translations.translated_body import ListPlaces

ERROR = "Error: "
"""Prefix of the result of a call that failed."""
_BLOCKS: Mapping[str, Mapping[str, FieldTable]] = {
    "user": {"text": TEXT_BLOCK, "tool_result": TOOL_RESULT_BLOCK},
    "assistant": {
        "text": TEXT_BLOCK,
        "thinking": THINKING_BLOCK,
        "redacted_thinking": REDACTED_BLOCK,
        "tool_use": TOOL_USE_BLOCK,
    },
    "system": {"text": TEXT_BLOCK},
}
"""Kinds of blocks in the messages of each role."""


class BlockMessages(ListPlaces):
    """Messages of a chat, made of Anthropic's messages."""

    def __init__(self, unknown: UnknownFields) -> None:
        super().__init__()
        self._unknown = unknown

    def add_system(self, value: object) -> None:
        """Begin with the field `system`. Raises InvalidField."""
        text = self._texts("system", value)
        if text:
            self.add("system", {"role": "system", "content": text})

    def add_messages(self, value: object) -> None:
        """Add the field `messages`. Raises InvalidField."""
        for place, message in objects_of("messages", value, "messages"):
            check_fields(message, MESSAGE, self._unknown, f"{place}.")
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or role not in _BLOCKS:
                roles = ", ".join(_BLOCKS)
                raise InvalidField(f"{place}.role", f"{place}.role is {printable(role)}; must be one of {roles}")
            if isinstance(content, JSON_LISTS):
                if not content and role != "assistant":
                    problem = f"{place}.content is an empty list; must be a string or a list of blocks"
                    raise InvalidField(f"{place}.content", problem)
                self._blocks(place, role, content)
            else:
                text = text_of(f"{place}.content", content, "must be a string or a list of blocks")
                self.add(place, {"role": role, "content": text})
        if not self.places or self.places[-1] == "system":
            raise InvalidField("messages", "messages is empty; send at least one message")

    @property
    def continues(self) -> bool:
        """True if the last message is text of the assistant, which the answer continues."""
        last = self.items[-1]
        return last["role"] == "assistant" and bool(last.get("content")) and "tool_calls" not in last

    def _blocks(self, place: str, role: str, content: object) -> None:
        texts: list[str] = []
        if role == "assistant":
            self.add(place, {"role": role})
        for at, block in objects_of(f"{place}.content", content, "messages"):
            kind = block.get("type")
            kinds = _BLOCKS[role]
            if not isinstance(kind, str) or kind not in kinds:
                known = ", ".join(kinds)
                raise unsupported(f"{at}.type", kind, f"a message of role {role} has blocks of type {known}")
            check_fields(block, kinds[kind], self._unknown, f"{at}.")
            if kind == "text":
                texts.append(text_of(f"{at}.text", block.get("text")))
            elif kind != "redacted_thinking":
                _ADDERS[kind](self, place, texts, at, block)
        if role == "assistant":
            if texts or len(self.items[-1]) == 1:
                self.items[-1]["content"] = "\n".join(texts)
        else:
            self._flush(place, role, texts)

    def _flush(self, place: str, role: str, texts: list[str]) -> None:
        """Add the texts before a result as a message."""
        if texts:
            self.add(place, {"role": role, "content": "\n".join(texts)})
            texts.clear()

    def _thinking(self, place: str, texts: list[str], at: str, block: Mapping[str, Any]) -> None:
        message, thinking = self.items[-1], text_of(f"{at}.thinking", block.get("thinking"))
        before = message.get("reasoning_content")
        message["reasoning_content"] = thinking if before is None else f"{before}\n{thinking}"

    def _tool_use(self, place: str, texts: list[str], at: str, block: Mapping[str, Any]) -> None:
        arguments = as_object(f"{at}.input", block.get("input"))
        call_id = call_text_of(f"{at}.id", block.get("id"), "messages.tool_call_id")
        name = call_text_of(f"{at}.name", block.get("name"), "messages.function_name")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.items[-1].setdefault("tool_calls", []).append(call)

    def _tool_result(self, place: str, texts: list[str], at: str, block: Mapping[str, Any]) -> None:
        self._flush(place, "user", texts)
        content = block.get("content")
        text = "" if content is None else self._texts(f"{at}.content", content)
        if flag_of(f"{at}.is_error", block.get("is_error")):
            text = ERROR + text
        call_id = text_of(f"{at}.tool_use_id", block.get("tool_use_id"))
        self.add(at, {"role": "tool", "tool_call_id": call_id, "content": text})

    def _texts(self, place: str, value: object) -> str:
        """Return a text, or joined text blocks."""
        if not isinstance(value, JSON_LISTS):
            return text_of(place, value, "must be a string or a list of text blocks")
        texts = []
        for at, block in objects_of(place, value, "messages"):
            if block.get("type") != "text":
                raise unsupported(f"{at}.type", block.get("type"), "must be 'text', because only text is implemented")
            check_fields(block, TEXT_BLOCK, self._unknown, f"{at}.")
            texts.append(text_of(f"{at}.text", block.get("text")))
        return "\n".join(texts)


_ADDERS: Mapping[str, Callable[[BlockMessages, str, list[str], str, Mapping[str, Any]], None]] = {
    "thinking": BlockMessages._thinking,
    "tool_use": BlockMessages._tool_use,
    "tool_result": BlockMessages._tool_result,
}
"""Methods that add blocks other than texts. Kept in the object, they would be in a cycle with it, and the
body would live until a garbage collection."""
