"""Validates and tokenizes calls for HTTP and gRPC: turns a request body into a `ClientCall` that fits the
model."""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from baton.core.client_api import Caller
from baton.core.errors import Code, Reason
from baton.core.ids import REQUEST_ID_BYTES
from baton.core.kv.block_hash import TokenIds
from baton.core.request import NO_SLO, GenerateRequest, Sampling, Slo
from baton.core.request_limits import U64_MAX, printable
from baton.gateway.input.client_call import ANONYMOUS, ClientCall, Endpoint, Identity, InvalidField
from baton.gateway.input.request_body import ParsedRequest, Prompt, parse_request
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.observability.tracing import is_traceparent

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. The default for chats is the rest of the context."""
MAX_CHARACTERS_PER_TOKEN = 8
"""A text with more characters than this per token of the model's context is probably too long. Natural
language has about four characters per token."""
ITEMS_PER_YIELD = 8 * 1024
"""Characters, or ids, of a call's prompts to tokenize before yielding to the event loop. They take up to 2
ms."""
EXACT_CHARACTERS = 16 * 1024
"""A shorter text is always encoded whole, so the error for one that is too long has its number of tokens."""
TRUNCATION_SLACK_TOKENS = 64
"""A text that is cut off may have this many more tokens than the same part of the complete text, because the
word at the cut is tokenized differently. The value is a generous upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the served model, as the workers reported them. None means unknown, so it is not checked.

    max_model_len: longest context, in tokens.
    max_num_seqs: number of sequences that one worker runs at a time; it bounds `n`.
    """

    max_model_len: int | None
    max_num_seqs: int | None


def largest_id(token_ids: TokenIds) -> int:
    """Return the largest token id of a prompt; 0 if it is empty. A million ids take less than a
    millisecond."""
    return int(np.frombuffer(token_ids, dtype=np.uint32).max(initial=0)) if token_ids else 0


class Validator:
    """Validates requests, tokenizes their prompts, and assigns request ids and seeds."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        model: str,
        model_limits: Callable[[], ModelLimits],
        rng: Random,
        request_timeout_s: float,
        default_slo: Slo = NO_SLO,
    ) -> None:
        """Create a validator. `model_limits` is called for each call, because the cluster changes."""
        self.tokenizer = tokenizer
        self.model = model
        self._model_limits = model_limits
        self._rng = rng
        self._request_timeout_s = request_timeout_s
        self._default_slo = default_slo

    @property
    def max_model_len(self) -> int | None:
        """Longest context in tokens; None if unknown."""
        return self._model_limits().max_model_len

    def draw_id(self) -> bytes:
        """Return a new random request id. Ids are never taken from clients."""
        return self._rng.randbytes(REQUEST_ID_BYTES)

    async def call(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        caller: Caller,
        *,
        received_s: float,
        in_thread: bool = False,
        request_id: bytes | None = None,
        identity: Identity = ANONYMOUS,
    ) -> ClientCall:
        """Validate a request body and tokenize its prompts.

        in_thread: check the fields in a thread, because the body is large.
        received_s: event loop time from which the deadline counts.
        request_id: id for the first prompt's request. The other ids are generated, and this one too if it is
            None.

        Raises Refused (400) if the request is invalid, and Refused (404) if it names another model.
        """
        parsed = await asyncio.to_thread(parse_request, endpoint, body) if in_thread else parse_request(endpoint, body)
        self.check_model(parsed.model)
        if identity.min_priority is not None and parsed.priority < identity.min_priority:
            message = (
                f"priority is {parsed.priority}; must be at least {identity.min_priority} "
                f"for the key {identity.name!r} (lower numbers are served first)"
            )
            raise InvalidField("priority", message)
        model_limits = self._model_limits()
        if model_limits.max_num_seqs is not None and parsed.n > model_limits.max_num_seqs:
            raise InvalidField(
                "n",
                f"n is {parsed.n}; must be at most {model_limits.max_num_seqs}, "
                "the number of sequences that one worker runs at a time",
            )
        deadline_s = received_s + (self._request_timeout_s if caller.timeout_s is None else caller.timeout_s)
        trace_context = caller.trace_context if is_traceparent(caller.trace_context) else ""
        prompts = await self._tokenize(parsed, model_limits.max_model_len)
        return ClientCall(
            endpoint=endpoint,
            model=self.model,
            requests=tuple(
                replace(
                    self._request(parsed, tokens, model_limits, received_s, deadline_s),
                    request_id=request_id if request_id and index == 0 else self.draw_id(),
                    trace_context=trace_context,
                    tenant=identity.tenant,
                    cache_salt=identity.cache_salt,
                )
                for index, tokens in enumerate(prompts)
            ),
            n=parsed.n,
            output_options=parsed.output_options,
            received_s=received_s,
            identity=identity,
        )

    async def _tokenize(self, parsed: ParsedRequest, max_model_len: int | None) -> list[TokenIds]:
        """Return the token ids of each prompt, or of the one prompt that the chat template makes of
        messages."""
        if parsed.messages:
            text = await self.tokenizer.chat_text(parsed.messages)
            return [await self.encoded(text, max_model_len, add_special_tokens=False)]
        prompts: list[TokenIds] = []
        num_items = 0
        for prompt in parsed.prompts:
            if num_items > ITEMS_PER_YIELD:
                await asyncio.sleep(0)
                num_items = 0
            prompts.append(await self.tokens_of(prompt, max_model_len))
            num_items += len(prompt)
        return prompts

    def check_model(self, name: str | None) -> None:
        """Raise Refused (404) if `name` is not the served model. None stands for the served model."""
        if name is not None and name != self.model:
            message = f"model {printable(name)} is not served; the served model is {printable(self.model)}"
            raise InvalidField("model", message, Reason.MODEL_NOT_FOUND, Code.NOT_FOUND)

    async def tokens_of(self, prompt: Prompt, max_model_len: int | None = None) -> TokenIds:
        """Return the token ids of a prompt that is a text or a list of ids. Raises Refused if it is
        invalid."""
        if isinstance(prompt, array):
            self.check_vocabulary("prompt", largest_id(prompt))
            return prompt
        assert isinstance(prompt, str)  # a prompt is either ids or a text
        return await self.encoded(prompt, max_model_len)

    async def encoded(self, text: str, max_model_len: int | None, *, add_special_tokens: bool = True) -> TokenIds:
        """Return the token ids of a text. Raises Refused if a long one has more than `max_model_len`.

        A long text is rejected by its length, or by the tokens of its beginning, before it is tokenized
        completely, because that takes about a second per MiB. A text of up to `EXACT_CHARACTERS` is returned
        even if it has more tokens; the caller refuses it with their exact number.
        """
        if max_model_len is None:
            return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        at_least = self.tokenizer.min_tokens_of(len(text) if text.isascii() else len(text.encode()))
        beginning = text[: max_model_len * MAX_CHARACTERS_PER_TOKEN]
        if at_least <= max_model_len and len(beginning) < len(text):
            ids = await self.tokenizer.encode(
                beginning, add_special_tokens=add_special_tokens, max_tokens=max_model_len + TRUNCATION_SLACK_TOKENS
            )
            at_least = len(ids) - TRUNCATION_SLACK_TOKENS
        if at_least <= max_model_len:
            ids = await self.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_model_len)
            if len(text) <= EXACT_CHARACTERS or len(ids) <= max_model_len:
                return ids
            at_least = len(ids)
        raise _too_long(f"at least {at_least}", 1, max_model_len)

    def _request(
        self, parsed: ParsedRequest, tokens: TokenIds, model_limits: ModelLimits, received_s: float, deadline_s: float
    ) -> GenerateRequest:
        if not tokens:
            raise InvalidField("prompt", "the prompt has no tokens; send at least one")
        for name in ("stop_token_ids", "logit_bias"):
            for item in parsed.sampling[name]:
                self.check_vocabulary(name, item if isinstance(item, int) else item[0])
        max_tokens = self._max_tokens(parsed, len(tokens), model_limits.max_model_len)
        seed = self._rng.getrandbits(64) if parsed.seed is None else parsed.seed & U64_MAX
        return GenerateRequest(
            request_id=b"",
            model=self.model,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=max_tokens, seed=seed, **parsed.sampling),
            sample_indices=tuple(range(parsed.n)),
            received_s=received_s,
            deadline_s=deadline_s,
            priority=parsed.priority,
            slo=parsed.slo.with_defaults(self._default_slo),
        )

    def _max_tokens(self, parsed: ParsedRequest, num_prompt_tokens: int, max_model_len: int | None) -> int:
        """Return the requested `max_tokens`, or the endpoint's default.

        Raises InvalidField if prompt and `max_tokens` together exceed the context.
        """
        min_tokens: int = parsed.sampling["min_tokens"]
        if max_model_len is None:
            return parsed.max_tokens or max(COMPLETION_MAX_TOKENS, min_tokens)
        remaining = max_model_len - num_prompt_tokens
        wanted = parsed.max_tokens or max(1, min_tokens)
        if wanted > remaining:
            raise _too_long(str(num_prompt_tokens), wanted, max_model_len)
        if parsed.max_tokens is not None:
            return parsed.max_tokens
        return remaining if parsed.endpoint.is_chat else min(remaining, max(COMPLETION_MAX_TOKENS, min_tokens))

    def check_vocabulary(self, name: str, token_id: int) -> None:
        """Raise InvalidField for the field `name` if the token id is outside the vocabulary."""
        if token_id >= self.tokenizer.vocab_size:
            raise InvalidField(
                name,
                f"{name} contains the token id {token_id}; must be between 0 and {self.tokenizer.vocab_size - 1}",
            )


def _too_long(num_prompt_tokens: str, max_tokens: int, max_model_len: int) -> InvalidField:
    return InvalidField(
        "prompt",
        f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}; together they must be at most "
        f"{max_model_len}; shorten the prompt or reduce max_tokens",
        Reason.CONTEXT_LENGTH_EXCEEDED,
    )
