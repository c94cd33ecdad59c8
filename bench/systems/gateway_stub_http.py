"""Stub OpenAI server behind sglang-router. It computes nothing.

python -m bench.systems.gateway_stub_http STEP_S STAMPS

Sends the first token as soon as a request arrives, then one token per step, as `gateway_stub` does. Prints
`ready ADDRESS`.
"""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import uvloop

from bench.support.gateway_load import Stamps

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n\r\n"
CHOICE = (
    '{"id":"cmpl-0","object":"text_completion","created":0,"model":"demo",'
    '"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":%s}]}'
)
EVENT = ("data: " + CHOICE % "null" + "\n\n").encode()
LAST_EVENT = ("data: " + CHOICE % '"length"' + "\n\ndata: [DONE]\n\n").encode()
NON_STREAMING = (CHOICE % '"length"')[
    :-1
].encode() + b',"usage":{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001}}'
MODEL_INFO = b'{"served_model_name":"demo","is_generation":true}'


def chunk(data: bytes) -> bytes:
    """Encode one chunk of a chunked HTTP body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Steps:
    """Writes one event per step to every open stream."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: dict[Any, int] = {}  # transport → events left
        self._has_streams = asyncio.Event()

    def add(self, transport: Any, num_events: int) -> None:
        """Start to send events to a stream, `num_events` in all."""
        self._streams[transport] = num_events
        self._has_streams.set()

    async def run(self) -> None:
        """Send events until cancelled. Late steps are caught up."""
        loop = asyncio.get_running_loop()
        event, last = chunk(EVENT), chunk(LAST_EVENT) + b"0\r\n\r\n"
        while True:
            await self._has_streams.wait()
            due_s = loop.time()
            while self._streams:
                due_s += self._step_s
                await asyncio.sleep(due_s - loop.time())
                for transport, left in tuple(self._streams.items()):
                    transport.write(event if left > 1 else last)
                    if left > 1:
                        self._streams[transport] = left - 1
                    else:
                        del self._streams[transport]
            self._has_streams.clear()


class StubConnection(asyncio.Protocol):
    """Reads one request after another. Of a body, only `max_tokens` and `stream` matter."""

    def __init__(self, steps: Steps, stamps: Stamps) -> None:
        self._steps = steps
        self._stamps = stamps
        self._received = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if not found or len(body) < (size := int(length[1]) if length else 0):
            return
        self._received = body[size:]
        self._answer(head, body[:size])

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST /v1/completions"):
            self._send_body(MODEL_INFO)  # health checks, model lists and other queries
            return
        arrived_ns = self._stamps.now_ns()
        found = re.search(rb'"max_tokens": *(\d+)', body)
        max_tokens = int(found[1]) if found else 1
        if re.search(rb'"stream": *true', body):
            begin = HEAD % (b"text/event-stream", b"transfer-encoding: chunked")
            self._stamps.put(max_tokens, arrived_ns)
            self._transport.write(begin + chunk(EVENT))
            self._steps.add(self._transport, max_tokens - 1)
        else:
            self._stamps.put(max_tokens, arrived_ns)
            self._send_body(NON_STREAMING)

    def _send_body(self, body: bytes) -> None:
        self._transport.write(HEAD % (b"application/json", b"content-length: %d" % len(body)) + body)


async def main(step_s: float, stamps: Stamps) -> None:
    loop = asyncio.get_running_loop()
    steps = Steps(step_s)
    server = await loop.create_server(lambda: StubConnection(steps, stamps), "127.0.0.1", 0)
    print(f"ready 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await steps.run()


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), Stamps(Path(sys.argv[2]))))
