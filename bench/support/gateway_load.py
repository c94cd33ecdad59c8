"""HTTP client of the gateway benchmarks with low CPU cost.

Connections are kept alive, requests are encoded in advance, and responses are counted but not parsed.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from string import ascii_lowercase
from typing import Any

WORDS = re.findall(r"[A-Za-z]+", " ".join(topics.values()))
"""Words of the Python manual. As in any prose, a few words are frequent and most are rare."""
EVENT = b"data: "
LAST_CHUNK = b"\n0\r\n\r\n"
CARRY = len(LAST_CHUNK) - 1


class Stamps:
    """File in which a stub logs each request: max_tokens, arrival, and send time of the first token (ns)."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    @staticmethod
    def now_ns() -> int:
        """Return the monotonic clock, which all processes of a machine share."""
        return time.monotonic_ns()

    def put(self, max_tokens: int, arrived_ns: int) -> None:
        """Log one request. Call this just before the first token is sent."""
        self._file.write(f"{max_tokens} {arrived_ns} {self.now_ns()}\n")


@dataclass(slots=True)
class TimedAnswer:
    """Timing of one response in ns (monotonic): request sent, first event (or body) received, and end."""

    sent_ns: int
    first_ns: int = 0
    end_ns: int = 0
    num_events: int = 0


class LoadConnection(asyncio.Protocol):
    """A kept-alive HTTP/1.1 connection that handles one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._done: asyncio.Future[TimedAnswer] | None = None
        self._answer = TimedAnswer(0)
        self._head = b""
        self._in_head = True
        self._left = 0
        self._is_chunked = False
        self._carry = b""

    async def ask(self, request: bytes) -> TimedAnswer:
        """Send one request and wait for its response.

        Raises RuntimeError if the status is not 200, and ConnectionError if the connection closes early.
        """
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._in_head, self._carry = b"", True, b"\r"
        self._answer = TimedAnswer(time.monotonic_ns())
        self._transport.write(request)
        return await self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(
                error or ConnectionError("the connection was closed before the end of the response")
            )

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._begin(head, data)
            if not data:
                return
        now_ns = time.monotonic_ns()
        self._answer.first_ns = self._answer.first_ns or now_ns
        seen = self._carry + data
        self._answer.num_events += seen.count(EVENT)
        self._carry = seen[-CARRY:]  # shorter than EVENT, so that no event is counted twice
        self._left -= len(data)
        if (
            (seen.endswith(LAST_CHUNK) if self._is_chunked else self._left <= 0)
            and self._done is not None
            and not self._done.done()
        ):
            self._answer.end_ns = now_ns
            self._done.set_result(self._answer)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _begin(self, head: bytes, body: bytes) -> None:
        self._in_head = False
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        self._left, self._is_chunked = int(length[1]) if length else 0, length is None
        if not head.startswith(b"HTTP/1.1 200") and self._done is not None:
            self._done.set_exception(RuntimeError(f"{head.decode()}\n\n{body.decode(errors='replace')}"[:1000]))


def prompts(seed: int, count: int, num_words: int) -> list[str]:
    """Return prompts of random words, all different."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=num_words)) for _ in range(count)]


def random_letter_prompts(seed: int, count: int, num_words: int) -> list[str]:
    """Return prompts whose words are random letters."""
    rng = random.Random(seed)
    return [
        " ".join("".join(rng.choices(ascii_lowercase, k=rng.randint(2, 9))) for _ in range(num_words))
        for _ in range(count)
    ]


def requests(host: str, model: str, texts: Iterable[str], *, max_tokens: int, stream: bool) -> list[bytes]:
    """Return encoded HTTP completion requests."""
    made = []
    for text in texts:
        fields = {
            "model": model,
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


async def connect(host: str, port: int) -> LoadConnection:
    """Open one connection."""
    _, connection = await asyncio.get_running_loop().create_connection(LoadConnection, host, port)
    return connection


async def load(host: str, port: int, work: Sequence[bytes], in_flight: int) -> list[TimedAnswer]:
    """Send all requests over `in_flight` connections, one request at a time on each."""
    left = iter(work)
    answers: list[TimedAnswer] = []

    async def client(connection: LoadConnection) -> None:
        answers.extend([await connection.ask(request) for request in left])
        connection.close()

    connections = await asyncio.gather(*(connect(host, port) for _ in range(in_flight)))
    await asyncio.gather(*map(client, connections))
    return answers
