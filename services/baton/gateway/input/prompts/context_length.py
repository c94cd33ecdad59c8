"""Checks that prompts and answers fit the context of the model.

Clients that shorten a prompt by themselves read the messages of these errors. The first half is therefore
worded as in Anthropic's API, and the rest names the limit as OpenAI's API does.
"""

from baton.core.errors import Reason
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.request_body import ParsedRequest

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. The default for chats is the rest of the context."""


def output_length(parsed: ParsedRequest, num_prompt_tokens: int, max_model_len: int | None) -> int:
    """Return the requested `max_tokens`, or the endpoint's default.

    Raises InvalidField if the prompt, or prompt and answer together, exceed the context.
    """
    min_tokens: int = parsed.sampling["min_tokens"]
    default = max(COMPLETION_MAX_TOKENS, min_tokens)
    if max_model_len is None:
        return parsed.max_tokens or default
    remaining = max_model_len - num_prompt_tokens
    if remaining < 1:
        raise prompt_too_long(parsed, num_prompt_tokens, max_model_len)
    wanted = parsed.max_tokens or min_tokens
    if wanted > remaining:
        raise _answer_too_long(parsed, num_prompt_tokens, wanted, max_model_len)
    if parsed.max_tokens is not None:
        return parsed.max_tokens
    return remaining if parsed.chat is not None else min(remaining, default)


def prompt_too_long(
    parsed: ParsedRequest, num_prompt_tokens: int, max_model_len: int, *, is_exact: bool = True
) -> InvalidField:
    """Return the error for a prompt that leaves no room for one token of an answer.

    is_exact: False if the prompt has this many tokens or more.
    """
    field, cut = parsed.prompt_field, parsed.truncate_prompt_tokens
    remedy = f"shorten {field}" if cut is None else f"reduce truncate_prompt_tokens to {max_model_len - 1} or less"
    return InvalidField(
        field,
        f"prompt is too long: {'' if is_exact else 'at least '}{num_prompt_tokens} tokens > {max_model_len - 1} "
        f"maximum; this model's maximum context length is {max_model_len} tokens, with at least one for the answer; "
        f"{remedy}",
        Reason.CONTEXT_LENGTH_EXCEEDED,
    )


def _answer_too_long(
    parsed: ParsedRequest, num_prompt_tokens: int, num_tokens: int, max_model_len: int
) -> InvalidField:
    """Return the error for a prompt that fits, but leaves fewer tokens than the request asks for."""
    name = parsed.max_tokens_field or "min_tokens"
    return InvalidField(
        parsed.prompt_field,
        f"input length and `{name}` exceed context limit: {num_prompt_tokens} + {num_tokens} > {max_model_len}; "
        f"this model's maximum context length is {max_model_len} tokens; shorten {parsed.prompt_field}, or reduce "
        f"{name} to {max_model_len - num_prompt_tokens} or less",
        Reason.CONTEXT_LENGTH_EXCEEDED,
    )
