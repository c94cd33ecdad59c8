"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it.

The tasks of one simulated process share the value of `PROCESS`. A process can have a clock of its own, and
can be paused: its callbacks and timers then stand still, as with SIGSTOP.
"""

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

PROCESS: ContextVar[str] = ContextVar("simulated process", default="")
"""Name of the simulated process that runs now. Tasks, timers and callbacks inherit it. Empty: none."""
TURN_S = 1e-9
"""Time of one turn of the loop, if processes have clocks of their own.

Their times are rounded, so a timer may fire slightly before its time. Code that then waits for the rest must
make progress.
"""
TIMER_RESOLUTION_S = 1e-9
"""Timers that are due within this time fire in the same turn."""
MIN_TIMERS_TO_CLEAN = 100
"""Cancelled timers are taken out of a longer queue once they are more than half of it."""


class Deadlock(Exception):
    """All tasks wait and no timer is left, so that no task can ever continue."""


@dataclass(frozen=True, slots=True)
class ProcessClock:
    """The clock of one process: `base_s + rate * t` at time `t` of the loop, in seconds."""

    base_s: float = 0.0
    rate: float = 1.0


@dataclass(slots=True)
class _HeldCallbacks:
    """Callbacks, in order, and timers that a paused process would have run."""

    ready: deque[asyncio.Handle] = field(default_factory=deque)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class _NoFiles(selectors.BaseSelector):
    """A selector that asyncio can register its own pipe with. No file is ever ready."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def close(self) -> None:
        self._keys.clear()


class _HandleWithoutDebug:
    """Constructor of asyncio's handles without their debug information, which takes less time."""

    if not TYPE_CHECKING:  # mypy does not see that the attributes have their place in asyncio's classes
        __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: "VirtualTimeLoop", context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop: Any = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Callback(_HandleWithoutDebug, asyncio.Handle):
    """A callback that takes less time to create."""

    __slots__ = ()


class _Timer(_HandleWithoutDebug, asyncio.TimerHandle):
    """A timer that takes less time to create, compare and cancel."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: "VirtualTimeLoop", context: Context | None) -> None:
        super().__init__(callback, args, loop, context)
        self._when = when
        self._scheduled = True

    def __lt__(self, other: Any) -> bool:
        is_earlier: bool = self._when < other._when
        return is_earlier

    def cancel(self) -> None:
        if not self._cancelled:
            self._loop._timer_handle_cancelled(self)
            self._cancelled = True
            self._callback, self._args = None, ()


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address, as in the set that a TaskGroup cancels."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: "VirtualTimeLoop", **options: Any) -> None:
        self._number = loop.next_task_number()  # first: the task is put into a set of all tasks
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock, which starts at 0 and advances only when no callback is ready.

    Threads, sockets and subprocesses cannot be used. It has no debug mode.
    """

    _ready: "deque[asyncio.Handle]"  # these are attributes of asyncio's BaseEventLoop
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool
    _closed: bool

    def __init__(self) -> None:
        self._now_s = 0.0
        self._turn_s = 0.0
        self._clocks: dict[str, ProcessClock] = {}
        self._paused: dict[str, _HeldCallbacks] = {}
        self._num_tasks = 0
        super().__init__(_NoFiles())
        self.set_task_factory(lambda loop, coro, **options: _Task(coro, loop=self, **options))

    def time(self) -> float:
        clock = self._clocks.get(PROCESS.get())
        return self._now_s if clock is None else clock.base_s + clock.rate * self._now_s

    @property
    def now_s(self) -> float:
        """Time of the simulation, in whatever process this is called."""
        return self._now_s

    def next_task_number(self) -> int:
        """Return the number of a new task."""
        self._num_tasks += 1
        return self._num_tasks

    def advance(self, by_s: float) -> None:
        """Move the clock forward."""
        self._now_s += by_s

    def call_at(  # type: ignore[override]  # the arguments are those of any callback
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        clock = self._clocks.get(PROCESS.get())
        if clock is not None:
            when = (when - clock.base_s) / clock.rate
        return self._add_timer(when, callback, args, context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        clock = self._clocks.get(PROCESS.get())
        if clock is None:
            when = self._now_s + delay
        else:  # rounded as `call_at(time() + delay)`
            when = (clock.base_s + clock.rate * self._now_s + delay - clock.base_s) / clock.rate
        return self._add_timer(when, callback, args, context)

    def _add_timer(self, when: float, callback: Any, args: Any, context: Context | None) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = _Callback(callback, args, self, context)
        if self._paused:
            held = self._paused.get(_process_of(handle))
            if held is not None:
                held.ready.append(handle)
                return handle
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """Run the callbacks that are ready. If there are none, advance the clock to the next timer.

        This is asyncio's turn of a loop without its wait for files. Timers of the same time fire in the order
        in which asyncio's heap has them.
        """
        scheduled, ready = self._scheduled, self._ready
        if len(scheduled) > MIN_TIMERS_TO_CLEAN and self._timer_cancelled_count > len(scheduled) / 2:
            scheduled[:] = [timer for timer in scheduled if not timer._cancelled]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)
        if ready or self._stopping:
            self.advance(self._turn_s)
        elif scheduled:
            self.advance(max(self._turn_s, scheduled[0]._when - self._now_s))  # type: ignore[attr-defined]
        else:
            raise Deadlock(f"at {self._now_s:.6f} s all tasks wait and no timer is left")
        end_s = self._now_s + TIMER_RESOLUTION_S
        while scheduled and scheduled[0]._when < end_s:  # type: ignore[attr-defined]
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            ready.append(timer)
        for _ in range(len(ready)):
            handle: Any = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func!r} would run in a thread, which virtual time does not support")

    # -- processes -------------------------------------------------------------------------------------------

    def set_clock(self, process: str, clock: ProcessClock) -> None:
        """Give a process its own clock, before it runs."""
        self._turn_s = TURN_S
        self._clocks[process] = clock

    def jump_clock(self, process: str, by_s: float) -> None:
        """Move the clock of a process forward, paused or not. Its timers fire earlier by as much."""
        clock = self._clocks.get(process, ProcessClock())
        self.set_clock(process, ProcessClock(clock.base_s + by_s, clock.rate))
        held = self._paused.get(process)
        for timer in self._scheduled if held is None else held.timers:
            if _process_of(timer) == process:
                timer._when -= by_s / clock.rate  # type: ignore[attr-defined]
        heapq.heapify(self._scheduled)

    def pause(self, process: str) -> None:
        """Stop a process: none of its callbacks and timers runs until `resume`."""
        if process in self._paused:
            raise ValueError(f"process {process} is paused already")
        held = self._paused[process] = _HeldCallbacks()
        skipped = asyncio.Handle(_nothing, (), self)
        skipped.cancel()
        for position, handle in enumerate(self._ready):
            if _process_of(handle) == process:
                held.ready.append(handle)
                self._ready[position] = skipped  # the loop counts the handles of its present turn
        held.timers = [timer for timer in self._scheduled if _process_of(timer) == process and not timer.cancelled()]
        taken = set(map(id, held.timers))
        self._scheduled[:] = [timer for timer in self._scheduled if id(timer) not in taken]
        heapq.heapify(self._scheduled)
        for timer in held.timers:
            timer._scheduled = False  # type: ignore[attr-defined]

    def resume(self, process: str) -> None:
        """Let a paused process run again. What it missed runs at once: callbacks in order, then timers."""
        held = self._paused.pop(process, None)
        if held is None:
            return
        self._ready.extend(handle for handle in held.ready if not handle.cancelled())
        for timer in held.timers:
            if not timer.cancelled():
                timer._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._scheduled, timer)

    def resume_all(self) -> None:
        """Let all paused processes run again."""
        for process in list(self._paused):
            self.resume(process)

    def is_paused(self, process: str) -> bool:
        """True while a process is paused."""
        return process in self._paused


def _nothing() -> None:
    """Stand in for a callback that was taken out of the queue."""


def _process_of(handle: asyncio.Handle) -> str:
    return handle._context.get(PROCESS, "")  # type: ignore[attr-defined]


def running_loop() -> VirtualTimeLoop:
    """Return the running loop. Raises TypeError if it has no virtual time."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        raise TypeError(f"the running loop is a {type(loop).__name__}; the simulator needs a VirtualTimeLoop")
    return loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under virtual time, as `asyncio.run` does. Raises Deadlock if no task can continue.

    At its end, paused processes run again: else their tasks could not be cancelled.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_then_resume_all(main))


async def _then_resume_all(main: Coroutine[Any, Any, T]) -> T:
    try:
        return await main
    finally:
        running_loop().resume_all()
