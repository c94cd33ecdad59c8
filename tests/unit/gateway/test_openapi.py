"""The OpenAPI document: valid, complete, and the same rules as validation. The page is made from it."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import Draft202012Validator

from baton.gateway.http.http_app import HttpApp
from baton.gateway.http.site.docs_page import CONTENT_SECURITY_POLICY, docs_page
from baton.gateway.http.site.openapi import openapi_document
from baton.gateway.http.site.response_schemas import RESPONSES, STREAMS
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.endpoint_fields import ENDPOINTS
from tests.invalid_requests import CHAT, COMPLETIONS, accepted_bodies, invalid_parameters, unimplemented_fields
from tests.unit.gateway.validator_calls import call

NOTHING: Any = None
APP = HttpApp(NOTHING, NOTHING, max_body_bytes=0, unread_s=0.0, metrics=bytes, created=0)
DOCUMENT = json.loads(json.dumps(openapi_document(APP.routes)))


def body_schema(path: str) -> Any:
    return DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def parts(value: Any, name: str) -> list[Any]:
    """Return every value with this name, at any depth."""
    if isinstance(value, list):
        return [part for item in value for part in parts(item, name)]
    if not isinstance(value, dict):
        return []
    here = [value[name]] if name in value else []
    return here + [part for item in value.values() for part in parts(item, name)]


def test_document_is_valid_openapi() -> None:
    rules = json.loads((Path(__file__).parents[2] / "data" / "openapi-3.1-schema.json").read_text())
    Draft202012Validator(rules).validate(DOCUMENT)
    for schema in (*parts(DOCUMENT["paths"], "schema"), *DOCUMENT["components"]["schemas"].values()):
        Draft202012Validator.check_schema(schema)
    for reference in parts(DOCUMENT, "$ref"):
        found = DOCUMENT
        for key in reference.removeprefix("#/").split("/"):
            found = found[key]
    identities = parts(DOCUMENT["paths"], "operationId")
    assert len(set(identities)) == len(identities) == len([m for p in DOCUMENT["paths"].values() for m in p])


def test_document_has_every_route_and_every_field() -> None:
    assert {path.removesuffix("{id}") for path in DOCUMENT["paths"]} == set(APP.routes)
    assert RESPONSES.keys() == APP.routes.keys()
    assert STREAMS.keys() <= ENDPOINTS.keys() <= APP.routes.keys()
    for path, table in ENDPOINTS.items():
        assert body_schema(path)["properties"].keys() == table.keys()
    assert body_schema("/v1/messages")["required"] == ["max_tokens", "messages"]


@pytest.mark.parametrize(("path", "endpoint"), [(COMPLETIONS, Endpoint.COMPLETIONS), (CHAT, Endpoint.CHAT)])
def test_document_accepts_what_validation_accepts(path: str, endpoint: Endpoint) -> None:
    checker = Draft202012Validator(body_schema(path))
    for where, body in accepted_bodies():
        if where == path:
            call(body, endpoint)
            checker.validate(body)


def test_document_accepts_values_of_any_type_where_validation_does() -> None:
    body = {"messages": [{"role": "assistant", "content": "x", "parsed": {"a": [1]}}]}
    call(body, Endpoint.CHAT)
    jsonschema.validate(body, body_schema(CHAT))


def test_document_rejects_what_validation_rejects() -> None:
    checker = Draft202012Validator(body_schema(COMPLETIONS))
    for case in invalid_parameters():
        name, text = case.name.rpartition("-")[0], json.dumps(case.body)
        is_text_rule = "\\u0000" in text or "\\ud" in text or case.body.get("truncate_prompt_tokens") == 0
        is_whole_float = ".0" in text
        if not (is_text_rule or is_whole_float or name in ("logit_bias", "prompt", "stop")):
            assert not checker.is_valid(case.body), case.body
    for case in unimplemented_fields():
        assert not Draft202012Validator(body_schema(case.path)).is_valid(case.body), case.name


def test_page_lists_every_field_and_loads_nothing() -> None:
    page = docs_page(DOCUMENT).decode()
    for path, table in ENDPOINTS.items():
        assert f"<code>{path}</code>" in page
        assert all(f"<code>{name}</code>" in page for name in table)
    assert "<code>messages[].content[].text</code>" in page
    assert not any(word in page for word in ("<script", "src=", "<link", "@import", "style=", "url("))
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "<b>" not in docs_page({"info": {"title": "<b>", "summary": ""}, "paths": {}}).decode()
