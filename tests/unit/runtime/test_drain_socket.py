"""Drain requests over a Unix socket, which also reports the end of the process."""

import asyncio
import socket
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from baton.core.errors import BatonError, ConfigError
from baton.runtime.process.drain_socket import DrainSocket, request_drain


class DrainRecorder:
    """Counts its calls. `twice` is set at the second one."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.twice = asyncio.Event()

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls == 2:
            self.twice.set()


def request_and_wait(path: Path, limit_s: float) -> tuple[str, bool]:
    with request_drain(path, answer_s=60.0) as (name, has_ended):
        return name, has_ended(limit_s)


async def test_drain_request_returns_the_worker_id_and_waits_for_its_end(tmp_path: Path) -> None:
    path, drain = tmp_path / "drain.sock", DrainRecorder()
    drain_socket = DrainSocket(path, "w0", drain)
    await drain_socket.start()
    assert await asyncio.to_thread(request_and_wait, path, 0.05) == ("w0", False)
    waiting = asyncio.create_task(asyncio.to_thread(request_and_wait, path, 30.0))
    async with asyncio.timeout(60):
        await drain.twice.wait()
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await drain_socket.stop()
    assert await waiting == ("w0", True)
    assert not path.exists()
    with pytest.raises(BatonError, match=r"no worker listens at .*drain\.sock: No such file"):
        await asyncio.to_thread(request_and_wait, path, 1.0)


async def test_socket_is_accessible_to_its_owner_only(tmp_path: Path) -> None:
    drain_socket = DrainSocket(tmp_path / "drain.sock", "w0", DrainRecorder())
    await drain_socket.start()
    assert stat.S_IMODE((tmp_path / "drain.sock").stat().st_mode) == 0o600
    await drain_socket.stop()


async def test_stale_socket_is_replaced_and_a_used_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "drain.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    drain_socket = DrainSocket(path, "w0", DrainRecorder())
    await drain_socket.start()
    with pytest.raises(ConfigError, match=r"drain_socket: cannot listen at .*: Address already in use"):
        await DrainSocket(path, "w1", DrainRecorder()).start()
    assert await asyncio.to_thread(request_and_wait, path, 0.01) == ("w0", False)
    await drain_socket.stop()


@pytest.mark.parametrize("where", ["missing/drain.sock", "d" * 200])
async def test_invalid_socket_path_is_an_error(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="drain_socket: cannot listen at "):
        await DrainSocket(tmp_path / where, "w0", DrainRecorder()).start()


async def test_file_that_is_not_a_socket_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("unchanged")
    with pytest.raises(ConfigError):
        await DrainSocket(tmp_path / "file", "w0", DrainRecorder()).start()
    assert (tmp_path / "file").read_text() == "unchanged"


@pytest.mark.parametrize("data", [b"", b"stop\n", b"x" * 100_000, b"drain"])
async def test_invalid_request_does_not_drain(tmp_path: Path, data: bytes) -> None:
    drain = DrainRecorder()
    drain_socket = DrainSocket(tmp_path / "drain.sock", "w0", drain)
    await drain_socket.start()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "drain.sock")
    writer.write(data)
    writer.write_eof()
    with suppress(ConnectionError):  # the socket was closed with unread, or before all, bytes
        assert await reader.read() == b""
    writer.close()
    await drain_socket.stop()
    assert drain.num_calls == 0
