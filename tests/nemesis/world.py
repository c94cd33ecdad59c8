"""What faults act on: the cluster, its network and clocks, and a record of which process was down when."""

import asyncio
import ctypes
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tests.cluster import ProcessCluster
from tests.nemesis.effect import NoEffect, until_true
from tests.nemesis.history import Interval
from tests.nemesis.links import CuttableNetwork
from tests.nemesis.plan import SERVICES

PRELOADED = Path(__file__).with_name("preloaded.c")
CLOCK = struct.Struct("qq")
"""Content of a clock file: the step in nanoseconds, and the number of readings with a step."""
READ_DELAY = struct.Struct("q")
"""What follows in that file: the delay of `preadv` in nanoseconds."""
LOG_DISK_BYTES = 128 * 2**20
"""Size of the file system for the logs of one process: more than its rotated logs need."""
REDIS_S = 60.0
"""Timeout of calls to Redis. Generous, because a test machine may be busy."""


@dataclass(slots=True)
class Times:
    """Times in which processes were down or paused, as they were observed.

    A process that is down has an entry in `open_down` until it is ready again.
    """

    down: list[Interval] = field(default_factory=list)
    paused: list[Interval] = field(default_factory=list)
    open_down: dict[str, float] = field(default_factory=dict)


class World:
    """A running cluster and the means to disturb it. Faults undo what they did; the world only keeps
    records."""

    def __init__(self, cluster: ProcessCluster, network: CuttableNetwork, tools: "HostTools") -> None:
        self.cluster = cluster
        self.network = network
        self.tools = tools
        self.times = Times()
        self.addresses: set[str] = set()
        """Addresses of all incarnations of all workers and schedulers, which no client may see."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def note_addresses(self) -> None:
        """Add the present addresses of workers and schedulers."""
        children = self.cluster.children.items()
        self.addresses |= {c.address for name, c in children if not name.startswith(("gateway", "redis")) if c.address}

    async def kill(self, name: str) -> None:
        """End a process with SIGKILL. Raises NoEffect if something else has ended it."""
        child = self.cluster.children[name]
        self.times.open_down[name] = self.now_s()
        await self.cluster.kill(name)
        if child.exit_code != -signal.SIGKILL:
            raise NoEffect(f"{name} ended with exit code {child.exit_code}, not by SIGKILL")

    async def restart(self, name: str) -> None:
        """Start a killed process again, and wait until it is ready."""
        await self.cluster.start_again(name)
        self.note_addresses()
        self.times.down.append(Interval(name=name, begin_s=self.times.open_down.pop(name), end_s=self.now_s()))

    @asynccontextmanager
    async def paused(self, name: str) -> AsyncIterator[None]:
        """Stop a process with SIGSTOP for the duration of the scope.

        Raises NoEffect if it does not stand still.
        """
        begin_s = self.now_s()
        self.cluster.signal(name, signal.SIGSTOP)
        try:
            await until_true(lambda: self._is_stopped(name), f"{name} is stopped")
            yield
            if not await self._is_stopped(name):
                raise NoEffect(f"{name} ran again before its pause was over")
        finally:
            self.cluster.children[name].resume()
            self.times.paused.append(Interval(name=name, begin_s=begin_s, end_s=self.now_s()))

    async def _is_stopped(self, name: str) -> bool:
        return bool(psutil.Process(self.cluster.pid(name)).status() == psutil.STATUS_STOPPED)

    @asynccontextmanager
    async def redis(self) -> AsyncIterator[redis.asyncio.Redis]:
        """Connect to the cluster's Redis."""
        url = self.cluster.settings["redis_url"]
        client = redis.asyncio.Redis.from_url(url, socket_timeout=REDIS_S, retry=Retry(NoBackoff(), 0))
        try:
            yield client
        finally:
            await client.aclose()


class HostTools:
    """What faults need of the machine: stepped clocks, and small file systems for logs.

    It needs a C compiler. Without root, a full disk is replaced by a limit of the size of files.
    """

    def __init__(self, directory: Path, names: Sequence[str] = SERVICES) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self.environs = self._preload(names)
        """Environment variables by process."""
        self.logs_are_mounted = self._mount_logs(names)

    def step_clock(self, name: str, step_s: float) -> None:
        """Set the difference of a process's wall clock from the machine's, and count from zero again."""
        with self._clock_file(name).open("r+b") as file:
            file.write(CLOCK.pack(round(step_s * 1e9), 0))

    def num_stepped_reads(self, name: str) -> int:
        """Return how often a process has read a wall clock with a step since `step_clock`."""
        return int(CLOCK.unpack_from(self._clock_file(name).read_bytes())[1])

    def delay_reads(self, name: str, delay_s: float) -> None:
        """Delay each `preadv` of a process, which is how it reads its file of KV."""
        with self._clock_file(name).open("r+b") as file:
            file.seek(CLOCK.size)
            file.write(READ_DELAY.pack(round(delay_s * 1e9)))

    def log_dir(self, name: str) -> Path:
        """Return the directory of a process's logs."""
        return self._directory / "logs" / name

    def close(self) -> None:
        """Unmount the file systems. Their logs are kept next to them, in `kept-logs`."""
        if self.logs_are_mounted:
            with suppress(OSError, shutil.Error):
                shutil.copytree(self._directory / "logs", self._directory / "kept-logs", dirs_exist_ok=True)
        self._stack.close()

    def _clock_file(self, name: str) -> Path:
        return self._directory / f"{name}.clock"

    def _preload(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Compile `preloaded.c`. Return the environment variables that load it, by process."""
        library = self._directory / "preloaded.so"
        command = [compiler(), "-shared", "-fPIC", "-O1", "-o", str(library), str(PRELOADED), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        for name in names:
            self._clock_file(name).write_bytes(bytes(CLOCK.size + READ_DELAY.size))
        return {name: {"LD_PRELOAD": str(library), "CLOCK_STEP_FILE": str(self._clock_file(name))} for name in names}

    def _mount_logs(self, names: Sequence[str]) -> bool:
        if os.geteuid() != 0 or shutil.which("mount") is None:
            return False
        for name in names:
            directory = self.log_dir(name)
            directory.mkdir(parents=True)
            mount = ["mount", "-t", "tmpfs", "-o", f"size={LOG_DISK_BYTES}", "tmpfs", str(directory)]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                self._stack.close()
                return False
            self._stack.callback(_unmount, directory)
        return True


def compiler() -> str:
    """Return the C compiler, an empty string if there is none."""
    return shutil.which("cc") or shutil.which("gcc") or ""


def host_unavailable_reason() -> str:
    """Return why no run is possible on this machine, or an empty string."""
    return "" if sys.platform == "linux" and compiler() else "needs Linux and a C compiler"


def _unmount(directory: Path) -> None:
    """Detach a file system, also while a file of it is open."""
    detach = 2
    ctypes.CDLL(None).umount2(os.fsencode(directory), detach)
