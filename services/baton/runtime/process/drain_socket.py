"""Unix socket through which a local tool asks a process to drain and waits for its end.

File permissions control access, so no port and no API key is needed. Protocol: the client sends the line
`drain`, the process answers with its name and keeps the connection open until it has ended.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.core.errors import BatonError, ConfigError

ANSWER_S = 5.0
MAX_NAME_BYTES = 1024
_REQUEST = b"drain\n"


class DrainSocket:
    """Server side of the drain socket. Calls `drain` on the event loop once per request."""

    def __init__(self, path: Path, name: str, drain: Callable[[], None]) -> None:
        self._path = path
        self._name = name
        self._drain = drain
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen. Raises ConfigError if the file cannot be created or another process listens there."""
        self._server = await asyncio.start_unix_server(self._handle, sock=_bind(self._path))

    async def stop(self) -> None:
        """Close all connections, which tells waiting clients that this process has ended.

        Call it last. Does nothing if the socket was never started.
        """
        if self._server is None:
            return
        self._server.close()
        for writer in tuple(self._open):
            writer.close()
        self._path.unlink(missing_ok=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(OSError, ValueError):  # the client is gone, or its line is too long
                if await reader.readline() == _REQUEST:
                    self._drain()
                    writer.write(f"{self._name}\n".encode())
                    await reader.read()
        finally:
            self._open.discard(writer)
            writer.close()


@contextmanager
def request_drain(path: Path, answer_s: float = ANSWER_S) -> Iterator[tuple[str, Callable[[float], bool]]]:
    """Ask the process that listens at `path` to drain.

    Yields its name and a function that waits up to the given seconds and returns True once the process has
    ended. Raises BatonError if no process listens there, or none answers within `answer_s`. A busy process
    may answer too late and drain nevertheless.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(answer_s)
        try:
            sock.connect(os.fspath(path))
        except OSError as error:
            raise BatonError(f"no worker listens at {path}: {error.strerror or error}") from error
        try:
            sock.sendall(_REQUEST)
            name = _read_line(sock)
        except OSError as error:
            raise BatonError(f"the worker at {path} does not answer: {error.strerror or error}") from error

        def has_ended(limit_s: float) -> bool:
            sock.settimeout(limit_s)
            try:
                return not sock.recv(1)
            except TimeoutError:
                return False
            except OSError:  # reset, because the other process is gone
                return True

        yield name, has_ended


def _read_line(sock: socket.socket) -> str:
    """Read one line. Raises OSError if the connection ends first or the line is too long."""
    received = b""
    while not received.endswith(b"\n"):
        more = sock.recv(MAX_NAME_BYTES)
        if not more or len(received) > MAX_NAME_BYTES:
            raise ConnectionError("the connection ended without an answer")
        received += more
    return received.decode(errors="replace").strip()


def _bind(path: Path) -> socket.socket:
    """Bind a socket at `path` that only its owner may open, replacing one left by a dead process."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _is_served(path):
            path.unlink()
        sock.bind(os.fspath(path))
        path.chmod(0o600)  # safe after bind: nothing can connect before listen
    except OSError as error:
        sock.close()
        raise ConfigError(f"drain_socket: cannot listen at {path}: {error.strerror or error}") from error
    return sock


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
    return True
