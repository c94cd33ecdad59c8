"""Probes that send much: framing, unfinished messages, large legal bodies and many stop strings."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.probes.result import Finding
from tests.probes.target import MIB, Target
from tests.probes.unfinished_messages import UnfinishedMessages

HEALTH_CPU_S = 0.5
"""Most CPU time of the event loop during one request of `/health`."""


async def stop_strings(target: Target) -> list[Finding]:
    """Send four requests of 64 samples with 16 stop strings of 1,024 characters."""
    stops = [chr(97 + number) * 1023 + "!" for number in range(16)]
    body = {"prompt": "hello", "n": 64, "stop": stops, "max_tokens": 4}
    async with target.watched() as watch:
        responses = await asyncio.gather(*(target.complete(body) for _ in range(4)), return_exceptions=True)
    failed = [response for response in responses if getattr(response, "status_code", 0) != 200]
    return [
        Finding("memory", watch.grown_bytes / MIB, 256, "MiB"),
        Finding("requests without an answer", len(failed), 0, ""),
        Finding("not serving afterwards", float(not await target.is_serving()), 0, ""),
    ]


async def trailers(target: Target, seconds: float = 10.0) -> list[Finding]:
    """Send trailers without end over two connections."""
    body = b"1\r\n{\r\n0\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"

    async def send() -> None:
        _, writer = await target.connect()
        writer.write(head + body)
        await _send_for(writer, b"a: b\r\n" * 10_000, seconds)

    async with target.watched() as watch:
        await asyncio.gather(send(), send())
    return _bounded(watch.grown_bytes, 64, watch.health_cpu_s)


async def unfinished_grpc_messages(target: Target) -> list[Finding]:
    """Begin 200 gRPC messages of 7 MiB on 20 connections and finish none of them."""
    host, _ = target.address
    async with target.watched() as watch:
        await asyncio.gather(*(UnfinishedMessages.run(host, target.grpc_port, 10, 15.0) for _ in range(20)))
    return _bounded(watch.grown_bytes, 400, watch.health_cpu_s)


async def legal_bodies(target: Target) -> list[Finding]:
    """Send bodies that are legal JSON and cost much to parse or to validate."""
    lists = b'{"prompt": [' + b"[]," * (2 * MIB // 3) + b"[]]}"
    prompts = {"prompt": [[5] * 16_000] * 256, "max_tokens": 1}
    messages = {"messages": [{"role": "user", "content": "x"}] * 4096, "max_tokens": 1}

    async def raw(content: bytes) -> None:
        await target.http.post(
            f"{target.url}/v1/completions", content=content, headers={"content-type": "application/json"}
        )

    findings: list[Finding] = []
    sends: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("empty lists", lambda: raw(lists)),
        ("256 prompts", lambda: target.complete(prompts)),
        ("4,096 messages", lambda: target.http.post(f"{target.url}/v1/chat/completions", json=messages)),
    ]
    for name, send in sends:
        async with target.watched() as watch:
            for _ in range(3):
                await send()
        findings.append(Finding(f"{name}: CPU time during /health", watch.health_cpu_s, 0.3, "s"))
    return findings


def _bounded(grown_bytes: int, limit_mib: float, health_cpu_s: float) -> list[Finding]:
    return [
        Finding("memory", grown_bytes / MIB, limit_mib, "MiB"),
        Finding("CPU time during /health", health_cpu_s, HEALTH_CPU_S, "s"),
    ]


async def _send_for(writer: asyncio.StreamWriter, unit: bytes, seconds: float) -> None:
    """Send `unit` again and again until the time is over or the other side closes."""
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(seconds):
            while True:
                writer.write(unit)
                await writer.drain()
                await asyncio.sleep(0)
    writer.transport.abort()
