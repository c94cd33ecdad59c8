"""The known request fields of `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

from baton.gateway.input.chat_fields import passed_fields, with_chat_fields
from baton.gateway.input.field_policy import CHAT, PROMPT_CACHE, WITHOUT_EFFECT
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

_SERVER_TOOLS = "the server runs no tools; send tools with an input_schema, which the client calls"

TEXT_BLOCK: FieldTable = {
    "type": ReadField("Kind of the block.", STRING),
    "text": ReadField("The text.", STRING),
    "cache_control": PROMPT_CACHE,
    "citations": ReadField(WITHOUT_EFFECT, OBJECTS),
}
THINKING_BLOCK: FieldTable = {
    "type": TEXT_BLOCK["type"],
    "thinking": ReadField("Reasoning of an earlier answer of the model.", STRING),
    "signature": ReadField(WITHOUT_EFFECT, STRING),
    "cache_control": PROMPT_CACHE,
}
REDACTED_BLOCK: FieldTable = {
    "type": TEXT_BLOCK["type"],
    "data": ReadField(WITHOUT_EFFECT, STRING),
}
TOOL_USE_BLOCK: FieldTable = {
    "type": TEXT_BLOCK["type"],
    "id": ReadField("Id of the call.", STRING),
    "name": ReadField("Name of the called tool.", STRING),
    "input": ReadField("Arguments of the call.", OBJECT),
    "cache_control": PROMPT_CACHE,
    "caller": ReadField(WITHOUT_EFFECT, OBJECT),
}
TOOL_RESULT_BLOCK: FieldTable = {
    "type": TEXT_BLOCK["type"],
    "tool_use_id": ReadField("Id of the call.", STRING),
    "content": ReadField("Text, or a list of text blocks.", STRING, table=TEXT_BLOCK, is_list=True),
    "is_error": ReadField("The call failed; the model gets the text after 'Error: '.", BOOLEAN),
    "cache_control": PROMPT_CACHE,
}
BLOCKS: FieldTable = {**THINKING_BLOCK, **REDACTED_BLOCK, **TOOL_USE_BLOCK, **TOOL_RESULT_BLOCK, **TEXT_BLOCK}
"""All fields of content blocks. Each kind of block has its own table."""

MESSAGE: FieldTable = {
    "role": ReadField("Author of the message.", {"type": "string", "enum": ["user", "assistant", "system"]}),
    "content": ReadField("Text, or a list of blocks.", STRING, table=BLOCKS, is_list=True),
}
TOOLS: FieldTable = {
    "type": ReadField("custom, or omitted.", {"const": "custom"}),
    "name": ReadField("Name of the tool.", STRING),
    "description": ReadField("What the tool does.", STRING),
    "input_schema": ReadField("JSON schema of the arguments.", OBJECT),
    "strict": ReadField("The arguments must match the schema.", BOOLEAN),
    "cache_control": PROMPT_CACHE,
    "eager_input_streaming": ReadField("Accepted without effect; arguments are always streamed.", BOOLEAN),
    "allowed_callers": RefusedField(_SERVER_TOOLS, (["direct"],)),
    "defer_loading": RefusedField("tool search is not implemented; send the tools that the model may call", (False,)),
    "input_examples": RefusedField("put the examples into description", ([],)),
}
TOOL_CHOICE: FieldTable = {
    "type": ReadField("Rule for calls.", {"type": "string", "enum": ["auto", "any", "tool", "none"]}),
    "name": ReadField("Name of the tool, with type tool.", STRING),
    "disable_parallel_tool_use": ReadField("At most one call.", BOOLEAN),
}
THINKING: FieldTable = {
    "type": ReadField("disabled is the default.", {"type": "string", "enum": ["enabled", "disabled", "adaptive"]}),
    "budget_tokens": ReadField("Checked, but not enforced.", {"type": "integer", "minimum": 1}),
    "display": LabelField("Thinking is returned as it is."),
}
FORMAT: FieldTable = {
    "type": ReadField("Always json_schema.", {"const": "json_schema"}),
    "schema": ReadField("JSON schema of the answer.", OBJECT),
}
OUTPUT_CONFIG: FieldTable = {
    "effort": ReadField("Effort that the chat template asks of the model.", STRING),
    "format": ReadField("Format of the answer.", table=FORMAT),
    "task_budget": RefusedField("task budgets are not implemented"),
}
METADATA: FieldTable = {"user_id": LabelField("Name of the end user.")}

COUNT_TOKENS: FieldTable = {
    "model": CHAT["model"],
    "messages": ReadField(
        "The messages so far. A last one of the assistant is continued.", table=MESSAGE, is_list=True
    ),
    "system": ReadField("System message.", STRING, table=TEXT_BLOCK, is_list=True),
    "tools": ReadField("Tools that the model may call.", table=TOOLS, is_list=True),
    "tool_choice": ReadField("How the model may use the tools.", table=TOOL_CHOICE),
    "thinking": ReadField("Whether the model reasons.", table=THINKING),
    "output_config": ReadField("Effort and format of the answer.", table=OUTPUT_CONFIG),
    "output_format": ReadField("Older form of output_config.format.", table=FORMAT),
    "chat_template": CHAT["chat_template"],
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "documents": CHAT["documents"],
    "cache_control": PROMPT_CACHE,
    "context_management": ReadField("Accepted without effect; all messages are the prompt.", OBJECT),
    "mcp_servers": RefusedField(_SERVER_TOOLS, ([],)),
    "compaction": RefusedField("ask for a summary in a message"),
    "speed": LabelField("There is one speed."),
    "user_profile_id": LabelField("Name of the end user."),
}

_OWN: FieldTable = {
    **COUNT_TOKENS,
    "max_tokens": ReadField(
        "Most tokens to generate. With 0 the request only puts its prompt into the prefix cache. Required."
    ),
    "stop_sequences": ReadField("Texts that end the answer.", {**STRINGS, "maxItems": 16}),
    "metadata": ReadField("Labels of the client.", table=METADATA),
    "inference_geo": LabelField("The cluster has one location."),
    "billing_policy": ReadField(WITHOUT_EFFECT, OBJECT),
    "diagnostics": ReadField(WITHOUT_EFFECT, OBJECT),
    "fallback_credit_token": ReadField(WITHOUT_EFFECT),
    "container": RefusedField(_SERVER_TOOLS),
    "fallbacks": RefusedField("there is one model", ([], "default")),
    "thread": RefusedField("messages are not stored; send all of them"),
}
MESSAGES: FieldTable = with_chat_fields(
    _OWN,
    {
        "stop": "send stop_sequences",
        "max_completion_tokens": "send max_tokens",
        "response_format": "send output_config.format",
        "reasoning_effort": "send output_config.effort",
        "parallel_tool_calls": "send tool_choice.disable_parallel_tool_use",
        "logprobs": "only chats and responses have logprobs",
        "top_logprobs": "only chats and responses have logprobs",
        "stream_options": "the event message_delta always has the usage",
        "add_generation_prompt": "end with a message of the assistant to continue it",
        "continue_final_message": "end with a message of the assistant to continue it",
    },
)
PASSED = passed_fields(MESSAGES)
"""Fields of `/v1/messages` that become part of the chat as they are. Those of counting are among them."""
