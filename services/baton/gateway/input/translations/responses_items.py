"""Translates the input items of `/v1/responses` to messages of a chat.

Items of one answer of the model, that is its reasoning, text and calls, become one message.
"""

from collections.abc import Callable, Mapping
from typing import Any

from baton.core.request_limits import printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import check_fields
from baton.gateway.input.field_table import FieldTable
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS
from baton.gateway.input.responses_fields import CALL_ITEM, CONTENT_PARTS, MESSAGE_ITEM, OUTPUT_ITEM, REASONING_ITEM
from baton.gateway.input.translations.checked_values import call_text_of, objects_of, text_of, unsupported
from baton.gateway.input.translations.translated_body import ListPlaces

ROLES = ("user", "assistant", "system", "developer")
_KINDS = "message, function_call, function_call_output and reasoning are implemented"


class InputMessages(ListPlaces):
    """Messages of a chat, made of input items."""

    def __init__(self, unknown: UnknownFields) -> None:
        super().__init__()
        self._unknown = unknown
        self._answer: dict[str, Any] | None = None

    def add_instructions(self, instructions: str) -> None:
        """Begin with a system message."""
        self.add("instructions", {"role": "system", "content": instructions})

    def add_input(self, value: object) -> None:
        """Add the field `input`. Raises InvalidField."""
        if not isinstance(value, JSON_LISTS):
            text = text_of("input", value, "must be a string or a list of items")
            self.add("input", {"role": "user", "content": text})
            return
        for place, item in objects_of("input", value, "messages"):
            kind = item.get("type", "message" if "role" in item else None)
            if not isinstance(kind, str) or kind not in _ITEMS:
                raise unsupported(f"{place}.type", kind, f"only {_KINDS}")
            table, add = _ITEMS[kind]
            check_fields(item, table, self._unknown, f"{place}.")
            add(self, place, item)

    def _message(self, place: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidField(f"{place}.role", f"{place}.role is {printable(role)}; must be one of {', '.join(ROLES)}")
        content = self._text(f"{place}.content", item.get("content"))
        if role == "assistant":
            self._answer_with(place, "content")["content"] = content
        elif role != "user" and len(self.items) == 1 and self.places[0] == "instructions":
            # Templates know a system message only at the beginning.
            self.items[0]["content"] += f"\n\n{content}"
        else:
            self._answer = None
            self.add(place, {"role": role, "content": content})

    def _call(self, place: str, item: Mapping[str, Any]) -> None:
        function = {
            "name": call_text_of(f"{place}.name", item.get("name"), "messages.function_name"),
            "arguments": text_of(f"{place}.arguments", item.get("arguments")),
        }
        call_id = call_text_of(f"{place}.call_id", item.get("call_id"), "messages.tool_call_id")
        call = {"id": call_id, "type": "function", "function": function}
        self._answer_with(place, None).setdefault("tool_calls", []).append(call)

    def _output(self, place: str, item: Mapping[str, Any]) -> None:
        self._answer = None
        call_id = text_of(f"{place}.call_id", item.get("call_id"))
        output = self._text(f"{place}.output", item.get("output"))
        self.add(place, {"role": "tool", "tool_call_id": call_id, "content": output})

    def _reasoning(self, place: str, item: Mapping[str, Any]) -> None:
        reasoning = item.get("content")
        if reasoning:
            self._answer_with(place, "reasoning_content")["reasoning_content"] = self._text(
                f"{place}.content", reasoning
            )

    def _answer_with(self, place: str, new: str | None) -> dict[str, Any]:
        """Return the open message of the assistant; a new one if reasoning or text begin another answer."""
        answer = self._answer
        if answer is None or (
            new is not None and (new in answer or "tool_calls" in answer or (new != "content" and "content" in answer))
        ):
            answer = self._answer = self.add(place, {"role": "assistant"})
        return answer

    def _text(self, place: str, value: object) -> str:
        """Return the text of a content, whose parts are joined."""
        if not isinstance(value, JSON_LISTS):
            return text_of(place, value, "must be a string or a list of text parts")
        texts = []
        for at, part in objects_of(place, value, "messages"):
            kind = part.get("type")
            if kind not in ("input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal"):
                raise unsupported(f"{at}.type", kind, "only text is implemented")
            check_fields(part, CONTENT_PARTS, self._unknown, f"{at}.")
            name = "refusal" if kind == "refusal" else "text"
            texts.append(text_of(f"{at}.{name}", part.get(name)))
        return "\n".join(texts)


_ITEMS: Mapping[str, tuple[FieldTable, Callable[[InputMessages, str, Mapping[str, Any]], None]]] = {
    "message": (MESSAGE_ITEM, InputMessages._message),
    "function_call": (CALL_ITEM, InputMessages._call),
    "function_call_output": (OUTPUT_ITEM, InputMessages._output),
    "reasoning": (REASONING_ITEM, InputMessages._reasoning),
}
"""Fields of each kind of item, and the method that adds it. Kept in the object, the methods would be in a
cycle with it, and the body would live until a garbage collection."""
