"""Records what a running `baton up` owns, and checks that it is gone after the end."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from baton.fleet.processes.run_dir import processes_of

GONE_S, KNOWN_S = 60.0, 10.0
SHM = Path("/dev/shm")
LISTEN = "0A"
"""State of a socket in /proc/net/tcp."""


class Leftovers:
    """Everything that the `baton up` below process `pid` owns at the time of construction."""

    def __init__(self, pid: int, shared_memory_before: set[str]) -> None:
        """`shared_memory_before`: the result of `shared_memory()` before the start."""
        self._reaper, self.run_id, self.directory = _reaper_below(pid)
        self._before = shared_memory_before
        below = {*psutil.Process(self._reaper.ppid()).children(recursive=True)} - {self._reaper}
        self.processes = below | {*processes_of(self.run_id)}
        # A process that has just been forked, or that is ending, shows no environment for a moment.
        _until_empty(lambda: self._unknown(below), KNOWN_S, "the reaper would not find")
        ports = {
            port for process in [psutil.Process(self._reaper.ppid()), *self.processes] for port in _listens_at(process)
        }
        self._sockets = {inode for inode, port in _listening().items() if port in ports}
        assert self.directory.is_dir()

    def _unknown(self, below: set[psutil.Process]) -> list[str]:
        return [
            _words(process)
            for process in below - {*processes_of(self.run_id)}
            if _is_running(process) and not _is_redis(process)
        ]

    def assert_gone(self, within_s: float = 10.0) -> None:
        """Fail unless everything is gone within `within_s`.

        Use `GONE_S` after a SIGKILL, when the reaper cleans up.
        """
        _until_empty(self._left, within_s)
        _until_empty(self._left_in_memory, GONE_S)

    def _left(self) -> list[str]:
        left = [
            f"process {_words(process)}"
            for process in {*processes_of(self.run_id), *self.processes, self._reaper}
            if _is_running(process)
        ]
        left += [str(self.directory)] if self.directory.exists() else []
        return left + [f"port {port}" for inode, port in _listening().items() if inode in self._sockets]

    def _left_in_memory(self) -> list[str]:
        """Return files that no process has mapped. Another test may be about to map one of its own."""
        return [f"{SHM}/{name}" for name in sorted(shared_memory() - self._before - _mapped())]


def _until_empty(left: Callable[[], list[str]], within_s: float, problem: str = "left behind:") -> None:
    """Fail if a look that began after `within_s` still finds something. A look may take long."""
    end_s = time.monotonic() + within_s
    while True:
        is_last = time.monotonic() >= end_s
        if not (found := left()):
            return
        assert not is_last, f"{problem} {found}"
        time.sleep(0.1)


def _listens_at(process: psutil.Process) -> set[int]:
    """Return the listening ports of a process, none if it has just ended, as some processes of Ray do."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def shared_memory() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def _mapped() -> set[str]:
    """Names in /dev/shm that any living process has mapped, such as those of other tests."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        names |= {line.partition(f"{SHM}/")[2] for line in text.splitlines() if f"{SHM}/" in line}
    return names


def _reaper_below(pid: int) -> tuple[psutil.Process, str, Path]:
    """Return the reaper process, its run id and its directory."""
    for child in psutil.Process(pid).children(recursive=True):
        command = _command(child)
        if "baton.fleet.processes.reaper" in command:
            return child, command[-2], Path(command[-1])
    raise AssertionError("baton up has no reaper")


def _listening() -> dict[int, int]:
    """Return the ports of all listening sockets by inode.

    A port alone says little: another process may listen there once it is free.
    """
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                found[int(fields[9])] = int(fields[1].rpartition(":")[2], 16)
    return found


def _is_redis(process: psutil.Process) -> bool:
    """Return True for Redis, whose process title overwrites its environment.

    The kernel ends it with `baton up`.
    """
    return "-server" in "".join(_command(process)[:1])


def _is_running(process: psutil.Process) -> bool:
    """Return False also for a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _words(process: psutil.Process) -> str:
    return " ".join([str(process.pid), *_command(process)])


def _command(process: psutil.Process) -> list[str]:
    """Return the command line, empty if the process has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
