"""The output items of a response: reasoning, a message, or a function call, each as JSON text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.client_api import PartKind
from baton.gateway.http.output.json_list import JsonList

Part = bytes | bytearray
ITEM_BYTES = 2048
"""Objects of an item, and of its events while they wait."""


class ItemStatus:
    """Values of an item's `status`."""

    IN_PROGRESS, COMPLETED, INCOMPLETE = b"in_progress", b"completed", b"incomplete"


@dataclass(slots=True)
class OutputItem:
    """One item of the output.

    kind: reasoning, content or a tool call.
    item_id: id of the item.
    call: JSON text of the fields that only calls have.
    text: text of the item, as the inside of a JSON string. It grows.
    logprobs: logprobs of the tokens of a message; empty if none were requested.
    """

    kind: PartKind
    index: int
    item_id: bytes
    call_index: int = 0
    call: bytes = b""
    status: bytes = ItemStatus.IN_PROGRESS
    text: bytearray = field(default_factory=bytearray)
    logprobs: JsonList = field(default_factory=JsonList)

    @property
    def num_bytes(self) -> int:
        """Bytes that the item takes."""
        return ITEM_BYTES + len(self.text) + self.logprobs.num_bytes + len(self.call)

    @property
    def place(self) -> bytes:
        """Fields of an event that name this item."""
        return b'"item_id": "%s", "output_index": %d' % (self.item_id, self.index)

    def parts(self) -> Iterator[Part]:
        """Yield the JSON object of the item."""
        yield b'{"id": "%s", "status": "%s", ' % (self.item_id, self.status)
        if self.kind is PartKind.TOOL_CALL:
            yield b'"type": "function_call", ' + self.call + b', "arguments": "'
            yield self.text
            yield b'"}'
            return
        if self.kind is PartKind.REASONING:
            yield b'"type": "reasoning", "summary": [], "encrypted_content": null, "content": ['
        else:
            yield b'"type": "message", "role": "assistant", "content": ['
        if self.status is not ItemStatus.IN_PROGRESS:
            yield from self.content_parts()
        yield b"]}"

    def content_parts(self) -> Iterator[Part]:
        """Yield the JSON object of the item's only content part."""
        is_reasoning = self.kind is PartKind.REASONING
        yield b'{"type": "reasoning_text", "text": "' if is_reasoning else b'{"type": "output_text", "text": "'
        yield self.text
        if is_reasoning:
            yield b'"}'
        else:
            yield b'", "annotations": [], "logprobs": '
            yield from self.logprobs.parts()
            yield b"}"

    def began(self) -> Iterator[tuple[bytes, Sequence[Part]]]:
        """Yield the events of a new item: their type, and their fields."""
        yield b"response.output_item.added", [b'"output_index": %d, "item": ' % self.index, *self.parts()]
        if self.kind is not PartKind.TOOL_CALL:
            place = self.place + b', "content_index": 0, "part": '
            yield b"response.content_part.added", [place, *self.content_parts()]

    def delta(self, text: bytes, logprobs: JsonList) -> tuple[bytes, bytes]:
        """Return the event for more text: its type and its fields."""
        delta = b', "delta": "%s"' % text
        if self.kind is PartKind.TOOL_CALL:
            return b"response.function_call_arguments.delta", self.place + delta
        delta = self.place + b', "content_index": 0' + delta
        if self.kind is PartKind.REASONING:
            return b"response.reasoning_text.delta", delta
        return b"response.output_text.delta", b'%s, "logprobs": %s' % (delta, b"".join(logprobs.parts()))

    def ended(self) -> Iterator[tuple[bytes, Sequence[Part]]]:
        """Yield the events at the end of the item. Each repeats its text."""
        place = self.place
        if self.kind is PartKind.TOOL_CALL:
            begin = place + b", " + self.call + b', "arguments": "'
            yield b"response.function_call_arguments.done", [begin, self.text, b'"']
        else:
            place += b', "content_index": 0, '
            if self.kind is PartKind.REASONING:
                yield b"response.reasoning_text.done", [place + b'"text": "', self.text, b'"']
            else:
                begin = place + b'"text": "'
                yield b"response.output_text.done", [begin, self.text, b'", "logprobs": ', *self.logprobs.parts()]
            yield b"response.content_part.done", [place + b'"part": ', *self.content_parts()]
        yield b"response.output_item.done", [b'"output_index": %d, "item": ' % self.index, *self.parts()]
