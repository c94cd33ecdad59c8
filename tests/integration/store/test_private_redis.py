"""The private Redis server that `baton up` starts."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from baton.core.errors import ConfigError, StoreUnavailable
from baton.store.redis.private_redis import PrivateRedis, find_server, redis_command
from baton.store.redis.redis_connection import RedisConnection

pytestmark = pytest.mark.integration


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return a short path: those of pytest are too long for a Unix socket."""
    with TemporaryDirectory(prefix="bt-redis-", dir="/tmp") as directory:
        yield Path(directory) / "redis"


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
async def test_server_answers_until_stopped_and_leaves_no_data_files(directory: Path, host: str | None) -> None:
    redis = await PrivateRedis.start(redis_command(directory, host=host))
    connection = RedisConnection(redis.url, timeout_s=30.0)
    await connection.ping()
    await redis.stop()
    await redis.stop()
    assert not redis.is_alive
    with pytest.raises(StoreUnavailable):
        await connection.ping()
    await connection.aclose()
    assert set(os.listdir(directory)) - {"redis.conf", "redis.log", "redis.sock"} == set()


async def test_server_has_no_tcp_port_and_private_files(directory: Path) -> None:
    redis = await PrivateRedis.start(redis_command(directory))
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(directory / "redis.conf").st_mode) == 0o600
    assert [c for c in psutil.Process(redis.pid).net_connections() if c.family in (2, 10)] == []
    await redis.stop()


async def test_server_over_tcp_requires_the_password(directory: Path) -> None:
    command = redis_command(directory, host="127.0.0.1")
    redis = await PrivateRedis.start(command)
    port = redis.url.rsplit(":", 1)[1].split("/")[0]
    assert await command.wait_until_ready() == f"127.0.0.1:{port}", "the logged address has no password"
    without_password = RedisConnection(f"redis://127.0.0.1:{port}/0", timeout_s=30.0)
    with pytest.raises(StoreUnavailable, match="uthentication"):
        await without_password.ping()
    assert redis.url.split("@")[0].removeprefix("redis://:") not in " ".join(psutil.Process(redis.pid).cmdline())
    await without_password.aclose()
    await redis.stop()


async def test_command_starts_again_after_a_kill(directory: Path) -> None:
    command = redis_command(directory)
    for _ in range(2):
        redis = await PrivateRedis.start(command)
        assert redis.is_alive
        os.kill(redis.pid, signal.SIGKILL)
        await redis.stop()


async def test_error_of_a_server_that_exits_at_start_contains_its_output(directory: Path) -> None:
    command = redis_command(directory)
    (directory / "redis.conf").write_text("no-such-setting yes\n")
    with pytest.raises(StoreUnavailable, match="no-such-setting"):
        await PrivateRedis.start(command)


async def test_server_that_does_not_answer_at_start_is_an_error(directory: Path) -> None:
    command = redis_command(directory)
    command.argv[:] = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await PrivateRedis.start(command, timeout_s=0.3)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
def test_server_exits_when_its_parent_process_is_killed(directory: Path) -> None:
    code = (
        "import asyncio, pathlib, sys\n"
        "from baton.store.redis.private_redis import PrivateRedis, redis_command\n"
        "async def main():\n"
        "    redis = await PrivateRedis.start(redis_command(pathlib.Path(sys.argv[1])))\n"
        "    print(redis.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert server.wait(timeout=60) is None or not server.is_running()


def test_error_without_an_installed_server_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--redis-url.*valkey-server.*baton-serve\[embedded\]"):
        find_server({"PATH": str(tmp_path)}, packaged=lambda: None)


def test_server_on_the_path_has_precedence(tmp_path: Path) -> None:
    on_path = tmp_path / "redis-server"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    assert find_server({"PATH": str(tmp_path)}) == on_path


def test_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        redis_command(tmp_path / ("x" * 100))
