"""Formats logprobs for the OpenAI chat and completions APIs."""

from collections.abc import Sequence
from typing import Any

from baton.core.request import PromptLogprobs, TokenLogprobs
from baton.gateway.text.tokenizer import Tokenizer

NO_LOGPROBS = TokenLogprobs(logprob=0.0)
LEAST_LOGPROB = -9999.0
"""Value written for minus infinity, which JSON cannot express."""


class TokenNames:
    """Names of tokens in logprobs: their text, or `token_id:ID`."""

    def __init__(self, tokenizer: Tokenizer, *, are_ids: bool = False) -> None:
        self.bytes_of = tokenizer.token_bytes
        self._are_ids = are_ids

    def name(self, token_id: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token_id}" if self._are_ids else token_name(self.bytes_of(token_id))


def chat_logprobs(names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        top = [_entry(names, id_, logprob) for id_, logprob in position.top]
        content.append({**_entry(names, token_id, position.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_offset: int
) -> tuple[dict[str, Any], int]:
    """Return (the `logprobs` object of a completion choice, text offset after these tokens).

    `text_offset` is the number of characters of the choice's earlier tokens.
    """
    tokens = [names.name(token_id) for token_id in token_ids]
    offsets = []
    for token_id in token_ids:
        offsets.append(text_offset)
        text_offset += len(token_name(names.bytes_of(token_id)))
    top = [
        {token: _finite(position.logprob)} | {names.name(id_): _finite(logprob) for id_, logprob in position.top}
        for token, position in zip(tokens, logprobs, strict=True)
    ]
    named = {
        "tokens": tokens,
        "token_logprobs": [_finite(position.logprob) for position in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }
    return named, text_offset


def completion_prompt_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    logprobs: PromptLogprobs,
    begin: int,
    text_offset: int,
    num_top: int | None,
) -> tuple[dict[str, Any], int]:
    """Return the same as `completion_logprobs` for prompt tokens from index `begin` on.

    The first token of a prompt has no logprob.
    """
    positions = [logprobs.at(index - 1, num_top) for index in range(max(1, begin), begin + len(token_ids))]
    skipped = len(token_ids) - len(positions)
    named, text_offset = completion_logprobs(names, token_ids, [NO_LOGPROBS] * skipped + positions, text_offset)
    if skipped:
        named["token_logprobs"][0] = named["top_logprobs"][0] = None
    return named, text_offset


def vllm_prompt_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: PromptLogprobs, begin: int, num_top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs` of prompt tokens from index `begin` on: by token id, the prompt's own
    token first."""
    found: list[dict[str, Any] | None] = []
    for index, token_id in enumerate(token_ids, begin):
        if not index:
            found.append(None)
            continue
        position = logprobs.at(index - 1, num_top)
        entries = {token_id: (position.logprob, logprobs.ranks[index - 1])}
        for rank, (id_, logprob) in enumerate(position.top, 1):
            entries.setdefault(id_, (logprob, rank))
        found.append(
            {
                str(id_): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": token_name(names.bytes_of(id_)),
                }
                for id_, (logprob, rank) in entries.items()
            }
        )
    return found


def token_name(token: bytes) -> str:
    """Return the text of a token. Part of a character is written as bytes, as OpenAI does, so that it is
    unique."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": _finite(logprob), "bytes": list(names.bytes_of(token_id))}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)
