"""Lists the known request fields: supported ones, labels that are accepted without effect, and unimplemented
ones.

Every other field is rejected, so no field is silently ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

COMMON = frozenset(
    """
    model max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p n seed stop
    stop_token_ids presence_penalty frequency_penalty repetition_penalty logit_bias logprobs
    ignore_eos skip_special_tokens stream stream_options return_token_ids timeline priority slo
    """.split()
)
COMPLETIONS = COMMON | {"prompt"}
CHAT = COMMON | {"messages", "top_logprobs"}

LABELS = frozenset(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"))
"""String fields that are accepted without effect. `metadata` and `store` are labels of other types."""

STREAM_OPTIONS = frozenset(("include_usage",))
SLO = frozenset(("ttft_ms", "tpot_ms"))

_NOTHING: tuple[object, ...] = ([], {}, "")
_OWN = "omit it; Baton sets it"
_TOOLS = "tools are not implemented; describe them in a message and parse the response"
_CONSTRAINED = "constrained output is not implemented; describe the format in a message and parse the response"
_SEARCH = "beam search is not implemented; use temperature, top_p, top_k and n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unimplemented:
    """A known field that is not implemented.

    advice: what a client can do instead; part of the error message.
    defaults: values that have no effect and are therefore accepted. Null is always accepted.
    """

    advice: str
    defaults: tuple[object, ...] = ()


def _not(advice: str, *defaults: object) -> Unimplemented:
    return Unimplemented(advice=advice, defaults=defaults)


_BOTH: Mapping[str, Unimplemented] = {
    "add_special_tokens": _not(
        "text prompts get the tokenizer's special tokens and chats those of the template; send token ids to avoid them"
    ),
    "allowed_token_ids": _not("use logit_bias", *_NOTHING),
    "bad_words": _not("use logit_bias", *_NOTHING),
    "cache_salt": _not(_OWN),
    "deadline_s": _not("send the header x-baton-timeout-ms"),
    "early_stopping": _not(_SEARCH, False),
    "guided_choice": _not(_CONSTRAINED),
    "guided_grammar": _not(_CONSTRAINED),
    "guided_json": _not(_CONSTRAINED),
    "guided_regex": _not(_CONSTRAINED),
    "include_stop_str_in_output": _not("add the stop string yourself", False),
    "kv_transfer_params": _not(_OWN),
    "length_penalty": _not(_SEARCH, 1, 1.0),
    "logits_processors": _not("use logit_bias", *_NOTHING),
    "prompt_logprobs": _not("only generated tokens have logprobs"),
    "request_id": _not("omit it; the response header x-request-id contains the id"),
    "response_format": _not(_CONSTRAINED, {"type": "text"}),
    "return_tokens_as_token_ids": _not("use return_token_ids", False),
    "sample_indices": _not(_OWN),
    "spaces_between_special_tokens": _not("special tokens are joined without spaces", True),
    "structured_outputs": _not(_CONSTRAINED),
    "truncate_prompt_tokens": _not("shorten the prompt yourself; /tokenize counts its tokens"),
    "use_beam_search": _not(_SEARCH, False),
}

NOT_IN_COMPLETIONS: Mapping[str, Unimplemented] = {
    **_BOTH,
    "best_of": _not("use n, and choose among the choices", 1),
    "echo": _not("prepend the prompt to the response yourself", False),
    "messages": _not("send chats to /v1/chat/completions"),
    "suffix": _not("text insertion is not implemented; only continuation is", ""),
}

NOT_IN_CHAT: Mapping[str, Unimplemented] = {
    **_BOTH,
    "add_generation_prompt": _not("the generation prompt is always added", True),
    "audio": _not("only text is implemented"),
    "chat_template": _not("the model's own chat template is used"),
    "chat_template_kwargs": _not("the model's own chat template is used", *_NOTHING),
    "continue_final_message": _not("send the whole prompt to /v1/completions", False),
    "documents": _not("put them into a message", *_NOTHING),
    "echo": _not("prepend the prompt to the response yourself", False),
    "function_call": _not(_TOOLS, "none", "auto"),
    "functions": _not(_TOOLS, *_NOTHING),
    "mm_processor_kwargs": _not("only text is implemented", *_NOTHING),
    "modalities": _not("only text is implemented", ["text"]),
    "moderation": _not("check the response yourself"),
    "parallel_tool_calls": _not(_TOOLS, True, False),
    "prediction": _not("predicted output is not implemented"),
    "prompt": _not("send prompts to /v1/completions"),
    "reasoning_effort": _not("ask for it in a message"),
    "tool_choice": _not(_TOOLS, "none", "auto"),
    "tools": _not(_TOOLS, *_NOTHING),
    "verbosity": _not("ask for it in a message", "medium"),
    "web_search_options": _not("web search is not implemented"),
}

NOT_IN_STREAM_OPTIONS: Mapping[str, Unimplemented] = {
    "continuous_usage_stats": _not("only the last chunk contains the usage", False),
    "include_obfuscation": _not("obfuscation is not implemented", False),
}
