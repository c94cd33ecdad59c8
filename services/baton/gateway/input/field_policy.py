"""Fields of the inference API by what becomes of them: read, accepted as a label, or refused by name. None is
ever silently ignored."""

from collections.abc import Mapping
from dataclasses import dataclass

COMMON = frozenset(
    """model max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p n seed stop stop_token_ids presence_penalty
    frequency_penalty repetition_penalty logit_bias logprobs ignore_eos skip_special_tokens stream stream_options return_token_ids timeline
    priority slo""".split()
)
COMPLETIONS = COMMON | {"prompt"}
CHAT = COMMON | {"messages", "top_logprobs"}

LABELS = frozenset(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"))
"""Strings that do not change an answer; `metadata` and `store` are labels of other types."""

STREAM_OPTIONS = frozenset(("include_usage",))
SLO = frozenset(("ttft_ms", "tpot_ms"))

_NOTHING: tuple[object, ...] = ([], {}, "")
_OWN = "leave it out: Baton sets it itself"
_TOOLS = "tools are not implemented; describe them in a message and parse the answer"
_CONSTRAINED = "constrained output is not implemented; ask for the format in a message and parse the answer"
_SEARCH = "Baton samples; use temperature, top_p, top_k and n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unimplemented:
    """A field that would change the answer. `defaults`: values that ask for nothing and are accepted, as null
    always is."""

    advice: str
    defaults: tuple[object, ...] = ()


def _not(advice: str, *defaults: object) -> Unimplemented:
    return Unimplemented(advice=advice, defaults=defaults)


_BOTH: Mapping[str, Unimplemented] = {
    "add_special_tokens": _not(
        "text prompts get the tokenizer's special tokens, chats those of the template; send token ids otherwise"
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
    "request_id": _not("leave it out: the response header x-request-id has it"),
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
    "best_of": _not("use n, and choose among the answers", 1),
    "echo": _not("put the prompt before the answer yourself", False),
    "messages": _not("send chats to /v1/chat/completions"),
    "suffix": _not("inserting is not implemented; the model only continues", ""),
}

NOT_IN_CHAT: Mapping[str, Unimplemented] = {
    **_BOTH,
    "add_generation_prompt": _not("the assistant's turn always follows", True),
    "audio": _not("only text is implemented"),
    "chat_template": _not("the model's own chat template is used"),
    "chat_template_kwargs": _not("the model's own chat template is used", *_NOTHING),
    "continue_final_message": _not("send the whole prompt to /v1/completions", False),
    "documents": _not("put them into a message", *_NOTHING),
    "echo": _not("put the prompt before the answer yourself", False),
    "function_call": _not(_TOOLS, "none", "auto"),
    "functions": _not(_TOOLS, *_NOTHING),
    "mm_processor_kwargs": _not("only text is implemented", *_NOTHING),
    "modalities": _not("only text is implemented", ["text"]),
    "moderation": _not("check the answer yourself"),
    "parallel_tool_calls": _not(_TOOLS, True, False),
    "prediction": _not("predicted output is not implemented"),
    "prompt": _not("send prompts to /v1/completions"),
    "reasoning_effort": _not("ask for it in a message"),
    "tool_choice": _not(_TOOLS, "none", "auto"),
    "tools": _not(_TOOLS, *_NOTHING),
    "verbosity": _not("ask for it in a message", "medium"),
    "web_search_options": _not("searching is not implemented"),
}

NOT_IN_STREAM_OPTIONS: Mapping[str, Unimplemented] = {
    "continuous_usage_stats": _not("the last chunk has the usage", False),
    "include_obfuscation": _not("obfuscation is not implemented", False),
}
