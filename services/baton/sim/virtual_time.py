"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it.

The tasks of one simulated process share the value of `PROCESS`. A process can have a clock of its own, and
can be paused: its callbacks and timers then stand still, as with SIGSTOP.
"""

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

PROCESS: ContextVar[str] = ContextVar("simulated process", default="")
"""Name of the simulated process that runs now. Tasks, timers and callbacks inherit it. Empty: none."""
TURN_S = 1e-9
"""Time of one turn of the loop, if processes have clocks of their own.

Their times are rounded, so a timer may fire slightly before its time. Code that then waits for the rest must
make progress.
"""


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


class _JumpSelector(selectors.BaseSelector):
    """A selector that never finds a ready file, and advances the clock by the timeout of each wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turn_s = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now_s:.6f} s all tasks wait and no timer is left")
        self.now_s += max(self.turn_s, timeout)
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


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock, which starts at 0 and advances only when no callback is ready.

    Threads, sockets and subprocesses cannot be used.
    """

    _ready: "deque[asyncio.Handle]"  # both are attributes of asyncio's BaseEventLoop
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._jumps = _JumpSelector()
        self._clocks: dict[str, ProcessClock] = {}
        self._paused: dict[str, _HeldCallbacks] = {}
        super().__init__(self._jumps)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        clock = self._clocks.get(PROCESS.get()) if self._clocks else None
        return self._jumps.now_s if clock is None else clock.base_s + clock.rate * self._jumps.now_s

    @property
    def now_s(self) -> float:
        """Time of the simulation, in whatever process this is called."""
        return self._jumps.now_s

    def call_at(  # type: ignore[override]  # the arguments are those of any callback
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        clock = self._clocks.get(PROCESS.get()) if self._clocks else None
        if clock is not None:
            when = (when - clock.base_s) / clock.rate
        return super().call_at(when, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._paused:
            process = PROCESS.get() if context is None else context.get(PROCESS, "")
            held = self._paused.get(process)
            if held is not None:
                handle = asyncio.Handle(callback, args, self, context)
                held.ready.append(handle)
                return handle
        return super().call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func!r} would run in a thread, which virtual time does not support")

    # -- processes -------------------------------------------------------------------------------------------

    def set_clock(self, process: str, clock: ProcessClock) -> None:
        """Give a process its own clock, before it runs."""
        self._jumps.turn_s = TURN_S
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
