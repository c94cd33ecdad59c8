"""Stops and ends the servers that a benchmark started, also if a signal ends the benchmark itself."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

STOP_S = 30.0
"""Time for a process to exit after the first signal; then it is killed."""


def exit_on_signals() -> None:
    """Let SIGTERM and SIGINT raise SystemExit, so that every `with` block that runs a server ends it.

    Later signals are ignored, because they would interrupt that. It takes at most `STOP_S` per process. A
    SIGINT that is ignored already, for example under nohup, stays ignored.
    """
    for number in _handled():
        signal.signal(number, _exit)


@contextmanager
def ended_after(
    process: subprocess.Popen[Any], number: signal.Signals = signal.SIGTERM, *, stop_s: float = STOP_S
) -> Iterator[None]:
    """Send `number` to the process when the block ends, and SIGKILL if it still runs after `stop_s`."""
    try:
        yield
    finally:
        process.send_signal(number)
        try:
            process.communicate(timeout=stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


class PausedTree:
    """A process and all that descend from it, in any process group. Stopped, they take no processor time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped: list[int] = []

    def stop(self) -> None:
        """Send SIGSTOP to all of them, parents first."""
        self._stopped = list(_tree(self._pid))
        _signal(self._stopped, signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT to those that were stopped, also if their parent has ended."""
        _signal(self._stopped, signal.SIGCONT)


def children(pid: int) -> set[int]:
    """Return the ids of a process's children; none if it has ended."""
    found: set[int] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.update(int(child) for child in (task / "children").read_text().split())
    return found


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from _tree(child)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _handled() -> list[signal.Signals]:
    return [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]


def _exit(number: int, _frame: FrameType | None) -> None:
    for each in _handled():
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)
