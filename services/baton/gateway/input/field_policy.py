"""The known request fields of each endpoint: read, accepted as labels, or refused by name.

A field that is in no table is unknown. It is ignored and named in the response, or refused with
`--strict-fields`.
"""

from collections.abc import Mapping
from typing import Any

from baton.gateway.input.field_table import (
    BOOLEAN,
    OBJECT,
    OBJECTS,
    STRING,
    STRINGS,
    FieldTable,
    LabelField,
    ReadField,
    RefusedField,
)

WITHOUT_EFFECT = "Accepted without effect."
_NOTHING: tuple[object, ...] = ([], {}, "")
_OWN = "clients may not set it; omit it"
_CONSTRAINED = "send response_format or structured_outputs"
_CHATS = "send chats to /v1/chat/completions"
_SEARCH = "beam search is not implemented; use temperature, top_p, top_k and n"
_ONE_MODEL = "adapters are not implemented; the served model has a name of its own"

_OBJECT_OR_TEXT: Mapping[str, Any] = {"anyOf": [OBJECT, STRING]}
_TOKEN_IDS: Mapping[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}

STREAM_OPTIONS: FieldTable = {
    "include_usage": ReadField("Add the usage to the last event of the stream."),
    "continuous_usage_stats": ReadField("Add the usage so far to every event; implies include_usage."),
    "include_obfuscation": RefusedField("obfuscation is not implemented", (False,)),
}
SLO: FieldTable = {
    "ttft_ms": ReadField("Objective for the time to the first token, in milliseconds."),
    "tpot_ms": ReadField("Objective for the mean time between tokens, in milliseconds."),
}
PROMPT_CACHE = ReadField("Accepted without effect; prefixes are cached without it.", OBJECT)
MESSAGE_PARTS: FieldTable = {
    "type": ReadField("Kind of the part.", {"enum": ["text", "refusal"]}),
    "text": ReadField("The text of a part of type text.", STRING),
    "refusal": ReadField("The text of a part of type refusal, only in messages of the assistant.", STRING),
    "prompt_cache_breakpoint": PROMPT_CACHE,
}
CALLED_FUNCTION: FieldTable = {
    "name": ReadField("Name of the function.", STRING),
    "arguments": ReadField("Arguments as a JSON object in a string.", STRING),
    "parsed_arguments": ReadField(WITHOUT_EFFECT),
}
TOOL_CALLS: FieldTable = {
    "id": ReadField("Id of the call, which its result repeats.", STRING),
    "type": ReadField("Always function.", {"const": "function"}),
    "function": ReadField("The called function.", table=CALLED_FUNCTION),
    "index": ReadField("Number of the call; not needed.", {"type": "integer"}),
}
MESSAGES: FieldTable = {
    "role": ReadField(
        "Author of the message.",
        {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool", "function"]},
    ),
    "content": ReadField(
        "Text, or a list of text parts, which are joined with newlines. Null if a message of the assistant has "
        "anything else.",
        STRING,
        table=MESSAGE_PARTS,
        is_list=True,
    ),
    "name": ReadField("Name of the author, if the chat template uses it; of the function for role function."),
    "tool_calls": ReadField("Tool calls of the assistant.", table=TOOL_CALLS, is_list=True),
    "tool_call_id": ReadField("Id of the call whose result a message of role tool has."),
    "reasoning_content": ReadField("Reasoning of the assistant, if the chat template uses it.", STRING),
    "reasoning": ReadField("Other name of reasoning_content.", STRING),
    "refusal": ReadField("Refusal of the assistant, which is added to its content.", STRING),
    "function_call": ReadField("Older form of one tool call.", table=CALLED_FUNCTION),
    "annotations": ReadField(WITHOUT_EFFECT, OBJECTS),
    "parsed": ReadField(WITHOUT_EFFECT),
    "audio": RefusedField("only text is implemented"),
}
FUNCTIONS: FieldTable = {
    "name": ReadField(
        "1 to 64 letters, digits, '_', '-' and '.'.", {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
    ),
    "description": ReadField("What the function does.", STRING),
    "parameters": ReadField("JSON schema of the arguments.", OBJECT),
    "strict": ReadField("The arguments must match the schema.", BOOLEAN),
}
TOOLS: FieldTable = {
    "type": ReadField("Always function.", {"const": "function"}),
    "function": ReadField("The function.", table=FUNCTIONS),
}
FUNCTION_NAME: FieldTable = {"name": ReadField("Name of the function.", STRING)}
ALLOWED_TOOL: FieldTable = {
    "type": ReadField("Always function.", {"const": "function"}),
    "function": ReadField("One of the tools.", table=FUNCTION_NAME),
}
ALLOWED_TOOLS: FieldTable = {
    "mode": ReadField("Whether one of the allowed tools must be called.", {"enum": ["auto", "required"]}),
    "tools": ReadField("The tools that the model may see and call.", table=ALLOWED_TOOL, is_list=True),
}
TOOL_CHOICE: FieldTable = {
    "type": ReadField("Kind of the choice.", {"enum": ["function", "allowed_tools"]}),
    "function": ReadField("The tool that must be called.", table=FUNCTION_NAME),
    "allowed_tools": ReadField("Some of the tools, for type allowed_tools.", table=ALLOWED_TOOLS),
}

LABELS: FieldTable = {
    "user": LabelField("Name of the end user."),
    "safety_identifier": LabelField("Name of the end user."),
    "prompt_cache_key": LabelField("Prefixes are cached without it."),
    "prompt_cache_retention": LabelField("Prefixes are cached without it."),
    "service_tier": LabelField("There is one tier."),
    "metadata": LabelField("Names and values of the client.", "metadata"),
    "store": LabelField("Nothing is stored.", "store"),
}

_SAMPLING: FieldTable = {
    "max_tokens": ReadField(
        "Maximum number of tokens to generate. A completion gets 16 without it, a chat the rest of the context. "
        "0 is allowed with echo."
    ),
    "max_completion_tokens": ReadField("Newer name of max_tokens."),
    "min_tokens": ReadField("Minimum number of tokens to generate. Until then no stop condition applies."),
    "temperature": ReadField("0 always takes the most likely token."),
    "top_p": ReadField("Draw from the most likely tokens whose probabilities add up to this."),
    "top_k": ReadField("Draw from this many most likely tokens; 0 and -1 mean all."),
    "min_p": ReadField("Draw from tokens with at least this share of the highest probability."),
    "n": ReadField("Number of choices for each prompt."),
    "best_of": ReadField("Must be equal to n: no choices are dropped."),
    "seed": ReadField("Seed of the random draws. Equal requests with equal seeds get equal answers."),
    "stop": ReadField(
        "One text or several. A choice ends before the first one that it contains.",
        {"anyOf": [STRING, {"type": "array", "maxItems": 16, "items": STRING}]},
    ),
    "stop_token_ids": ReadField("Token ids that end a choice. The text of the last one is left out."),
    "ignore_eos": ReadField("Continue after the model's end token."),
    "presence_penalty": ReadField("Subtracted from the logits of tokens that were generated before."),
    "frequency_penalty": ReadField("Subtracted from the logits of a token for each time that it was generated."),
    "repetition_penalty": ReadField("Divides the logits of tokens in the prompt and in the output; 1 changes nothing."),
    "logit_bias": ReadField(
        "Token ids and what is added to their logits.",
        {"type": "object", "maxProperties": 1024, "additionalProperties": {"type": "number"}},
    ),
    "allowed_token_ids": ReadField("The only token ids that may be generated."),
    "bad_words": ReadField("Texts that must not be generated."),
    "early_stopping": RefusedField(_SEARCH, (False,)),
    "length_penalty": RefusedField(_SEARCH, (1, 1.0)),
    "logits_processors": RefusedField("use logit_bias", _NOTHING),
    "stop_regex": RefusedField("use stop", _NOTHING),
    "use_beam_search": RefusedField(_SEARCH, (False,)),
}
"""Fields that decide which tokens are generated."""

JSON_SCHEMA: FieldTable = {
    "name": ReadField("Name of the schema; not needed.", STRING),
    "description": ReadField("What the schema is for; not needed.", STRING),
    "schema": ReadField("JSON schema of the answer.", OBJECT),
    "strict": ReadField(
        "False ignores parts of the schema that are not supported, which are otherwise refused.", BOOLEAN
    ),
}
TAG_CONTENT: FieldTable = {
    "type": ReadField("Kind of the content.", {"enum": ["json_schema", "regex", "grammar"]}),
    "json_schema": ReadField("JSON schema, for type json_schema.", OBJECT),
    "pattern": ReadField("Regular expression, for type regex.", STRING),
    "grammar": ReadField("Grammar, for type grammar.", STRING),
    "style": RefusedField("content of type json_schema is written as JSON", ("json",)),
    "excludes": RefusedField("use another pattern", _NOTHING),
}
TAGS: FieldTable = {
    "type": ReadField("Always tag; not needed.", {"const": "tag"}),
    "begin": ReadField("Text that begins the tag. It begins with one of the triggers.", STRING),
    "content": ReadField("The constraint of what follows.", table=TAG_CONTENT),
    "end": ReadField("Text after the content.", STRING),
}
TAG_FORMAT: FieldTable = {
    "type": ReadField("Always triggered_tags.", {"const": "triggered_tags"}),
    "triggers": ReadField("Texts that begin a tag.", STRINGS),
    "tags": ReadField("The tags.", table=TAGS, is_list=True),
    "at_least_one": ReadField("True: the answer has at least one tag.", BOOLEAN),
    "stop_after_first": ReadField("True: the answer ends with its first tag.", BOOLEAN),
    "excludes": RefusedField("leave it out", _NOTHING),
}
STRUCTURES: FieldTable = {
    "begin": TAGS["begin"],
    "schema": ReadField("JSON schema of what follows.", OBJECT),
    "end": TAGS["end"],
}
_TAG_FORMS: FieldTable = {
    "structures": ReadField("Older form of a structural_tag.", table=STRUCTURES, is_list=True),
    "triggers": ReadField("Texts that begin a tag, in the older form.", STRINGS),
    "format": ReadField("Newer form of a structural_tag.", table=TAG_FORMAT),
}
STRUCTURAL_TAG: FieldTable = {
    "type": ReadField("Always structural_tag; not needed.", {"const": "structural_tag"}),
    **_TAG_FORMS,
}
RESPONSE_FORMAT: FieldTable = {
    "type": ReadField("Kind of the format.", {"enum": ["text", "json_object", "json_schema", "structural_tag"]}),
    "json_schema": ReadField("Format of type json_schema.", table=JSON_SCHEMA),
    "schema": ReadField("JSON schema of the answer, for type json_object.", OBJECT),
    **_TAG_FORMS,
}
STRUCTURED_OUTPUTS: FieldTable = {
    "json": ReadField("JSON schema of the answer, as an object or in a string.", _OBJECT_OR_TEXT),
    "json_object": ReadField("True: the answer is any JSON object.", BOOLEAN),
    "regex": ReadField("Regular expression that matches the whole answer.", STRING),
    "choice": ReadField("Texts of which the answer is one.", STRINGS),
    "grammar": ReadField("Grammar of the answer in llguidance's form of Lark, or in GBNF.", STRING),
    "structural_tag": ReadField("Free text with tags; also in a string.", STRING, table=STRUCTURAL_TAG),
    "whitespace_pattern": ReadField("Regular expression for white space in JSON.", STRING),
    "disable_any_whitespace": ReadField("True: JSON has no white space.", BOOLEAN),
    "disable_fallback": RefusedField("llguidance is the only backend", (False, True)),
    "disable_additional_properties": RefusedField("set additionalProperties in the schema", (False,)),
}
CONSTRAINTS: FieldTable = {
    "ebnf": RefusedField(_CONSTRAINED),
    "guided_choice": ReadField("Older form of structured_outputs.choice.", STRINGS),
    "guided_decoding_backend": LabelField("llguidance is the only backend."),
    "guided_grammar": ReadField("Older form of structured_outputs.grammar.", STRING),
    "guided_json": ReadField("Older form of structured_outputs.json.", _OBJECT_OR_TEXT),
    "guided_regex": ReadField("Older form of structured_outputs.regex.", STRING),
    "guided_whitespace_pattern": ReadField("Older form of structured_outputs.whitespace_pattern.", STRING),
    "json_schema": RefusedField(_CONSTRAINED),
    "regex": RefusedField(_CONSTRAINED),
    "response_format": ReadField("Format of the answer. Default: text.", table=RESPONSE_FORMAT),
    "structured_outputs": ReadField("Constraint of the answer; exactly one of them.", table=STRUCTURED_OUTPUTS),
}
"""Fields for the format of the answer."""

_OUTPUT: FieldTable = {
    "stream": ReadField("Send the answer as server-sent events."),
    "stream_options": ReadField("Options of a stream.", table=STREAM_OPTIONS),
    "skip_special_tokens": ReadField("Leave special tokens out of the text."),
    "return_token_ids": ReadField("Add the token ids of the prompt and of each choice."),
    "timeline": ReadField("Add the object baton, which says where the time went."),
    "include_stop_str_in_output": ReadField(
        "Keep the stop string, or the token that ended the choice, at the end of the text."
    ),
    "prompt_logprobs": ReadField(
        "Report the logprob of each prompt token but the first, and of this many most likely tokens. Not with stream."
    ),
    "return_hidden_states": RefusedField("hidden states are not returned", (False,)),
    "return_tokens_as_token_ids": ReadField("Name tokens in logprobs token_id:ID instead of by their text."),
    "spaces_between_special_tokens": RefusedField("special tokens are joined without spaces", (True,)),
}
"""Fields for the form of the response."""

_PROMPT: FieldTable = {
    "add_special_tokens": ReadField(
        "Add the tokenizer's special tokens to the prompt. Default: true for text prompts, false for chats, whose "
        "template has them."
    ),
    "truncate_prompt_tokens": ReadField(
        "Keep only this many last tokens of the prompt; -1 keeps as many as fit before max_tokens."
    ),
}
"""Fields for the prompt's tokens."""

_SERVICE: FieldTable = {
    "model": ReadField("Name of the served model; may be omitted."),
    "priority": ReadField("Requests with lower numbers are served first."),
    "slo": ReadField("Service level objective of the request.", table=SLO),
    "cache_salt": ReadField("Reuse cached prefixes only of requests with the same salt, and of the same tenant."),
    "session": ReadField(
        "Id of the client's session, whose requests follow each other; also in the header x-session-id."
    ),
    "retain_s": ReadField(
        "Keep the KV of prompt and answer for so many seconds after the answer, within the tenant's budget; 0 ends "
        "what an earlier request of the session has asked for."
    ),
    "next_in_s": ReadField(
        "Seconds from the end of the answer to the session's next request, if the client knows it: its KV may leave "
        "the device until shortly before."
    ),
    "prompt_cache_options": PROMPT_CACHE,
    "deadline_s": RefusedField("send the header x-baton-timeout-ms"),
    "lora_path": RefusedField(_ONE_MODEL),
    "request_id": RefusedField("omit it; the response header x-request-id contains the id"),
    **{
        name: RefusedField(_OWN)
        for name in (
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "data_parallel_rank",
            "decision_id",
            "decode",
            "job",
            "kv_transfer_params",
            "nvext",
            "otlp_endpoint",
            "owner",
            "prefill",
            "prefix_source",
            "reader",
            "sample_indices",
            "source",
            "tenant",
            "transfer_id",
            "trust_remote_code",
            "vllm_xargs",
            "worker_id",
        )
    },
}
"""Fields for the service: model, scheduling and routing. Clients cannot direct transfers of KV."""

_BOTH: FieldTable = {**_SERVICE, **_PROMPT, **_SAMPLING, **CONSTRAINTS, **_OUTPUT, **LABELS}

CHAT_ONLY = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "messages",
    "tool_choice",
    "tools",
    "web_search_options",
)
"""Fields that are refused without a chat."""

COMPLETIONS: FieldTable = {
    **_BOTH,
    "prompt": ReadField(
        "A text, a list of token ids, or up to 256 of either.",
        {
            "anyOf": [
                STRING,
                _TOKEN_IDS,
                {"type": "array", "maxItems": 256, "items": STRING},
                {"type": "array", "maxItems": 256, "items": _TOKEN_IDS},
            ]
        },
    ),
    "logprobs": ReadField("Report the logprobs of this many most likely tokens at each position."),
    "echo": ReadField(
        "Begin each choice with the prompt, and with logprobs its logprobs with those of the prompt. In a stream the "
        "first event of a choice has them."
    ),
    **{name: RefusedField(_CHATS) for name in CHAT_ONLY},
    "suffix": RefusedField(
        "a model needs tokens of its own for text insertion; write the model's fill-in-the-middle format into prompt",
        ("",),
    ),
}

CHAT_TEMPLATE: FieldTable = {
    "messages": ReadField("The chat so far.", table=MESSAGES, is_list=True),
    "tools": ReadField("Tools that the model may call, at most 128.", table=TOOLS, is_list=True),
    "tool_choice": ReadField(
        "none, auto, required, the tool that must be called, or the tools that are allowed. Default: auto if there "
        "are tools.",
        {"enum": ["none", "auto", "required"]},
        table=TOOL_CHOICE,
    ),
    "parallel_tool_calls": ReadField("False: at most one call in an answer.", BOOLEAN),
    "functions": ReadField("Older form of tools. The answer then has function_call.", table=FUNCTIONS, is_list=True),
    "function_call": ReadField("Older form of tool_choice.", {"enum": ["none", "auto"]}, table=FUNCTION_NAME),
    "include_reasoning": ReadField("False leaves the reasoning out of the answer.", BOOLEAN),
    "reasoning_effort": ReadField(
        "Variable of the chat template. none also sets enable_thinking and thinking to false."
    ),
    "documents": ReadField(
        "Documents for the chat template.", {"type": "array", "maxItems": 1024, "items": {"type": "object"}}
    ),
    "chat_template": ReadField(
        "Name of one of the model's chat templates; or a template, if --allow-request-chat-template allows it."
    ),
    "chat_template_kwargs": ReadField(
        "Variables of the chat template, such as enable_thinking.", {"type": "object", "maxProperties": 64}
    ),
    "add_generation_prompt": ReadField("End the prompt with the beginning of an answer.", BOOLEAN),
    "continue_final_message": ReadField("Continue the last message instead of a new answer.", BOOLEAN),
}
"""Fields that make the prompt of a chat, and say how its answer is parsed."""

CHAT: FieldTable = {
    **_BOTH,
    **CHAT_TEMPLATE,
    "logprobs": ReadField("Report the logprob of each generated token.", BOOLEAN),
    "top_logprobs": ReadField("Report the logprobs of this many most likely tokens at each position."),
    "audio": RefusedField("only text is implemented"),
    "echo": RefusedField("prepend the prompt to the response yourself", (False,)),
    "mm_processor_kwargs": RefusedField("only text is implemented", _NOTHING),
    "modalities": RefusedField("only text is implemented", (["text"],)),
    "moderation": RefusedField("check the response yourself"),
    "prediction": RefusedField("predicted output is not implemented"),
    "prompt": RefusedField("send prompts to /v1/completions"),
    "verbosity": RefusedField("ask for it in a message", ("medium",)),
    "web_search_options": RefusedField("web search is not implemented"),
}

TOKENIZE: FieldTable = {
    "model": _SERVICE["model"],
    "prompt": ReadField("A text. Exactly one of prompt and messages is sent.", STRING),
    **CHAT_TEMPLATE,
    "add_special_tokens": ReadField("Add the tokenizer's special tokens to a text.", BOOLEAN),
    "return_token_strs": RefusedField("/detokenize returns the text of each id", (False,)),
}
DETOKENIZE: FieldTable = {
    "model": _SERVICE["model"],
    "tokens": ReadField("Token ids.", _TOKEN_IDS),
}
