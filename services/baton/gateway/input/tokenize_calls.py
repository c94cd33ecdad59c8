"""Tokenizing and detokenizing for clients of both front doors, with the fields that vLLM gives them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request_limits import U32_MAX, printable
from baton.gateway.input.chat_messages import messages_of
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import Reader, check, check_text, refuse_others
from baton.gateway.input.validation import CHARACTERS_A_TOKEN, Validator

_TOKENIZE = frozenset(("model", "prompt", "messages", "add_special_tokens"))
_DETOKENIZE = frozenset(("model", "tokens"))
MAX_CHARACTERS = 2**20
MAX_TOKENS = 2**16
"""What may always be converted in one call; where the model's length has more, that much may."""
TOKENS_A_TURN = 1024
"""Decoded before the event loop gets its turn: about a millisecond."""


async def ids_of(validator: Validator, body: Mapping[str, Any]) -> TokenIds:
    """The ids of `prompt`, or of the whole prompt that `messages` make. It may be longer than the model's
    length. Raises Refused."""
    refuse_others(body, _TOKENIZE, {})
    read = Reader(body)
    validator.check_model(read.value("model"))
    prompt = body.get("prompt")
    if (prompt is None) == (body.get("messages") is None):
        raise InvalidField("prompt", "send either prompt or messages")
    if prompt is None:
        text = validator.tokenizer.chat_text(messages_of(body))
        _check_length(validator, "messages", text)
        return await validator.tokenizer.encode(text, add_special_tokens=False)
    if not isinstance(prompt, str):
        raise InvalidField("prompt", f"prompt must be a string, not {printable(prompt)}")
    check_text("prompt", prompt)
    _check_length(validator, "prompt", prompt)
    wanted = body.get("add_special_tokens")
    return await validator.tokenizer.encode(
        prompt, add_special_tokens=wanted is None or read.flag("add_special_tokens")
    )


async def text_of(validator: Validator, body: Mapping[str, Any]) -> str:
    """The text of `tokens`; an id without text is U+FFFD. Raises Refused."""
    refuse_others(body, _DETOKENIZE, {})
    validator.check_model(Reader(body).value("model"))
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise InvalidField("tokens", f"tokens must be a list of token ids, not {printable(tokens)}")
    most = max(MAX_TOKENS, validator.max_model_len or 0)
    if len(tokens) > most:
        raise InvalidField("tokens", f"tokens has {len(tokens)} ids; one call takes {most}: send them in several")
    if not set(map(type, tokens)) <= {int} or not 0 <= min(tokens, default=0) <= max(tokens, default=0) <= U32_MAX:
        for token in tokens:
            check("token_ids", token, "tokens")
    validator.check_vocabulary("tokens", max(tokens, default=0))
    ids, detokenizer = token_ids(tokens), validator.tokenizer.detokenizer(skip_special_tokens=False)
    pieces: list[str] = []
    for begin in range(0, len(ids), TOKENS_A_TURN):
        pieces += map(detokenizer.put, ids[begin : begin + TOKENS_A_TURN])
        await asyncio.sleep(0)
    return "".join(pieces) + detokenizer.flush()


def _check_length(validator: Validator, name: str, text: str) -> None:
    most = max(MAX_CHARACTERS, CHARACTERS_A_TOKEN * (validator.max_model_len or 0))
    if len(text) > most:
        raise InvalidField(name, f"{name} has {len(text)} characters; one call takes {most}: send them in several")
