"""The session of a request: from its field, else from the header of any client or of an agent."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.client_api import SESSION_HEADERS, Caller, session_of
from baton.core.errors import Code, Refused
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import SessionHints
from baton.gateway.http.asgi_io import caller_of as caller_over_http
from baton.gateway.input.client_call import Endpoint
from baton.gateway.request.attempt import make_attempt
from baton.rpc.inference_rpc import caller_of as caller_over_grpc
from baton.rpc.mappers.client_mapper import from_generate_request
from baton.v1 import inference_pb2
from tests.builders import layout, placement
from tests.unit.gateway.validator_calls import validator


def over_http(**headers: str) -> str:
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return caller_over_http({"headers": pairs}).session


def over_grpc(**metadata: str) -> str:
    context: Any = SimpleNamespace(
        invocation_metadata=lambda: tuple((name.replace("_", "-"), value) for name, value in metadata.items()),
        time_remaining=lambda: None,
        peer=lambda: "peer",
    )
    return caller_over_grpc(context).session


@pytest.mark.parametrize("over", [over_http, over_grpc])
def test_session_comes_from_the_header_of_any_client_or_of_an_agent(over: Any) -> None:
    assert over() == ""
    assert over(x_session_id="mine") == "mine"
    assert over(x_claude_code_session_id="claude") == "claude"
    assert over(session_id="codex") == "codex"
    assert over(x_session_affinity="open", session_id="codex", x_session_id="mine") == "mine"


@pytest.mark.parametrize("name", SESSION_HEADERS)
def test_every_header_is_read(name: str) -> None:
    assert session_of({name: "s", "x-other": "o"}) == "s"


@pytest.mark.parametrize("value", ["", "x" * 129, "a\nb", "a\0"])
def test_header_that_is_no_session_is_ignored(value: str) -> None:
    assert session_of({"x-session-id": value, "session-id": "next"}) == "next"
    assert session_of({"x-session-id": value}) == ""


def session(body: dict[str, Any], header: str = "", endpoint: Endpoint = Endpoint.COMPLETIONS) -> str:
    async def validated() -> str:
        call = await validator().call(endpoint, body, Caller(session=header), received_s=0.0)
        return call.requests[0].session

    return asyncio.run(validated())


def test_field_comes_before_the_header() -> None:
    assert session({"prompt": "x"}) == ""
    assert session({"prompt": "x"}, "header") == "header"
    assert session({"prompt": "x", "session": "field"}, "header") == "field"


@pytest.mark.parametrize("value", ["", "x" * 129, 7, ["s"]])
def test_invalid_field_is_refused(value: object) -> None:
    with pytest.raises(Refused, match="session"):
        session({"prompt": "x", "session": value})


def test_message_has_the_field() -> None:
    message = inference_pb2.GenerateRequest(prompt="x", session="s")
    assert from_generate_request(message)["session"] == "s"
    assert "session" not in from_generate_request(inference_pb2.GenerateRequest(prompt="x"))


def test_session_goes_to_the_scheduler_with_the_tenant() -> None:
    async def asked() -> tuple[str, str]:
        call = await validator().call(Endpoint.COMPLETIONS, {"prompt": "x", "session": "s"}, Caller(), received_s=0.0)
        known: KvLayout = layout()
        query = (await make_attempt(call.requests[0], 0, known)).query(0.0, 1.0)
        return query.tenant, query.session_key

    assert asyncio.run(asked()) == ("default", "s")


def hints(body: dict[str, Any]) -> SessionHints:
    """The hints of both jobs of a request."""

    async def of_jobs() -> SessionHints:
        call = await validator().call(Endpoint.COMPLETIONS, {"prompt": "x", **body}, Caller(), received_s=0.0)
        attempt = await make_attempt(call.requests[0], 0, layout())
        prefill, decode = attempt.jobs(placement(), 0.0)
        assert prefill is not None
        assert decode is not None
        assert prefill.hints == decode.hints
        return decode.hints

    return asyncio.run(of_jobs())


def test_hints_go_to_both_workers() -> None:
    assert hints({}) == SessionHints(tenant="default")
    assert hints({"session": "s", "retain_s": 60, "next_in_s": 2.5}) == SessionHints(
        tenant="default", session="s", retain_s=60, next_in_s=2.5
    )
    assert hints({"retain_s": 0}).retain_s == 0


@pytest.mark.parametrize("field", ["retain_s", "next_in_s"])
@pytest.mark.parametrize("value", [-1, 86_401, "60", True, [1]])
def test_invalid_hint_is_refused(field: str, value: object) -> None:
    with pytest.raises(Refused, match=field) as refused:
        hints({field: value})
    assert refused.value.failure.code is Code.INVALID_ARGUMENT


def test_message_has_the_hints() -> None:
    message = inference_pb2.GenerateRequest(prompt="x", retain_s=0.0, next_in_s=1.5)
    body = from_generate_request(message)
    assert (body["retain_s"], body["next_in_s"]) == (0.0, 1.5)
    assert not {"retain_s", "next_in_s"} & from_generate_request(inference_pb2.GenerateRequest(prompt="x")).keys()
