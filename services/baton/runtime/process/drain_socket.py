"""A socket in the file system at which a process is asked to drain, and seen to go: who may open the file
needs no port and no key.

One line each way: `drain`, and the name of who drains. Then the connection stands until that one has ended,
however it ends.
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
_ASK = b"drain\n"


class DrainSocket:
    """The process's side. `drain` is called on the event loop, once for each that asks."""

    def __init__(self, path: Path, name: str, drain: Callable[[], None]) -> None:
        self._path = path
        self._name = name
        self._drain = drain
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Raises ConfigError where the file cannot be made, or another process listens there."""
        self._server = await asyncio.start_unix_server(self._asked, sock=_bound(self._path))

    async def stop(self) -> None:
        """Everything else has ended: whoever waits may go. Safe to call when it was never started."""
        if self._server is None:
            return
        self._server.close()
        for writer in tuple(self._open):
            writer.close()
        self._path.unlink(missing_ok=True)

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(OSError, ValueError):  # who asks has gone, or says something endless
                if await reader.readline() == _ASK:
                    self._drain()
                    writer.write(f"{self._name}\n".encode())
                    await reader.read()
        finally:
            self._open.discard(writer)
            writer.close()


@contextmanager
def asked_to_drain(path: Path, answer_s: float = ANSWER_S) -> Iterator[tuple[str, Callable[[float], bool]]]:
    """Who was asked, and a function that waits so many seconds at most for it to end and says whether it has.
    Raises BatonError where nobody listens there, or nobody answers within `answer_s`: who is busy does so
    late, and drains all the same."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(answer_s)
        try:
            sock.connect(os.fspath(path))
        except OSError as error:
            raise BatonError(f"no worker listens at {path}: {error.strerror or error}") from error
        try:
            sock.sendall(_ASK)
            name = _line(sock)
        except OSError as error:
            raise BatonError(f"the worker at {path} does not answer: {error.strerror or error}") from error

        def has_ended(limit_s: float) -> bool:
            sock.settimeout(limit_s)
            try:
                return not sock.recv(1)
            except TimeoutError:
                return False
            except OSError:  # it was reset: the other side is gone
                return True

        yield name, has_ended


def _line(sock: socket.socket) -> str:
    """Raises OSError where none comes."""
    said = b""
    while not said.endswith(b"\n"):
        more = sock.recv(MAX_NAME_BYTES)
        if not more or len(said) > MAX_NAME_BYTES:
            raise ConnectionError("it does not answer")
        said += more
    return said.decode(errors="replace").strip()


def _bound(path: Path) -> socket.socket:
    """A socket at that path, which its owner alone may open, in place of one that a process has left
    behind."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()
        sock.bind(os.fspath(path))
        path.chmod(0o600)  # nobody can connect yet: it does not listen
    except OSError as error:
        sock.close()
        raise ConfigError(f"drain_socket: cannot listen at {path}: {error.strerror or error}") from error
    return sock


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
    return True
