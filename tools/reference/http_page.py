"""The HTTP page: routes, and every request field with its limits."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from baton.core.request_limits import LIMITS, MAX_HEAD_BYTES, MAX_JSON_DEPTH
from baton.gateway.http.http_app import HttpApp
from baton.gateway.input.endpoint_fields import ENDPOINTS
from baton.gateway.input.field_table import FieldRule, FieldTable, LabelField, ReadField, RefusedField
from baton.gateway.input.ignored_fields import MAX_FIELDS, MAX_NAMES
from tools.reference.markdown import code, page, paragraph, table

RuleT = TypeVar("RuleT", ReadField, LabelField, RefusedField)

INTRODUCTION = f"""
The gateway serves OpenAI's API for completions, chats and responses, and Anthropic's for messages. A known field is
read, accepted as a label without effect, or refused by name. Unknown fields are ignored, and the first {MAX_NAMES} are
named in the response header `x-baton-ignored-fields`; more than {MAX_FIELDS:,}, or any with `--strict-fields`, are
refused. Errors have OpenAI's shape, those of `/v1/messages` Anthropic's; [Errors](errors.md) lists each status and
reason, and what a client does about it. A request head may have {MAX_HEAD_BYTES // 1024} KiB, a JSON body
{MAX_JSON_DEPTH} levels.

Every response has the request's id in `x-request-id`. An error says in `retry-after` when a retry can succeed. With
`x-should-retry: false` the same request fails again; the clients of OpenAI and Anthropic then do not repeat it.
"""

RESPONSES = (
    """
    The gateway translates a request to a chat: `instructions` and `input` become messages, and the reasoning, text
    and calls of one answer become one message. Nothing is stored, so clients send all items in `input`, and
    `previous_response_id`, `conversation`, `background`, `prompt` and `store: true` are refused. Clients may omit
    `store`; the response says `store: false`.
    """,
    """
    The output has items of type `reasoning` (with `content`, and without a summary), `message` and `function_call`.
    A response that reached `max_output_tokens` has the status `incomplete`. The events of a stream are those of
    OpenAI, with consecutive `sequence_number`. The last one is `response.completed`, `response.incomplete`, or after a
    failure `response.failed`; no `[DONE]` follows. Because these events repeat the output, a streamed response
    counts at admission like one that is not streamed.
    """,
    """
    `message.output_text.logprobs` in `include`, or `top_logprobs`, adds the logprobs of the message's tokens.
    Fields of a chat that OpenAI's API does not have here, such as `seed`, `top_k` and `slo`, work as in a chat.
    """,
)
MESSAGES = (
    """
    A request is a chat in another form, too. Fields of a chat that Anthropic's API does not have, such as `cache_salt`
    and `seed`, work as in a chat. Blocks of type `tool_use` become calls, `tool_result` a message with the
    result (after `Error: ` if `is_error` is true), and `thinking` the reasoning of an answer. If the last message is
    one of the assistant, the answer continues it. `cache_control` changes nothing, because all prefixes are cached.
    """,
    """
    `thinking` of type `enabled` or `adaptive` sets the variables `enable_thinking` and `thinking` of the chat template
    to true; without it, or with `disabled`, they are false. `budget_tokens` is not enforced. A model that
    always reasons returns its reasoning in any case. A thinking block has the signature `unsigned`, which is not
    checked.
    """,
    """
    The answer has blocks of type `thinking`, `text` and `tool_use`. If the arguments of a call are no JSON object,
    because `max_tokens` cut them off, its `input` is empty. `usage.input_tokens` does not include the cached tokens,
    which are `cache_read_input_tokens`. In a stream only the last usage has the cached tokens, because the first
    one is sent before the cache is read. `/v1/messages/count_tokens` counts the prompt of the same fields.
    """,
    """
    The key may be in the header `x-api-key`. `anthropic-version` and `anthropic-beta` have no effect. The request's id
    is in the header `request-id`, too, and in errors in `request_id`. A cluster that is not ready, or lost workers,
    have the status 529 and the type `overloaded_error`, where other APIs have 503. `thread` is refused in the way that
    makes Anthropic's tool runner send all messages instead.
    """,
)


def http_page() -> str:
    """Routes, fields that are read, labels, and fields that are refused."""
    return page(
        "HTTP API",
        *map(paragraph, INTRODUCTION.strip().split("\n\n")),
        "## Routes",
        paragraph("If the gateway has API keys, a route needs the key in the third column."),
        table(("method", "path", "key", "what it does"), _routes()),
        "## Responses",
        *map(paragraph, RESPONSES),
        "## Messages",
        *map(paragraph, MESSAGES),
        "## Request fields",
        paragraph(
            "**reads**: the field is implemented, or accepted without effect if the next table says so. **label**: "
            "it is accepted and checked, and does not change the answer. **refuses**: it would change the answer "
            "and is not implemented, or clients may not set it. An empty cell: the field is unknown there, so it is "
            "ignored and named. A name with a dot is a field of an object; brackets stand for each item of a list."
        ),
        table(("field", *(code(path) for path in ENDPOINTS)), _uses()),
        "## Fields that are read",
        paragraph("A field that differs between endpoints has one row for each form, with the endpoints."),
        table(("field", "type", "limits", "default", "what it does"), _read()),
        "## Labels",
        table(("field", "type", "what it does"), _labels()),
        "## Fields that are refused",
        paragraph("A field is refused unless it has one of the values that change nothing. `null` is always accepted."),
        table(("field", "accepted values", "what to do instead"), _refused()),
    )


def _routes() -> list[tuple[str, str, str, str]]:
    """Method, path, key and description of each route."""
    nothing: Any = None
    app = HttpApp(nothing, nothing, max_body_bytes=0, unread_s=0.0, metrics=bytes, created=0)
    return [
        (
            ", ".join(route.methods),
            code(path + ("{id}" if path.endswith("/") else "")),
            route.access.value,
            route.summary,
        )
        for path, route in app.routes.items()
    ]


def _rules() -> dict[str, dict[str, FieldRule]]:
    """The rule of each field for each endpoint, by the field's full name and the endpoint's path."""
    rules: dict[str, dict[str, FieldRule]] = {}

    def add(path: str, fields: FieldTable, prefix: str) -> None:
        for name, rule in fields.items():
            rules.setdefault(prefix + name, {})[path] = rule
            if isinstance(rule, ReadField) and rule.table is not None:
                add(path, rule.table, f"{prefix}{name}{'[]' if rule.is_list else ''}.")

    for path, fields in ENDPOINTS.items():
        add(path, fields, "")
    return dict(sorted(rules.items()))


def _uses() -> list[tuple[str, ...]]:
    words = {ReadField: "reads", LabelField: "label", RefusedField: "refuses"}
    return [
        (code(name), *(words[type(by_path[path])] if path in by_path else "" for path in ENDPOINTS))
        for name, by_path in _rules().items()
    ]


def _read() -> list[tuple[str, str, str, str, str]]:
    """Fields that are read."""
    return [(label, *_limits(name, rule), rule.text) for name, label, rule in _forms(ReadField)]


def _forms(kind: type[RuleT]) -> Iterator[tuple[str, str, RuleT]]:
    """Yield the name, the label and the rule of each form of the fields with rules of this kind.

    A field with several forms has the endpoints of each in its label.
    """
    for name, by_path in _rules().items():
        forms: dict[str, list[tuple[str, RuleT]]] = {}
        for path, rule in by_path.items():
            if isinstance(rule, kind):
                forms.setdefault(repr(rule), []).append((path, rule))
        for form in forms.values():
            places = ", ".join(code(path) for path, _ in form)
            yield name, code(name) + (f" of {places}" if len(forms) > 1 else ""), form[0][1]


def _limits(name: str, rule: ReadField) -> tuple[str, str, str]:
    """Type, limits and default of a field."""
    limit = LIMITS.get(name.replace("[]", ""))
    kind = "object" if rule.table is not None else "" if limit is None else limit.kind.value
    kind = _schema_type(rule.schema) if rule.schema is not None else kind
    if rule.is_list:
        kind = " or ".join(filter(None, ("list of objects", kind if rule.schema is not None else "")))
    if limit is None:
        return kind, "", ""
    count = f"at most {limit.max_items} items" if limit.max_items is not None else ""
    is_bounded = any(bound is not None for bound in (limit.minimum, limit.above, limit.maximum))
    has_range = is_bounded and (rule.schema is None or rule.schema.get("type") != "boolean")
    return kind, ", ".join(filter(None, (count, limit.range if has_range else ""))), code(_json(limit.default))


def _schema_type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in schema:
        return ", or ".join(_schema_type(each) for each in schema["anyOf"])
    if "const" in schema:
        return code(_json(schema["const"]))
    if "enum" in schema:
        return " or ".join(code(_json(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of: {_schema_type(schema['items'])}" if "items" in schema else "list"
    return str(schema.get("type", "any"))


def _json(value: object) -> str:
    return "" if value is None else json.dumps(value)


def _labels() -> list[tuple[str, str, str]]:
    rows = []
    for _, label, rule in _forms(LabelField):
        limit = LIMITS[rule.limit]
        many = "object; each value is " if limit.max_items is not None else ""
        rows.append((label, many + limit.kind.value, rule.text))
    return rows


def _refused() -> list[tuple[str, str, str]]:
    return [
        (label, ", ".join(code(json.dumps(value)) for value in rule.defaults), rule.advice)
        for _, label, rule in _forms(RefusedField)
    ]
