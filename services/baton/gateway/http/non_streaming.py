"""An answer that is not streamed: one JSON object at its end."""

import json
from typing import Any

from baton.core.client_api import ChoiceDelta
from baton.core.request import FinishReason, TokenLogprobs
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.openai_logprobs import chat_logprobs, completion_logprobs
from baton.gateway.http.openai_objects import Names, timeline_object, usage_object
from baton.gateway.input.client_call import ClientCall
from baton.gateway.text.tokenizer import Tokenizer


class _Choice:
    __slots__ = ("finish", "logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None


class NonStreamingAnswer:
    """Implements `answer.Receiver`. Bounded by what the call may generate."""

    def __init__(self, call: ClientCall, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._names = Names(call)
        self._choices = [_Choice() for _ in range(len(call.requests) * call.n)]

    def put(self, choice: ChoiceDelta) -> None:
        kept = self._choices[choice.index]
        kept.texts.append(choice.text)
        kept.token_ids.extend(choice.token_ids)
        kept.logprobs.extend(choice.logprobs)
        if choice.finish is not None:
            kept.finish = choice.finish

    def body(self, ending: CallOutcome) -> bytes:
        answer = self._names.whole()
        answer["choices"] = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        answer["usage"] = usage_object(ending.usage)
        if ending.timeline:
            answer["baton"] = timeline_object(ending.timeline)
        if self._call.shape.return_token_ids and self._call.endpoint.is_chat:
            answer["prompt_token_ids"] = list(self._call.requests[0].token_ids)
        return json.dumps(answer, ensure_ascii=False).encode()

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        is_chat = self._call.endpoint.is_chat
        made: dict[str, Any] = {"index": index}
        if is_chat:
            made["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            made["text"] = text
        made["logprobs"] = self._logprobs(choice)
        made["finish_reason"] = choice.finish.value if choice.finish else None
        if self._call.shape.return_token_ids:
            made["token_ids"] = choice.token_ids
            if not is_chat:
                made["prompt_token_ids"] = list(self._call.requests[index // self._call.n].token_ids)
        return made

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if self._call.num_logprobs is None:
            return None
        if self._call.endpoint.is_chat:
            return chat_logprobs(self._tokenizer, choice.token_ids, choice.logprobs)
        return completion_logprobs(self._tokenizer, choice.token_ids, choice.logprobs, 0)[0]
