"""Runs `baton gateway`, and reports each callback of its event loop that takes too much CPU time.

python -m tests.integration.gateway.cost_fuzz.measured_gateway REPORT gateway --config FILE

The time is that of the loop's own thread, so it does not depend on what else the machine does. A callback is
one turn of a task, a timer, or the data that an HTTP connection received. Callbacks of `SHOWN_S` and more are
appended to the file REPORT, a line each: seconds, then what ran.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import Any

from baton.cli.main import main
from baton.gateway.http.http_protocol import GatewayProtocol
from baton.runtime.process import event_loop, process

SHOWN_S = 0.02


class SlowCallbacks:
    """Writes slow callbacks to a file."""

    def __init__(self, report: Path) -> None:
        self._file = report.open("a", buffering=1)

    def timed(self, callback: Callable[..., object]) -> Callable[..., object]:
        """Return a callback that does the same and measures it."""

        def run(*args: Any) -> object:
            began_s = time.thread_time()
            try:
                return callback(*args)
            finally:
                took_s = time.thread_time() - began_s
                if took_s >= SHOWN_S:
                    self._file.write(f"{took_s:.4f} {_described(callback)}\n")

        return run


def _described(callback: Any) -> str:
    """Return the name of a callback. For a task: the functions in which it waits now."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    names, at = [], task.get_coro()
    while at is not None and hasattr(at, "cr_frame"):
        line = f":{at.cr_frame.f_lineno}" if at.cr_frame else ""
        names.append(f"{at.__qualname__}{line}")
        at = at.cr_await
    return f"{task.get_name()} " + " > ".join(names)


def measured_loop(slow: SlowCallbacks) -> asyncio.AbstractEventLoop:
    """Return the loop that a service runs on, with measured callbacks."""
    original: Any = type(event_loop.new_event_loop())

    class MeasuredLoop(original):
        def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
            return super().call_soon(slow.timed(callback), *args, context=context)

        def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
            return super().call_soon_threadsafe(slow.timed(callback), *args, context=context)

        def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
            return super().call_at(when, slow.timed(callback), *args, context=context)

        def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
            return super().add_reader(fd, slow.timed(callback), *args)

    loop: asyncio.AbstractEventLoop = MeasuredLoop()
    return loop


def run_measured(report: Path, args: list[str]) -> None:
    """Run a command of `baton` with measured callbacks."""
    slow = SlowCallbacks(report)
    for name in ("data_received", "eof_received", "resume_writing", "connection_made", "connection_lost"):
        original: Any = getattr(GatewayProtocol, name)

        def method(self: Any, *given: Any, original: Any = original) -> object:
            return slow.timed(original)(self, *given)

        setattr(GatewayProtocol, name, method)
    process.new_event_loop = lambda: measured_loop(slow)
    main(args)


if __name__ == "__main__":
    run_measured(Path(sys.argv[1]), sys.argv[2:])
