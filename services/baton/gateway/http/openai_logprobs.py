"""Formats logprobs for the OpenAI chat and completions APIs."""

from collections.abc import Sequence
from typing import Any

from baton.core.request import TokenLogprobs
from baton.gateway.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Value written for minus infinity, which JSON cannot express."""


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        top = [_entry(tokenizer, id_, logprob) for id_, logprob in position.top]
        content.append({**_entry(tokenizer, token_id, position.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_offset: int
) -> tuple[dict[str, Any], int]:
    """Return (the `logprobs` object of a completion choice, text offset after these tokens).

    `text_offset` is the number of characters of the choice's earlier tokens.
    """
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
    """Return the text of a token. Part of a character is written as bytes, as OpenAI does, so that it is
    unique."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {"token": token_name(token), "logprob": _finite(logprob), "bytes": list(token)}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)
