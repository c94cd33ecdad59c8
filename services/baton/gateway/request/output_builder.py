"""Turns a request's tokens into choices: detokenizes them, parses messages and applies stop strings."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from baton.core.client_api import ChoiceDelta, MessagePart
from baton.core.request import FinishReason, GenerateRequest, PromptLogprobs, TokenDelta
from baton.gateway.input.client_call import OutputOptions
from baton.gateway.request.message_sample import MessageSample
from baton.gateway.request.text_sample import TextSample
from baton.gateway.text.stop_strings import StopPatterns
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


class SampleOutput(Protocol):
    """Output of one sample that the client has not got yet."""

    num_tokens: int

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of reasoning."""
        ...

    @property
    def num_calls(self) -> int:
        """Number of tool calls."""
        ...

    @property
    def stop_string(self) -> str:
        """The stop string that was found, or empty."""
        ...

    def put(self, token_id: int) -> bool:
        """Add a token. Return True if a stop string, or the only call that the client wants, ended the
        sample."""
        ...

    def put_stop_token(self, token_id: int) -> bool:
        """Add the token that ended the sample, without a text. Return the same as `put`."""
        ...

    def finish(self, reason: FinishReason) -> bool:
        """End the sample, and add what was held back. Return the same as `put`."""
        ...

    def take(self) -> tuple[str, tuple[MessagePart, ...]]:
        """Return (new text, new parts of the message)."""
        ...

    def close(self) -> None:
        """Free what the sample holds. No token is added afterwards."""
        ...


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
        self._drops_output = output_options.drops_output
        self._includes_stop = output_options.includes_stop
        self._divides = output_options.message is not None and request.sampling.num_logprobs is not None
        self._prompt_logprobs: PromptLogprobs | None = None
        self.finishes: list[FinishReason] = []
        """Finish reasons of the samples that have ended."""
        self._first_index = first_index
        self._new_sample = _sample_maker(request, output_options, stops, tokenizer)
        self._samples: dict[int, SampleOutput] = {}

    @property
    def num_tokens(self) -> int:
        """Number of tokens delivered to the client. Tokens after a stop string do not count."""
        return sum(sample.num_tokens for sample in self._samples.values())

    @property
    def num_longest_sample_tokens(self) -> int:
        """Number of these tokens that belong to the sample with the most."""
        return max((sample.num_tokens for sample in self._samples.values()), default=0)

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of these tokens that belong to reasoning."""
        return sum(sample.num_reasoning_tokens for sample in self._samples.values())

    def put(self, delta: TokenDelta) -> bool:
        """Pass the new tokens and their text on. Return True if the sample ended before its last token."""
        return any(self._put(each) for each in self._pieces(delta)) and delta.finish is None

    def _pieces(self, delta: TokenDelta) -> Sequence[TokenDelta]:
        """Divide new output into single tokens if their logprobs belong to parts of a message."""
        if not self._divides or len(delta.token_ids) < 2:
            return (delta,)
        last = len(delta.token_ids) - 1
        return [
            replace(
                delta,
                output_index=delta.output_index + at,
                token_ids=(token_id,),
                logprobs=delta.logprobs[at : at + 1],
                finish=delta.finish if at == last else None,
            )
            for at, token_id in enumerate(delta.token_ids)
        ]

    def _put(self, delta: TokenDelta) -> bool:
        """Pass new output on. Return True if it ended the sample, other than by its finish reason."""
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        if self._drops_output:
            self.finishes.append(FinishReason.LENGTH)
            self._sink.put(
                ChoiceDelta(
                    index=self._first_index + delta.sample_index,
                    prompt_logprobs=self._prompt_logprobs,
                    finish=FinishReason.LENGTH,
                )
            )
            return True
        sample = self._sample(delta.sample_index)
        token_ids, logprobs, finish = delta.token_ids, delta.logprobs, delta.finish
        found = False
        hides_last = finish is FinishReason.STOP and not self._includes_stop
        for used, token_id in enumerate(token_ids, 1):
            is_hidden = hides_last and used == len(token_ids)
            found = sample.put_stop_token(token_id) if is_hidden else sample.put(token_id)
            if found:
                token_ids, logprobs = token_ids[:used], logprobs[:used]
                break
        if finish is not None and not found:
            found = sample.finish(finish)
        if found:
            finish = FinishReason.STOP
        if finish is FinishReason.STOP and sample.num_calls:
            finish = FinishReason.TOOL_CALLS
        if finish is not None:
            self.finishes.append(finish)
        text, parts = sample.take()
        self._sink.put(
            ChoiceDelta(
                index=self._first_index + delta.sample_index,
                text=text,
                parts=parts,
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=None if delta.output_index else self._prompt_logprobs,
                finish=finish,
                stop_string=sample.stop_string if found else "",
            )
        )
        return found

    def _sample(self, index: int) -> SampleOutput:
        """Return a sample. It is created with its first token, because all of them take milliseconds."""
        sample = self._samples.get(index)
        if sample is None:
            sample = self._samples[index] = self._new_sample(index)
        return sample

    def close(self) -> None:
        """Free what the samples hold, once the request has ended."""
        for sample in self._samples.values():
            sample.close()


def _sample_maker(
    request: GenerateRequest, output_options: OutputOptions, stops: StopPatterns, tokenizer: Tokenizer
) -> Callable[[int], SampleOutput]:
    """Return a function that creates the sample of an index."""
    message, min_tokens = output_options.message, request.sampling.min_tokens
    skips = output_options.skip_special_tokens
    if message is None:
        return lambda _: TextSample(
            tokenizer.detokenizer(skip_special_tokens=skips, prompt=request.token_ids), stops, min_tokens
        )
    special = tokenizer.added_tokens if skips else tokenizer.visible_tokens
    return lambda index: MessageSample(
        tokenizer.detokenizer(skip_special_tokens=False, prompt=request.token_ids),
        special,
        message,
        f"{request.request_id.hex()}-{index}",
        stops,
        min_tokens,
    )
