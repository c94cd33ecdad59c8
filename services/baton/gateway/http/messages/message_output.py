"""Builds a response of `/v1/messages`: one JSON object, or a stream of events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

from baton.core.client_api import ChoiceDelta, MessagePart, PartKind, TotalUsage
from baton.core.errors import Failure
from baton.core.request import FinishReason
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.asgi_io import in_pieces
from baton.gateway.http.messages.message_errors import message_error
from baton.gateway.http.output.api_form import ResponseServices
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.http.output.message_parts import continues, parts_of
from baton.gateway.input.client_call import ClientCall
from baton.gateway.input.response_size import response_bytes
from baton.gateway.output.values.json_escape import escaped_bytes
from baton.runtime.process import loop_time
from baton.runtime.process.byte_budget import Account

SIGNATURE = "unsigned"
"""Signature of every thinking block. Clients send blocks back only with one, and it is not checked."""
BLOCK_BYTES = 512
"""Objects of a content block."""
_STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessageFields:
    """The fields of a message beside its content, for one call."""

    def __init__(self, call: ClientCall) -> None:
        self._num_prompt_tokens = sum(request.num_prompt_tokens for request in call.requests)
        self._head = {
            "id": f"msg_{call.request_id.hex()}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
        }
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def put(self, choice: ChoiceDelta) -> None:
        """Take the reason of the end from new output."""
        if choice.finish is not None:
            stop_string = choice.stop_string or None
            reason = "stop_sequence" if stop_string is not None else _STOP_REASONS[choice.finish]
            self._stop = {"stop_reason": reason, "stop_sequence": stop_string}

    @property
    def head(self) -> dict[str, Any]:
        """Fields before the content."""
        return self._head

    @property
    def stop(self) -> dict[str, str | None]:
        """Reason of the end."""
        return self._stop

    def usage(self, usage: TotalUsage | None) -> dict[str, Any]:
        """Return the usage, at the beginning of a stream without the output and the cached tokens."""
        total = usage or TotalUsage(num_prompt_tokens=self._num_prompt_tokens, num_output_tokens=0)
        return {
            "input_tokens": total.num_prompt_tokens - total.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": total.num_cached_tokens,
            "output_tokens": total.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": total.num_reasoning_tokens},
        }


@dataclass(slots=True)
class _Block:
    """One content block. `text` is the inside of a JSON string, or the JSON text of a call's arguments."""

    kind: PartKind
    call_index: int
    head: bytes
    text: bytearray = field(default_factory=bytearray)

    @classmethod
    def of(cls, part: MessagePart) -> "_Block":
        """Begin the block of a part."""
        if part.kind is PartKind.REASONING:
            fields = {"type": "thinking", "signature": SIGNATURE}
        elif part.kind is PartKind.CONTENT:
            fields = {"type": "text"}
        else:
            fields = {"type": "tool_use", "id": part.call_id, "name": part.text}
        return cls(part.kind, part.call_index, json.dumps(fields)[:-1].encode())

    def put(self, text: str) -> None:
        """Append text."""
        self.text += text.encode() if self.kind is PartKind.TOOL_CALL else escaped_bytes(text)

    @property
    def num_bytes(self) -> int:
        """Bytes that the block takes."""
        return BLOCK_BYTES + len(self.head) + len(self.text)

    def check(self) -> None:
        """Replace arguments by an empty object if they are no JSON object, as after `max_tokens`."""
        if self.kind is PartKind.TOOL_CALL and not _is_json_object(self.text):
            self.text = bytearray(b"{}")

    def parts(self) -> Iterator[bytes | bytearray]:
        """Yield the JSON object of the block."""
        yield self.head
        if self.kind is PartKind.TOOL_CALL:
            yield b', "input": '
            yield self.text
            yield b"}"
        else:
            yield b', "thinking": "' if self.kind is PartKind.REASONING else b', "text": "'
            yield self.text
            yield b'"}'


class MessageObject:
    """Collects a call's output for one JSON object. Implements `CollectedResponse`."""

    def __init__(self, call: ClientCall, echo: bytes, services: ResponseServices) -> None:
        """Reserve memory. Raises OverBudget if there is too little. Messages repeat nothing, so `echo` is
        empty."""
        self._fields = MessageFields(call)
        self._blocks: list[_Block] = []
        self._num_bytes = 0
        self._parts: Sequence[bytes | bytearray] = ()
        self._reservation = services.budget.reserve(Account.REQUESTS, response_bytes(call), "the response")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reservation.release()

    async def begin(self) -> None:
        """Do nothing; the response repeats no prompt."""

    def put(self, choice: ChoiceDelta) -> None:
        """Take new output. Raises OverBudget if it outgrows the estimate and does not fit."""
        self._fields.put(choice)
        for part in parts_of(choice):
            last = self._blocks[-1] if self._blocks else None
            before = 0 if last is None else last.num_bytes
            if last is None or not continues(part, last.kind, last.call_index):
                if not part.text and part.kind is not PartKind.TOOL_CALL:
                    continue
                last, before = _Block.of(part), 0
                self._blocks.append(last)
            if part.kind is not PartKind.TOOL_CALL:
                last.put(part.text)
            self._num_bytes += last.num_bytes - before
        if self._num_bytes > self._reservation.num_bytes:
            self._reservation.resize(self._num_bytes)

    async def finish(self, outcome: CallOutcome) -> int:
        """Add what is known at the end, and return the length of the JSON object in bytes."""
        num_bytes = sum(len(block.text) for block in self._blocks)
        await loop_time.call(num_bytes, loop_time.JSON_BYTES, self._check)
        self._parts = list(self._object(outcome.usage))
        return sum(map(len, self._parts))

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON object in pieces. It exists once in memory."""
        return in_pieces(self._parts)

    def _check(self) -> None:
        for block in self._blocks:
            block.check()

    def _object(self, usage: TotalUsage) -> Iterator[bytes | bytearray]:
        yield json.dumps(self._fields.head)[:-1].encode() + b', "content": ['
        for number, block in enumerate(self._blocks):
            if number:
                yield b", "
            yield from block.parts()
        yield b"], " + json.dumps({**self._fields.stop, "usage": self._fields.usage(usage)})[1:].encode()


class MessageEvents:
    """Adds a call's output to a queue as events. Implements `StreamedResponse`."""

    def __init__(self, call: ClientCall, echo: bytes, services: ResponseServices, queue: EventQueue) -> None:
        """Create the events. Messages repeat nothing, so `echo` is empty."""
        self._fields = MessageFields(call)
        self._request_id = call.request_id.hex()
        self._queue = queue
        self._has_begun = False
        self._open: MessagePart | None = None
        self._index = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing; only the queue holds memory."""

    async def begin(self) -> None:
        """Do nothing; the events repeat no prompt."""

    def put(self, choice: ChoiceDelta) -> None:
        """Add events for new output. Raises Refused (slow_reader) if too many bytes are unread."""
        self._begin_stream()
        self._fields.put(choice)
        for part in parts_of(choice):
            if self._open is None or not continues(part, self._open.kind, self._open.call_index):
                if not part.text and part.kind is not PartKind.TOOL_CALL:
                    continue
                self._end_block()
                self._begin_block(part)
            if part.kind is not PartKind.TOOL_CALL and part.text:
                self._put("content_block_delta", {"index": self._index, "delta": _delta(part)})

    async def finish(self, outcome: CallOutcome) -> None:
        """Add the last events of a response that succeeded."""
        self._begin_stream()
        self._end_block()
        ending = {"delta": self._fields.stop, "usage": self._fields.usage(outcome.usage)}
        self._queue.put_uncounted(_event("message_delta", ending), _event("message_stop", {}))

    def fail(self, failure: Failure) -> None:
        """Add the last event of a response that failed after its first event."""
        self._queue.put_uncounted(b"event: error\ndata: ", message_error(failure, self._request_id), b"\n\n")

    def _begin_stream(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            message = {**self._fields.head, "content": [], **self._fields.stop, "usage": self._fields.usage(None)}
            self._put("message_start", {"message": message})

    def _begin_block(self, part: MessagePart) -> None:
        self._open = part
        self._index += 1
        if part.kind is PartKind.REASONING:
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
        elif part.kind is PartKind.CONTENT:
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "tool_use", "id": part.call_id, "name": part.text, "input": {}}
        self._put("content_block_start", {"index": self._index, "content_block": block})

    def _end_block(self) -> None:
        part, self._open = self._open, None
        if part is None:
            return
        if part.kind is PartKind.REASONING:
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            self._put("content_block_delta", {"index": self._index, "delta": signature})
        self._put("content_block_stop", {"index": self._index})

    def _put(self, name: str, fields: Mapping[str, Any]) -> None:
        self._queue.put(_event(name, fields))


def _event(name: str, fields: Mapping[str, Any]) -> bytes:
    data = json.dumps({"type": name, **fields}, ensure_ascii=False)
    return f"event: {name}\ndata: {data}\n\n".encode()


def _delta(part: MessagePart) -> dict[str, str]:
    if part.kind is PartKind.REASONING:
        return {"type": "thinking_delta", "thinking": part.text}
    if part.kind is PartKind.CONTENT:
        return {"type": "text_delta", "text": part.text}
    return {"type": "input_json_delta", "partial_json": part.text}


def _is_json_object(text: bytearray) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")
