"""Writes parsed chat messages as JSON: deltas of a stream, and whole messages."""

import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring

from baton.core.client_api import MessagePart, PartKind
from baton.core.request import FinishReason
from baton.gateway.output.values.json_escape import escaped_bytes

CALL_BYTES = 256
"""Objects of a call in a collected message."""
LEGACY_FINISH = "function_call"
"""Finish reason in place of `tool_calls` for clients of the older `functions`."""


def finish_json(finish: FinishReason | None, *, legacy: bool = False) -> str:
    """Return the finish reason of a choice as JSON."""
    if finish is None:
        return "null"
    return f'"{LEGACY_FINISH if legacy and finish is FinishReason.TOOL_CALLS else finish.value}"'


def delta_json(parts: Sequence[MessagePart], *, is_first: bool, legacy: bool) -> str:
    """Return the `delta` of a chunk with these parts. The first one of a choice has the role.

    The entry that begins a call has its id and name, and the arguments that arrived with them.
    """
    texts = {PartKind.CONTENT: "", PartKind.REASONING: ""}
    calls: dict[int, tuple[MessagePart | None, str]] = {}
    for part in parts:
        if part.kind is PartKind.TOOL_CALL:
            calls[part.call_index] = (part, "")
        elif part.kind is PartKind.TOOL_ARGUMENTS:
            begin, arguments = calls.get(part.call_index, (None, ""))
            calls[part.call_index] = (begin, arguments + part.text)
        else:
            texts[part.kind] += part.text
    content, reasoning = texts[PartKind.CONTENT], texts[PartKind.REASONING]
    fields = ['"role":"assistant"'] if is_first else []
    if content or is_first:
        fields.append(f'"content":{"null" if not content and parts else encode_basestring(content)}')
    if reasoning:
        fields.append(f'"reasoning_content":{encode_basestring(reasoning)}')
    if calls and legacy:
        fields.append(f'"function_call":{{{_function(*next(iter(calls.values())))}}}')
    elif calls:
        entries = ",".join(_call(index, *call) for index, call in sorted(calls.items()))
        fields.append(f'"tool_calls":[{entries}]')
    return f"{{{','.join(fields)}}}"


def _call(index: int, begin: MessagePart | None, arguments: str) -> str:
    head = f'"index":{index},'
    if begin is not None:
        head += f'"id":{encode_basestring(begin.call_id)},"type":"function",'
    return f'{{{head}"function":{{{_function(begin, arguments)}}}}}'


def _function(begin: MessagePart | None, arguments: str) -> str:
    name = "" if begin is None else f'"name":{encode_basestring(begin.text)},'
    return f'{name}"arguments":{encode_basestring(arguments)}'


class CollectedMessage:
    """A message of a response that is not streamed, as JSON text."""

    __slots__ = ("_calls", "_content", "_reasoning", "num_bytes")

    def __init__(self) -> None:
        self._content = bytearray()
        self._reasoning = bytearray()
        self._calls: list[tuple[bytes, bytearray]] = []
        self.num_bytes = 0
        """Bytes of the text so far, and of the objects of its calls."""

    def put_text(self, text: str) -> None:
        """Append content."""
        self._append(self._content, text)

    def put(self, part: MessagePart) -> None:
        """Append a part."""
        if part.kind is PartKind.TOOL_CALL:
            head = json.dumps({"id": part.call_id, "type": "function", "function": {"name": part.text}})
            self._calls.append((head.encode(), bytearray()))
            self.num_bytes += CALL_BYTES + len(head)
        elif part.kind is PartKind.TOOL_ARGUMENTS:
            self._append(self._calls[-1][1], part.text)
        elif part.kind is PartKind.REASONING:
            self._append(self._reasoning, part.text)
        else:
            self.put_text(part.text)

    def _append(self, to: bytearray, text: str) -> None:
        new = escaped_bytes(text)
        to += new
        self.num_bytes += len(new)

    def parts(self, *, legacy: bool) -> Iterator[bytes | bytearray]:
        """Yield the text of the message object."""
        has_more = bool(self._calls or self._reasoning)
        yield b'{"role": "assistant", "content": '
        if self._content or not has_more:
            yield from (b'"', self._content, b'"')
        else:
            yield b"null"
        yield b', "refusal": null'
        if self._reasoning:
            yield from (b', "reasoning_content": "', self._reasoning, b'"')
        if self._calls and legacy:
            head, arguments = self._calls[0]
            name = json.dumps(json.loads(head)["function"]["name"]).encode()
            yield from (b', "function_call": {"name": ', name, b', "arguments": "', arguments, b'"}')
        elif self._calls:
            for number, (head, arguments) in enumerate(self._calls):
                yield b", " if number else b', "tool_calls": ['
                yield from (head[:-2], b', "arguments": "', arguments, b'"}}')
            yield b"]"
        yield b"}"
