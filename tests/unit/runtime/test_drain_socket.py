"""A process is asked to drain by whoever may open a file, who also sees its end."""

import asyncio
import socket
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from baton.core.errors import BatonError, ConfigError
from baton.runtime.process.drain_socket import DrainSocket, request_drain


class Asked:
    def __init__(self) -> None:
        self.times = 0
        self.twice = asyncio.Event()

    def __call__(self) -> None:
        self.times += 1
        if self.times == 2:
            self.twice.set()


def ask(path: Path, limit_s: float) -> tuple[str, bool]:
    with request_drain(path) as (name, has_ended):
        return name, has_ended(limit_s)


async def test_who_asks_hears_who_drains_and_when_it_has_ended(tmp_path: Path) -> None:
    path, drain = tmp_path / "drain.sock", Asked()
    drains = DrainSocket(path, "w0", drain)
    await drains.start()
    assert await asyncio.to_thread(ask, path, 0.05) == ("w0", False)
    waiting = asyncio.create_task(asyncio.to_thread(ask, path, 30.0))
    async with asyncio.timeout(10):
        await drain.twice.wait()
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await drains.stop()
    assert await waiting == ("w0", True)
    assert not path.exists()
    with pytest.raises(BatonError, match=r"no worker listens at .*drain\.sock: No such file"):
        await asyncio.to_thread(ask, path, 1.0)


async def test_only_its_own_user_may_open_it(tmp_path: Path) -> None:
    drains = DrainSocket(tmp_path / "drain.sock", "w0", Asked())
    await drains.start()
    assert stat.S_IMODE((tmp_path / "drain.sock").stat().st_mode) == 0o600
    await drains.stop()


async def test_what_a_killed_process_left_behind_is_replaced_and_what_lives_is_not(tmp_path: Path) -> None:
    path = tmp_path / "drain.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    drains = DrainSocket(path, "w0", Asked())
    await drains.start()
    with pytest.raises(ConfigError, match=r"drain_socket: cannot listen at .*: Address already in use"):
        await DrainSocket(path, "w1", Asked()).start()
    assert await asyncio.to_thread(ask, path, 0.01) == ("w0", False)
    await drains.stop()


@pytest.mark.parametrize("where", ["missing/drain.sock", "d" * 200])
async def test_a_place_that_is_none_is_named(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="drain_socket: cannot listen at "):
        await DrainSocket(tmp_path / where, "w0", Asked()).start()


async def test_file_that_is_not_a_socket_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError):
        await DrainSocket(tmp_path / "file", "w0", Asked()).start()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("said", [b"", b"stop\n", b"x" * 100_000, b"drain"])
async def test_what_is_no_question_drains_nothing(tmp_path: Path, said: bytes) -> None:
    drain = Asked()
    drains = DrainSocket(tmp_path / "drain.sock", "w0", drain)
    await drains.start()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "drain.sock")
    writer.write(said)
    writer.write_eof()
    with suppress(ConnectionResetError):  # it has not read all of it
        assert await reader.read() == b""
    writer.close()
    await drains.stop()
    assert drain.times == 0
