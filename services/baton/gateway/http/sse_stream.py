"""Builds the server-sent events of a streamed response.

The fixed parts of an event are built once per response, so one event takes about a microsecond.
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from json.encoder import encode_basestring

from baton.core.client_api import ChoiceDelta
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.asgi_io import PIECE_BYTES
from baton.gateway.http.id_json import repeated_prompts
from baton.gateway.http.openai_logprobs import chat_logprobs, completion_logprobs
from baton.gateway.http.openai_objects import ObjectFields, timeline_object, usage_object
from baton.gateway.input.client_call import ClientCall
from baton.gateway.request.unread_output import UnreadOutput
from baton.gateway.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class EventStream:
    """Collects a call's choices as events until they are taken. Implements `ChoiceSink`.

    Events that arrive together leave in one write of about `PIECE_BYTES`.
    """

    def __init__(self, call: ClientCall, tokenizer: Tokenizer, unread: UnreadOutput) -> None:
        """Create the stream. `unread` counts the events that are not written yet."""
        self._call = call
        self._is_chat = call.endpoint.is_chat
        self._options = call.output_options
        self._has_logprobs = call.num_logprobs is not None
        self._prompts: Sequence[str] = ()
        self._n = call.n
        self._tokenizer = tokenizer
        self._unread = unread
        self._fields = ObjectFields(call)
        self._begin = f'data: {json.dumps(self._fields.chunk())[:-1]}, "choices":[{{"index":'
        usage = ', "usage":null' if call.output_options.include_usage else ""
        self._end = "}]" + usage + "}\n\n"
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._pending: deque[bytes] = deque()
        self._num_written = 0
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False

    async def begin(self) -> None:
        """Format the token ids of the prompts, if events repeat them."""
        self._prompts = await repeated_prompts(self._call)

    def put(self, choice: ChoiceDelta) -> None:
        """Add an event for new output. Raises Refused (slow_reader) if too many bytes are unread."""
        is_first = choice.index not in self._begun
        carries_ids = bool(choice.token_ids) and (self._options.return_token_ids or self._has_logprobs)
        if not (choice.text or choice.finish is not None or carries_ids or (is_first and self._is_chat)):
            return  # the text is held back: an incomplete character or a possible stop string
        event = self._event(choice, is_first).encode()
        self._unread.add(len(event))
        self._pending.append(event)
        self._wake()

    def end(self) -> None:
        """Record that no more events will be added."""
        self._prompts = ()
        self._has_ended = True
        self._wake()

    @property
    def is_exhausted(self) -> bool:
        """True if all events were taken and no more will be added."""
        return self._has_ended and not self._pending

    def drop(self) -> None:
        """Drop all events, because the client does not read them."""
        self._pending.clear()

    async def next_piece(self) -> bytes:
        """Wait for events, and return as many as a piece holds; empty after the end.

        The piece counts as unread until the next call, since the caller is still writing it. Only one task
        may wait.
        """
        self._unread.remove(self._num_written)
        self._num_written = 0
        if not self._pending and not self._has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events: list[bytes] = []
        while self._pending and self._num_written < PIECE_BYTES:
            events.append(self._pending.popleft())
            self._num_written += len(events[-1])
        return b"".join(events)

    def final_events(self, outcome: CallOutcome) -> bytes:
        """Return the last events of a response that succeeded."""
        if not (self._options.include_usage or outcome.timeline):
            return DONE
        chunk = {**self._fields.chunk(), "choices": [], "usage": usage_object(outcome.usage)}
        if outcome.timeline:
            chunk["baton"] = timeline_object(outcome.timeline)
        return b"data: " + json.dumps(chunk).encode() + b"\n\n" + DONE

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _event(self, choice: ChoiceDelta, is_first: bool) -> str:
        finish = "null" if choice.finish is None else f'"{choice.finish.value}"'
        more = ""
        end = self._end
        if is_first:
            self._begun.add(choice.index)
        if self._options.return_token_ids:
            more = f',"token_ids":{list(choice.token_ids)}'
            if is_first:
                prompt = f',"prompt_token_ids":{self._prompts[choice.index // self._n]}'
                if self._is_chat:  # vLLM puts it next to the choices for chats, and inside the choice for completions
                    end = "}]" + prompt + end[2:]
                else:
                    more += prompt
        logprobs = self._logprobs(choice) if self._has_logprobs else "null"
        text = encode_basestring(choice.text)
        if self._is_chat:
            role = '"role":"assistant",' if is_first else ""
            text = f'"delta":{{{role}"content":{text}}}' if choice.text or is_first else '"delta":{}'
        else:
            text = f'"text":{text}'
        return f'{self._begin}{choice.index},{text},"logprobs":{logprobs},"finish_reason":{finish}{more}{end}'

    def _logprobs(self, choice: ChoiceDelta) -> str:
        if not choice.token_ids:
            return "null"
        if self._is_chat:
            return json.dumps(chat_logprobs(self._tokenizer, choice.token_ids, choice.logprobs))
        offset = self._offsets.get(choice.index, 0)
        named, self._offsets[choice.index] = completion_logprobs(
            self._tokenizer, choice.token_ids, choice.logprobs, offset
        )
        return json.dumps(named)
