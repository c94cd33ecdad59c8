"""The memory that a call may need in the gateway, estimated before it starts."""

import sys

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.kv.block_hash import TokenIds
from baton.core.request import Sampling
from baton.gateway.input.client_call import ClientCall

OBJECT_BYTES = 4096
"""Objects of one request: its state, task, streams and timeline."""
PROMPT_TOKEN_BYTES = 16
"""A prompt token: its id (4), as part of a second attempt (4), and its share of a block hash."""
GRAMMAR_COPIES = 2
"""A grammar, and its copy in a message to a worker."""
OUTPUT_TOKEN_BYTES = 8
"""A delivered token: its id, in the delivery and in the prompt of a second attempt."""
HELD_TOKEN_BYTES = 8
"""Text of an output token that a parser of tool calls holds back, twice: for the call, and for the content if
the call turns out to be malformed."""
RULE_ID_BYTES = 40
"""A token id of `allowed_token_ids`, `bad_words` or `stop_token_ids`: a number, and its place in a tuple."""
RULE_BYTES = 128
"""An entry of `bad_words` without its ids, or of `logit_bias`."""
RAW_LOGPROB_BYTES = 8
"""The logprob of a prompt token, or of one of its alternatives, with a rank or an id, in arrays."""
TEXT_BYTES = 16
"""JSON text of one token. Natural language has about four characters per token."""
JSON_CHARACTER_BYTES = 12
"""JSON text of one character that is escaped as two surrogates."""
JSON_TEXT_SHARE = 2
"""JSON text of a prompt, per byte in memory. Control characters take more, but are rare."""
JSON_ID_BYTES = 10
"""JSON text of one token id."""
CHAT_LOGPROB_BYTES, COMPLETION_LOGPROB_BYTES = 96, 48
"""JSON text of one token with its logprob."""
PROMPT_LOGPROB_BYTES = 80
"""JSON text of a prompt token, or of one of its alternatives, with its logprob."""
CHOICE_BYTES = 256
"""JSON text of one choice without its output."""


def call_bytes(call: ClientCall) -> int:
    """Return the bytes of a call's prompts, of their JSON text if a stream repeats it, and of the tokens that
    were delivered."""
    options = call.output_options
    message_bytes = 0 if options.message is None else options.message.num_bytes
    prompt_token_bytes = PROMPT_TOKEN_BYTES + JSON_ID_BYTES * options.return_token_ids
    if call.num_prompt_logprobs is not None:
        each = RAW_LOGPROB_BYTES + (PROMPT_LOGPROB_BYTES if options.stream else 0)
        prompt_token_bytes += each * (1 + call.num_prompt_logprobs)
    output_token_bytes = OUTPUT_TOKEN_BYTES
    if options.message is not None and options.message.may_hold_text:
        output_token_bytes += HELD_TOKEN_BYTES
    return (
        message_bytes
        + sum(map(sys.getsizeof, (*filter(None, call.prompt_texts), *options.stop)))
        + (sum(_echo_bytes(call, index) for index in range(len(call.requests))) if options.stream else 0)
        + _rules_bytes(call.requests[0].sampling)
        + sum(
            OBJECT_BYTES
            + GRAMMAR_COPIES * len(request.sampling.grammar)
            + prompt_token_bytes * len(request.token_ids)
            + output_token_bytes * len(request.sample_indices) * request.sampling.max_tokens
            for request in call.requests
        )
    )


def _rules_bytes(sampling: Sampling) -> int:
    """Return the bytes of the lists in sampling parameters, which all requests of a call share."""
    num_ids = len(sampling.allowed_token_ids) + len(sampling.stop_token_ids) + sum(map(len, sampling.bad_words))
    return RULE_ID_BYTES * num_ids + RULE_BYTES * (len(sampling.bad_words) + len(sampling.logit_bias))


def _echo_bytes(call: ClientCall, index: int) -> int:
    """Return the bytes of the JSON text of a prompt that the response repeats."""
    if not call.output_options.echo:
        return 0
    text = call.prompt_texts[index]
    return TEXT_BYTES * len(call.requests[index].token_ids) if text is None else JSON_TEXT_SHARE * sys.getsizeof(text)


def response_bytes(call: ClientCall) -> int:
    """Return the bytes that the gateway may have to hold of the response.

    A streamed response is held only as far as it is unread, but an event may repeat the prompt's ids, or the
    output. Other responses are collected as JSON.
    """
    total = 0
    for index, request in enumerate(call.requests):
        num_choices = len(request.sample_indices)
        total += _echo_bytes(call, index) * num_choices
        if call.output_options.return_token_ids:
            echoes = 1 if call.endpoint.is_chat and not call.output_options.stream else num_choices
            total += JSON_ID_BYTES * len(request.token_ids) * echoes
        if call.num_prompt_logprobs is not None:
            forms = (call.output_options.prompt_logprobs is not None) + (
                call.output_options.echo and call.num_logprobs is not None
            )
            copies = 1 if call.endpoint.is_chat else num_choices
            num_entries = len(request.token_ids) * (1 + call.num_prompt_logprobs)
            total += PROMPT_LOGPROB_BYTES * num_entries * forms * copies
        if not call.output_options.stream or call.endpoint.repeats_output:
            total += num_choices * (CHOICE_BYTES + request.sampling.max_tokens * bytes_per_token(call))
    return total


def ids_bytes(ids: TokenIds) -> int:
    """Return the bytes of an answer with these token ids: the ids, their text, and its encoding."""
    return (ids.itemsize + 2 * JSON_ID_BYTES) * len(ids)


def text_bytes(text: str) -> int:
    """Return the most bytes of an answer with this text: the text, and its JSON form."""
    return sys.getsizeof(text) + JSON_CHARACTER_BYTES * len(text)


def bytes_per_token(call: ClientCall) -> int:
    """Return the JSON bytes of one output token of a call."""
    num_bytes = TEXT_BYTES
    if call.output_options.return_token_ids:
        num_bytes += JSON_ID_BYTES
    if call.num_logprobs is not None:
        each = CHAT_LOGPROB_BYTES if call.endpoint.is_chat else COMPLETION_LOGPROB_BYTES
        num_bytes += each * (1 + call.num_logprobs)
    return num_bytes


def check_response_size(call: ClientCall, max_bytes: int) -> None:
    """Raise Refused (400) with the arithmetic if the response may take more than `max_bytes`."""
    num_bytes = response_bytes(call)
    if num_bytes <= max_bytes:
        return
    request = max(call.requests, key=lambda each: each.sampling.max_tokens)
    num_choices = sum(len(each.sample_indices) for each in call.requests)
    if call.output_options.stream and not call.endpoint.repeats_output:
        arithmetic = f"{num_choices:,} choices that repeat the prompt"
        remedy = "lower n, or leave out return_token_ids and echo"
    else:
        each = f"{request.sampling.max_tokens:,} tokens of about {bytes_per_token(call):,} bytes"
        arithmetic = f"{num_choices:,} choices of {each}"
        remedy = "lower n, max_tokens or top_logprobs, or use stream"
    raise Refused(
        Failure(
            code=Code.INVALID_ARGUMENT,
            reason=Reason.MEMORY_BUDGET,
            message=f"the response may take {num_bytes:,} bytes ({arithmetic}); at most {max_bytes:,} are allowed; "
            f"{remedy}, or raise --max-response-bytes",
        )
    )
