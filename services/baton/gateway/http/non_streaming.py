"""Builds the JSON object of a response that is not streamed.

Output is converted to JSON when it arrives, a few tokens at a time, because converting a long response at its
end would delay all other requests. The text is held as bytes until the response is sent.
"""

import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring
from types import TracebackType
from typing import Any, Self

from baton.core.client_api import ChoiceDelta
from baton.core.request import FinishReason
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.asgi_io import in_pieces
from baton.gateway.http.id_json import repeated_prompts
from baton.gateway.http.openai_logprobs import chat_logprobs, completion_logprobs
from baton.gateway.http.openai_objects import ObjectFields, timeline_object, usage_object
from baton.gateway.input.client_call import ClientCall
from baton.gateway.input.response_size import response_bytes
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.process.byte_budget import Account, ByteBudget

COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Lists of the `logprobs` object of a completion, with one item per token."""


class _JsonList:
    """A JSON list that grows. Holds its text."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, items: list[Any]) -> None:
        """Append items."""
        if items:
            if self._items:
                self._items += b", "
            self._items += json.dumps(items, ensure_ascii=False)[1:-1].encode()

    @property
    def num_bytes(self) -> int:
        """Length of the items' text."""
        return len(self._items)

    def parts(self) -> Iterator[bytes | bytearray]:
        """Yield the text of the list."""
        yield b"["
        yield self._items
        yield b"]"


class _CollectedChoice:
    """Output of one choice as JSON text."""

    __slots__ = ("_call", "_offset", "_text", "_tokenizer", "finish", "logprobs", "token_ids")

    def __init__(self, call: ClientCall, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._text = bytearray()
        self._offset = 0
        self.finish: FinishReason | None = None
        self.token_ids = _JsonList()
        names = () if call.num_logprobs is None else ("content",) if call.endpoint.is_chat else COMPLETION_LISTS
        self.logprobs = {name: _JsonList() for name in names}

    def put(self, choice: ChoiceDelta) -> None:
        """Take new output."""
        self._text += encode_basestring(choice.text)[1:-1].encode()
        self.finish = choice.finish or self.finish
        if self._call.output_options.return_token_ids:
            self.token_ids.extend(list(choice.token_ids))
        if self.logprobs and choice.token_ids:
            self._put_logprobs(choice)

    def _put_logprobs(self, choice: ChoiceDelta) -> None:
        if self._call.endpoint.is_chat:
            new = chat_logprobs(self._tokenizer, choice.token_ids, choice.logprobs)
        else:
            new, self._offset = completion_logprobs(self._tokenizer, choice.token_ids, choice.logprobs, self._offset)
        for name, items in self.logprobs.items():
            items.extend(new[name])

    @property
    def num_bytes(self) -> int:
        """Bytes of all collected text."""
        return len(self._text) + self.token_ids.num_bytes + sum(each.num_bytes for each in self.logprobs.values())

    def parts(self, index: int, prompt_ids: bytes | None) -> Iterator[bytes | bytearray]:
        """Yield the text of the choice object. `prompt_ids`, a JSON list, is repeated in it unless None."""
        is_chat = self._call.endpoint.is_chat
        yield b'{"index": %d, ' % index
        yield b'"message": {"role": "assistant", "content": "' if is_chat else b'"text": "'
        yield self._text
        yield b'", "refusal": null}, "logprobs": ' if is_chat else b'", "logprobs": '
        if self.logprobs:
            for number, (name, items) in enumerate(self.logprobs.items()):
                yield (b', "%s": ' if number else b'{"%s": ') % name.encode()
                yield from items.parts()
            yield b', "refusal": null}' if is_chat else b"}"
        else:
            yield b"null"
        yield b', "finish_reason": ' + json.dumps(self.finish.value if self.finish else None).encode()
        if self._call.output_options.return_token_ids:
            yield b', "token_ids": '
            yield from self.token_ids.parts()
        if prompt_ids is not None:
            yield b', "prompt_token_ids": '
            yield prompt_ids
        yield b"}"


class NonStreamingResponse:
    """Collects a call's choices for one JSON object. Implements `ChoiceSink`.

    Use as `with`: creating it reserves the bytes that the response may take, leaving releases them. Call
    `finish`, then `pieces`.
    """

    def __init__(self, call: ClientCall, tokenizer: Tokenizer, budget: ByteBudget) -> None:
        """Reserve memory. Raises OverBudget if there is too little."""
        self._call = call
        self._prompts: Sequence[bytes] = ()
        self._fields = ObjectFields(call)
        self._choices = [_CollectedChoice(call, tokenizer) for _ in range(len(call.requests) * call.n)]
        self._num_bytes = 0
        self._parts: list[bytes | bytearray] = []
        self._reservation = budget.reserve(Account.REQUESTS, response_bytes(call), "the response")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reservation.release()

    async def begin(self) -> None:
        """Format the token ids of the prompts, if the response repeats them."""
        self._prompts = [prompt.encode() for prompt in await repeated_prompts(self._call)]

    def put(self, choice: ChoiceDelta) -> None:
        """Take new output of one choice. Raises OverBudget if it outgrows the estimate and does not fit."""
        collected = self._choices[choice.index]
        before = collected.num_bytes
        collected.put(choice)
        self._num_bytes += collected.num_bytes - before
        if self._num_bytes > self._reservation.num_bytes:
            self._reservation.resize(self._num_bytes)

    def finish(self, outcome: CallOutcome) -> int:
        """Add what is known at the end, and return the length of the JSON object in bytes."""
        self._parts = list(self._all_parts(outcome))
        return sum(map(len, self._parts))

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON object in pieces. It exists once in memory."""
        return in_pieces(self._parts)

    def _all_parts(self, outcome: CallOutcome) -> Iterator[bytes | bytearray]:
        has_ids, is_chat = self._call.output_options.return_token_ids, self._call.endpoint.is_chat
        yield json.dumps(self._fields.completion(), ensure_ascii=False)[:-1].encode() + b', "choices": ['
        for index, choice in enumerate(self._choices):
            if index:
                yield b", "
            prompt_ids = self._prompts[index // self._call.n] if has_ids and not is_chat else None
            yield from choice.parts(index, prompt_ids)
        ending: dict[str, Any] = {"usage": usage_object(outcome.usage)}
        if outcome.timeline:
            ending["baton"] = timeline_object(outcome.timeline)
        yield b"], " + json.dumps(ending, ensure_ascii=False)[1:-1].encode()
        if has_ids and is_chat:
            yield b', "prompt_token_ids": '
            yield self._prompts[0]
        yield b"}"
