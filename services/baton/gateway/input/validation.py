"""The one validator of both front doors: from a plain dict to a `ClientCall` whose requests fit the model."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from baton.core.client_api import Caller
from baton.core.errors import Code, Reason
from baton.core.ids import REQUEST_ID_BYTES
from baton.core.kv.block_hash import TokenIds
from baton.core.request import NO_SLO, GenerateRequest, Sampling, Slo
from baton.core.request_limits import U64_MAX, printable
from baton.gateway.input.client_call import ANYBODY, ClientCall, Endpoint, Identity, InvalidField
from baton.gateway.input.request_body import Draft, Prompt, draft_of
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.observability.tracing import is_traceparent

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat may go on to the end of the context."""
CHARACTERS_A_TOKEN = 8
"""A text with more than these a token of the model's length is probably too long: natural language has about
four."""
CUT_TOKENS = 64
"""By so much, and a good deal less, a beginning may have more tokens than the whole: a word that is cut is
encoded in other pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the cluster says of the model that is served. None: not known yet, so not checked."""

    max_model_len: int | None
    max_num_seqs: int | None


class Validator:
    """Checks requests, tokenizes them and gives them their ids and seeds."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        model: str,
        facts: Callable[[], ModelFacts],
        rng: Random,
        request_timeout_s: float,
        default_slo: Slo = NO_SLO,
    ) -> None:
        """`facts` is asked once a call: the cluster changes."""
        self.tokenizer = tokenizer
        self.model = model
        self._facts = facts
        self._rng = rng
        self._request_timeout_s = request_timeout_s
        self._default_slo = default_slo

    @property
    def max_model_len(self) -> int | None:
        """The longest context; None: not known yet."""
        return self._facts().max_model_len

    def draw_id(self) -> bytes:
        """A new request's id. Ids are made inside, never taken from a client."""
        return self._rng.randbytes(REQUEST_ID_BYTES)

    async def call(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        caller: Caller,
        *,
        received_s: float,
        request_id: bytes | None = None,
        identity: Identity = ANYBODY,
    ) -> ClientCall:
        """The deadline counts from `received_s` (loop time). `request_id`: for the first prompt; the others',
        or all, are drawn. Raises Refused: 400, or 404 for another model."""
        draft = draft_of(endpoint, body)
        self.check_model(draft.model)
        if identity.min_priority is not None and draft.priority < identity.min_priority:
            message = f"priority must be at least {identity.min_priority} with the key {identity.name!r} (lower goes first), not {draft.priority}"
            raise InvalidField("priority", message)
        facts = self._facts()
        if facts.max_num_seqs is not None and draft.n > facts.max_num_seqs:
            raise InvalidField(
                "n", f"n must be at most {facts.max_num_seqs}, what one worker runs at a time, not {draft.n}"
            )
        deadline_s = received_s + (self._request_timeout_s if caller.timeout_s is None else caller.timeout_s)
        trace_context = caller.trace_context if is_traceparent(caller.trace_context) else ""
        if draft.messages:
            prompts = [
                await self.encoded(
                    self.tokenizer.chat_text(draft.messages), facts.max_model_len, add_special_tokens=False
                )
            ]
        else:
            prompts = [await self.tokens_of(prompt, facts.max_model_len) for prompt in draft.prompts]
        return ClientCall(
            endpoint=endpoint,
            model=self.model,
            requests=tuple(
                replace(
                    self._request(draft, tokens, facts, received_s, deadline_s),
                    request_id=request_id if request_id and index == 0 else self.draw_id(),
                    trace_context=trace_context,
                    tenant=identity.tenant,
                    cache_salt=identity.cache_salt,
                )
                for index, tokens in enumerate(prompts)
            ),
            n=draft.n,
            shape=draft.shape,
            received_s=received_s,
            identity=identity,
        )

    def check_model(self, name: str | None) -> None:
        """Raises Refused (404) for a model that is not served here; None means the one that is."""
        if name is not None and name != self.model:
            message = f"model {printable(name)} is not served here; this is {printable(self.model)}, as /v1/models says"
            raise InvalidField("model", message, Reason.MODEL_NOT_FOUND, Code.NOT_FOUND)

    async def tokens_of(self, prompt: Prompt, max_model_len: int | None = None) -> TokenIds:
        """A prompt's ids; a text is encoded."""
        if isinstance(prompt, array):
            self.check_vocabulary("prompt", max(prompt, default=0))
            return prompt
        assert isinstance(prompt, str)  # the only other kind of prompt
        return await self.encoded(prompt, max_model_len)

    async def encoded(self, text: str, max_model_len: int | None, *, add_special_tokens: bool = True) -> TokenIds:
        """A text's ids. One that cannot fit is refused for its length alone, or its beginning's: encoding
        takes a second and 90 MB of memory a megabyte."""
        if max_model_len is not None:
            at_least = self.tokenizer.min_tokens_of(len(text) if text.isascii() else len(text.encode()))
            beginning = text[: max_model_len * CHARACTERS_A_TOKEN]
            if at_least <= max_model_len and len(beginning) < len(text):
                at_least = (
                    len(await self.tokenizer.encode(beginning, add_special_tokens=add_special_tokens)) - CUT_TOKENS
                )
            if at_least > max_model_len:
                raise _too_long(f"at least {at_least}", 1, max_model_len)
        return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _request(
        self, draft: Draft, tokens: TokenIds, facts: ModelFacts, received_s: float, deadline_s: float
    ) -> GenerateRequest:
        if not tokens:
            raise InvalidField("prompt", "the prompt has no tokens; send at least one")
        for name in ("stop_token_ids", "logit_bias"):
            for item in draft.sampling[name]:
                self.check_vocabulary(name, item if isinstance(item, int) else item[0])
        max_tokens = self._max_tokens(draft, len(tokens), facts.max_model_len)
        seed = self._rng.getrandbits(64) if draft.seed is None else draft.seed & U64_MAX
        return GenerateRequest(
            request_id=b"",
            model=self.model,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=max_tokens, seed=seed, **draft.sampling),
            sample_indices=tuple(range(draft.n)),
            received_s=received_s,
            deadline_s=deadline_s,
            priority=draft.priority,
            slo=draft.slo.with_defaults(self._default_slo),
        )

    def _max_tokens(self, draft: Draft, num_prompt_tokens: int, max_model_len: int | None) -> int:
        """What was asked for, or the endpoint's default. Raises InvalidField with both numbers when it does
        not fit."""
        min_tokens: int = draft.sampling["min_tokens"]
        if max_model_len is None:
            return draft.max_tokens or max(COMPLETION_MAX_TOKENS, min_tokens)
        room = max_model_len - num_prompt_tokens
        wanted = draft.max_tokens or max(1, min_tokens)
        if wanted > room:
            raise _too_long(str(num_prompt_tokens), wanted, max_model_len)
        if draft.max_tokens is not None:
            return draft.max_tokens
        return room if draft.endpoint.is_chat else min(room, max(COMPLETION_MAX_TOKENS, min_tokens))

    def check_vocabulary(self, name: str, token_id: int) -> None:
        if token_id >= self.tokenizer.vocab_size:
            raise InvalidField(
                name,
                f"{name} has the token id {token_id}; the model's ids go from 0 to {self.tokenizer.vocab_size - 1}",
            )


def _too_long(num_prompt_tokens: str, max_tokens: int, max_model_len: int) -> InvalidField:
    return InvalidField(
        "prompt",
        f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together more than the model's {max_model_len}; "
        "shorten one of them",
        Reason.CONTEXT_LENGTH_EXCEEDED,
    )
