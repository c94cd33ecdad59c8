"""What a `baton up` has on the machine while it runs, and what of it is still there afterwards."""

import os
import socket
import time
from pathlib import Path

import psutil

from baton.fleet.processes.run_dir import marked

GONE_S = 10.0
SHM = Path("/dev/shm")


class Leftovers:
    """Looked at once, while `baton up` runs below the process `pid`; `assert_gone` then looks for the same
    things."""

    def __init__(self, pid: int, shared_memory_before: set[str]) -> None:
        """`shared_memory_before`: what `shared_memory()` said before the start."""
        self._reaper, self.run_id, self.directory = _reaper_below(pid)
        self._before = shared_memory_before
        below = {*psutil.Process(self._reaper.ppid()).children(recursive=True)} - {self._reaper}
        self.processes = below | {*marked(self.run_id)}
        unmarked = [
            _words(process) for process in below - {*marked(self.run_id)} if _lives(process) and not _is_redis(process)
        ]
        assert not unmarked, f"the reaper would not find {unmarked}"
        self._ports = {
            port for process in [psutil.Process(self._reaper.ppid()), *self.processes] for port in _listens_at(process)
        }
        assert self.directory.is_dir()

    def assert_gone(self, within_s: float = 1.0) -> None:
        """`within_s`: what ended by itself has ended all of it before; `GONE_S` for one that was killed."""
        end_s = time.monotonic() + within_s
        while left := self._left():
            assert time.monotonic() < end_s, f"left behind: {left}"
            time.sleep(0.1)

    def _left(self) -> list[str]:
        left = [
            f"process {_words(process)}"
            for process in {*marked(self.run_id), *self.processes, self._reaper}
            if _lives(process)
        ]
        left += [str(self.directory)] if self.directory.exists() else []
        left += [f"port {port}" for port in sorted(self._ports) if not left and _answers(port)]
        return left + [f"{SHM}/{name}" for name in sorted(shared_memory() - self._before - _mapped())]


def _listens_at(process: psutil.Process) -> set[int]:
    """No port, where it has just ended: some of Ray's processes live for a moment."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def shared_memory() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def _mapped() -> set[str]:
    """Names in use by whoever lives now: those of other clusters and tests."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        names |= {line.partition(f"{SHM}/")[2] for line in text.splitlines() if f"{SHM}/" in line}
    return names


def _reaper_below(pid: int) -> tuple[psutil.Process, str, Path]:
    """The process that was told the mark and the directory."""
    for child in psutil.Process(pid).children(recursive=True):
        command = _command(child)
        if "baton.fleet.processes.reaper" in command:
            return child, command[-2], Path(command[-1])
    raise AssertionError("no reaper beside baton up")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_redis(process: psutil.Process) -> bool:
    """It writes its title over its whole environment; the kernel ends it with `baton up`."""
    return "-server" in "".join(_command(process)[:1])


def _lives(process: psutil.Process) -> bool:
    """Not when it only waits to be collected by whoever inherited it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _words(process: psutil.Process) -> str:
    return " ".join([str(process.pid), *_command(process)])


def _command(process: psutil.Process) -> list[str]:
    """Nothing, where it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
