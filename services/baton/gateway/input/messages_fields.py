"""The known request fields of `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

from baton.gateway.input.field_policy import CHAT
from baton.gateway.input.field_table import FieldTable, LabelField, ReadField, RefusedField

_SERVER_TOOLS = "the server runs no tools; send tools with an input_schema, which the client calls"
_UNCACHED = ReadField("Accepted without effect; prefixes are cached without it.", {"type": "object"})
_STRING, _OBJECT, _BOOLEAN = {"type": "string"}, {"type": "object"}, {"type": "boolean"}

TEXT_BLOCK: FieldTable = {
    "type": ReadField("Kind of the block.", _STRING),
    "text": ReadField("The text.", _STRING),
    "cache_control": _UNCACHED,
    "citations": ReadField("Accepted without effect.", {"type": "array", "items": {"type": "object"}}),
}
THINKING_BLOCK: FieldTable = {
    "type": TEXT_BLOCK["type"],
    "thinking": ReadField("Reasoning of the model, of an earlier answer.", _STRING),
    "signature": ReadField("Accepted without effect.", _STRING),
    "cache_control": _UNCACHED,
}
REDACTED_BLOCK: FieldTable = {
    "type": TEXT_BLOCK["type"],
    "data": ReadField("Accepted without effect.", _STRING),
}
TOOL_USE_BLOCK: FieldTable = {
    "type": TEXT_BLOCK["type"],
    "id": ReadField("Id of the call.", _STRING),
    "name": ReadField("Name of the called tool.", _STRING),
    "input": ReadField("Arguments of the call.", _OBJECT),
    "cache_control": _UNCACHED,
    "caller": ReadField("Accepted without effect.", _OBJECT),
}
TOOL_RESULT_BLOCK: FieldTable = {
    "type": TEXT_BLOCK["type"],
    "tool_use_id": ReadField("Id of the call.", _STRING),
    "content": ReadField("Text, or a list of text blocks.", _STRING, table=TEXT_BLOCK, is_list=True),
    "is_error": ReadField("The call failed; the model gets the text after 'Error: '.", _BOOLEAN),
    "cache_control": _UNCACHED,
}
BLOCKS: FieldTable = {**THINKING_BLOCK, **REDACTED_BLOCK, **TOOL_USE_BLOCK, **TOOL_RESULT_BLOCK, **TEXT_BLOCK}
"""All fields of content blocks. Each kind of block has its own table."""

MESSAGE: FieldTable = {
    "role": ReadField("Author of the message.", {"type": "string", "enum": ["user", "assistant", "system"]}),
    "content": ReadField("Text, or a list of blocks.", _STRING, table=BLOCKS, is_list=True),
}
TOOLS: FieldTable = {
    "type": ReadField("custom, or omitted.", {"const": "custom"}),
    "name": ReadField("Name of the tool.", _STRING),
    "description": ReadField("What the tool does.", _STRING),
    "input_schema": ReadField("JSON schema of the arguments.", _OBJECT),
    "strict": ReadField("The arguments must match the schema.", _BOOLEAN),
    "cache_control": _UNCACHED,
}
TOOL_CHOICE: FieldTable = {
    "type": ReadField("Rule for calls.", {"type": "string", "enum": ["auto", "any", "tool", "none"]}),
    "name": ReadField("Name of the tool, with type tool.", _STRING),
    "disable_parallel_tool_use": ReadField("At most one call.", _BOOLEAN),
}
THINKING: FieldTable = {
    "type": ReadField("disabled is the default.", {"type": "string", "enum": ["enabled", "disabled", "adaptive"]}),
    "budget_tokens": ReadField("Checked, but not enforced.", {"type": "integer", "minimum": 1}),
    "display": LabelField("Thinking is returned as it is."),
}
FORMAT: FieldTable = {
    "type": ReadField("Always json_schema.", {"const": "json_schema"}),
    "schema": ReadField("JSON schema of the answer.", _OBJECT),
}
OUTPUT_CONFIG: FieldTable = {
    "effort": ReadField("Effort that the chat template asks of the model.", _STRING),
    "format": ReadField("Format of the answer.", table=FORMAT),
    "task_budget": RefusedField("task budgets are not implemented"),
}
METADATA: FieldTable = {"user_id": LabelField("Name of the end user.")}

COUNT_TOKENS: FieldTable = {
    "model": CHAT["model"],
    "messages": ReadField(
        "The messages so far. A last one of the assistant is continued.", table=MESSAGE, is_list=True
    ),
    "system": ReadField("System message.", _STRING, table=TEXT_BLOCK, is_list=True),
    "tools": ReadField("Tools that the model may call.", table=TOOLS, is_list=True),
    "tool_choice": ReadField("How the model may use the tools.", table=TOOL_CHOICE),
    "thinking": ReadField("Whether the model reasons.", table=THINKING),
    "output_config": ReadField("Effort and format of the answer.", table=OUTPUT_CONFIG),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "cache_control": _UNCACHED,
    "context_management": ReadField("Accepted without effect; all messages are the prompt.", {"type": "object"}),
    "mcp_servers": RefusedField(_SERVER_TOOLS, ([],)),
}

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
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "chat_template_kwargs",
)
"""Fields that have the same name and meaning as in a chat."""

MESSAGES: FieldTable = {
    **{name: CHAT[name] for name in PASSED},
    **COUNT_TOKENS,
    "max_tokens": ReadField("Most tokens to generate. Required."),
    "stop_sequences": ReadField(
        "Texts that end the answer.", {"type": "array", "maxItems": 16, "items": {"type": "string"}}
    ),
    "metadata": ReadField("Labels of the client.", table=METADATA),
    "service_tier": LabelField("There is one tier."),
    "inference_geo": LabelField("The cluster is where it is."),
    "speed": LabelField("There is one speed."),
    "container": RefusedField(_SERVER_TOOLS),
}
