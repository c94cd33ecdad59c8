"""Processes of `gateway.py`: started on chosen cores, waited for, and asked how much of a core they took.
Linux only."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]

READY = "ready "
START_LINES = 200
STOP_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """`gateway`: whatever is under test, alone. `others`: clients and stubs."""

    gateway: set[int]
    others: set[int]

    @staticmethod
    def split() -> "Cores":
        """The last core for the gateway: the first one has the most of the machine's own work."""
        *others, last = sorted(os.sched_getaffinity(0))
        return Cores(gateway={last}, others=set(others) or {last})


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One gateway that runs, with the stub behind it."""

    name: str
    url: str
    model: str
    pid: int
    stub_pid: int
    stamps: Path

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@contextmanager
def started(command: Sequence[str], cores: set[int]) -> Iterator[tuple[int, str]]:
    """(process id, what it printed after `ready `) of a process on these cores, which ends with the block."""
    process = subprocess.Popen([*_on(cores), *command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with _ended(process):
        assert process.stdout is not None
        for _ in range(START_LINES):
            line = process.stdout.readline()
            if line.startswith(READY):
                break
        else:
            raise SystemExit(f"did not start: {' '.join(command)}")
        yield process.pid, line.removeprefix(READY).strip()


@contextmanager
def logged(command: Sequence[str], cores: set[int], log: Path, **env: str) -> Iterator[int]:
    """The process id of one that says nothing when it is ready; all its words go to `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen([*_on(cores), *command], stdout=out, stderr=out, env=os.environ | env)
        with _ended(process):
            yield process.pid


def free_port() -> int:
    """One that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_s(pid: int) -> float:
    """CPU time that all threads of a process have taken, those that have ended, too; in hundredths."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _on(cores: set[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, sorted(cores)))]


@contextmanager
def _ended(process: "subprocess.Popen[Any]") -> Iterator[None]:
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
