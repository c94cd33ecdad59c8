"""Turns a request's tokens into choices: detokenizes them and applies stop strings."""

from typing import Protocol

from baton.core.client_api import ChoiceDelta
from baton.core.request import FinishReason, GenerateRequest, TokenDelta
from baton.gateway.input.client_call import OutputOptions
from baton.gateway.text.detokenizer import Detokenizer
from baton.gateway.text.stop_strings import StopMatcher, StopPatterns
from baton.gateway.text.tokenizer import Tokenizer


class ChoiceSink(Protocol):
    """Receives the choices of a call: a stream of events, one JSON object, or a gRPC stream."""

    async def begin(self) -> None:
        """Prepare for output. Called once, when the call is admitted and its memory is reserved."""
        ...

    def put(self, choice: ChoiceDelta) -> None:
        """Take new output without waiting. Raises Refused (slow_reader) if the client left too much
        unread."""
        ...


class _Sample:
    """Builds the text of one sample."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, stops: StopPatterns, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0

    def put(self, token_id: int) -> tuple[str, bool]:
        """Return (new text, True if a stop string ended the sample)."""
        self.num_tokens += 1
        text = self._detokenizer.put(token_id)
        if self._stops is None:
            return text, False
        if self.num_tokens < self._min_tokens:
            return self._stops.pass_through(text), False
        return self._stops.put(text)

    def flush(self) -> tuple[str, bool]:
        """Return the same for the text that was held back, at the end of the sample."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text, False
        text, found = self._stops.put(text)
        return (text, True) if found else (text + self._stops.flush(), False)


class OutputBuilder:
    """Implements `TokenSink` for one prompt's request. Sample s becomes choice `first_index + s`."""

    def __init__(
        self,
        request: GenerateRequest,
        output_options: OutputOptions,
        stops: StopPatterns,
        tokenizer: Tokenizer,
        sink: ChoiceSink,
        first_index: int,
    ) -> None:
        """Create the builder. `stops` are the stop strings of `output_options`, which all requests of a call
        share."""
        self._sink = sink
        self._first_index = first_index
        self._samples = {
            index: _Sample(
                tokenizer.detokenizer(skip_special_tokens=output_options.skip_special_tokens, prompt=request.token_ids),
                stops,
                request.sampling.min_tokens,
            )
            for index in request.sample_indices
        }

    @property
    def num_tokens(self) -> int:
        """Number of tokens delivered to the client. Tokens after a stop string do not count."""
        return sum(sample.num_tokens for sample in self._samples.values())

    def put(self, delta: TokenDelta) -> bool:
        """Pass the new tokens and their text on. Return True if a stop string ended the sample."""
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
        self._sink.put(
            ChoiceDelta(
                index=self._first_index + delta.sample_index,
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish=finish,
            )
        )
        return found and delta.finish is None
