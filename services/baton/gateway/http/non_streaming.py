"""Builds the JSON object of a response that is not streamed.

Output is converted to JSON when it arrives, a few tokens at a time, because converting a long response at its
end would delay all other requests. The text is held as bytes until the response is sent.
"""

import json
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from baton.core.client_api import ChoiceDelta
from baton.core.request import FinishReason, PromptLogprobs
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.asgi_io import in_pieces
from baton.gateway.http.openai_logprobs import TokenNames, chat_logprobs, completion_logprobs
from baton.gateway.http.openai_objects import ObjectFields, timeline_object, usage_object
from baton.gateway.http.output.id_json import repeated_prompts
from baton.gateway.http.output.json_list import JsonList
from baton.gateway.http.output.prompt_lists import COMPLETION_LISTS, PROMPT_TOKENS_PER_PIECE, PromptLists
from baton.gateway.http.output.text_json import NO_ECHO, EchoedPrompt, echoed_prompts
from baton.gateway.input.client_call import ClientCall
from baton.gateway.input.response_size import response_bytes
from baton.gateway.output.message_json import CollectedMessage, finish_json
from baton.gateway.output.values.json_escape import escaped_bytes
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.process import loop_time
from baton.runtime.process.byte_budget import Account, ByteBudget


class _CollectedChoice:
    """Output of one choice as JSON text."""

    __slots__ = (
        "_call",
        "_message",
        "_names",
        "_offset",
        "_text",
        "echo",
        "finish",
        "logprobs",
        "prompt_logprobs",
        "token_ids",
    )

    def __init__(self, call: ClientCall, names: TokenNames) -> None:
        self._call = call
        self._names = names
        self.echo = NO_ECHO
        self._text = bytearray()
        self._message = CollectedMessage()
        self._offset = 0
        self.finish: FinishReason | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.token_ids = JsonList()
        lists = () if call.num_logprobs is None else ("content",) if call.endpoint.is_chat else COMPLETION_LISTS
        self.logprobs = {name: JsonList() for name in lists}

    def begin(self, echo: EchoedPrompt) -> None:
        """Begin the text with a prompt."""
        self.echo = echo
        self._offset = echo.num_chars

    def put(self, choice: ChoiceDelta) -> None:
        """Take new output."""
        if self._call.endpoint.is_chat:
            self._message.put_text(choice.text)
            for part in choice.parts:
                self._message.put(part)
        else:
            self._text += escaped_bytes(choice.text)
        self.finish = choice.finish or self.finish
        self.prompt_logprobs = choice.prompt_logprobs or self.prompt_logprobs
        if self._call.output_options.return_token_ids:
            self.token_ids.extend(list(choice.token_ids))
        if self.logprobs and choice.token_ids:
            self._put_logprobs(choice)

    def _put_logprobs(self, choice: ChoiceDelta) -> None:
        if self._call.endpoint.is_chat:
            new = chat_logprobs(self._names, choice.token_ids, choice.logprobs)
        else:
            new, self._offset = completion_logprobs(self._names, choice.token_ids, choice.logprobs, self._offset)
        for name, items in self.logprobs.items():
            items.extend(new[name])

    @property
    def num_bytes(self) -> int:
        """Bytes of all collected text."""
        lists = self.token_ids.num_bytes + sum(each.num_bytes for each in self.logprobs.values())
        return len(self._text) + self._message.num_bytes + lists

    def parts(self, index: int, prompt_ids: bytes | None, prompt: PromptLists) -> Iterator[bytes | bytearray]:
        """Yield the text of the choice object. `prompt_ids`, a JSON list, is repeated in it unless None.

        prompt: logprobs of the prompt, which all choices of it share.
        """
        is_chat, options = self._call.endpoint.is_chat, self._call.output_options.message
        legacy = bool(options and options.legacy_calls)
        yield b'{"index": %d, ' % index
        if is_chat:
            yield b'"message": '
            yield from self._message.parts(legacy=legacy)
        else:
            yield b'"text": "'
            yield from self.echo.pieces
            yield from (self._text, b'"')
        yield b', "logprobs": '
        if self.logprobs:
            for number, (name, items) in enumerate(self.logprobs.items()):
                yield (b', "%s": ' if number else b'{"%s": ') % name.encode()
                yield from prompt.echoed[name].joined(items) if name in prompt.echoed else items.parts()
            yield b', "refusal": null}' if is_chat else b"}"
        else:
            yield b"null"
        yield b', "finish_reason": ' + finish_json(self.finish, legacy=legacy).encode()
        if self._call.output_options.return_token_ids:
            yield b', "token_ids": '
            yield from self.token_ids.parts()
        if prompt_ids is not None:
            yield b', "prompt_token_ids": '
            yield prompt_ids
        if self._call.output_options.prompt_logprobs is not None and not is_chat:
            yield b', "prompt_logprobs": '
            yield from prompt.entries.parts()
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
        names = TokenNames(tokenizer, are_ids=call.output_options.token_ids_as_names)
        self._tokenizer = tokenizer
        self._names = names
        self._prompt_lists = [PromptLists() for _ in call.requests]
        self._choices = [_CollectedChoice(call, names) for _ in range(len(call.requests) * call.n)]
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
        """Format the prompts and their token ids, if the response repeats them. Raises OverBudget."""
        self._prompts = [prompt.encode() for prompt in await repeated_prompts(self._call)]
        echoes = await echoed_prompts(self._call, self._tokenizer)
        for index, choice in enumerate(self._choices):
            choice.begin(echoes[index // self._call.n])
        self._grow(sum(echo.num_bytes for echo in echoes))

    def put(self, choice: ChoiceDelta) -> None:
        """Take new output of one choice. Raises OverBudget if it outgrows the estimate and does not fit."""
        collected = self._choices[choice.index]
        before = collected.num_bytes
        collected.put(choice)
        self._grow(collected.num_bytes - before)

    def _grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._reservation.num_bytes:
            self._reservation.resize(self._num_bytes)

    async def _format_prompts(self) -> None:
        """Format the logprobs of the prompts, if the response has them: many in a thread. Raises
        OverBudget."""
        if self._call.num_prompt_logprobs is None:
            return
        num_tokens = sum(len(request.token_ids) for request in self._call.requests)
        await loop_time.call(num_tokens, PROMPT_TOKENS_PER_PIECE, self._fill_prompts)
        self._grow(sum(prompt.num_bytes for prompt in self._prompt_lists))

    def _fill_prompts(self) -> None:
        for index, request in enumerate(self._call.requests):
            logprobs = self._choices[index * self._call.n].prompt_logprobs
            self._prompt_lists[index].fill(self._call, self._names, request.token_ids, logprobs)

    async def finish(self, outcome: CallOutcome) -> int:
        """Add what is known at the end, and return the length of the JSON object in bytes."""
        await self._format_prompts()
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
            yield from choice.parts(index, prompt_ids, self._prompt_lists[index // self._call.n])
        ending: dict[str, Any] = {"usage": usage_object(outcome.usage)}
        if outcome.timeline:
            ending["baton"] = timeline_object(outcome.timeline)
        yield b"], " + json.dumps(ending, ensure_ascii=False)[1:-1].encode()
        if has_ids and is_chat:
            yield b', "prompt_token_ids": '
            yield self._prompts[0]
        if self._call.output_options.prompt_logprobs is not None and is_chat:
            yield b', "prompt_logprobs": '
            yield from self._prompt_lists[0].entries.parts()
        yield b"}"
