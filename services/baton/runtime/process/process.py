"""Runs a service as an operating-system process: signals, event loop, threads, parent."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self

from baton.runtime.process.event_loop import new_event_loop


class Stop:
    """Stop request of a process: the first request drains it, the second stops it immediately.

    drain: event that is set when the process must take no new work and finish what runs.
    now: event that is set when the process must stop without finishing.

    Both events belong to the running loop; call the methods from that loop.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        """Set `drain` on the first call and `now` on the second."""
        if self.drain.is_set():
            self.now.set()
        self.drain.set()

    def request_now(self) -> None:
        """Set both events."""
        self.drain.set()
        self.now.set()


def python_module(name: str) -> tuple[str, ...]:
    """Return the command that runs a module in a new interpreter. The current directory is not searched.

    Otherwise a `click.py` there, which may be another user's, would be run instead of the library.
    """
    return sys.executable, "-P", "-m", name


Main = Callable[[Stop], Coroutine[Any, Any, None]]
"""Main coroutine of a service: returns after draining, and is cancelled if it must stop immediately."""


def run(main: Main) -> int:
    """Run `main` in the main thread until it returns; SIGTERM and SIGINT request a stop.

    Returns the exit code: 0 if `main` returned, 128 + signal number if a second signal stopped it. Exceptions
    of `main` propagate.
    """
    last_signal = 0

    async def supervised() -> None:
        nonlocal last_signal
        stop = Stop()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            nonlocal last_signal
            last_signal = number
            stop.request()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        try:
            await until_stopped(main, stop)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(supervised())
        except StoppedNow:
            return 128 + last_signal
    return 0


class StoppedNow(Exception):
    """Raised if a second stop request ended a service before it had drained."""


async def until_stopped(main: Main, stop: Stop) -> None:
    """Await `main(stop)`. If `stop.now` is set first, cancel it, await its cleanup and raise StoppedNow."""
    work = asyncio.create_task(main(stop))
    now = asyncio.create_task(stop.now.wait())
    try:
        await asyncio.wait((work, now), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            raise StoppedNow
        await work
    finally:
        now.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))


async def unless_stopped(stop: Stop, work: Awaitable[None]) -> None:
    """Await `work`, or cancel it and wait for its cleanup once a stop is requested."""
    task = asyncio.ensure_future(work)
    asked = asyncio.create_task(stop.drain.wait())
    try:
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, asked):
            each.cancel()
        await asyncio.gather(task, asked, return_exceptions=True)


def set_batch_scheduling() -> None:
    """Schedule this thread, and the threads and processes that it starts, with SCHED_BATCH.

    A batch thread that wakes up does not preempt a running thread. Other processes of the machine then do not
    interrupt a worker's compute threads, for which the rest of the thread team would have to wait. Does
    nothing if the policy is not the default one.
    """
    _change_policy("SCHED_OTHER", "SCHED_BATCH")


def set_default_scheduling() -> None:
    """Undo `set_batch_scheduling` for this thread, such as a compute thread."""
    _change_policy("SCHED_BATCH", "SCHED_OTHER")


def _change_policy(before: str, after: str) -> None:
    """Change this thread's scheduling policy from `before` to `after`.

    Does nothing if the system lacks these policies or forbids the change: that costs only some speed.
    """
    with contextlib.suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == getattr(os, before):
            os.sched_setscheduler(0, getattr(os, after), os.sched_param(0))


class ServiceThread:
    """Runs a service in a thread with its own event loop and without signal handlers, as in a Ray actor.

    All methods are thread-safe.
    """

    def __init__(self, main: Main, *, name: str) -> None:
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Stop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread and return once its loop runs."""
        self._thread.start()
        self._started.wait()

    def request_stop(self) -> None:
        """Ask the service to drain; a second call stops it immediately."""
        self._call(lambda stop: stop.request())

    def request_stop_now(self) -> None:
        """Stop the service immediately."""
        self._call(lambda stop: stop.request_now())

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` and return True if the service has ended. Its exception is in `error`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _call(self, action: Callable[[Stop], None]) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed because the service has ended
                self._loop.call_soon_threadsafe(action, self._stop)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._supervised())
        except BaseException as error:  # stored, because it cannot be raised in the owner's thread
            self.error = error
        finally:
            self._started.set()

    async def _supervised(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), Stop()
        self._started.set()
        await until_stopped(self._main, self._stop)


class Background:
    """Runs tasks for the duration of a scope: `async with Background(reap(), report()): ...`.

    Leaving the scope cancels the tasks and waits for them. A task that fails cancels the body of the scope,
    and the scope raises an ExceptionGroup as TaskGroup does. A task may return early.
    """

    def __init__(self, *work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(work) for work in self._work]
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(*error)


def disable_usage_reports() -> None:
    """Disable usage statistics of libraries here and in child processes. Call it before importing them."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}


def process_age_s() -> float:
    """Return the seconds since this process started, including the start of the interpreter."""
    stat = Path("/proc/self/stat")
    if sys.platform == "linux" and stat.exists():
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # field 22, `starttime`, since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    import psutil

    return time.time() - psutil.Process().create_time()


_EXEC_WITH_DEATH_SIGNAL = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def with_parent_death_signal(argv: Sequence[str]) -> list[str]:
    """Return a command line that runs `argv` and, on Linux, kills it when the thread that starts it ends.

    A small Python program requests the death signal from the kernel and then executes `argv`. Unlike a
    `preexec_fn`, this does not run Python code in a fork of a process with threads.
    """
    return [sys.executable, "-I", "-S", "-c", _EXEC_WITH_DEATH_SIGNAL, str(os.getpid()), *argv]
