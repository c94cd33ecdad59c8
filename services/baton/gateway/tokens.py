"""Tokenizing and detokenizing for clients of both front doors, with the fields that vLLM gives them."""

from collections.abc import Mapping
from typing import Any

from baton.core.blocks import TokenIds, token_ids
from baton.core.limits import shown
from baton.gateway.call import InvalidField
from baton.gateway.messages import messages_of
from baton.gateway.reading import Reader, check, check_text, refuse_others
from baton.gateway.validation import Validator

_TOKENIZE = frozenset(("model", "prompt", "messages", "add_special_tokens"))
_DETOKENIZE = frozenset(("model", "tokens"))


async def ids_of(validator: Validator, body: Mapping[str, Any]) -> TokenIds:
    """The ids of `prompt`, or of the whole prompt that `messages` make. Raises Refused."""
    refuse_others(body, _TOKENIZE, {})
    read = Reader(body)
    validator.check_model(read.value("model"))
    prompt = body.get("prompt")
    if (prompt is None) == (body.get("messages") is None):
        raise InvalidField("prompt", "send either prompt or messages")
    if prompt is None:
        return await validator.tokenizer.encode_chat(messages_of(body))
    if not isinstance(prompt, str):
        raise InvalidField("prompt", f"prompt must be a string, not {shown(prompt)}")
    check_text("prompt", prompt)
    wanted = body.get("add_special_tokens")
    return await validator.tokenizer.encode(prompt, add_special_tokens=wanted is None or read.flag("add_special_tokens"))


def text_of(validator: Validator, body: Mapping[str, Any]) -> str:
    """The text of `tokens`; an id without text is U+FFFD. Raises Refused."""
    refuse_others(body, _DETOKENIZE, {})
    validator.check_model(Reader(body).value("model"))
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise InvalidField("tokens", f"tokens must be a list of token ids, not {shown(tokens)}")
    for token in tokens:
        check("token_ids", token, "tokens")
    validator.check_vocabulary("tokens", max(tokens, default=0))
    return validator.tokenizer.decode(token_ids(tokens))
