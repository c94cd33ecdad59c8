"""Malformed HTTP, HTTP/2 and gRPC connections, and pickles that create a file if they are loaded."""

import asyncio
import pickle
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, ACK = 1, 4, 8, 1


class Received(NamedTuple):
    """The received bytes, and whether the other side closed the connection."""

    data: bytes
    was_closed: bool


async def exchange(
    port: int, pieces: Iterable[bytes], *, listen_s: float = 5.0, quiet_s: float = 0.25, until: bytes = b""
) -> Received:
    """Send bytes over a new TCP connection and receive the response.

    Stops when the other side closes, when `until` was received, or after `quiet_s` without data.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    was_closed = False

    async def send() -> None:
        with suppress(OSError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()

    sending = asyncio.create_task(send())
    loop = asyncio.get_running_loop()
    end_s = loop.time() + listen_s
    try:
        while not was_closed and not (until and until in received) and loop.time() < end_s:
            was_sent = sending.done()
            try:
                async with asyncio.timeout(quiet_s):
                    data = await _read(reader)
            except TimeoutError:
                if was_sent:
                    break
                continue
            received += data
            was_closed = not data
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
        writer.transport.abort()
    return Received(bytes(received), was_closed)


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65536)
    except OSError:
        return b""


def internal_errors(log: Iterable[str]) -> list[str]:
    """Return the lines of a process's log that report an internal error. Errors of grpc about unreadable
    input are left out."""
    errors = (line for line in log if '"level": "error"' in line or '"level": "critical"' in line)
    return [line for line in errors if '"logger": "grpc.' not in line]


# HTTP/2, as far as needed for broken connections.


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0, length: int | None = None) -> bytes:
    """Return an HTTP/2 frame. `length` replaces the true length in its header."""
    declared = len(payload) if length is None else length
    return struct.pack(">I", declared)[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def field_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return header fields as HPACK literals without indexing."""
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),)) + text
    rest, out = len(text) - 127, bytearray(b"\x7f")
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes((*out, rest)) + text


def request_head(call: str, /, **changes: bytes | None) -> list[tuple[bytes, bytes]]:
    """Return the header fields of a gRPC call with the path `call`.

    changes: values by name, with `_` for `-` and without the colon of pseudo-headers; None omits a field.
    """
    fields: dict[str, bytes | None] = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": call.encode(),
        ":authority": b"localhost",
        "te": b"trailers",
        "content-type": b"application/grpc",
    }
    for name, value in changes.items():
        fields[f":{name}" if f":{name}" in fields else name.replace("_", "-")] = value
    return [(name.encode(), value) for name, value in fields.items() if value is not None]


def grpc_message(payload: bytes, *, length: int | None = None, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(payload) if length is None else length) + payload


def grpc_call(call: str, message: bytes, /, *, stream: int = 1, **changes: bytes | None) -> bytes:
    """Return the frames of a complete call. `message` is the content of its DATA frames."""
    frames = [frame(HEADERS, field_block(request_head(call, **changes)), flags=END_HEADERS, stream=stream)]
    frames += [frame(DATA, message[at : at + 16384], stream=stream) for at in range(0, len(message), 16384)]
    return b"".join([*frames, frame(DATA, flags=END_STREAM, stream=stream)])


HTTP2_START = PREFACE + frame(SETTINGS)


def broken_http2(method: str) -> Mapping[str, bytes]:
    """Return invalid gRPC connections by the kind of error. `method` is the path of an existing method."""
    head = field_block(request_head(method))
    opened = frame(HEADERS, head, flags=END_HEADERS, stream=1)
    return {
        "random-bytes": bytes(range(256)) * 40,
        "http1": b"POST /baton HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
        "tls": bytes.fromhex("16030100050100000100") + bytes(300),
        "preface-wrong": b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + frame(SETTINGS),
        "no-settings": PREFACE + opened,
        "settings-cut": PREFACE + frame(SETTINGS, b"12345"),
        "settings-on-a-stream": PREFACE + frame(SETTINGS, stream=1),
        "settings-ack-with-content": HTTP2_START + frame(SETTINGS, bytes(6), flags=ACK),
        "settings-window": PREFACE + frame(SETTINGS, struct.pack(">HI", 4, 2**32 - 1)),
        "settings-frame-size": PREFACE + frame(SETTINGS, struct.pack(">HI", 5, 1)),
        "headers-on-stream-0": HTTP2_START + frame(HEADERS, head, flags=END_HEADERS),
        "headers-even-stream": HTTP2_START + frame(HEADERS, head, flags=END_HEADERS, stream=2),
        "headers-garbage": HTTP2_START + frame(HEADERS, b"\xff" * 100, flags=END_HEADERS, stream=1),
        "headers-index": HTTP2_START + frame(HEADERS, b"\xff\xff\xff\xff\x7f", flags=END_HEADERS, stream=1),
        "headers-table-size": HTTP2_START
        + frame(HEADERS, b"\x3f\xff\xff\xff\xff\x0f" + head, flags=END_HEADERS, stream=1),
        "headers-interrupted": HTTP2_START + frame(HEADERS, head, stream=1) + frame(PING, bytes(8)),
        "headers-too-large": HTTP2_START
        + frame(HEADERS, field_block([(b"x", b"y" * 1000)] * 15), stream=1)
        + frame(CONTINUATION, field_block([(b"x", b"y" * 1000)] * 15), stream=1) * 100,
        "continuation-without-headers": HTTP2_START + frame(CONTINUATION, head, stream=1),
        "continuation-flood": HTTP2_START
        + frame(HEADERS, head, stream=1)
        + frame(CONTINUATION, b"\0\1x\1y" * 3000, stream=1) * 150,
        "data-on-stream-0": HTTP2_START + frame(DATA, b"x"),
        "data-on-an-idle-stream": HTTP2_START + frame(DATA, b"x", stream=7),
        "data-padding": HTTP2_START + opened + frame(DATA, b"\xff12", flags=PADDED, stream=1),
        "frame-too-large": HTTP2_START + opened + frame(DATA, bytes(9), stream=1, length=2**24 - 1) + bytes(2**20),
        "window-update-zero": HTTP2_START + frame(WINDOW_UPDATE, bytes(4)),
        "window-overflow": HTTP2_START + frame(WINDOW_UPDATE, struct.pack(">I", 2**31 - 1)) * 2,
        "ping-cut": HTTP2_START + frame(PING, b"1234"),
        "reset-cut": HTTP2_START + opened + frame(RST_STREAM, b"1", stream=1),
        "goaway-cut": HTTP2_START + frame(GOAWAY, b"1"),
        "push-from-a-client": HTTP2_START
        + opened
        + frame(PUSH, struct.pack(">I", 2) + head, flags=END_HEADERS, stream=1),
        "depends-on-itself": HTTP2_START + frame(PRIORITY, struct.pack(">IB", 1, 1), stream=1),
        "rapid-resets": HTTP2_START
        + b"".join(
            frame(HEADERS, head, flags=END_HEADERS, stream=s) + frame(RST_STREAM, struct.pack(">I", 8), stream=s)
            for s in range(1, 1001, 2)
        ),
        "message-length": HTTP2_START + grpc_call(method, grpc_message(b"abc", length=2**32 - 1)),
        "message-cut": HTTP2_START + grpc_call(method, grpc_message(b"abc", length=100)),
        "message-flag": HTTP2_START + grpc_call(method, grpc_message(b"abc", flag=7)),
        "message-compressed-without-encoding": HTTP2_START + grpc_call(method, grpc_message(b"abc", flag=1)),
        "message-invalid-gzip": HTTP2_START + grpc_call(method, grpc_message(b"abc", flag=1), grpc_encoding=b"gzip"),
        "message-encoding": HTTP2_START + grpc_call(method, grpc_message(b"abc", flag=1), grpc_encoding=b"bogus"),
        "messages-many": HTTP2_START + grpc_call(method, grpc_message(b"") * 1000),
        "method-get": HTTP2_START + grpc_call(method, b"", method=b"GET"),
        "path-none": HTTP2_START + grpc_call("/", grpc_message(b"")),
        "path-control-characters": HTTP2_START + grpc_call("/%00/\u202e/../..", grpc_message(b"")),
        "path-invalid-utf8": HTTP2_START + grpc_call(method, grpc_message(b""), path=b"/\xff/\xfe"),
        "no-authority": HTTP2_START + grpc_call(method, grpc_message(b""), authority=None),
        "no-path": HTTP2_START + grpc_call(method, grpc_message(b""), path=None),
        "content-type": HTTP2_START + grpc_call(method, grpc_message(b""), content_type=b"text/html"),
        "timeout": HTTP2_START + grpc_call(method, grpc_message(b""), grpc_timeout=b"99999999999999999999H"),
        "timeout-negative": HTTP2_START + grpc_call(method, grpc_message(b""), grpc_timeout=b"-1S"),
        "binary-header": HTTP2_START + grpc_call(method, grpc_message(b""), x_bin=b"\xff\xfe!!"),
        "header-with-nul": HTTP2_START + grpc_call(method, grpc_message(b""), x=b"a\0b\r\nc: d"),
        "unknown-frames": HTTP2_START + frame(99, b"?" * 1000, stream=3) * 10,
        "pings": HTTP2_START + frame(PING, bytes(8)) * 500,
    }


# Pickles.


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._file), "w")


class Canary:
    """A file that exists as soon as one of `payloads` was unpickled."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "canary"
        self.payloads = tuple(pickle.dumps(_Touch(self.file), protocol) for protocol in (0, 2, 5))

    def check(self) -> None:
        assert not self.file.exists(), "a pickle from the network was loaded"

    def check_payloads(self) -> None:
        """Check that loading a payload creates the file."""
        for payload in self.payloads:
            pickle.loads(payload).close()
            assert self.file.exists()
            self.file.unlink()
