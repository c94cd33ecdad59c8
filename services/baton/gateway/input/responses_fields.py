"""The known request fields of `/v1/responses`, OpenAI's API for responses, without state on the server."""

from baton.gateway.input.field_policy import CHAT, LABELS
from baton.gateway.input.field_table import FieldTable, LabelField, ReadField, RefusedField

_STATELESS = "responses are not stored; send the earlier items in input"
_OWN_TOOLS = "only function tools are implemented, which the client calls"

FORMAT: FieldTable = {
    "type": ReadField("Kind of the text.", {"type": "string", "enum": ["text", "json_object", "json_schema"]}),
    "name": ReadField("Name of the schema.", {"type": "string"}),
    "description": ReadField("Description of the schema.", {"type": "string"}),
    "schema": ReadField("JSON schema of the text.", {"type": "object"}),
    "strict": ReadField("The text must match the schema.", {"type": "boolean"}),
}
TEXT: FieldTable = {
    "format": ReadField("Format of the text.", table=FORMAT),
    "verbosity": RefusedField("ask for it in instructions", ("medium",)),
}
REASONING: FieldTable = {
    "effort": ReadField("Effort that the chat template asks of the model.", {"type": "string"}),
    "summary": LabelField("Reasoning is returned as it is, not summarised."),
    "generate_summary": LabelField("Reasoning is returned as it is, not summarised."),
    "context": LabelField("All reasoning that is sent back is used."),
}
TOOLS: FieldTable = {
    "type": ReadField("Always function.", {"const": "function"}),
    "name": ReadField("Name of the function.", {"type": "string"}),
    "description": ReadField("What the function does.", {"type": "string"}),
    "parameters": ReadField("JSON schema of the arguments.", {"type": "object"}),
    "strict": ReadField("The arguments must match the schema.", {"type": "boolean"}),
}
STREAM_OPTIONS: FieldTable = {
    "include_obfuscation": RefusedField("obfuscation is not implemented", (False,)),
    "include_usage": LabelField("The last event always has the usage.", "store"),
}
_ITEM_LABELS: FieldTable = {
    "id": LabelField("Id of the item."),
    "status": LabelField("State of the item."),
}
_TYPE = ReadField("Kind of the item.", {"type": "string"})
CONTENT_PARTS: FieldTable = {
    "type": ReadField(
        "Kind of the part.",
        {"type": "string", "enum": ["input_text", "output_text", "refusal", "summary_text", "reasoning_text"]},
    ),
    "text": ReadField("The text.", {"type": "string"}),
    "refusal": ReadField("The text of a refusal.", {"type": "string"}),
    "annotations": ReadField("Accepted without effect.", {"type": "array", "items": {"type": "object"}}),
    "logprobs": ReadField("Accepted without effect.", {"type": "array", "items": {"type": "object"}}),
}
MESSAGE_ITEM: FieldTable = {
    **_ITEM_LABELS,
    "type": _TYPE,
    "role": ReadField("Author.", {"type": "string", "enum": ["user", "assistant", "system", "developer"]}),
    "content": ReadField("Text, or a list of text parts.", {"type": "string"}, table=CONTENT_PARTS, is_list=True),
    "phase": LabelField("Phase of an answer."),
}
CALL_ITEM: FieldTable = {
    **_ITEM_LABELS,
    "type": _TYPE,
    "call_id": ReadField("Id of the call.", {"type": "string"}),
    "name": ReadField("Name of the called function.", {"type": "string"}),
    "arguments": ReadField("Arguments as JSON text.", {"type": "string"}),
    "namespace": LabelField("Functions have no namespaces."),
    "caller": ReadField("Accepted without effect.", {"type": "object"}),
}
OUTPUT_ITEM: FieldTable = {
    **_ITEM_LABELS,
    "type": _TYPE,
    "call_id": CALL_ITEM["call_id"],
    "output": ReadField("Text, or a list of text parts.", {"type": "string"}, table=CONTENT_PARTS, is_list=True),
    "caller": CALL_ITEM["caller"],
}
REASONING_ITEM: FieldTable = {
    **_ITEM_LABELS,
    "type": _TYPE,
    "content": ReadField("Reasoning of the model.", table=CONTENT_PARTS, is_list=True),
    "summary": ReadField("Accepted without effect.", table=CONTENT_PARTS, is_list=True),
    "encrypted_content": ReadField("Accepted without effect.", {"type": "string"}),
}
ITEMS: FieldTable = {**MESSAGE_ITEM, **CALL_ITEM, **OUTPUT_ITEM, **REASONING_ITEM, **MESSAGE_ITEM}
"""All fields of input items. Each kind of item has its own table."""

PASSED = (
    "model",
    "priority",
    "slo",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "chat_template_kwargs",
    "parallel_tool_calls",
)
"""Fields that have the same name and meaning as in a chat."""

RESPONSES: FieldTable = {
    **{name: CHAT[name] for name in PASSED},
    **LABELS,
    "input": ReadField("Text of the user, or the items so far.", {"type": "string"}, table=ITEMS, is_list=True),
    "instructions": ReadField("System message before the input.", {"type": "string"}),
    "max_output_tokens": ReadField("Most tokens to generate. The rest of the context without it."),
    "tools": ReadField("Functions that the model may call.", table=TOOLS, is_list=True),
    "tool_choice": ReadField(
        "auto, none, required, a function, or allowed_tools.",
        {"anyOf": [{"type": "string", "enum": ["auto", "none", "required"]}, {"type": "object"}]},
    ),
    "text": ReadField("Format of the answer's text.", table=TEXT),
    "reasoning": ReadField("How the model reasons.", table=REASONING),
    "include": ReadField(
        "Additions to the response: message.output_text.logprobs. reasoning.encrypted_content changes nothing.",
        {"type": "array", "items": {"type": "string"}},
    ),
    "top_logprobs": ReadField("Report the logprobs of this many most likely tokens at each position."),
    "stream_options": ReadField("Options of a stream.", table=STREAM_OPTIONS),
    "background": RefusedField("responses are not stored; leave the request open, or use stream", (False,)),
    "context_management": RefusedField("shorten the input yourself", ([],)),
    "conversation": RefusedField(_STATELESS),
    "max_tool_calls": RefusedField(_OWN_TOOLS),
    "moderation": RefusedField("check the response yourself"),
    "previous_response_id": RefusedField(_STATELESS),
    "prompt": RefusedField("prompt templates are not stored; send the text in input"),
    "prompt_cache_options": RefusedField("prefixes are always cached", ({},)),
    "store": RefusedField(_STATELESS, (False,)),
    "truncation": RefusedField("shorten the input yourself; /tokenize counts tokens", ("disabled",)),
}
