"""Builds the server-sent events of a streamed response.

The fixed parts of an event are built once per response, so one event takes about a microsecond.
"""

import asyncio
import json
from json.encoder import encode_basestring

from baton.core.client_api import ChoiceDelta
from baton.core.errors import Code, Failure, Reason, Refused
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.openai_logprobs import chat_logprobs, completion_logprobs
from baton.gateway.http.openai_objects import ObjectFields, timeline_object, usage_object
from baton.gateway.input.client_call import ClientCall
from baton.gateway.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
WRITE_BUFFER_BYTES = 64 * 1024
"""Bytes that a transport buffers before a write waits. It is asyncio's default, which uvicorn does not
change."""


class EventStream:
    """Collects a call's choices as events until they are taken. Implements `ChoiceSink`.

    All events of one event loop iteration are taken together and leave in one write.
    """

    def __init__(self, call: ClientCall, tokenizer: Tokenizer, max_bytes: int) -> None:
        """Create the stream. `max_bytes` bounds the unread events, including those in the transport's
        buffer."""
        self._is_chat = call.endpoint.is_chat
        self._options = call.output_options
        self._has_logprobs = call.num_logprobs is not None
        self._prompts = [request.token_ids for request in call.requests]
        self._n = call.n
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes - min(max_bytes // 2, WRITE_BUFFER_BYTES)
        self._fields = ObjectFields(call)
        self._begin = f'data: {json.dumps(self._fields.chunk())[:-1]}, "choices":[{{"index":'
        usage = ', "usage":null' if call.output_options.include_usage else ""
        self._end = "}]" + usage + "}\n\n"
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._taken_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False

    def put(self, choice: ChoiceDelta) -> None:
        """Add an event for new output. Raises Refused (slow_reader) if too many bytes are unread."""
        is_first = choice.index not in self._begun
        carries_ids = bool(choice.token_ids) and (self._options.return_token_ids or self._has_logprobs)
        if not (choice.text or choice.finish is not None or carries_ids or (is_first and self._is_chat)):
            return  # the text is held back: an incomplete character or a possible stop string
        event = self._event(choice, is_first).encode()
        self._pending.append(event)
        self._pending_bytes += len(event)
        if self._pending_bytes + self._taken_bytes > self._max_bytes:
            message = f"more than {self._max_bytes} bytes of the stream are unread; read faster"
            raise Refused(Failure(code=Code.CANCELLED, reason=Reason.SLOW_READER, message=message))
        self._wake()

    def end(self) -> None:
        """Record that no more events will be added."""
        self._has_ended = True
        self._wake()

    def take(self) -> bytes:
        """Return all collected events; empty if there are none.

        The bytes count as unread until the next `wait_for_events`, since the caller is still writing them.
        """
        events, self._pending = self._pending, []
        self._taken_bytes, self._pending_bytes = self._pending_bytes, 0
        return b"".join(events)

    async def wait_for_events(self) -> None:
        """Wait until there are events to take, or until `end` was called. Only one task may wait."""
        self._taken_bytes = 0
        if not self._pending and not self._has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

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
                prompt = f',"prompt_token_ids":{list(self._prompts[choice.index // self._n])}'
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
