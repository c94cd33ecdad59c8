"""From tokens to what a client gets: text, stop strings, choices. One `OutputBuilder` a prompt's request."""

from typing import Protocol

from baton.core.client_api import ChoiceDelta
from baton.core.request import FinishReason, GenerateRequest, TokenDelta
from baton.gateway.input.client_call import Shape
from baton.gateway.text.detokenizer import Detokenizer
from baton.gateway.text.stop_strings import StopMatcher
from baton.gateway.text.tokenizer import Tokenizer


class Receiver(Protocol):
    """Where a call's choices go: a stream of events, one JSON object, a gRPC stream."""

    def put(self, choice: ChoiceDelta) -> None:
        """Never waits. Raises Refused (slow_reader) when the client has left too much unread."""
        ...


class _Sample:
    """One sample's text."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, shape: Shape, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(shape.stop) if shape.stop else None
        self._min_tokens = min_tokens
        self.num_tokens = 0

    def put(self, token_id: int) -> tuple[str, bool]:
        """(new text, whether a stop string has ended the sample)."""
        self.num_tokens += 1
        text = self._detokenizer.put(token_id)
        if self._stops is None:
            return text, False
        if self.num_tokens < self._min_tokens:
            return self._stops.pass_through(text), False
        return self._stops.put(text)

    def flush(self) -> tuple[str, bool]:
        """The same for what was held back, at the sample's end."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text, False
        text, found = self._stops.put(text)
        return (text, True) if found else (text + self._stops.flush(), False)


class OutputBuilder:
    """Implements `relay.TokenSink` for one request: its sample s is choice `first_index + s`."""

    def __init__(
        self, request: GenerateRequest, shape: Shape, tokenizer: Tokenizer, receiver: Receiver, first_index: int
    ) -> None:
        self._receiver = receiver
        self._first_index = first_index
        self._samples = {
            index: _Sample(
                tokenizer.detokenizer(skip_special_tokens=shape.skip_special_tokens, prompt=request.token_ids),
                shape,
                request.sampling.min_tokens,
            )
            for index in request.sample_indices
        }

    @property
    def num_tokens(self) -> int:
        """Delivered to the client; tokens after a stop string do not count."""
        return sum(sample.num_tokens for sample in self._samples.values())

    def put(self, delta: TokenDelta) -> bool:
        sample = self._samples[delta.sample_index]
        token_ids, logprobs, finish = delta.token_ids, delta.logprobs, delta.finish
        found = False
        text = ""
        for used, token_id in enumerate(token_ids, 1):
            new, found = sample.put(token_id)
            text += new
            if found:
                token_ids, logprobs, finish = token_ids[:used], logprobs[:used], FinishReason.STOP
                break
        if finish is not None and not found:
            rest, found = sample.flush()
            text += rest
            finish = FinishReason.STOP if found else finish
        self._receiver.put(
            ChoiceDelta(
                index=self._first_index + delta.sample_index,
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish=finish,
            )
        )
        return found and delta.finish is None
