"""Builds the JSON object of a response that is not streamed."""

import json
from typing import Any

from baton.core.client_api import ChoiceDelta
from baton.core.request import FinishReason, TokenLogprobs
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.openai_logprobs import chat_logprobs, completion_logprobs
from baton.gateway.http.openai_objects import ObjectFields, timeline_object, usage_object
from baton.gateway.input.client_call import ClientCall
from baton.gateway.text.tokenizer import Tokenizer


class _Choice:
    __slots__ = ("finish", "logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None


class NonStreamingResponse:
    """Collects a call's choices for one JSON object. Implements `ChoiceSink`.

    Its size is bounded by the number of tokens that the call may generate.
    """

    def __init__(self, call: ClientCall, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._fields = ObjectFields(call)
        self._choices = [_Choice() for _ in range(len(call.requests) * call.n)]

    def put(self, choice: ChoiceDelta) -> None:
        """Take new output of one choice."""
        collected = self._choices[choice.index]
        collected.texts.append(choice.text)
        collected.token_ids.extend(choice.token_ids)
        collected.logprobs.extend(choice.logprobs)
        if choice.finish is not None:
            collected.finish = choice.finish

    def body(self, outcome: CallOutcome) -> bytes:
        """Return the JSON object of the complete response."""
        response = self._fields.completion()
        response["choices"] = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        response["usage"] = usage_object(outcome.usage)
        if outcome.timeline:
            response["baton"] = timeline_object(outcome.timeline)
        if self._call.output_options.return_token_ids and self._call.endpoint.is_chat:
            response["prompt_token_ids"] = list(self._call.requests[0].token_ids)
        return json.dumps(response, ensure_ascii=False).encode()

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        is_chat = self._call.endpoint.is_chat
        result: dict[str, Any] = {"index": index}
        if is_chat:
            result["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            result["text"] = text
        result["logprobs"] = self._logprobs(choice)
        result["finish_reason"] = choice.finish.value if choice.finish else None
        if self._call.output_options.return_token_ids:
            result["token_ids"] = choice.token_ids
            if not is_chat:
                result["prompt_token_ids"] = list(self._call.requests[index // self._call.n].token_ids)
        return result

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if self._call.num_logprobs is None:
            return None
        if self._call.endpoint.is_chat:
            return chat_logprobs(self._tokenizer, choice.token_ids, choice.logprobs)
        return completion_logprobs(self._tokenizer, choice.token_ids, choice.logprobs, 0)[0]
