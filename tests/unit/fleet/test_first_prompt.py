"""What `baton up` asks before it says that it is ready."""

import json
from collections.abc import Callable

import httpx
import pytest

from baton.core.errors import BatonError
from baton.fleet import first_prompt
from baton.fleet.first_prompt import rehearse

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    def answered_by(handler: Handler) -> None:
        monkeypatch.setattr(
            first_prompt, "client_of_ours", lambda _: httpx.AsyncClient(transport=httpx.MockTransport(handler))
        )

    return answered_by


async def test_a_short_answer_of_the_served_model_is_asked_for(gateway: Callable[[Handler], None]) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={})

    gateway(answer)
    await rehearse("http://gateway", "mine")
    (request,) = asked
    body = json.loads(request.content)
    assert request.url == "http://gateway/v1/completions"
    assert (body["model"], body["max_tokens"]) == ("mine", 2), "two: the second comes from the decode worker"


@pytest.mark.parametrize("status", [401, 429])
async def test_a_refusal_is_an_answer(gateway: Callable[[Handler], None], status: int) -> None:
    gateway(lambda _: httpx.Response(status))
    await rehearse("http://gateway", "mine")


async def test_what_the_cluster_cannot_answer_is_said(gateway: Callable[[Handler], None]) -> None:
    gateway(lambda _: httpx.Response(503, text="no pair"))
    with pytest.raises(BatonError, match="HTTP 503: no pair"):
        await rehearse("http://gateway", "mine")

    def gone(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    gateway(gone)
    with pytest.raises(BatonError, match="a first request failed: ConnectError"):
        await rehearse("http://gateway", "mine")
