"""Starts the processes of the gateway benchmarks on chosen cores and measures their CPU time. Linux only."""

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.systems.child_processes import ended_after

ROOT = Path(__file__).resolve().parents[2]

READY = "ready "
START_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """CPU cores of the gateway under test, and of the clients and stubs (`others`)."""

    gateway: set[int]
    others: set[int]

    @staticmethod
    def split() -> "Cores":
        """Give the last core to the gateway, because the first one handles most system work."""
        *others, last = sorted(os.sched_getaffinity(0))
        return Cores(gateway={last}, others=set(others) or {last})


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A running gateway and the stub behind it. `stamps` is the file of `gateway_load.Stamps`."""

    name: str
    url: str
    model: str
    pid: int
    stub_pid: int
    stamps: Path

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the gateway."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@contextmanager
def started(command: Sequence[str], cores: set[int]) -> Iterator[tuple[int, str]]:
    """Run a process on these cores for the duration of the block.

    Yield (process id, text it printed after `ready `).
    """
    process = subprocess.Popen([*_on(cores), *command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with ended_after(process):
        assert process.stdout is not None
        for _ in range(START_LINES):
            line = process.stdout.readline()
            if line.startswith(READY):
                break
        else:
            raise SystemExit(f"the process printed no `ready` line: {' '.join(command)}")
        yield process.pid, line.removeprefix(READY).strip()


@contextmanager
def logged(command: Sequence[str], cores: set[int], log: Path, **env: str) -> Iterator[int]:
    """Run a process that prints no `ready` line. Yield its process id; its output goes to `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen([*_on(cores), *command], stdout=out, stderr=out, env=os.environ | env)
        with ended_after(process):
            yield process.pid


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, ended threads included. The resolution is 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _on(cores: set[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, sorted(cores)))]
