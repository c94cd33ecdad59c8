"""What a process is to the operating system: its signals, its parent, its event loop and its threads."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from baton.runtime.process.event_loop import new_event_loop

LAG_INTERVAL_S = 0.25


class Stop:
    """Asked once, a process drains: it takes no new work and finishes what runs. Asked twice, it stops now.

    `drain` and `now` are events of the loop that made them. Call `request` from that loop.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        """The first call sets `drain`, the second `now`."""
        if self.drain.is_set():
            self.now.set()
        self.drain.set()

    def request_now(self) -> None:
        """Set both."""
        self.drain.set()
        self.now.set()


Main = Callable[[Stop], Coroutine[Any, Any, None]]
"""A service's main: returns when it has drained; is cancelled when it must stop now."""


def run(main: Main) -> int:
    """Run `main` in the main thread until it returns; SIGTERM and SIGINT are requests to stop.

    Returns the process's exit code: 0 when `main` returned, 128 + the signal's number when a second signal
    cut it off. What `main` raises, this raises.
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
    """A service was cut off by a second request to stop, before it had drained."""


async def until_stopped(main: Main, stop: Stop) -> None:
    """Await `main(stop)`; when `stop.now` is set first, cancel it, let it clean up, and raise StoppedNow."""
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
    """Await `work`, or cancel it and let it clean up when a stop is asked for."""
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


def give_way() -> None:
    """From now on this thread, and all threads and processes that it starts, wait for a core until it is
    offered, as `engine/model/native/team.h` does all the time, or until the system takes it away: they stop
    no thread that computes in the middle of what others wait for. Where somebody has chosen how this process
    is scheduled, it stays so."""
    _change_policy("SCHED_OTHER", "SCHED_BATCH")


def compute_first() -> None:
    """The opposite, for a thread whose process gives way."""
    _change_policy("SCHED_BATCH", "SCHED_OTHER")


def _change_policy(before: str, after: str) -> None:
    """Of this thread. A system that has no such policies, or a sandbox that forbids them, costs some speed
    and nothing else."""
    with contextlib.suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == getattr(os, before):
            os.sched_setscheduler(0, getattr(os, after), os.sched_param(0))


class ServiceThread:
    """A service in a thread with a loop of its own and no signal handlers, as it lives in a Ray actor. Any
    thread may call its methods."""

    def __init__(self, main: Main, *, name: str) -> None:
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Stop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread; returns once its loop runs."""
        self._thread.start()
        self._started.wait()

    def request_stop(self) -> None:
        """Ask the service to drain; a second call cuts it off."""
        self._call(lambda stop: stop.request())

    def request_stop_now(self) -> None:
        self._call(lambda stop: stop.request_now())

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the service has ended; whether it has. What it raised is in `error`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _call(self, action: Callable[[Stop], None]) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the service has ended already
                self._loop.call_soon_threadsafe(action, self._stop)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._supervised())
        except BaseException as error:  # kept for the owner of the thread, to whom it cannot be raised
            self.error = error
        finally:
            self._started.set()

    async def _supervised(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), Stop()
        self._started.set()
        await until_stopped(self._main, self._stop)


class Background:
    """Tasks that live as long as a scope: `async with Background(reap(), report()): ...`.

    Leaving the scope cancels them and waits for them. A task that fails cancels the scope's body; both errors
    leave as TaskGroup's ExceptionGroup does. A task that just returns is no failure.
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


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """What there is now lives for longer than this. Without it, garbage collections look not only at what
    requests have made but at every module and class again: a seventh of a gateway's time for a request, and
    0.2 s, rarely, in which a worker with torch stands still. It is of the whole process: the first of several
    to end ends it for all."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """A `settled_heap` for a service that answers in fractions of a millisecond and makes few cycles: what is
    new is looked through less often, too. By default that is each 700 objects that outlive others, with a
    longer look each tenth time."""
    before = gc.get_threshold()
    with settled_heap():
        gc.set_threshold(20_000, 20, 50)
        try:
            yield
        finally:
            gc.set_threshold(*before)


def report_to_nobody() -> None:
    """Turn off what libraries would report of their use, here and in every process that this one starts. Call
    it before their import."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}


def age_s() -> float:
    """Seconds since this process began, the start of its interpreter included."""
    stat = Path("/proc/self/stat")
    if sys.platform == "linux" and stat.exists():
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # field 22, `starttime`, since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    import psutil

    return time.time() - psutil.Process().create_time()


async def watch_loop_lag(observe: Callable[[float], None], interval_s: float = LAG_INTERVAL_S) -> None:
    """Tell `observe`, for ever, by how many seconds the loop was late for a timer of `interval_s`."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due_s))


_TETHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def tethered(argv: Sequence[str]) -> list[str]:
    """The command line of a program that is to die (on Linux) with the thread that starts it.

    A little Python asks the kernel for that, and becomes the program. Other than a `preexec_fn` it needs no
    fork of a process with threads.
    """
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *argv]
