"""HTTP over ASGI: reads request bodies within limits, reads headers, sends responses, and detects
disconnects."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from types import TracebackType
from typing import Any, Self

from baton.core.client_api import Caller, session_of
from baton.core.errors import BatonError, Code, Failure, Reason, Refused
from baton.core.request_limits import LIMITS, OutOfLimits, printable
from baton.gateway.http.openai_errors import Headers
from baton.gateway.input.client_call import InvalidField
from baton.runtime.process.byte_budget import Reservation

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON_TYPE = b"application/json"
PIECE_BYTES = 64 * 1024
"""Bytes after which a piece of a response is written, so that a connection's own buffer stays small. At this
size uvicorn makes the next write wait."""
_TEXT_COPIES, _VALUE_BYTES = 3, 48
"""Memory of a parsed body: copies of its text, and a Python object with its place in a list for each
value."""
TIMEOUT_HEADER = "x-baton-timeout-ms"


class ClientDisconnected(BatonError):
    """The client has closed the connection, so a response cannot be delivered."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, reservation: Reservation) -> bytearray:
    """Read the body of a JSON request. `reservation` grows with it, and then to what parsing it may take.

    Raises OverBudget if the memory budget is used up, Refused (415) for another media type and Refused (413)
    for a body of more than `max_bytes`, if possible before reading it. Raises ClientDisconnected if the
    client leaves before the end of the body.
    """
    headers = dict(scope["headers"])
    _check_type(headers)
    too_large = Failure(
        code=Code.BODY_TOO_LARGE,
        reason=Reason.BODY_TOO_LARGE,
        message=f"the body is larger than {max_bytes} bytes; send a smaller body",
    )
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > max_bytes:
        raise Refused(too_large)
    body = bytearray()
    num_commas = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client disconnected before its request had arrived")
        received = message.get("body", b"")
        body += received
        num_commas += received.count(b",")
        if len(body) > max_bytes:
            raise Refused(too_large)
        if len(body) > reservation.num_bytes:
            reservation.resize(len(body))
        if not message.get("more_body"):
            reservation.resize(_TEXT_COPIES * len(body) + _VALUE_BYTES * num_commas)
            return body  # a copy of 8 MiB would take 3 ms, and so would a count of its commas


def caller_of(scope: Scope) -> Caller:
    """Read the caller's metadata from the headers. Raises InvalidField if the timeout header is invalid.

    Clients of Anthropic's API send their key in the header `x-api-key`.
    """
    headers = dict(scope["headers"])
    authorization = headers.get(b"authorization", b"")
    if not authorization and (key := headers.get(b"x-api-key")):
        authorization = b"Bearer " + key
    return Caller(
        authorization=authorization.decode("latin-1"),
        timeout_s=_timeout_s(headers.get(TIMEOUT_HEADER.encode())),
        address=":".join(map(str, scope.get("client") or ())),
        trace_context=headers.get(b"traceparent", b"").decode("latin-1"),
        session=session_of({name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}),
    )


def _timeout_s(text: bytes | None) -> float | None:
    if text is None:
        return None
    value = int(text) if text.isdigit() and len(text) <= 18 else text.decode("latin-1")
    try:
        LIMITS[TIMEOUT_HEADER].check(TIMEOUT_HEADER, value)
    except OutOfLimits as error:
        raise InvalidField(TIMEOUT_HEADER, str(error)) from error
    return int(value) / 1000


async def respond(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON_TYPE,
    headers: Headers | None = None,
    close: bool = False,
) -> None:
    """Send a complete response. `close` asks the client to close the connection."""
    all_headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]
    if close:
        all_headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def respond_in_pieces(
    send: Send, num_bytes: int, pieces: Iterable[bytes], *, headers: Headers | None = None
) -> None:
    """Send a complete JSON response of `num_bytes` in several writes.

    Each write waits until the client has read most of the one before.
    """
    all_headers = [(b"content-type", JSON_TYPE), (b"content-length", b"%d" % num_bytes), *(headers or ())]
    await send({"type": "http.response.start", "status": 200, "headers": all_headers})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def in_pieces(parts: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """Yield joined parts in pieces of at most `PIECE_BYTES`."""
    piece = bytearray()
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            chunk = part[at : at + PIECE_BYTES]
            if len(piece) + len(chunk) > PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
            piece += chunk
    yield bytes(piece)


async def respond_json(send: Send, status: int, value: object, *, headers: Headers | None = None) -> None:
    """Send a complete response with a JSON body."""
    await respond(send, status, json.dumps(value).encode(), headers=headers)


class WhileConnected:
    """Cancels the body of `async with WhileConnected(receive)` if the client disconnects.

    The statement then raises ClientDisconnected. Use it after the request body was received.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._scope = asyncio.timeout(None)
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()  # its error refers to this object, which must not refer to it: a cycle of all the request
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ClientDisconnected("the client has disconnected") from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # no other message is expected after the complete request
        self._scope.reschedule(asyncio.get_running_loop().time())


def _check_type(headers: dict[bytes, bytes]) -> None:
    given = headers.get(b"content-type", b"")
    kind, _, parameters = given.lower().partition(b";")
    charset = parameters.partition(b"charset=")[2].strip().strip(b'"')
    is_json = kind.strip() == JSON_TYPE and charset in (b"", b"utf-8", b"utf8")
    if not is_json or headers.get(b"content-encoding", b"identity") != b"identity":
        what = f"content type {printable(given.decode('latin-1'))}" if not is_json else "a content encoding"
        message = f"{what} is not supported; send plain JSON with the header content-type: application/json"
        raise Refused(Failure(code=Code.UNSUPPORTED_MEDIA_TYPE, reason=Reason.INVALID_REQUEST, message=message))
