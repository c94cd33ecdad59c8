"""Sends HTTP requests pipelined over a few connections, and returns the status of each response."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httptools

from tests.integration.gateway.cost_fuzz.cost_case import CostCase

WINDOW = 16
"""Requests of one connection that are under way at a time."""
ANSWER_S = 120.0
TAIL_BYTES = 1024


@dataclass(slots=True, eq=False)
class Answer:
    """The response to one case. `status` 0 means that the connection was closed without a response.

    tail: the last bytes of the body.
    """

    status: int = 0
    tail: bytearray = field(default_factory=bytearray)


class _Responses:
    """Parses the responses of one connection."""

    def __init__(self) -> None:
        self.ended: list[Answer] = []
        self._open = Answer()
        self._parser: Any = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._open = Answer()

    def on_headers_complete(self) -> None:
        self._open.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._open.tail += body
        del self._open.tail[:-TAIL_BYTES]

    def on_message_complete(self) -> None:
        if self._open.status != 100:
            self.ended.append(self._open)


async def send_pipelined(port: int, cases: Sequence[CostCase], num_connections: int) -> list[Answer]:
    """Send cases over connections that each have several requests under way. Returns an answer for each."""
    shares = [range(first, len(cases), num_connections) for first in range(num_connections)]
    answers: dict[int, Answer] = {}
    await asyncio.gather(*(_send_share(port, cases, share, answers) for share in shares))
    return [answers.get(index) or Answer() for index in range(len(cases))]


async def _send_share(port: int, cases: Sequence[CostCase], share: range, answers: dict[int, Answer]) -> None:
    left = deque(share)
    while left:
        before = len(left)
        await _send_over_one_connection(port, cases, left, answers)
        if len(left) == before:
            # A later request of the same connection may have ended it before the response was read.
            alone = deque((left.popleft(),))
            await _send_over_one_connection(port, cases, alone, answers)
            for index in alone:  # the server closed without an answer
                answers[index] = Answer()


async def _send_over_one_connection(
    port: int, cases: Sequence[CostCase], left: deque[int], answers: dict[int, Answer]
) -> None:
    """Send the cases `left`, and remove those that were answered, until all are or the connection closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        responses = _Responses()
        to_send, num_sent = deque(left), 0
        num_answered = 0
        while left:
            while to_send and num_sent - num_answered < WINDOW:
                writer.write(cases[to_send.popleft()].wire_bytes)
                num_sent += 1
            async with asyncio.timeout(ANSWER_S):
                data = await reader.read(2**18)
            if not data:
                return
            responses.feed(data)
            for answer in responses.ended:
                answers[left.popleft()] = answer
                num_answered += 1
            responses.ended.clear()
    except (ConnectionError, httptools.HttpParserError):
        return
    finally:
        writer.transport.abort()


async def send_raw(port: int, case: CostCase) -> Answer:
    """Send all bytes of a case over a connection of its own. Returns the first response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    responses = _Responses()
    try:
        writer.write(case.content)
        with suppress(OSError):  # the gateway may have closed the connection
            writer.write_eof()
        async with asyncio.timeout(ANSWER_S):
            while data := await reader.read(2**18):
                responses.feed(data)
    except (ConnectionError, httptools.HttpParserError):
        pass
    finally:
        writer.transport.abort()
    return responses.ended[0] if responses.ended else Answer()
