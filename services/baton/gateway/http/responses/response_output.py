"""Collects the output of a call for `/v1/responses`, and builds the JSON object of a response."""

import json
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from baton.core.client_api import ChoiceDelta, MessagePart, PartKind, TotalUsage
from baton.core.request import FinishReason
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.asgi_io import in_pieces
from baton.gateway.http.openai_logprobs import TokenNames, chat_logprobs
from baton.gateway.http.output.api_form import ResponseServices
from baton.gateway.http.output.json_list import JsonList
from baton.gateway.http.output.message_parts import continues, parts_of
from baton.gateway.http.responses.response_items import ItemStatus, OutputItem, Part
from baton.gateway.input.client_call import ClientCall
from baton.gateway.input.response_size import response_bytes
from baton.gateway.output.values.json_escape import escaped_bytes
from baton.runtime.process.byte_budget import Account

NO_PROBLEM: dict[str, Any] = {"error": None, "incomplete_details": None}
_PREFIXES = {PartKind.REASONING: "rs", PartKind.CONTENT: "msg", PartKind.TOOL_CALL: "fc"}


class ResponseOutput:
    """The output of a call as items. Use as `with`: leaving releases its memory."""

    def __init__(self, call: ClientCall, echo: bytes, services: ResponseServices) -> None:
        """Reserve memory. Raises OverBudget if there is too little.

        echo: fields of the request that the response repeats, as the inside of a JSON object.
        """
        self._call = call
        self._names = TokenNames(services.tokenizer)
        self._echo = echo
        self._head = json.dumps(
            {
                "id": f"resp_{call.request_id.hex()}",
                "object": "response",
                "created_at": int(time.time()),
                "model": call.model,
            }
        )[:-1].encode()
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._pending: list[tuple[bytes, JsonList]] = []
        """Bytes and logprobs of the tokens whose text has not come, or has none."""
        self._finish: FinishReason | None = None
        self._num_bytes = len(echo)
        num_bytes = len(echo) + response_bytes(call)
        self._reservation = services.budget.reserve(Account.REQUESTS, num_bytes, "the response")

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
        if self._call.num_logprobs is not None:
            self._add_logprobs(choice)
        for part in parts_of(choice):
            if self._open is None or not continues(part, self._open.kind, self._open.call_index):
                if not part.text and part.kind is not PartKind.TOOL_CALL:
                    continue
                self._end_item(ItemStatus.COMPLETED)
                self._begin_item(part)
            if part.kind is not PartKind.TOOL_CALL and part.text:
                self._append(part.text)
        if choice.finish is not None:
            self._finish = choice.finish
            self._append("")
            self._end_item(ItemStatus.INCOMPLETE if choice.finish is FinishReason.LENGTH else ItemStatus.COMPLETED)

    def _begin_item(self, part: MessagePart) -> None:
        kind = PartKind.TOOL_CALL if part.kind is PartKind.TOOL_ARGUMENTS else part.kind
        index = len(self._items)
        item = self._open = OutputItem(
            kind, index, f"{_PREFIXES[kind]}_{self._call.request_id.hex()}{index:04x}".encode(), part.call_index
        )
        if kind is PartKind.TOOL_CALL:
            item.call = json.dumps({"call_id": part.call_id, "name": part.text})[1:-1].encode()
        self._items.append(item)
        self._grow(item.num_bytes)
        self._item_began(item)

    def _add_logprobs(self, choice: ChoiceDelta) -> None:
        entries = chat_logprobs(self._names, choice.token_ids, choice.logprobs)["content"]
        for token_id, entry in zip(choice.token_ids, entries, strict=True):
            logprobs = JsonList()
            logprobs.extend([entry])
            self._pending.append((self._names.bytes_of(token_id), logprobs))
            self._grow(logprobs.num_bytes)

    def _take_logprobs(self, text: str) -> JsonList:
        """Return the logprobs of the waiting tokens, without those before `text`, new text of the open item.

        Tokens of delimiters, and of reasoning that is left out, stand before it.
        """
        pending, self._pending = self._pending, []
        self._num_bytes -= sum(logprobs.num_bytes for _, logprobs in pending)
        written = b"".join(token for token, _ in pending)
        has_text = self._open is not None and self._open.text
        is_next = not text or (has_text and written.startswith(text.encode()))
        begin, end = -1 if is_next else written.rfind(text.encode()), 0
        taken = JsonList()
        for token, logprobs in pending:
            end += len(token)
            if end > begin:
                taken.join(logprobs)
        return taken

    def _append(self, text: str) -> None:
        """Append text to the open item, and to a message the logprobs of its tokens."""
        item, logprobs = self._open, self._take_logprobs(text)
        if item is None or not (text or (logprobs.num_bytes and item.kind is PartKind.CONTENT)):
            return
        new, before = escaped_bytes(text), item.num_bytes
        item.text += new
        if item.kind is PartKind.CONTENT:
            item.logprobs.join(logprobs)
        self._grow(item.num_bytes - before)
        self._item_grew(item, new, logprobs)

    def _end_item(self, status: bytes) -> None:
        item, self._open = self._open, None
        if item is not None:
            item.status = status
            self._item_ended(item)

    def _item_began(self, item: OutputItem) -> None:
        """Called when an item has begun."""

    def _item_grew(self, item: OutputItem, new: bytes, logprobs: JsonList) -> None:
        """Called with the new text of an item, as the inside of a JSON string, and its logprobs."""

    def _item_ended(self, item: OutputItem) -> None:
        """Called when an item is complete."""

    def _grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._reservation.num_bytes:
            self._reservation.resize(self._num_bytes)

    def _ended_object(self, usage: TotalUsage) -> tuple[bytes, Iterator[Part]]:
        """Return the status of a response that has ended, and its JSON object."""
        if self._finish is FinishReason.LENGTH:
            problem = {**NO_PROBLEM, "incomplete_details": {"reason": "max_output_tokens"}}
            return b"incomplete", self._object(b"incomplete", problem, usage)
        return b"completed", self._object(b"completed", NO_PROBLEM, usage)

    def _object(self, status: bytes, problem: dict[str, Any], usage: TotalUsage | None) -> Iterator[Part]:
        """Yield the JSON object of the response."""
        completed_at = int(time.time()) if status == b"completed" else None
        ending = {**problem, "completed_at": completed_at, "usage": None if usage is None else _usage_object(usage)}
        yield self._head + b', "status": "%s", ' % status
        yield self._echo
        yield b', "output": ['
        for item in self._items:
            if item.index:
                yield b", "
            yield from item.parts()
        yield b"], " + json.dumps(ending)[1:].encode()


class ResponseObject(ResponseOutput):
    """Implements `CollectedResponse`."""

    _parts: Sequence[Part] = ()

    async def finish(self, outcome: CallOutcome) -> int:
        """Add what is known at the end, and return the length of the JSON object in bytes."""
        self._parts = list(self._ended_object(outcome.usage)[1])
        return sum(map(len, self._parts))

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON object in pieces. It exists once in memory."""
        return in_pieces(self._parts)


def _usage_object(usage: TotalUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
