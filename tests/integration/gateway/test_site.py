"""Routes beside inference over a real server on loopback: versions, load, documentation."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator

import baton
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, stream_events
from tests.scripted_chats import chat_tokenizer, write

PD = (("p0", "prefill"), ("d0", "decode"))
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway(*PD) as g:
        yield g


async def test_version_load_ping_and_tokenizer(gateway: HttpGateway) -> None:
    async def get(path: str) -> Any:
        answer = await gateway.client.get(path)
        assert answer.status_code == 200
        return answer.json()

    assert await get("/version") == {"version": baton.__version__}
    assert await get("/load") == {"server_load": 0}
    assert await get("/ping") == {"status": "ok"}
    assert (await gateway.client.post("/ping")).status_code == 200
    assert await get("/tokenizer_info") == {"tokenizer_class": "ByteTokenizer"}


async def test_page_has_a_strict_policy(gateway: HttpGateway) -> None:
    page = await gateway.client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "<code>/v1/chat/completions</code>" in page.text


async def test_responses_match_the_document(gateway: HttpGateway) -> None:
    document = (await gateway.client.get("/openapi.json")).json()

    def check(path: str, value: Any, media: str = "application/json", method: str = "post") -> None:
        schema = document["paths"][path][method]["responses"]["200"]["content"][media]["schema"]
        Draft202012Validator(schema | {"components": document["components"]}).validate(value)

    function = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    async with http_gateway(*PD, tokenizer=chat_tokenizer("qwen3")) as calling:
        write(calling.cluster, '<think>a</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>')
        tool = {"type": "function", "function": function}
        for path, body in (
            (CHAT, {"tools": [tool]}),
            (CHAT, {"functions": [function]}),
            ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}),
            ("/v1/messages", {"max_tokens": 90, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
        ):
            body = ({} if "input" in body else HELLO) | body
            check(path, (await calling.post(path, body)).json())
            for line in (await calling.post(path, body | {"stream": True})).text.splitlines():
                if line.startswith("data: {"):
                    check(path, json.loads(line.removeprefix("data: ")), "text/event-stream")
    more = {"max_tokens": 2, "n": 2, "timeline": True, "return_token_ids": True}
    for path, body in (
        (COMPLETIONS, {"prompt": "hi", "logprobs": 2}),
        (CHAT, HELLO | {"logprobs": True, "top_logprobs": 2}),
    ):
        check(path, (await gateway.post(path, body | more)).json())
        for event in await stream_events(gateway, path, body | more):
            check(path, event, "text/event-stream")
    check("/tokenize", (await gateway.post("/tokenize", {"prompt": "hi"})).json())
    check("/detokenize", (await gateway.post("/detokenize", {"tokens": [65]})).json())
    for path in ("/v1/models", "/v1/models/{id}", "/health", "/ready", "/version", "/load", "/tokenizer_info"):
        check(path, (await gateway.client.get(path.format(id="demo"))).json(), method="get")
    for path, name in ((COMPLETIONS, "Error"), ("/v1/messages", "MessageError")):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        Draft202012Validator(schema).validate((await gateway.post(path, {})).json())
        assert document["paths"][path]["post"]["responses"]["default"]["$ref"].endswith(f"/{name}")


async def test_browser_of_an_allowed_origin_is_served() -> None:
    origin = "https://app.example"
    async with http_gateway(*PD, cors_allow_origins=(origin,)) as gateway:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        found = await gateway.client.options(COMPLETIONS, headers={"origin": origin} | asked)
        assert (found.status_code, found.content) == (204, b"")
        assert found.headers["access-control-allow-methods"] == "POST"
        assert found.headers["access-control-allow-headers"] == "authorization"
        for body, status in (({"prompt": "hi"}, 200), ({}, 400), ({"prompt": "hi", "stream": True}, 200)):
            answer = await gateway.client.post(COMPLETIONS, json=body, headers={"origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)
            other = await gateway.client.post(COMPLETIONS, json=body, headers={"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers
        refused = await gateway.client.options(COMPLETIONS, headers={"origin": "https://evil.example"} | asked)
        assert refused.status_code == 405
