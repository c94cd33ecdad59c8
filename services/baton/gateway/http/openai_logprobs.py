"""Logprobs as OpenAI's two APIs write them."""

from collections.abc import Sequence
from typing import Any

from baton.core.request import TokenLogprobs
from baton.gateway.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON has not."""


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        top = [_entry(tokenizer, id_, logprob) for id_, logprob in position.top]
        content.append({**_entry(tokenizer, token_id, position.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_offset: int
) -> tuple[dict[str, Any], int]:
    """The object, and the offset after it. `text_offset`: characters of the choice's tokens before these."""
    tokens = [token_name(tokenizer.token_bytes(token_id)) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    top = [
        {token: _finite(position.logprob)}
        | {token_name(tokenizer.token_bytes(id_)): _finite(logprob) for id_, logprob in position.top}
        for token, position in zip(tokens, logprobs, strict=True)
    ]
    named = {
        "tokens": tokens,
        "token_logprobs": [_finite(position.logprob) for position in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }
    return named, text_offset


def token_name(token: bytes) -> str:
    """A token that is a part of a character is spelled in bytes, as OpenAI spells it, so that two of them
    stay apart."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {"token": token_name(token), "logprob": _finite(logprob), "bytes": list(token)}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)
