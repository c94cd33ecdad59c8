"""Builds the server-sent events of a streamed response.

The fixed parts of an event are built once per response, so one event takes about a microsecond.
"""

import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring
from types import TracebackType
from typing import Any, Self

from baton.core.client_api import ChoiceDelta, MessagePart, PartKind
from baton.core.errors import Failure
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.openai_errors import error_event
from baton.gateway.http.openai_logprobs import TokenNames, chat_logprobs, completion_logprobs
from baton.gateway.http.openai_objects import ObjectFields, timeline_object, usage_object
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.http.output.formatted_prompts import FormattedPrompts
from baton.gateway.http.output.id_json import repeated_prompts
from baton.gateway.http.output.text_json import EchoedPrompt, echoed_prompts
from baton.gateway.input.client_call import ClientCall
from baton.gateway.output.message_json import delta_json, finish_json
from baton.gateway.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
EVENT_END = "}\n\n"
_LOGPROBS = "\0"
"""Place of the logprobs in an event whose logprobs are in pieces. JSON text has no such character."""


class EventStream:
    """Adds a call's choices to a queue as events. Implements `StreamedResponse`."""

    def __init__(self, call: ClientCall, tokenizer: Tokenizer, queue: EventQueue) -> None:
        """Create the stream. `queue` gets its events."""
        self._call = call
        self._is_chat = call.endpoint.is_chat
        self._options = call.output_options
        self._has_legacy_calls = bool(self._options.message and self._options.message.legacy_calls)
        self._has_logprobs = call.num_logprobs is not None
        self._prompts: Sequence[str] = ()
        self._n = call.n
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, are_ids=call.output_options.token_ids_as_names)
        self._echoes: Sequence[EchoedPrompt] = ()
        self._num_prompt_tokens = sum(request.num_prompt_tokens for request in call.requests)
        self._num_output_tokens = 0
        self._queue = queue
        self._fields = ObjectFields(call)
        self._begin = f'data: {json.dumps(self._fields.chunk())[:-1]}, "choices":[{{"index":'
        has_usage = self._options.include_usage and not self._options.continuous_usage
        self._end = "}]" + (', "usage":null' if has_usage else "") + "}\n\n"
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        repeats_logprobs = self._has_logprobs and self._options.echo
        self._formatted = FormattedPrompts(call, self._names, self._put) if repeats_logprobs else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop the formatted prompts."""
        self._drop_prompts()

    def _drop_prompts(self) -> None:
        self._prompts = self._echoes = ()
        if self._formatted is not None:
            self._formatted.close()

    async def begin(self) -> None:
        """Format the prompts and their token ids, if events repeat them."""
        self._prompts = await repeated_prompts(self._call)
        self._echoes = await echoed_prompts(self._call, self._tokenizer)

    def put(self, choice: ChoiceDelta) -> None:
        """Add an event for new output. Raises Refused (slow_reader) if too many bytes are unread.

        If the first event repeats the logprobs of the prompt, it is added when these are formatted.
        """
        if self._formatted is None:
            self._put(choice)
        else:
            self._formatted.put(choice)

    def _put(self, choice: ChoiceDelta) -> None:
        is_first = choice.index not in self._begun
        self._num_output_tokens += len(choice.token_ids)
        carries_ids = bool(choice.token_ids) and (self._options.return_token_ids or self._has_logprobs)
        begins = is_first and (self._is_chat or self._options.echo)
        if not (choice.text or choice.parts or choice.finish is not None or carries_ids or begins):
            return  # the text is held back: an incomplete character or a possible stop string
        self._queue.put(*self._event_pieces(choice, is_first))

    async def finish(self, outcome: CallOutcome) -> None:
        """Add the last events of a response that succeeded. Its prompts are no longer needed."""
        if self._formatted is not None:
            await self._formatted.wait()
        self._drop_prompts()
        if self._options.include_usage or outcome.timeline:
            chunk = {**self._fields.chunk(), "choices": [], "usage": usage_object(outcome.usage)}
            if outcome.timeline:
                chunk["baton"] = timeline_object(outcome.timeline)
            self._queue.put_uncounted(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self._queue.put_uncounted(DONE)

    def fail(self, failure: Failure) -> None:
        """Add the last event of a response that failed after its first event."""
        self._queue.put_uncounted(error_event(failure))

    def _event_pieces(self, choice: ChoiceDelta, is_first: bool) -> list[bytes]:
        """Return an event. If it repeats a prompt, that is in pieces, which other events share."""
        if not (is_first and self._options.echo):
            return [self._event(choice, is_first).encode()]
        echo = self._echoes[choice.index // self._n]
        self._offsets[choice.index] = echo.num_chars
        before, text, after = self._event(choice, is_first).partition(',"text":"')
        pieces = [(before + text).encode(), *echo.pieces]
        if self._formatted is None:
            return [*pieces, after.encode()]
        middle, _, after = after.partition(_LOGPROBS)
        return [*pieces, middle.encode(), *self._prompt_logprobs(choice, self._formatted), after.encode()]

    def _prompt_logprobs(self, choice: ChoiceDelta, formatted: FormattedPrompts) -> Iterator[bytes]:
        """Yield the logprobs of a prompt, in pieces that other events share, and of the first tokens."""
        new = self._completion_logprobs(choice) if choice.token_ids else {}
        for number, (name, pieces) in enumerate(formatted.lists(choice).items()):
            more = json.dumps(new.get(name, []))[1:-1]
            yield f'{"," if number else "{"}"{name}":['.encode()
            yield from pieces
            yield f"{',' if more else ''}{more}]".encode()
        yield b"}"

    def _event(self, choice: ChoiceDelta, is_first: bool) -> str:
        finish = finish_json(choice.finish, legacy=self._has_legacy_calls)
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
        if self._options.continuous_usage:
            end = f'{end[: -len(EVENT_END)]}, "usage":{json.dumps(self._usage())}{EVENT_END}'
        if is_first and self._formatted is not None:
            logprobs = _LOGPROBS
        else:
            logprobs = self._logprobs(choice) if self._has_logprobs else "null"
        if self._is_chat:
            parts = choice.parts or _content_parts(choice.text)
            text = f'"delta":{delta_json(parts, is_first=is_first, legacy=self._has_legacy_calls)}'
        else:
            text = f'"text":{encode_basestring(choice.text)}'
        return f'{self._begin}{choice.index},{text},"logprobs":{logprobs},"finish_reason":{finish}{more}{end}'

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
        }

    def _logprobs(self, choice: ChoiceDelta) -> str:
        if not choice.token_ids:
            return "null"
        if self._is_chat:
            return json.dumps(chat_logprobs(self._names, choice.token_ids, choice.logprobs))
        return json.dumps(self._completion_logprobs(choice))

    def _completion_logprobs(self, choice: ChoiceDelta) -> dict[str, Any]:
        offset = self._offsets.get(choice.index, 0)
        named, self._offsets[choice.index] = completion_logprobs(self._names, choice.token_ids, choice.logprobs, offset)
        return named


def _content_parts(text: str) -> tuple[MessagePart, ...]:
    """Return the text of a choice as a part of a message; nothing if it is empty."""
    return (MessagePart(kind=PartKind.CONTENT, text=text),) if text else ()
