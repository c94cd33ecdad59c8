"""Validates and tokenizes calls for HTTP and gRPC: turns a request body into a `ClientCall` that fits the
model."""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Any

import numpy as np

from baton.core.client_api import Caller
from baton.core.errors import Code, Reason, Refused
from baton.core.ids import REQUEST_ID_BYTES
from baton.core.kv.block_hash import TENANT_SALT_BYTES, TokenIds
from baton.core.request import NO_SLO, GenerateRequest, Sampling, Slo
from baton.core.request_limits import MAX_BAD_WORD_TOKENS, U64_MAX, printable
from baton.gateway.input.answers.answer_grammar import GrammarCheck, answer_grammar
from baton.gateway.input.answers.constraint_fields import is_read_in_thread
from baton.gateway.input.chat.chat_request import ChatRequest
from baton.gateway.input.chat.message_options import message_options
from baton.gateway.input.chat.template_check import check_template
from baton.gateway.input.client_call import ANONYMOUS, ClientCall, Endpoint, Identity, InvalidField, OutputOptions
from baton.gateway.input.field_reader import check_count
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.prompts.context_length import output_length, prompt_too_long
from baton.gateway.input.request_body import ParsedRequest, Prompt, parse_request
from baton.gateway.output.formats import OutputFormat
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.observability.tracing import is_traceparent
from baton.runtime.process import loop_time

MAX_CHARACTERS = 2**20
"""Characters of a text that is tokenized even if it is longer than the model's context."""
MAX_CHARACTERS_PER_TOKEN = 8
"""A text with more characters than this per token of the model's context is probably too long. Natural
language has about four characters per token."""
ITEMS_PER_YIELD = 8 * 1024
"""Characters, or ids, of a call's prompts to tokenize before yielding to the event loop. They take up to 2
ms."""
EXACT_CHARACTERS = 16 * 1024
"""A shorter text is always encoded whole, so the error for one that is too long has its number of tokens."""
WORD_ITEMS = 64
"""Cost of tokenizing a bad word twice, in addition to its characters, in items."""
MAX_PROMPT_LOGPROBS = 2**18
"""Logprobs of the tokens of one prompt, over all positions."""
TRUNCATION_SLACK_TOKENS = 64
"""A text that is cut off may have this many more tokens than the same part of the complete text, because the
word at the cut is tokenized differently. The value is a generous upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the served model, as the workers reported them. None means unknown, so it is not checked.

    max_model_len: longest context, in tokens.
    max_num_seqs: number of sequences that one worker runs at a time; it bounds `n`.
    fingerprint: name of the weights that the workers have, for `system_fingerprint`.
    """

    max_model_len: int | None
    max_num_seqs: int | None
    fingerprint: str | None = None


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
        strict_fields: bool = False,
        allow_request_chat_template: bool = False,
        output_format: OutputFormat | None = None,
        grammar_check: GrammarCheck | None = None,
    ) -> None:
        """Create a validator. `model_limits` is called for each call, because the cluster changes.

        strict_fields: refuse unknown fields.
        allow_request_chat_template: chats may bring a template.
        output_format: format of the model's answers to chats; None leaves their text as it is.
        grammar_check: checks grammars; None leaves that to the workers.
        """
        self.tokenizer = tokenizer
        self.model = model
        self._model_limits = model_limits
        self._rng = rng
        self._request_timeout_s = request_timeout_s
        self._default_slo = default_slo
        self._strict_fields = strict_fields
        self._allow_request_chat_template = allow_request_chat_template
        self._output_format = output_format or OutputFormat()
        self._grammar_check = grammar_check
        self._special_tokens = frozenset(token.text for token in tokenizer.added_tokens.values())

    @property
    def max_model_len(self) -> int | None:
        """Longest context in tokens; None if unknown."""
        return self._model_limits().max_model_len

    def draw_id(self) -> bytes:
        """Return a new random request id. Ids are never taken from clients."""
        return self._rng.randbytes(REQUEST_ID_BYTES)

    def unknown_fields(self) -> UnknownFields:
        """Return a collector for the unknown fields of one request."""
        return UnknownFields(is_strict=self._strict_fields)

    async def call(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        caller: Caller,
        *,
        received_s: float,
        size: int = 0,
        request_id: bytes | None = None,
        identity: Identity = ANONYMOUS,
    ) -> ClientCall:
        """Validate a request body and tokenize its prompts.

        received_s: event loop time from which the deadline counts.
        size: characters of the body's text. A large body is checked in a thread.
        request_id: id for the first prompt's request. The other ids are generated, and this one too if it is
            None.

        Raises Refused (400) if the request is invalid, and Refused (404) if it names another model.
        """
        unknown = self.unknown_fields()
        if is_read_in_thread(size, body):
            parsed = await asyncio.to_thread(parse_request, endpoint, body, unknown)
        else:
            parsed = parse_request(endpoint, body, unknown)
        self.check_model(parsed.model)
        model_limits = self._model_limits()
        _check_allowed(parsed, identity, model_limits)
        deadline_s = received_s + (self._request_timeout_s if caller.timeout_s is None else caller.timeout_s)
        text = None if parsed.chat is None else await self.chat_text(parsed.chat)
        prompts = await self._tokenize(parsed, text, model_limits.max_model_len)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for item in parsed.sampling[name]:
                self.check_vocabulary(name, item if isinstance(item, int) else item[0])
        rules = {
            "grammar": await self._grammar(parsed, text, identity),
            "bad_words": await self._bad_words(parsed.bad_words),
        }
        return ClientCall(
            endpoint=endpoint,
            model=self.model,
            requests=tuple(
                replace(
                    self._request(parsed, tokens, rules, model_limits, received_s, deadline_s),
                    request_id=request_id if request_id and index == 0 else self.draw_id(),
                    trace_context=caller.trace_context if is_traceparent(caller.trace_context) else "",
                    session=parsed.session or caller.session,
                    tenant=identity.tenant,
                    cache_salt=mixed_salt(identity.cache_salt, parsed.cache_salt),
                )
                for index, tokens in enumerate(prompts)
            ),
            n=parsed.n,
            output_options=self._output_options(parsed, text),
            received_s=received_s,
            identity=identity,
            prompt_texts=_prompt_texts(parsed),
            ignored_fields=tuple(unknown.names),
            system_fingerprint=model_limits.fingerprint,
        )

    async def _grammar(self, parsed: ParsedRequest, text: str | None, identity: Identity) -> str:
        """Return the grammar of the answers; empty if there is none. `text` is the prompt of a chat."""
        grammar = await answer_grammar(parsed.constraint, parsed.chat, text, self._output_format, self.tokenizer)
        if grammar.written.text and self._grammar_check is not None:
            await self._grammar_check.check(grammar, identity.tenant)
        return grammar.written.text

    async def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at the beginning of a text and after a space.

        Raises InvalidField if a word, or all of them, have too many tokens.
        """
        found: dict[tuple[int, ...], None] = {}
        num_items = 0
        for number, word in enumerate(words):
            if num_items > ITEMS_PER_YIELD:
                await asyncio.sleep(0)
                num_items = 0
            num_items += 2 * len(word) + WORD_ITEMS
            for text in (word.lstrip() or word, f" {word.lstrip()}"):
                ids = tuple(await self.tokenizer.encode(text, add_special_tokens=False))
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    message = f"bad_words[{number}] has {len(ids)} tokens; must have at most {MAX_BAD_WORD_TOKENS}"
                    raise InvalidField("bad_words", message)
                found.setdefault(ids)
        check_count("bad_words", len(found))
        return tuple(filter(None, found))

    def _output_options(self, parsed: ParsedRequest, text: str | None) -> OutputOptions:
        """Return the format of the response. `text` is the prompt of a chat."""
        if parsed.chat is None or text is None:
            return parsed.output_options
        rule = None if parsed.constraint is None else parsed.constraint.rule
        message = message_options(parsed.chat, text, self._output_format, self._special_tokens, rule)
        return replace(parsed.output_options, message=message)

    async def _tokenize(self, parsed: ParsedRequest, text: str | None, max_model_len: int | None) -> list[TokenIds]:
        """Return the token ids of each prompt, or of `text`, which is the prompt of a chat."""
        kept = _num_kept(parsed, max_model_len)
        special = parsed.add_special_tokens
        if text is not None:
            return [await self._kept_tokens(text, parsed, max_model_len, kept, add_special_tokens=bool(special))]
        prompts: list[TokenIds] = []
        num_items = 0
        for prompt in parsed.prompts:
            if num_items > ITEMS_PER_YIELD:
                await asyncio.sleep(0)
                num_items = 0
            prompts.append(
                await self._kept_tokens(prompt, parsed, max_model_len, kept, add_special_tokens=special is not False)
            )
            num_items += len(prompt)
        return prompts

    async def _kept_tokens(
        self,
        prompt: Prompt,
        parsed: ParsedRequest,
        max_model_len: int | None,
        kept: int | None,
        *,
        add_special_tokens: bool,
    ) -> TokenIds:
        """Return the last `kept` tokens of a prompt, or all of them.

        Raises Refused if a prompt is invalid, or if one that is not truncated is too long.
        """
        if isinstance(prompt, array):
            self.check_vocabulary(parsed.prompt_field, largest_id(prompt))
            return prompt if kept is None else prompt[-kept:]
        assert isinstance(prompt, str)  # a prompt is either ids or a text
        if kept is None:
            return await self._encoded(prompt, parsed, max_model_len, add_special_tokens=add_special_tokens)
        most = max(MAX_CHARACTERS, MAX_CHARACTERS_PER_TOKEN * (max_model_len or 0))
        if len(prompt) > most:
            raise InvalidField(
                parsed.prompt_field,
                f"the prompt has {len(prompt)} characters; at most {most} can be truncated; send its last part",
            )
        return (await self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))[-kept:]

    async def chat_text(self, chat: ChatRequest) -> str:
        """Return the text that the chat template makes of a chat. Raises InvalidField if it cannot use the
        chat."""
        check_template(chat, self.tokenizer.chat_templates, allow_own=self._allow_request_chat_template)
        try:
            return await self.tokenizer.chat_text(chat.prompt)
        except Refused as error:
            field = "messages" if chat.prompt.template is None else "chat_template"
            raise InvalidField(field, error.failure.message) from error

    def check_model(self, name: str | None) -> None:
        """Raise Refused (404) if `name` is not the served model. None stands for the served model."""
        if name is not None and name != self.model:
            message = f"model {printable(name)} is not served; the served model is {printable(self.model)}"
            raise InvalidField("model", message, Reason.MODEL_NOT_FOUND, Code.NOT_FOUND)

    async def _encoded(
        self, text: str, parsed: ParsedRequest, max_model_len: int | None, *, add_special_tokens: bool
    ) -> TokenIds:
        """Return the token ids of a text. Raises Refused if a long one has more than `max_model_len`.

        A long text is rejected by its length, or by the tokens of its beginning, before it is tokenized
        completely, because that takes about a second per MiB. A text of up to `EXACT_CHARACTERS` is returned
        even if it has more tokens; the caller refuses it with their exact number.
        """
        if max_model_len is None:
            return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        num_bytes = len(text)
        if not text.isascii():
            num_bytes = await loop_time.call(num_bytes, loop_time.JSON_CHARACTERS, lambda: len(text.encode()))
        at_least = self.tokenizer.min_tokens_of(num_bytes)
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
        raise prompt_too_long(parsed, at_least, max_model_len, is_exact=False)

    def _request(
        self,
        parsed: ParsedRequest,
        tokens: TokenIds,
        rules: Mapping[str, Any],
        model_limits: ModelLimits,
        received_s: float,
        deadline_s: float,
    ) -> GenerateRequest:
        if not tokens:
            raise InvalidField(parsed.prompt_field, "the prompt has no tokens; send at least one")
        max_tokens = output_length(parsed, len(tokens), model_limits.max_model_len)
        _check_prompt_logprobs(parsed.sampling["num_prompt_logprobs"], len(tokens))
        seed = self._rng.getrandbits(64) if parsed.seed is None else parsed.seed & U64_MAX
        return GenerateRequest(
            request_id=b"",
            model=self.model,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=max_tokens, seed=seed, **rules, **parsed.sampling),
            sample_indices=tuple(range(parsed.n)),
            received_s=received_s,
            deadline_s=deadline_s,
            priority=parsed.priority,
            slo=parsed.slo.with_defaults(self._default_slo),
            retain_s=parsed.retain_s,
            next_in_s=parsed.next_in_s,
        )

    def check_vocabulary(self, name: str, token_id: int) -> None:
        """Raise InvalidField for the field `name` if the token id is outside the vocabulary."""
        if token_id >= self.tokenizer.vocab_size:
            raise InvalidField(
                name,
                f"{name} contains the token id {token_id}; must be between 0 and {self.tokenizer.vocab_size - 1}",
            )


def mixed_salt(tenant_salt: bytes, client_salt: str) -> bytes:
    """Return the salt of a request's block hashes: the tenant's, then one made of it and the client's own.

    Without a client salt it is the tenant's. No client salt leads to the salt of another tenant, because all
    of a tenant's begin with its own, or there are no tenants.
    """
    if not client_salt:
        return tenant_salt
    tenant_salt = tenant_salt.ljust(TENANT_SALT_BYTES, b"\0")  # that of the only tenant may be empty
    mixed = blake2b(client_salt.encode(), key=tenant_salt, digest_size=TENANT_SALT_BYTES, person=b"baton-salt")
    return tenant_salt + mixed.digest()


def _check_prompt_logprobs(num_logprobs: int | None, num_prompt_tokens: int) -> None:
    """Raise InvalidField if the logprobs of a prompt are too many for one message between services."""
    if num_logprobs is not None and (1 + num_logprobs) * num_prompt_tokens > MAX_PROMPT_LOGPROBS:
        most = MAX_PROMPT_LOGPROBS // num_prompt_tokens - 1
        remedy = f"ask for at most {most}" if most >= 0 else "send a shorter prompt"
        raise InvalidField(
            "prompt_logprobs",
            f"{num_logprobs} logprobs for each of {num_prompt_tokens} prompt tokens are too many; {remedy}",
        )


def _num_kept(parsed: ParsedRequest, max_model_len: int | None) -> int | None:
    """Return the number of last tokens of each prompt to keep; None for all."""
    if parsed.truncate_prompt_tokens != -1:
        return parsed.truncate_prompt_tokens
    if max_model_len is None:
        return None
    return max(1, max_model_len - (parsed.max_tokens or max(1, parsed.sampling["min_tokens"])))


def _prompt_texts(parsed: ParsedRequest) -> tuple[str | None, ...]:
    """Return the texts of prompts that the response repeats. The text of a truncated one is not known."""
    if not parsed.output_options.echo:
        return ()
    is_whole = parsed.truncate_prompt_tokens is None
    return tuple(prompt if is_whole and isinstance(prompt, str) else None for prompt in parsed.prompts)


def _check_allowed(parsed: ParsedRequest, identity: Identity, model_limits: ModelLimits) -> None:
    """Raise InvalidField if the key may not use this priority, or if no worker runs so many choices."""
    if identity.min_priority is not None and parsed.priority < identity.min_priority:
        message = (
            f"priority is {parsed.priority}; must be at least {identity.min_priority} "
            f"for the key {identity.name!r} (lower numbers are served first)"
        )
        raise InvalidField("priority", message)
    if model_limits.max_num_seqs is not None and parsed.n > model_limits.max_num_seqs:
        raise InvalidField(
            "n",
            f"n is {parsed.n}; must be at most {model_limits.max_num_seqs}, "
            "the number of sequences that one worker runs at a time",
        )
