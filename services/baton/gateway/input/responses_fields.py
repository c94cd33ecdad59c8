"""The known request fields of `/v1/responses`, OpenAI's API for responses, without state on the server."""

from baton.gateway.input.chat_fields import passed_fields, with_chat_fields
from baton.gateway.input.field_policy import PROMPT_CACHE, WITHOUT_EFFECT
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

_STATELESS = "responses are not stored; send the earlier items in input"
_OWN_TOOLS = "only function tools are implemented, which the client calls"

FORMAT: FieldTable = {
    "type": ReadField("Kind of the text.", {"type": "string", "enum": ["text", "json_object", "json_schema"]}),
    "name": ReadField("Name of the schema.", STRING),
    "description": ReadField("Description of the schema.", STRING),
    "schema": ReadField("JSON schema of the text.", OBJECT),
    "strict": ReadField("The text must match the schema.", BOOLEAN),
}
TEXT: FieldTable = {
    "format": ReadField("Format of the text.", table=FORMAT),
    "verbosity": RefusedField("ask for it in instructions", ("medium",)),
}
REASONING: FieldTable = {
    "effort": ReadField("Effort that the chat template asks of the model.", STRING),
    "summary": LabelField("Reasoning is returned as it is, not summarised."),
    "generate_summary": LabelField("Reasoning is returned as it is, not summarised."),
    "context": LabelField("All reasoning that is sent back is used."),
    "mode": RefusedField("there is one mode", ("standard",)),
}
TOOLS: FieldTable = {
    "type": ReadField("Always function.", {"const": "function"}),
    "name": ReadField("Name of the function.", STRING),
    "description": ReadField("What the function does.", STRING),
    "parameters": ReadField("JSON schema of the arguments.", OBJECT),
    "strict": ReadField("The arguments must match the schema.", BOOLEAN),
    "allowed_callers": RefusedField(_OWN_TOOLS, (["direct"],)),
    "defer_loading": RefusedField("tool search is not implemented; send the tools that the model may call", (False,)),
    "output_schema": RefusedField("describe the output in description"),
}
ALLOWED_TOOL: FieldTable = {
    "type": ReadField("Always function.", {"const": "function"}),
    "name": ReadField("Name of one of the tools.", STRING),
}
TOOL_CHOICE: FieldTable = {
    "type": ReadField("Kind of the choice.", {"enum": ["function", "allowed_tools"]}),
    "name": ReadField("Name of the function that must be called.", STRING),
    "mode": ReadField("Whether one of the allowed tools must be called.", {"enum": ["auto", "required"]}),
    "tools": ReadField("The tools that the model may see and call.", table=ALLOWED_TOOL, is_list=True),
}
STREAM_OPTIONS: FieldTable = {
    "include_obfuscation": RefusedField("obfuscation is not implemented", (False,)),
    "include_usage": LabelField("The last event always has the usage.", "store"),
}
_ITEM_LABELS: FieldTable = {
    "id": LabelField("Id of the item."),
    "status": LabelField("State of the item."),
}
_TYPE = ReadField("Kind of the item.", STRING)
CONTENT_PARTS: FieldTable = {
    "type": ReadField(
        "Kind of the part.",
        {"type": "string", "enum": ["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]},
    ),
    "text": ReadField("The text.", STRING),
    "refusal": ReadField("The text of a refusal.", STRING),
    "parsed": ReadField(WITHOUT_EFFECT),
    "prompt_cache_breakpoint": PROMPT_CACHE,
    "annotations": ReadField(WITHOUT_EFFECT, OBJECTS),
    "logprobs": ReadField(WITHOUT_EFFECT, OBJECTS),
}
MESSAGE_ITEM: FieldTable = {
    **_ITEM_LABELS,
    "type": _TYPE,
    "role": ReadField("Author.", {"type": "string", "enum": ["user", "assistant", "system", "developer"]}),
    "content": ReadField("Text, or a list of text parts.", STRING, table=CONTENT_PARTS, is_list=True),
    "phase": LabelField("Phase of an answer."),
}
CALL_ITEM: FieldTable = {
    **_ITEM_LABELS,
    "type": _TYPE,
    "call_id": ReadField("Id of the call.", STRING),
    "name": ReadField("Name of the called function.", STRING),
    "arguments": ReadField("Arguments as JSON text.", STRING),
    "parsed_arguments": ReadField(WITHOUT_EFFECT),
    "namespace": LabelField("Functions have no namespaces."),
    "caller": ReadField(WITHOUT_EFFECT, OBJECT),
}
OUTPUT_ITEM: FieldTable = {
    **_ITEM_LABELS,
    "type": _TYPE,
    "call_id": CALL_ITEM["call_id"],
    "output": ReadField("Text, or a list of text parts.", STRING, table=CONTENT_PARTS, is_list=True),
    "caller": CALL_ITEM["caller"],
}
REASONING_ITEM: FieldTable = {
    **_ITEM_LABELS,
    "type": _TYPE,
    "content": ReadField("Reasoning of the model.", table=CONTENT_PARTS, is_list=True),
    "summary": ReadField(WITHOUT_EFFECT, table=CONTENT_PARTS, is_list=True),
    "encrypted_content": ReadField(WITHOUT_EFFECT, STRING),
}
ITEMS: FieldTable = {**CALL_ITEM, **OUTPUT_ITEM, **REASONING_ITEM, **MESSAGE_ITEM}
"""All fields of input items. Each kind of item has its own table."""

_OWN: FieldTable = {
    "input": ReadField("Text of the user, or the items so far.", STRING, table=ITEMS, is_list=True),
    "instructions": ReadField("System message before the input.", STRING),
    "max_output_tokens": ReadField("Most tokens to generate. The rest of the context without it."),
    "tools": ReadField("Functions that the model may call.", table=TOOLS, is_list=True),
    "tool_choice": ReadField(
        "auto, none, required, a function, or allowed_tools.",
        {"type": "string", "enum": ["auto", "none", "required"]},
        table=TOOL_CHOICE,
    ),
    "text": ReadField("Format of the answer's text.", table=TEXT),
    "reasoning": ReadField("How the model reasons.", table=REASONING),
    "include": ReadField(
        "Additions to the response: message.output_text.logprobs. Those for other kinds of items change nothing.",
        STRINGS,
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
    "store": RefusedField(_STATELESS, (False,)),
    "truncation": RefusedField("shorten the input yourself; /tokenize counts tokens", ("disabled",)),
}

RESPONSES: FieldTable = with_chat_fields(
    _OWN,
    {
        "messages": "send them in input",
        "max_tokens": "send max_output_tokens",
        "max_completion_tokens": "send max_output_tokens",
        "response_format": "send text.format",
        "reasoning_effort": "send reasoning.effort",
        "logprobs": "ask for message.output_text.logprobs in include",
    },
)
PASSED = passed_fields(RESPONSES)
