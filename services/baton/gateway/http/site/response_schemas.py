"""JSON schemas of the responses, for the OpenAPI document."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_OPTIONAL_STRING: Schema = {"type": ["string", "null"]}
_TOKEN_IDS: Schema = {"type": "array", "items": _COUNT}
_FINISH: Schema = {"type": ["string", "null"], "enum": ["stop", "length", "tool_calls", "function_call", None]}
_JSON = "application/json"


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: str, **properties: Schema) -> Schema:
    """Return the schema of an object; `required` are the names of its fields that are always there."""
    return {"type": "object", "properties": properties, "required": required.split()}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _response(kind: str, choice: str) -> Schema:
    return _object(
        "id object created model system_fingerprint choices",
        id=_STRING,
        object={"const": kind},
        created=_COUNT,
        model=_STRING,
        system_fingerprint=_OPTIONAL_STRING,
        choices=_list(_ref(choice)),
        usage={"anyOf": [_ref("Usage"), {"type": "null"}]},
        prompt_token_ids=_TOKEN_IDS,
        prompt_logprobs=_list({"type": ["object", "null"]}),
        baton={"type": "object", "description": "Where the time went, if timeline was true."},
    )


def _choice(required: str, **more: Schema) -> Schema:
    return _object(
        f"index finish_reason logprobs {required}",
        index=_COUNT,
        finish_reason=_FINISH,
        token_ids=_TOKEN_IDS,
        prompt_token_ids=_TOKEN_IDS,
        prompt_logprobs=_list({"type": ["object", "null"]}),
        **more,
    )


_CALL = {"id": _STRING, "type": {"const": "function"}}
_FUNCTION = {"name": _STRING, "arguments": _STRING}
_LOGPROB = {"token": _STRING, "logprob": _NUMBER, "bytes": _TOKEN_IDS}
_CHAT_LOGPROBS: Schema = {"anyOf": [_ref("ChatLogprobs"), {"type": "null"}]}
_COMPLETION_LOGPROBS: Schema = {"anyOf": [_ref("CompletionLogprobs"), {"type": "null"}]}

SCHEMAS: Mapping[str, Schema] = {
    "Error": _object(
        "error",
        error=_object(
            "message type param code",
            message=_STRING,
            type=_STRING,
            param=_OPTIONAL_STRING,
            code=_STRING,
            status=_COUNT,
        ),
    ),
    "MessageError": _object(
        "type error request_id",
        type={"const": "error"},
        error=_object("type message", type=_STRING, message=_STRING),
        request_id=_OPTIONAL_STRING,
    ),
    "Usage": _object(
        "prompt_tokens completion_tokens total_tokens",
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object("cached_tokens", cached_tokens=_COUNT),
        completion_tokens_details=_object("reasoning_tokens", reasoning_tokens=_COUNT),
    ),
    "ChatLogprobs": _object(
        "content",
        content=_list(
            _object("token logprob bytes", **_LOGPROB, top_logprobs=_list(_object("token logprob bytes", **_LOGPROB)))
        ),
        refusal={"type": "null"},
    ),
    "CompletionLogprobs": _object(
        "tokens token_logprobs top_logprobs text_offset",
        tokens=_list(_STRING),
        token_logprobs=_list({"type": ["number", "null"]}),
        top_logprobs=_list({"type": ["object", "null"], "additionalProperties": _NUMBER}),
        text_offset=_list(_COUNT),
    ),
    "ChatChoice": _choice(
        "message",
        message=_object(
            "role content",
            role={"const": "assistant"},
            content=_OPTIONAL_STRING,
            refusal=_OPTIONAL_STRING,
            reasoning_content=_STRING,
            tool_calls=_list(_object("id type function", **_CALL, function=_object("name arguments", **_FUNCTION))),
            function_call=_object("name arguments", **_FUNCTION),
        ),
        logprobs=_CHAT_LOGPROBS,
    ),
    "ChatDelta": _choice(
        "delta",
        delta=_object(
            "",
            role={"const": "assistant"},
            content=_OPTIONAL_STRING,
            reasoning_content=_STRING,
            tool_calls=_list(
                _object("index function", index=_COUNT, **_CALL, function=_object("arguments", **_FUNCTION))
            ),
            function_call=_object("arguments", **_FUNCTION),
        ),
        logprobs=_CHAT_LOGPROBS,
    ),
    "CompletionChoice": _choice("text", text=_STRING, logprobs=_COMPLETION_LOGPROBS),
    "ChatCompletion": _response("chat.completion", "ChatChoice"),
    "ChatCompletionChunk": _response("chat.completion.chunk", "ChatDelta"),
    "Completion": _response("text_completion", "CompletionChoice"),
    "Response": _object(
        "id object created_at status model output error incomplete_details usage tools tool_choice text",
        id=_STRING,
        object={"const": "response"},
        created_at=_COUNT,
        status={"type": "string", "enum": ["in_progress", "completed", "incomplete", "failed"]},
        model=_STRING,
        output=_list(_object("id type status", id=_STRING, type=_STRING, status=_STRING)),
        error={"type": ["object", "null"]},
        incomplete_details={"type": ["object", "null"]},
        usage={"type": ["object", "null"]},
    ),
    "ResponseEvent": _object("type sequence_number", type=_STRING, sequence_number=_COUNT),
    "Message": _object(
        "id type role model content stop_reason stop_sequence usage",
        id=_STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_STRING,
        content=_list(_object("type", type={"type": "string", "enum": ["text", "thinking", "tool_use"]})),
        stop_reason=_OPTIONAL_STRING,
        stop_sequence=_OPTIONAL_STRING,
        usage=_object("input_tokens output_tokens", input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "MessageEvent": _object("type", type=_STRING),
    "TokenCount": _object("input_tokens", input_tokens=_COUNT),
    "Model": _object(
        "id object type created created_at display_name owned_by",
        id=_STRING,
        object={"const": "model"},
        type={"const": "model"},
        created_at=_STRING,
        display_name=_STRING,
        created=_COUNT,
        owned_by=_STRING,
        max_model_len={"type": ["integer", "null"]},
    ),
    "ModelList": _object("object data", object={"const": "list"}, data=_list(_ref("Model"))),
    "Tokens": _object(
        "count max_model_len tokens", count=_COUNT, max_model_len={"type": ["integer", "null"]}, tokens=_TOKEN_IDS
    ),
    "Text": _object("prompt", prompt=_STRING),
    "Status": _object("status", status=_STRING, reasons=_list(_STRING), links=_STRING, grpc_port=_COUNT),
    "Version": _object("version", version=_STRING),
    "TokenizerInfo": _object("tokenizer_class", tokenizer_class=_STRING),
    "Load": _object("server_load", server_load=_COUNT),
    "Decisions": _object("decisions", decisions=_list({"type": "object"})),
}
"""Schemas by name; objects may have further fields."""

RESPONSES: Mapping[str, tuple[str, Schema]] = {
    "/v1/chat/completions": (_JSON, _ref("ChatCompletion")),
    "/v1/completions": (_JSON, _ref("Completion")),
    "/v1/responses": (_JSON, _ref("Response")),
    "/v1/messages": (_JSON, _ref("Message")),
    "/v1/messages/count_tokens": (_JSON, _ref("TokenCount")),
    "/tokenize": (_JSON, _ref("Tokens")),
    "/detokenize": (_JSON, _ref("Text")),
    "/v1/models": (_JSON, _ref("ModelList")),
    "/v1/models/": (_JSON, _ref("Model")),
    "/health": (_JSON, _ref("Status")),
    "/ping": (_JSON, _ref("Status")),
    "/ready": (_JSON, _ref("Status")),
    "/version": (_JSON, _ref("Version")),
    "/load": (_JSON, _ref("Load")),
    "/tokenizer_info": (_JSON, _ref("TokenizerInfo")),
    "/openapi.json": (_JSON, {"type": "object"}),
    "/debug/decisions/": (_JSON, _ref("Decisions")),
    "/metrics": ("text/plain", _STRING),
    "/docs": ("text/html", _STRING),
}
"""Media type and schema of a successful response, by path."""

STREAMS: Mapping[str, Schema] = {
    "/v1/chat/completions": _ref("ChatCompletionChunk"),
    "/v1/completions": _ref("Completion"),
    "/v1/responses": _ref("ResponseEvent"),
    "/v1/messages": _ref("MessageEvent"),
}
"""Schema of the data of one server-sent event, by path."""
