"""A completions server whose every delay is scripted. Loadgen's own error and its tests are measured against
it.

The last event of a response contains when the request was received and when each event was written to the
kernel, by the clock that all processes of the machine share. What a client saw later than that is the
client's error. `python -m loadgen.send.selftest.scripted_server --ttft 20ms --gap 5ms` runs one on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import json
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import httptools

from loadgen.send.selftest.script import Script, ScriptedEnd, ServedRequest
from loadgen.send.selftest.scripted_events import ScriptedEvents
from loadgen.send.timers import Alarm, new_alarm, now_s

Scripts = Callable[[ServedRequest], Script]


class ScriptedServer:
    """Serves at `server.url` while entered. `served` has every request so far, if `keeps` is true."""

    def __init__(
        self,
        script: Script | Scripts,
        *,
        stalls: Sequence[tuple[float, float]] = (),
        port: int = 0,
        owned_by: str = "baton",
        model: str = "scripted",
        max_model_len: int = 1 << 20,
        keeps: bool = True,
        tls: ssl.SSLContext | None = None,
        slots: int | None = None,
    ) -> None:
        """Configure the server; it starts when entered.

        - `stalls`: (from, to) in seconds after the first request; everything due within is delayed to its end
        - `slots`: responses at a time; other requests wait in a queue, and their scripts begin when they
          leave it
        """
        self.tls = tls
        self._script_of: Scripts = script if callable(script) else lambda _: script
        self._stalls = stalls
        self._port = port
        self._keeps = keeps
        self._free_slots = slots
        self._queue: deque[_Answer] = deque()
        self.models = {
            "object": "list",
            "data": [{"id": model, "object": "model", "owned_by": owned_by, "max_model_len": max_model_len}],
        }
        self.served: list[ServedRequest] = []
        self.num_served = 0
        self.url = ""
        self.first_s: float | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._alarm: Alarm | None = None
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._alarm = new_alarm(loop, self._fire)
        listener = socket.create_server(("127.0.0.1", self._port), backlog=4096)
        self.url = f"{'http' if self.tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener, ssl=self.tls)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        assert self._alarm is not None
        self._server.close()
        for connection in tuple(self.connections):
            connection.abort()
        await self._server.wait_closed()
        self._alarm.close()

    def register(self, body: dict[str, Any], headers: dict[str, str], at_s: float) -> tuple[ServedRequest, Script]:
        """Register a request and return it with its script."""
        served = ServedRequest(number=self.num_served, body=body, headers=headers, received_s=at_s)
        self.num_served += 1
        if self.first_s is None:
            self.first_s = at_s
        if self._keeps:
            self.served.append(served)
        return served, self._script_of(served)

    def admit(self, answer: _Answer, at_s: float) -> None:
        """Start a response now or when a slot becomes free."""
        if self._free_slots is None:
            answer.start(at_s)
        elif self._free_slots:
            self._free_slots -= 1
            answer.start(at_s)
        else:
            self._queue.append(answer)

    def release(self, answer: _Answer, at_s: float) -> None:
        """Free the slot of a response that has ended or whose client is gone."""
        if answer.is_over or self._free_slots is None:
            return
        answer.is_over = True
        if not answer.is_started:
            self._queue.remove(answer)
        elif self._queue:
            self._queue.popleft().start(at_s)
        else:
            self._free_slots += 1

    def at(self, due_s: float, do: Callable[[], None]) -> None:
        """Call `do` at `due_s`, or later if the server stalls then."""
        first_s = due_s if self.first_s is None else self.first_s
        for begin, end in self._stalls:
            if first_s + begin <= due_s < first_s + end:
                due_s = first_s + end
        if due_s <= now_s():
            do()
            return
        assert self._alarm is not None
        self._number += 1
        entry = (due_s, self._number, do)
        heapq.heappush(self._due, entry)
        if self._due[0] is entry:
            self._alarm.set(due_s)

    def _fire(self) -> None:
        assert self._alarm is not None
        while self._due and self._due[0][0] <= now_s():
            heapq.heappop(self._due)[2]()
        if self._due:
            self._alarm.set(self._due[0][0])


class _Connection(asyncio.Protocol):
    """One client connection. Requests come one after another; each is parsed completely, then answered."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._fd = -1
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._at_s = 0.0
        self._answer: _Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        sock = transport.get_extra_info("socket")
        self._fd = sock.fileno()
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.connections.discard(self)
        if self._answer is not None:
            self._answer.served.disconnected_s = now_s()
            self.ended()

    def data_received(self, data: bytes) -> None:
        self._at_s = now_s()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def on_url(self, url: bytes) -> None:
        self._url, self._headers, self._body = url, {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self.respond(200, json.dumps(self._server.models).encode(), {})
            return
        served, script = self._server.register(json.loads(b"".join(self._body)), self._headers, self._at_s)
        self._answer = _Answer(self, self._server, served, script, is_chat=b"chat" in self._url)
        self._server.admit(self._answer, self._at_s)

    def ended(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self._server.release(answer, now_s())

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.write(head.encode() + b"\r\n" + body)

    def write(self, data: bytes) -> float:
        """Write to the kernel. Returns the time just before."""
        at_s = now_s()
        if self._transport is None or self._transport.is_closing():
            return at_s
        num_sent = 0
        if self._server.tls is None and self._transport.get_write_buffer_size() == 0:
            try:
                num_sent = os.write(self._fd, data)
            except OSError:
                num_sent = 0
        if num_sent < len(data):
            self._transport.write(data[num_sent:])
        return at_s

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """Reset the connection like a killed process: unsent data is lost."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self._transport.abort()


class _Answer:
    """One response, sent event by event."""

    def __init__(
        self, connection: _Connection, server: ScriptedServer, served: ServedRequest, script: Script, *, is_chat: bool
    ) -> None:
        self._connection = connection
        self._server = server
        self.served = served
        self._script = script
        self._events = ScriptedEvents(served, script, is_chat=is_chat)
        self._due_s = 0.0
        self.is_started = False
        self.is_over = False

    def start(self, at_s: float) -> None:
        self.is_started = True
        self._due_s = at_s + self._script.ttft_s
        self._server.at(self._due_s, self.begin)

    def begin(self) -> None:
        if self.is_over:
            return
        script = self._script
        if script.ending is ScriptedEnd.NOTHING:
            self._connection.ended()
            self._connection.close()
            return
        if script.status != 200 or script.body:
            self._connection.respond(script.status, script.body, script.headers)
            self._connection.ended()
            return
        head = self._events.head()
        if self._events.num_tokens:
            self._tokens(head)
        else:
            self._connection.write(head)
            self._end()

    def _next(self) -> None:
        if not self.is_over:
            self._tokens(b"")

    def _tokens(self, head: bytes) -> None:
        events = self._events
        event = events.tokens()
        if events.has_more:
            self.served.sent_s.append(self._connection.write(head + events.chunk(event)))
            gaps = self._script.gaps_s
            self._due_s += gaps[min(len(self.served.sent_s), len(gaps)) - 1]
            self._server.at(self._due_s, self._next)
            return
        self.served.sent_s.append(now_s())
        self._connection.write(head + events.chunk(event))
        self._end()

    def _end(self) -> None:
        ending = self._script.ending
        connection, events = self._connection, self._events
        if ending is ScriptedEnd.SILENCE:
            return
        connection.ended()
        if ending in (ScriptedEnd.CLOSE, ScriptedEnd.RESET):
            connection.close() if ending is ScriptedEnd.CLOSE else connection.reset()
        elif ending is ScriptedEnd.ERROR:
            error = {"message": "scripted", "code": "worker_lost", "status": 503}
            connection.write(
                events.chunk(b"event: error\ndata: " + json.dumps({"error": error}).encode() + b"\n\n", is_last=True)
            )
        elif ending is ScriptedEnd.GARBAGE:
            connection.write(events.chunk(b"data: {]\n\n", is_last=True))
        elif ending is ScriptedEnd.LONG_LINE:
            connection.write(events.chunk(b"data: " + b"x" * (40 << 20)))
        else:
            done = b"data: [DONE]\n\n" if ending is ScriptedEnd.DONE else b""
            connection.write(events.chunk(events.usage() + done, is_last=True))


def main() -> None:
    """Serve one script to all clients until standard input ends or the process is interrupted."""
    import argparse
    import sys

    import uvloop

    from loadgen.send.run.priority import Priority, raise_priority
    from loadgen.send.target import raise_file_limit
    from loadgen.text_forms import seconds

    parser = argparse.ArgumentParser(
        prog="python -m loadgen.send.selftest.scripted_server", description="A completions server with scripted delays."
    )
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0 picks a free one")
    parser.add_argument("--ttft", type=seconds, default=0.02, help="time from request to first token, such as 20ms")
    parser.add_argument("--gap", type=seconds, default=0.01, help="time between tokens")
    parser.add_argument(
        "--stall",
        type=seconds,
        nargs=2,
        action="append",
        default=[],
        metavar=("FROM", "TO"),
        help="stall between these times after the first request",
    )
    parser.add_argument("--slots", type=int, help="concurrent responses; other requests wait in a queue")
    parser.add_argument(
        "--owned-by", default="baton", help="owned_by in /v1/models, from which loadgen detects the dialect"
    )
    parser.add_argument("--core", type=int, help="run on this core only")
    parser.add_argument(
        "--priority",
        type=Priority,
        default=Priority.NORMAL,
        help="scheduling priority: normal, high or realtime (if permitted)",
    )
    given = parser.parse_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    raise_priority(given.priority)
    raise_file_limit()

    async def serve() -> None:
        script = Script(ttft_s=given.ttft, gaps_s=(given.gap,))
        stalls = [(begin, end) for begin, end in given.stall]
        async with ScriptedServer(
            script, stalls=stalls, port=given.port, owned_by=given.owned_by, keeps=False, slots=given.slots
        ) as server:
            gc.collect()
            gc.freeze()
            gc.disable()
            print(server.url, flush=True)
            await asyncio.to_thread(sys.stdin.read)

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve())


if __name__ == "__main__":
    main()
