"""Probes that ask for much and read it at once, late, or never."""

import asyncio
import socket

from tests.probes.result import Finding
from tests.probes.target import MIB, Target

LARGE = {"prompt": "hello", "n": 32, "logprobs": 5, "ignore_eos": True}
"""With 1,000 tokens a sample its response has more bytes than the kernel buffers."""
CLOSED_WITHIN_S = 240.0
"""Includes the time in which a busy machine computes 96,000 tokens."""
ESTABLISHED = 1
"""State of a TCP connection in Linux."""
FEWEST_EVENTS = 20
"""Events that another stream must get while a large response is computed. Fewer would show nothing."""


async def unread_responses(target: Target) -> list[Finding]:
    """Ask for three large responses and never read them."""
    connections = [await target.connect() for _ in range(3)]
    for _, writer in connections:
        writer.write(target.request_bytes({**LARGE, "max_tokens": 1000}))
    loop = asyncio.get_running_loop()
    end_s = loop.time() + CLOSED_WITHIN_S
    while (left := sum(map(is_established, connections))) and loop.time() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    for _, writer in connections:
        writer.transport.abort()
    return [Finding(f"connections left after {CLOSED_WITHIN_S:g} s", left, 0, "")]


def is_established(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    """True until the other side has closed the connection."""
    info: bytes = connection[1].transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return info[0] == ESTABLISHED


async def large_response(target: Target) -> list[Finding]:
    """Ask for a whole response with many logprobs while another client reads a stream."""
    gaps: list[float] = []

    async def other() -> None:
        last_s = target.loop_cpu_s()
        async for _ in target.stream({"prompt": "hi", "max_tokens": 2000, "ignore_eos": True}):
            now_s = target.loop_cpu_s()
            gaps.append(now_s - last_s)
            last_s = now_s

    async with target.watched() as watch:
        reading = asyncio.create_task(other())
        response = await target.complete({**LARGE, "logprobs": 20, "max_tokens": 1000})
        reading.cancel()
        await asyncio.wait((reading,))
    return [
        Finding("large response is missing", float(response.status_code != 200), 0, ""),
        Finding("events missing in the other stream", max(0, FEWEST_EVENTS - len(gaps)), 0, ""),
        Finding("memory", watch.grown_bytes / MIB, 256, "MiB"),
        Finding("most CPU time between events of the other stream", max(gaps, default=0.0), 0.5, "s"),
    ]


async def readers_at_once(target: Target) -> list[Finding]:
    """Read streams at once whose events are large: prompt ids in each choice, and many logprobs."""
    bodies = [
        {"prompt": list(range(1000, 3999)), "n": 32, "return_token_ids": True, "max_tokens": 64},
        {"prompt": "hello", "n": 64, "logprobs": 20, "max_tokens": 32},
    ]
    findings = []
    for name, body in zip(("prompt ids", "logprobs"), bodies, strict=True):
        unfinished = 0
        for _ in range(10):
            last = ""
            async for data in target.stream(body):
                last = data
            unfinished += last != "[DONE]"
        findings.append(Finding(f"{name}: streams of 10 without [DONE]", unfinished, 0, ""))
    return findings
