"""Responses that are large, come in bursts, or are not read."""

import asyncio
import json
import socket
from dataclasses import replace

import pytest

from baton.runtime.process.byte_budget import Account
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, request_bytes
from tests.unit.gateway.fakes import until

COMPLETIONS = "/v1/completions"
pytestmark = pytest.mark.integration
PD = (("p0", "prefill"), ("d0", "decode"))
TCP_ESTABLISHED = 1
"""Number that Linux gives this state."""


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
        await make_fast(gateway)
        for _ in range(3):
            assert (await events_of(gateway, {**body, "stream": True}))[-1] == "[DONE]"


@pytest.mark.parametrize("num_tokens", [10, 200_000])
async def test_connection_of_a_client_that_never_reads_its_response_is_closed(num_tokens: int) -> None:
    """A small response fits into the kernel's buffers. The rest of a large one would be held for ever."""
    async with http_gateway(*PD, unread_s=1.0) as gateway:
        await make_fast(gateway)
        gateway.cluster.scheduler.workers[1].tokens_a_step = 10_000
        raw = await gateway.connect()
        body = {"prompt": "x", "max_tokens": num_tokens, "return_token_ids": True, "n": 8}
        await raw.send(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        await until(lambda: gateway.server.connections and not gateway.cluster.gateway.num_open, timeout_s=20)
        if num_tokens > 1000:
            await until(lambda: not gateway.server.connections, timeout_s=10)
            await until(lambda: not is_established(raw.writer), timeout_s=5)
        await raw.close()


def is_established(writer: asyncio.StreamWriter) -> bool:
    """True until the other side has reset the connection, whatever is unread in the kernel."""
    raw = writer.transport.get_extra_info("socket")
    return bool(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_reads_slowly_loses_its_ended_response(stream: bool) -> None:
    """It makes progress, so it never counts as not reading, but it would hold the memory for hours."""
    limits = {"unread_s": 60.0, "ended_unread_s": 0.5, "min_read_rate": 10**7, "stream_buffer_bytes": 2**26}
    async with http_gateway(*PD, **limits) as gateway:
        await make_fast(gateway)
        gateway.cluster.scheduler.workers[1].tokens_a_step = 10_000
        raw = await gateway.connect()
        body = {"prompt": "x", "max_tokens": 200_000, "return_token_ids": True, "n": 8, "stream": stream}
        await raw.send(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        await until(lambda: gateway.cluster.gateway.num_open, timeout_s=20)
        await until(lambda: not gateway.cluster.gateway.num_open, timeout_s=20)
        async with asyncio.timeout(10):
            while gateway.server.connections:
                await raw.reader.read(4096)
                await asyncio.sleep(0.02)
        budget = gateway.cluster.gateway.budget
        await until(lambda: budget.used(Account.REQUESTS) == budget.used(Account.UNSENT) == 0)
        await raw.close()
