"""Adapts messages to the form that a model's chat template expects, found by rendering small chats.

Templates differ: arguments of tool calls are objects for most, and JSON texts for some; the content of a
message with only tool calls is null for some; ids must have nine characters for Mistral's older templates;
the content of every message is a list of parts for templates of some models that also read images.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from baton.core.errors import Refused
from baton.gateway.text.chat_prompt import ChatPrompt, Message

SHORT_ID_CHARACTERS = 9
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_TOOL, _KEY, _VALUE, _THOUGHT = "probe_tool", "probe_key", "probe-value", "probe-thought"
_QUESTION = "probe-question"

Render = Callable[[ChatPrompt], str]
"""Renders a chat. Raises Refused if the template rejects it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateStyle:
    """Form of the messages that a template expects.

    knows_developer: the role `developer` is passed on; otherwise it becomes `system`.
    arguments_as_text: arguments of tool calls are JSON texts; otherwise objects.
    null_content: the content beside tool calls is null if there is none; otherwise an empty text.
    short_ids: ids of tool calls have nine letters and digits.
    content_excludes_thinking: a message with tool calls has either a content or reasoning.
    content_as_parts: the content is a list with one part of type text; otherwise a text.
    """

    knows_developer: bool = False
    arguments_as_text: bool = False
    null_content: bool = False
    short_ids: bool = False
    content_excludes_thinking: bool = False
    content_as_parts: bool = False

    def adapted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return new messages in this form."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        adapted = dict(message)
        if adapted["role"] == "developer" and not self.knows_developer:
            adapted["role"] = "system"
        if (calls := adapted.get("tool_calls")) is not None:
            adapted["tool_calls"] = [self._call(call) for call in calls]
        if adapted.get("content", "") is None and not self.null_content:
            adapted["content"] = ""
        if self.short_ids and "tool_call_id" in adapted:
            adapted["tool_call_id"] = short_id(adapted["tool_call_id"])
        if self.content_excludes_thinking and calls and adapted["content"]:
            adapted.pop("reasoning_content", None)
        elif (reasoning := adapted.get("reasoning_content")) is not None:
            adapted["thinking"] = reasoning  # the name that gpt-oss reads; transformers gives both names, too
        if self.content_as_parts and isinstance(content := adapted.get("content"), str):
            adapted["content"] = [{"type": "text", "text": content}] if content else []
        return adapted

    def _call(self, call: Message) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments_as_text:
            function["arguments"] = call["arguments_text"]
        return {
            "id": short_id(call["id"]) if self.short_ids else call["id"],
            "type": "function",
            "function": function,
        }


def short_id(call_id: str) -> str:
    """Return an id of nine letters and digits for the id of a tool call."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_ID_CHARACTERS]


def style_of(source: str, render: Render) -> TemplateStyle:
    """Return the style of a template, which `render` renders with messages as they are.

    The first form counts in which a tool call appears in the prompt, from the usual to the unusual. A
    template that shows no tool call gets the usual one.
    """
    base = TemplateStyle(knows_developer="developer" in source, content_as_parts=_needs_parts(render))
    for style in _styles(base):
        text = _rendered(render, style.adapted(_probe("")))
        if text is not None and _shows_call(text):
            thinking = _rendered(render, style.adapted(_probe("probe-content")))
            if thinking is not None:
                return style
            return replace(style, content_excludes_thinking=True)
    return base


def _styles(base: TemplateStyle) -> Iterator[TemplateStyle]:
    for short_ids, arguments_as_text, null_content in product((False, True), repeat=3):
        yield replace(base, short_ids=short_ids, arguments_as_text=arguments_as_text, null_content=null_content)


def _needs_parts(render: Render) -> bool:
    """True if a question is only in the prompt when its content is a list of parts."""

    def is_shown(style: TemplateStyle) -> bool:
        question: Message = {"role": "user", "content": _QUESTION}
        try:
            return _QUESTION in render(ChatPrompt(messages=style.adapted([question])))
        except Refused:
            return False

    return not is_shown(TemplateStyle()) and is_shown(TemplateStyle(content_as_parts=True))


def _probe(content: str) -> list[Message]:
    """Return a chat with a tool call and its result. With a content, the call has reasoning beside it."""
    call = {
        "id": "call_probe_0123456789",
        "type": "function",
        "arguments_text": f'{{"{_KEY}": "{_VALUE}"}}',
        "function": {"name": _TOOL, "arguments": {_KEY: _VALUE}},
    }
    answer: dict[str, Any] = {"role": "assistant", "content": content or None, "tool_calls": [call]}
    if content:
        answer["reasoning_content"] = _THOUGHT
    result = {"role": "tool", "tool_call_id": call["id"], "name": _TOOL, "content": "probe-result"}
    return [{"role": "user", "content": _QUESTION}, answer, result]


def _rendered(render: Render, messages: list[dict[str, Any]]) -> str | None:
    schema = {"type": "object", "properties": {_KEY: {"type": "string", "description": "a text"}}}
    tool = {"type": "function", "function": {"name": _TOOL, "description": "a tool", "parameters": schema}}
    try:
        return render(ChatPrompt(messages=messages, tools=[tool]))
    except Refused:
        return None


def _shows_call(text: str) -> bool:
    """True if a prompt has the call with its arguments, and not the way in which Python prints objects."""
    has_call = _TOOL in text and _VALUE in text
    return has_call and "None" not in text and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text
