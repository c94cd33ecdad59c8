"""Requests that are larger than what they ask for: padded bodies, trailers, chunk extensions, tiny chunks."""

import asyncio
import tracemalloc

import pytest

from tests.integration.gateway.http_gateway import HttpGateway, RawConnection, http_gateway, request_bytes
from tests.unit.gateway.fakes import until

pytestmark = pytest.mark.integration
PD = (("p0", "prefill"), ("d0", "decode"))
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)
BODY = b'{"prompt": "x", "max_tokens": 3}'
MIB = 2**20


def chunked(body: bytes, size: int = 1000, extension: bytes = b"") -> bytes:
    """Return the chunks of a body, without the last chunk."""
    return b"".join(
        b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk)
        for chunk in (body[at : at + size] for at in range(0, len(body), size))
    )


async def send_until_refused(raw: RawConnection, unit: bytes, limit_bytes: int) -> int:
    """Send `unit` again and again until the gateway closes the connection. Return the bytes sent."""
    sent = 0
    try:
        while sent < limit_bytes and not raw.reader.at_eof():
            await raw.send(unit)
            sent += len(unit)
    except ConnectionError:
        pass
    return sent


async def status_of(gateway: HttpGateway, *parts: bytes) -> bytes:
    raw = await gateway.connect()
    for part in parts:
        await raw.send(part)
    await raw.read_until(b"\r\n")
    await raw.close()
    return bytes(raw.seen).split(b" ")[1]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_body_in_small_chunks_with_trailers_is_accepted(size: int) -> None:
    async with http_gateway(*PD) as gateway:
        body = BODY + b" " * 2000
        assert await status_of(gateway, HEAD, chunked(body, size), b"0\r\nx-checksum: 1\r\n\r\n") == b"200"


@pytest.mark.parametrize(
    ("begin", "unit"),
    [
        (chunked(BODY) + b"0\r\n", b"a: b\r\n" * 1000),
        (chunked(BODY) + b"0\r\na: ", b"b" * 6000),
        (chunked(BODY)[:-2] + b"\r\n1;", b"e" * 6000),
    ],
    ids=["many trailers", "one endless trailer", "one endless chunk extension"],
)
async def test_endless_framing_is_refused_before_it_takes_memory(begin: bytes, unit: bytes) -> None:
    async with http_gateway(*PD, receive_deadline_s=60.0) as gateway:
        raw = await gateway.connect()
        await raw.send(HEAD + begin)
        sent = await send_until_refused(raw, unit, 16 * MIB)
        seen = await raw.read_until_closed()
        assert sent < 8 * MIB
        assert not seen or seen.startswith(b"HTTP/1.1 413 ")
        await raw.close()


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_body_is_freed_when_its_request_begins_to_run(stream: bytes) -> None:
    """A running request holds its prompt, not the padded body in which it arrived."""
    number = 6
    body = b'{"prompt": "x", "max_tokens": 3, "stream": ' + stream + b"}" + b" " * 2 * MIB
    request = request_bytes("/v1/completions", body)
    async with http_gateway(("h0", "hybrid")) as gateway:
        gateway.cluster.scheduler.workers[0].prefill_s = 1e6
        connections = [await gateway.connect() for _ in range(number)]
        tracemalloc.start()
        try:
            await asyncio.gather(*(connection.send(request) for connection in connections))
            await until(lambda: len(gateway.cluster.scheduler.workers[0].jobs) == number, timeout_s=20)
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held_bytes < len(body)
        for connection in connections:
            await connection.close()
