"""Responses that are large, come in bursts, or are not read."""

import asyncio
import json
import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest

from baton.gateway.http.output import id_json
from baton.runtime.process.byte_budget import Account
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, request_bytes
from tests.unit.gateway.fakes import until

COMPLETIONS = "/v1/completions"
pytestmark = pytest.mark.integration
PD = (("p0", "prefill"), ("d0", "decode"))
TCP_ESTABLISHED = 1
"""Number that Linux gives this state."""
MANY_TOKENS = 20_000
"""Of each of eight choices: more than all buffers of a connection with small ones take."""
SMALL_BUFFERS = {"send_buffer_bytes": 2**16}


async def events_of(gateway: HttpGateway, body: dict[str, object]) -> list[str]:
    """Return the data of all events of a streamed response, which is read at once."""
    lines: list[str] = []
    async with gateway.client.stream("POST", COMPLETIONS, json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    return lines


async def make_fast(gateway: HttpGateway) -> None:
    """Let the decode worker produce a step every 2 ms, for long prompts and responses."""
    for worker in gateway.cluster.scheduler.workers:
        worker.report = replace(worker.report, max_model_len=10**6, max_num_seqs=64)
        worker.step_s = 0.002
        worker.token_at = lambda _prompt, _sample, _index: 97
    gateway.cluster.scheduler.publish()
    await until(lambda: gateway.cluster.gateway.view.max_model_len == 10**6)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [97] * 5000, "n": 8, "return_token_ids": True, "max_tokens": 20},
        {"prompt": "x", "n": 64, "logprobs": 20, "max_tokens": 20},
    ],
    ids=["prompt ids in each choice", "64 choices with 20 logprobs"],
)
async def test_client_that_reads_at_once_gets_the_whole_stream(body: dict[str, object]) -> None:
    async with http_gateway(*PD, stream_buffer_bytes=4096) as gateway:
        gateway.cluster.gateway.unread.grace_s = 60.0  # client and gateway share a loop, which may be slow
        await make_fast(gateway)
        for _ in range(3):
            assert (await events_of(gateway, {**body, "stream": True}))[-1] == "[DONE]"


@pytest.mark.parametrize("num_tokens", [10, MANY_TOKENS])
async def test_connection_of_a_client_that_never_reads_its_response_is_closed(num_tokens: int) -> None:
    """A small response fits into the kernel's buffers. The rest of a large one would be held for ever."""
    async with http_gateway(*PD, unread_s=1.0, **SMALL_BUFFERS) as gateway:
        await make_fast(gateway)
        gateway.cluster.scheduler.workers[1].tokens_a_step = 1_000
        raw = await gateway.connect()
        body = {"prompt": "x", "max_tokens": num_tokens, "return_token_ids": True, "n": 8}
        await raw.send(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        if num_tokens > 1000:
            await until(lambda: gateway.cluster.gateway.num_open, timeout_s=30)
            await until(lambda: not gateway.cluster.gateway.num_open, timeout_s=60)
            await until(lambda: not gateway.server.connections, timeout_s=30)
            await until(lambda: not is_established(raw.writer), timeout_s=30)
        else:
            await until(lambda: gateway.cluster.scheduler.actuals, timeout_s=30)
        await raw.close()


def is_established(writer: asyncio.StreamWriter) -> bool:
    """True until the other side has reset the connection, whatever is unread in the kernel."""
    raw = writer.transport.get_extra_info("socket")
    return bool(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_reads_slowly_loses_its_ended_response(stream: bool) -> None:
    """It makes progress, so it never counts as not reading, but it would hold the memory for hours."""
    limits = {"unread_s": 60.0, "ended_unread_s": 0.5, "min_read_rate": 10**7, "stream_buffer_bytes": 2**26}
    async with http_gateway(*PD, **limits, **SMALL_BUFFERS) as gateway:
        await make_fast(gateway)
        gateway.cluster.scheduler.workers[1].tokens_a_step = 1_000
        raw = await gateway.connect()
        body = {"prompt": "x", "max_tokens": MANY_TOKENS, "return_token_ids": True, "n": 8, "stream": stream}
        await raw.send(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        await until(lambda: gateway.cluster.gateway.num_open, timeout_s=30)
        await until(lambda: not gateway.cluster.gateway.num_open, timeout_s=60)
        async with asyncio.timeout(30):
            while gateway.server.connections:
                await raw.read_slowly(4096)
        budget = gateway.cluster.gateway.budget
        await until(lambda: budget.used(Account.REQUESTS) == budget.used(Account.UNSENT) == 0)
        await raw.close()


async def test_client_that_reads_a_long_conversion_slowly_loses_it() -> None:
    limits = {"unread_s": 60.0, "ended_unread_s": 0.5, "min_read_rate": 10**7}
    async with http_gateway(*PD, **limits) as gateway:
        budget = gateway.cluster.gateway.budget
        raw = await gateway.connect()
        await raw.send(request_bytes("/tokenize", json.dumps({"prompt": "x" * 10**6}).encode()))
        await until(lambda: budget.used(Account.UNSENT), timeout_s=20)
        async with asyncio.timeout(30):
            while gateway.server.connections:
                await raw.read_slowly(512)
        await until(lambda: budget.used(Account.UNSENT) == 0)
        await raw.close()


async def test_conversion_that_is_not_read_is_cut_off_when_others_need_its_memory() -> None:
    limit = 30 * 10**6
    async with http_gateway(*PD, unread_s=60.0, memory_limits={Account.UNSENT: limit}) as gateway:
        service = gateway.cluster.gateway
        raw = await gateway.connect()
        await raw.send(request_bytes("/tokenize", json.dumps({"prompt": "x" * 10**6}).encode()))
        await until(lambda: 0 < service.budget.used(Account.UNSENT) < 10**7, timeout_s=20)  # it is formatted
        sizes = [service.budget.used(Account.UNSENT) - 1] * 20
        with ExitStack() as stack:
            for size in sizes[: limit // sizes[0]]:
                stack.enter_context(service.unsent_answer(size, lambda _: None))
            await until(lambda: not gateway.server.connections)
        await raw.close()


async def test_conversion_without_memory_is_refused() -> None:
    async with http_gateway(*PD, memory_limits={Account.UNSENT: 1000}) as gateway:
        for path, body in (("/tokenize", {"prompt": "x" * 1000}), ("/detokenize", {"tokens": [97] * 1000})):
            response = await gateway.post(path, body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "memory_budget")


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_ids_of_a_refused_call_are_not_formatted(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    formatted: list[object] = []

    async def format_many_ids(*lists: object) -> tuple[str, ...]:
        formatted.extend(lists)
        return tuple("[]" for _ in lists)

    monkeypatch.setattr(id_json, "format_many_ids", format_many_ids)
    body = {"prompt": [97] * 1000, "max_tokens": 1, "return_token_ids": True, "stream": stream}
    async with http_gateway(*PD, memory_limits={Account.REQUESTS: 60_000}) as gateway:
        await make_fast(gateway)
        assert (await gateway.post(COMPLETIONS, body)).status_code == 200
        assert len(formatted) == 1
        assert (await gateway.post(COMPLETIONS, {**body, "prompt": [97] * 2500})).status_code == 400
        assert len(formatted) == 1
