"""The OpenAPI 3.1 document of the HTTP API, made from the routes and from the field tables of validation."""

from collections.abc import Mapping
from typing import Any

from baton.core.request_limits import LIMITS, Limit, ValueKind
from baton.gateway.http.error_forms import MESSAGES, error_form
from baton.gateway.http.http_exchange import Access, Route, Routes
from baton.gateway.http.site.response_schemas import RESPONSES, SCHEMAS, STREAMS
from baton.gateway.input.endpoint_fields import ENDPOINTS
from baton.gateway.input.field_table import FieldTable, LabelField, ReadField, RefusedField

API_VERSION = "1"
_TYPES: Mapping[ValueKind, str] = {
    ValueKind.INTEGER: "integer",
    ValueKind.NUMBER: "number",
    ValueKind.BOOLEAN: "boolean",
    ValueKind.STRING: "string",
}
_BOUNDS: Mapping[ValueKind, tuple[str, str]] = {
    ValueKind.INTEGER: ("minimum", "maximum"),
    ValueKind.NUMBER: ("minimum", "maximum"),
    ValueKind.STRING: ("minLength", "maxLength"),
}
_REQUIRED = frozenset(("prompt", "messages", "tokens", "messages[].role", "input"))
"""Fields that a request must have, if the endpoint reads them."""
_REQUIRED_BY: Mapping[str, frozenset[str]] = {MESSAGES: frozenset(("max_tokens",))}
"""Further required fields, by path."""


def openapi_document(routes: Routes) -> dict[str, Any]:
    """Return the document. It says nothing about this cluster."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": API_VERSION,
            "summary": "The APIs of OpenAI and Anthropic, served by prefill and decode workers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {path + ("{id}" if path.endswith("/") else ""): _path(path, route) for path, route in routes.items()},
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "responses": {
                name: {
                    "description": "The request failed.",
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
                }
                for name in ("Error", "MessageError")
            },
        },
    }


def _path(path: str, route: Route) -> dict[str, Any]:
    return {method.lower(): _operation(path, method, route) for method in route.methods}


def _operation(path: str, method: str, route: Route) -> dict[str, Any]:
    words = path.strip("/").replace(".", "/").replace("-", "/").split("/")
    name = method.lower() + "".join(word.capitalize() for word in words) + ("Item" if path.endswith("/") else "")
    error = "MessageError" if error_form(path) is error_form(MESSAGES) else "Error"
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "security": [] if route.access is Access.OPEN else [{"key": []}],
        "x-baton-key": route.access.value,
        "responses": {"200": _response(path), "default": {"$ref": f"#/components/responses/{error}"}},
    }
    if path.endswith("/"):
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path in ENDPOINTS:
        schema = object_schema(ENDPOINTS[path])
        schema["required"] = sorted({*schema.get("required", ()), *_REQUIRED_BY.get(path, ())})
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _response(path: str) -> dict[str, Any]:
    media, schema = RESPONSES.get(path, ("application/json", {"type": "object"}))
    content: dict[str, Any] = {media: {"schema": schema}}
    if path in STREAMS:
        content["text/event-stream"] = {"schema": STREAMS[path]}
    return {"description": "The request succeeded.", "content": content}


def object_schema(table: FieldTable, prefix: str = "") -> dict[str, Any]:
    """Return the schema of an object with these fields. Other fields are ignored, so they are allowed."""
    properties = {name: _field_schema(prefix + name, rule) for name, rule in sorted(table.items())}
    required = [
        name
        for name, rule in sorted(table.items())
        if isinstance(rule, ReadField) and prefix + name in _REQUIRED and not _is_alternative(table, name)
    ]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | ({"required": required} if required else {})


def _is_alternative(table: FieldTable, name: str) -> bool:
    """True if an endpoint reads both a prompt and messages, of which a request has one."""
    return {"prompt", "messages"} <= {each for each, rule in table.items() if isinstance(rule, ReadField)} and (
        name in ("prompt", "messages")
    )


def _field_schema(name: str, rule: ReadField | LabelField | RefusedField) -> dict[str, Any]:
    """Return the schema of a field. Null always counts as omitted."""
    if isinstance(rule, RefusedField):
        allowed = [*rule.defaults, None]
        return {"enum": allowed, "description": f"Not implemented: {rule.advice}.", "deprecated": True}
    if isinstance(rule, LabelField):
        of_label = LIMITS[rule.limit]
        value = _value_schema(of_label)
        if of_label.max_items is not None:
            value = {"type": "object", "maxProperties": of_label.max_items, "additionalProperties": value}
        return {"anyOf": [value, {"type": "null"}], "description": f"{rule.text} Accepted without effect."}
    limit = LIMITS.get(name.replace("[]", ""))
    schema: dict[str, Any] = {"description": rule.text}
    if values := _alternatives(name, rule, limit):
        schema["anyOf"] = [*values, {"type": "null"}]
    if limit is not None and limit.default is not None:
        schema["default"] = limit.default
    return schema


def _alternatives(name: str, rule: ReadField, limit: Limit | None) -> list[dict[str, Any]]:
    """Return the schemas of the values of a field, of which one applies; none if it may have any value."""
    found: list[dict[str, Any]] = [] if rule.schema is None else [dict(rule.schema)]
    if rule.table is not None and rule.is_list:
        items: dict[str, Any] = {"type": "array", "items": object_schema(rule.table, f"{name}[].")}
        found.append(items if limit is None else items | {"maxItems": limit.max_items})
    elif rule.table is not None:
        found.append(object_schema(rule.table, f"{name}."))
    if not found and limit is not None:
        value = _value_schema(limit)
        many = {"type": "array", "maxItems": limit.max_items, "items": value}
        found.append(value if limit.max_items is None else many)
    return found


def _value_schema(limit: Limit) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": _TYPES[limit.kind]}
    if limit.kind is ValueKind.BOOLEAN:
        return schema
    low, high = _BOUNDS[limit.kind]
    if limit.minimum is not None:
        schema[low] = limit.minimum
    if limit.maximum is not None:
        schema[high] = limit.maximum
    if limit.above is not None:
        schema["exclusiveMinimum"] = limit.above
    return schema
