"""Parses and checks a request body, as far as possible without the tokenizer and the cluster.

Used for HTTP and gRPC. Errors are `InvalidField` with a message that names the field, the rule and the
remedy.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request import NO_SLO, Slo
from baton.core.request_limits import LIMITS, U32_MAX, printable
from baton.gateway.input import field_policy
from baton.gateway.input.answers.constraint_fields import AnswerConstraint, parse_constraint
from baton.gateway.input.chat.chat_request import ChatRequest, parse_chat
from baton.gateway.input.client_call import Endpoint, InvalidField, OutputOptions
from baton.gateway.input.field_reader import (
    FieldReader,
    as_object,
    check,
    check_count,
    check_fields,
    check_text,
)
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS

Prompt: TypeAlias = "str | TokenIds"
_MAX_TOKENS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request whose fields are valid by themselves.

    prompts: empty for a chat.
    chat: None for completions.
    max_tokens: None means the endpoint's default.
    max_tokens_field: the name under which the client sent `max_tokens`; empty if it did not.
    sampling: arguments of `Sampling` other than `max_tokens` and `seed`.
    add_special_tokens: None means the endpoint's default.
    truncate_prompt_tokens: number of last tokens of the prompt to keep; -1 keeps as many as fit, None all.
    cache_salt: the client's own salt for cached prefixes.
    session: id of the client's session; empty if the body names none.
    retain_s, next_in_s: see `SessionHints`.
    constraint: format of the answers; None if their text is free.
    bad_words: texts that the answers must not have.
    """

    endpoint: Endpoint
    model: str | None
    prompts: tuple[Prompt, ...]
    chat: ChatRequest | None
    n: int
    max_tokens: int | None
    max_tokens_field: str
    seed: int | None
    sampling: Mapping[str, Any]
    priority: int
    slo: Slo
    output_options: OutputOptions
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str = ""
    session: str = ""
    retain_s: float | None = None
    next_in_s: float | None = None
    constraint: AnswerConstraint | None = None
    bad_words: tuple[str, ...] = ()

    @property
    def prompt_field(self) -> str:
        """Field that has the prompt, for errors about its tokens."""
        if self.chat is not None:
            return "messages"
        has_ids = self.endpoint is Endpoint.GRPC and isinstance(self.prompts[0], array)
        return "token_ids" if has_ids else "prompt"


def parse_request(endpoint: Endpoint, body: Mapping[str, Any], unknown: UnknownFields) -> ParsedRequest:
    """Parse a body with the fields of OpenAI's completions or chat API and Baton's additions.

    Unknown fields are reported to `unknown`. Raises InvalidField if a field is refused or invalid.
    """
    is_chat = endpoint.is_chat or (endpoint is Endpoint.GRPC and body.get("messages") is not None)
    check_fields(body, field_policy.CHAT if is_chat else field_policy.COMPLETIONS, unknown)
    read = FieldReader(body)
    n = read.value("n")
    prompts = () if is_chat else _prompts(body, endpoint)
    if max(1, len(prompts)) * n > (most := LIMITS["choices"].maximum or 0):
        raise InvalidField(
            "n",
            f"{len(prompts)} prompts times n = {n} make {len(prompts) * n} choices; at most {most:g} are allowed; "
            "send several requests",
        )
    if (best_of := read.value("best_of")) not in (None, n):
        raise InvalidField("best_of", f"best_of is {best_of}; must be equal to n ({n}), because no choice is dropped")
    echo = not is_chat and read.value("echo")
    max_tokens = _max_tokens(read, endpoint, echo=echo)
    min_tokens = read.value("min_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidField("min_tokens", f"min_tokens is {min_tokens}; must be at most max_tokens ({max_tokens})")
    return ParsedRequest(
        endpoint=endpoint,
        model=read.value("model"),
        prompts=prompts,
        chat=parse_chat(body, unknown) if is_chat else None,
        n=n,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        max_tokens_field=next((name for name in _MAX_TOKENS if body.get(name) is not None), ""),
        seed=read.value("seed"),
        sampling={
            "temperature": float(read.value("temperature")),
            "top_k": max(0, read.value("top_k")),
            "top_p": float(read.value("top_p")),
            "min_p": float(read.value("min_p")),
            "repetition_penalty": float(read.value("repetition_penalty")),
            "presence_penalty": float(read.value("presence_penalty")),
            "frequency_penalty": float(read.value("frequency_penalty")),
            "min_tokens": min_tokens,
            "ignore_eos": read.value("ignore_eos"),
            "stop_token_ids": read.items("stop_token_ids"),
            "num_logprobs": _num_logprobs(read, endpoint.is_chat),
            "num_prompt_logprobs": _num_prompt_logprobs(read, echo=echo),
            "logit_bias": _logit_bias(body.get("logit_bias")),
            "allowed_token_ids": _allowed_token_ids(body, read),
        },
        bad_words=read.items("bad_words"),
        constraint=parse_constraint(body, unknown),
        priority=read.value("priority"),
        slo=_slo(body.get("slo"), unknown),
        add_special_tokens=read.value("add_special_tokens"),
        truncate_prompt_tokens=_truncate_prompt_tokens(read),
        cache_salt=read.value("cache_salt") or "",
        session=read.value("session") or "",
        retain_s=read.value("retain_s"),
        next_in_s=read.value("next_in_s"),
        output_options=_output_options(body, read, unknown, echo=echo, drops_output=max_tokens == 0),
    )


def _output_options(
    body: Mapping[str, Any], read: FieldReader, unknown: UnknownFields, *, echo: bool, drops_output: bool
) -> OutputOptions:
    return OutputOptions(
        stop=(body["stop"],) if _checked_text("stop", body.get("stop")) else read.items("stop"),
        skip_special_tokens=read.value("skip_special_tokens"),
        stream=read.value("stream"),
        **_stream_options(body, unknown),
        includes_stop=read.value("include_stop_str_in_output"),
        echo=echo,
        prompt_logprobs=read.value("prompt_logprobs"),
        drops_output=drops_output,
        token_ids_as_names=read.value("return_tokens_as_token_ids"),
        return_token_ids=read.value("return_token_ids"),
        timeline=read.value("timeline"),
    )


def _prompts(body: Mapping[str, Any], endpoint: Endpoint) -> tuple[Prompt, ...]:
    """Return the prompts of a body: a string, a list of token ids, or a list of either."""
    prompt = body.get("prompt")
    if prompt is None and endpoint is Endpoint.GRPC:
        message = "the prompt is missing; set prompt, token_ids or fields_json.messages"
        raise InvalidField("prompt", message)
    if isinstance(prompt, str):
        return (_prompt(prompt),)
    if not isinstance(prompt, JSON_LISTS):
        what = "missing" if prompt is None else printable(prompt)
        raise InvalidField("prompt", f"prompt is {what}; must be a string, a list of token ids, or a list of either")
    if not prompt:
        raise InvalidField("prompt", "prompt is an empty list; send at least one prompt or token id")
    if isinstance(prompt[0], (str, *JSON_LISTS)):
        check_count("prompt", len(prompt))
        kind = str if isinstance(prompt[0], str) else JSON_LISTS
        if not all(isinstance(item, kind) for item in prompt):
            raise InvalidField("prompt", "prompt mixes strings and lists of token ids; send only one kind in a list")
        return tuple(_prompt(item) for item in prompt)
    return (_prompt(prompt),)


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidField("prompt", "prompt is empty; send at least one character")
        check_text("prompt", prompt)
        return prompt
    if not prompt:
        raise InvalidField("prompt", "prompt is empty; send at least one token id")
    check_count("token_ids", len(prompt), "prompt")
    if isinstance(prompt, array):
        return prompt
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) > U32_MAX:
        for item in prompt:
            check("token_ids", item, "prompt")
    return token_ids(prompt)


def _checked_text(name: str, value: object) -> bool:
    """Return True if the value is a string. Raises InvalidField if it is a string outside its limits."""
    if isinstance(value, str):
        check(name, value)
        return True
    return False


def _max_tokens(read: FieldReader, endpoint: Endpoint, *, echo: bool) -> int | None:
    """Return `max_tokens`, or `max_completion_tokens`, which is OpenAI's newer name for it.

    It may be 0 with `echo`, and in messages, as in Anthropic's API: the request then only fills the cache.
    """
    old, new = read.value("max_tokens"), read.value("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidField(
            "max_tokens",
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same, so send only one",
        )
    if old == 0 and not echo and endpoint is not Endpoint.MESSAGES:
        unless = " unless echo is true" if endpoint is Endpoint.COMPLETIONS else ""
        raise InvalidField("max_tokens", f"max_tokens is 0; must be at least 1{unless}")
    return old if new is None else new


def _truncate_prompt_tokens(read: FieldReader) -> int | None:
    kept: int | None = read.value("truncate_prompt_tokens")
    if kept == 0:
        message = "truncate_prompt_tokens is 0; must be at least 1, or -1 to keep as many tokens as fit"
        raise InvalidField("truncate_prompt_tokens", message)
    return kept


def _num_logprobs(read: FieldReader, is_chat: bool) -> int | None:
    """Return the number of logprobs to report. Completions send a number, chats a flag and a number."""
    if not is_chat:
        return read.value("logprobs")
    wanted, top = read.flag("logprobs"), read.value("top_logprobs")
    if top and not wanted:
        raise InvalidField("top_logprobs", f"top_logprobs is {top}, but logprobs is not true; set logprobs to true")
    return (top or 0) if wanted else None


def _num_prompt_logprobs(read: FieldReader, *, echo: bool) -> int | None:
    """Return the number of logprobs to report for prompt tokens: those of `prompt_logprobs`, and of `echo`
    with `logprobs`."""
    wanted = read.value("prompt_logprobs")
    if wanted is not None and read.value("stream"):
        remedy = "set stream to false, or ask a completion for echo and logprobs"
        raise InvalidField("prompt_logprobs", f"prompt_logprobs is not available with stream; {remedy}")
    numbers = [wanted, read.value("logprobs") if echo else None]
    return max((number for number in numbers if number is not None), default=None)


def _allowed_token_ids(body: Mapping[str, Any], read: FieldReader) -> tuple[int, ...]:
    """Return the allowed ids in ascending order; empty without the field. An empty list would allow none."""
    allowed = tuple(sorted(set(read.items("allowed_token_ids"))))
    if not allowed and body.get("allowed_token_ids") is not None:
        message = "allowed_token_ids is an empty list; send at least one token id, or leave it out to allow all"
        raise InvalidField("allowed_token_ids", message)
    return allowed


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InvalidField(
            "logit_bias", f"logit_bias is {printable(value)}; must be an object of token ids and numbers"
        )
    check_count("logit_bias", len(value))
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        is_id = (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10) or type(key) is int
        if not is_id or not 0 <= int(key) <= U32_MAX:
            raise InvalidField("logit_bias", f"logit_bias has the key {printable(key)}; keys must be token ids")
        biases[int(key)] = bias
    checked: list[tuple[int, float]] = []
    for token_id, bias in sorted(biases.items()):  # sorted, because gRPC maps have no order: errors stay the same
        check("logit_bias", bias)
        checked.append((token_id, float(bias)))
    return tuple(checked)


def _slo(value: object, unknown: UnknownFields) -> Slo:
    if value is None:
        return NO_SLO
    nested = as_object("slo", value)
    check_fields(nested, field_policy.SLO, unknown, "slo.")
    read = FieldReader(nested, "slo.")
    ttft_ms, tpot_ms = read.value("ttft_ms"), read.value("tpot_ms")
    return Slo(ttft_s=None if ttft_ms is None else ttft_ms / 1000, tpot_s=None if tpot_ms is None else tpot_ms / 1000)


def _stream_options(body: Mapping[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    """Return the fields of `OutputOptions` that `stream_options` sets."""
    options = body.get("stream_options")
    if options is None:
        return {}
    nested = as_object("stream_options", options)
    if not body.get("stream"):
        raise InvalidField("stream_options", "stream_options is set, but stream is not true; set stream to true")
    check_fields(nested, field_policy.STREAM_OPTIONS, unknown, "stream_options.")
    read = FieldReader(nested, "stream_options.")
    continuous = read.value("continuous_usage_stats")
    return {"include_usage": continuous or read.value("include_usage"), "continuous_usage": continuous}
