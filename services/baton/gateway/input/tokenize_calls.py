"""Implements /tokenize and /detokenize for HTTP and gRPC, with the field names of vLLM."""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request_limits import U32_MAX, printable
from baton.gateway.input import field_policy
from baton.gateway.input.chat.chat_request import ChatRequest, parse_chat
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import FieldReader, check, check_fields, check_text
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS
from baton.gateway.input.validation import MAX_CHARACTERS, MAX_CHARACTERS_PER_TOKEN, Validator, largest_id
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.process import loop_time

MAX_TOKENS = 2**16
"""Token ids of one call. If the model's context is longer, the context length is the limit instead."""


async def tokenize_body(
    validator: Validator, body: Mapping[str, Any], unknown: UnknownFields, *, size: int
) -> TokenIds:
    """Return the token ids of `prompt`, or of the prompt that the chat template makes of a chat.

    size: characters of the JSON that has the messages and further fields. A large one is checked in a thread.

    The prompt may be longer than the model's context. Raises Refused if the body is invalid.
    """
    prompt = await loop_time.call(size, loop_time.JSON_BYTES, lambda: _parsed(body, unknown))
    validator.check_model(FieldReader(body).value("model"))
    if not isinstance(prompt, str):
        text = await validator.chat_text(prompt)
        _check_length(validator, "messages", text)
        return await validator.tokenizer.encode(text, add_special_tokens=False)
    _check_length(validator, "prompt", prompt)
    check_text("prompt", prompt)
    wanted = body.get("add_special_tokens")
    return await validator.tokenizer.encode(
        prompt, add_special_tokens=wanted is None or FieldReader(body).flag("add_special_tokens")
    )


def _parsed(body: Mapping[str, Any], unknown: UnknownFields) -> str | ChatRequest:
    """Return the prompt or the chat of a body. Raises InvalidField."""
    check_fields(body, field_policy.TOKENIZE, unknown)
    prompt = body.get("prompt")
    if (prompt is None) == (body.get("messages") is None):
        raise InvalidField("prompt", "exactly one of prompt and messages must be sent")
    if prompt is None:
        return parse_chat(body, unknown)
    if not isinstance(prompt, str):
        raise InvalidField("prompt", f"prompt is {printable(prompt)}; must be a string")
    return prompt


async def detokenize_body(
    validator: Validator, body: Mapping[str, Any], unknown: UnknownFields, name: str = "tokens"
) -> str:
    """Return the text of `tokens`. An id without text becomes U+FFFD.

    Raises Refused if the body is invalid. `name` is the field's name in errors.
    """
    check_fields(body, field_policy.DETOKENIZE, unknown)
    validator.check_model(FieldReader(body).value("model"))
    tokens = body.get("tokens")
    if not isinstance(tokens, JSON_LISTS):
        raise InvalidField(name, f"{name} is {printable(tokens)}; must be a list of token ids")
    most = max(MAX_TOKENS, validator.max_model_len or 0)
    if len(tokens) > most:
        raise InvalidField(
            name, f"{name} has {len(tokens)} ids; at most {most} are allowed in one call; send several calls"
        )
    ids = tokens if isinstance(tokens, array) else _checked_ids(name, tokens)
    validator.check_vocabulary(name, largest_id(ids))
    return await decoded(validator.tokenizer, ids)


async def decoded(tokenizer: Tokenizer, ids: TokenIds) -> str:
    """Return the text of token ids, with special tokens. Many ids do not block the event loop."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    texts: list[str] = []
    for begin in range(0, len(ids), loop_time.DETOKENIZED_IDS):
        texts += map(detokenizer.put, ids[begin : begin + loop_time.DETOKENIZED_IDS])
        await asyncio.sleep(0)
    return "".join(texts) + detokenizer.flush()


def _checked_ids(name: str, tokens: Sequence[Any]) -> TokenIds:
    """Convert token ids. Raises InvalidField for the first value that is none."""
    if not set(map(type, tokens)) <= {int} or not 0 <= min(tokens, default=0) <= max(tokens, default=0) <= U32_MAX:
        for token in tokens:
            check("token_ids", token, name)
    return token_ids(tokens)


def _check_length(validator: Validator, name: str, text: str) -> None:
    most = max(MAX_CHARACTERS, MAX_CHARACTERS_PER_TOKEN * (validator.max_model_len or 0))
    if len(text) > most:
        raise InvalidField(
            name, f"{name} has {len(text)} characters; at most {most} are allowed in one call; send several calls"
        )
