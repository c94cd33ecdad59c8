"""Ends the servers that a benchmark started, also if a signal ends the benchmark itself."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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


def _handled() -> list[signal.Signals]:
    return [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]


def _exit(number: int, _frame: FrameType | None) -> None:
    for each in _handled():
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)
