"""CORS: preflight requests and headers for allowed origins, nothing for others, never credentials."""

from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.gateway.http.site.cors import Cors
from baton.runtime.config.gateway_settings import FrontDoorSettings
from tests.unit.gateway.test_openapi import APP

HERE = "https://app.example"


class Inner:
    """An application that answers every request with an empty 200."""

    count_rejected = staticmethod(lambda failure: None)
    methods_of = staticmethod(APP.methods_of)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"1")]})
        await send({"type": "http.response.body", "body": b""})


def answer(origins: tuple[str, ...], method: str = "GET", path: str = "/v1/models", **headers: str) -> dict[str, str]:
    """Return the headers and the status of an answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    work = Cors(Inner(), origins)(scope, NotImplemented, send)
    with pytest.raises(StopIteration):
        work.send(None)
    return {"status": str(sent[0]["status"])} | {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def preflight(origins: tuple[str, ...], origin: str = HERE, path: str = "/v1/completions", asked: str = "") -> Any:
    more = {"access_control_request_headers": asked} if asked else {}
    return answer(origins, "OPTIONS", path, origin=origin, access_control_request_method="POST", **more)


def test_page_of_an_allowed_origin_may_read_the_answer() -> None:
    found = answer((HERE, "http://localhost:3000"), origin=HERE)
    assert (found["access-control-allow-origin"], found["vary"]) == (HERE, "origin")
    exposed = found["access-control-expose-headers"].split(", ")
    assert {"x-baton-ignored-fields", "retry-after", "x-should-retry"} <= set(exposed)  # clients read these
    assert answer(("*",), origin="null")["access-control-allow-origin"] == "*"


def test_preflight_allows_the_methods_of_the_path_and_the_headers_that_were_asked_for() -> None:
    found = preflight((HERE,), asked="authorization, x-stainless-os")
    assert (found["status"], found["access-control-allow-methods"]) == ("204", "POST")
    assert found["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "access-control-allow-methods" not in preflight((HERE,), path="/nothing")
    for hostile in ("a\r\nset-cookie: b", "x" * 5000, "a\x00"):
        assert "access-control-allow-headers" not in preflight((HERE,), asked=hostile)


def test_other_origins_get_no_headers() -> None:
    for origin in ("https://evil.example", "https://app.example.evil", "http://app.example", "null"):
        for found in (answer((HERE,), origin=origin), preflight((HERE,), origin=origin)):
            assert not any(name.startswith("access-control") for name in found)
            assert found["vary"] == "origin"
    assert "vary" not in answer(())
    assert answer((), origin=HERE) == {"status": "200", "x-request-id": "1"}


def test_credentials_are_never_allowed() -> None:
    for origins in ((HERE,), ("*",)):
        for found in (answer(origins, origin=HERE), preflight(origins)):
            assert "access-control-allow-credentials" not in found


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://*.example", "", "https://a b"])
def test_setting_refuses_what_is_no_origin(origin: str) -> None:
    FrontDoorSettings(cors_allow_origins=(HERE, "*", "http://localhost:3000"))
    with pytest.raises(ConfigError):
        FrontDoorSettings(cors_allow_origins=(origin,))
