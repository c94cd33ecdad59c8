"""The warm-up request that `baton up` sends before it reports ready, and the description of an answer."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.core.errors import BatonError
from baton.fleet.first_prompt import ask, describe_answer, warm_up


def gateway(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.MockTransport:
    return httpx.MockTransport(handler)


async def test_warm_up_requests_two_tokens_of_the_served_model() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json={})

    await warm_up("http://gateway", "mine", transport=gateway(answer))
    (request,) = requests
    body = json.loads(request.content)
    assert request.url == "http://gateway/v1/completions"
    assert (body["model"], body["max_tokens"]) == ("mine", 2), "the second token comes from the decode worker"


@pytest.mark.parametrize("status", [401, 429])
async def test_refused_warm_up_does_not_raise(status: int) -> None:
    await warm_up("http://gateway", "mine", transport=gateway(lambda _: httpx.Response(status)))


async def test_warm_up_raises_on_server_and_connection_errors() -> None:
    with pytest.raises(BatonError, match="HTTP 503: no pair"):
        await warm_up("http://gateway", "mine", transport=gateway(lambda _: httpx.Response(503, text="no pair")))

    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(BatonError, match="a first request failed: ConnectError"):
        await warm_up("http://gateway", "mine", transport=gateway(refuse))


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (httpx.ReadTimeout("slow"), "nothing arrived for 120 s; send it without --first-prompt"),
        (httpx.ReadError("gone"), "ReadError.*; the gateway's log tells why"),
        (None, "HTTP 401: no key; set BATON_API_KEY"),
    ],
)
async def test_first_prompt_without_an_answer_is_a_typed_error(error: Exception | None, problem: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if error is not None:
            raise error
        return httpx.Response(401, text="no key")

    with pytest.raises(BatonError, match=problem):
        await ask("http://gateway", "mine", "hi", write=lambda _: None, transport=gateway(answer))


@pytest.mark.parametrize(
    ("timeline", "description"),
    [
        (
            {"prefill": {"worker_id": "w0", "pid": 1}, "kv_bytes": 98304, "transport": "cma"},
            "w0 (pid 1) prefilled 17 tokens (8 cached); w1 (pid 2) pulled 96 KiB over cma and decoded 5 tokens.",
        ),
        ({"prefill": None, "kv_bytes": 0, "transport": ""}, "w1 (pid 2) decoded 5 tokens."),
    ],
)
def test_answer_is_described_by_workers_bytes_and_latency(timeline: dict[str, Any], description: str) -> None:
    usage = {"prompt_tokens": 17, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
    timeline = {"decode": {"worker_id": "w1", "pid": 2}, "ttft_s": 0.024, "tpot_s": None, **timeline}
    assert describe_answer({"baton": timeline, "usage": usage}) == f"{description}   TTFT 24.0 ms   TPOT -"
