"""Commands for a thread that sleeps in `poll`: other threads add them, and a pipe wakes the thread."""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class ThreadCommands:
    """Commands that one thread runs in the order in which they were added.

    wake_fd: descriptor that becomes readable when a command was added, or after `wake`
    """

    def __init__(self) -> None:
        self._commands: deque[Callable[[], None]] = deque()
        self.wake_fd, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_closed = False
        self._lock = threading.Lock()
        """Held while the pipe is written or closed: a closed descriptor may belong to another file."""

    def add(self, command: Callable[[], None]) -> None:
        """Add a command and wake the thread. A command that is added after `close` never runs."""
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        """Wake the thread. Does nothing after `close`."""
        with self._lock:
            if self._is_closed:
                return
            with suppress(BlockingIOError):  # the pipe is full, so the thread wakes anyway
                os.write(self._wake_write, b"!")

    # -- in the thread -----------------------------------------------------------------------------

    def run(self) -> bool:
        """Run the commands, those that are added meanwhile too. Returns True if there was one."""
        any_command = bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        return any_command

    def drain(self) -> None:
        """Empty the pipe, after `wake_fd` was readable."""
        os.read(self.wake_fd, 4096)

    def close(self) -> None:
        """Close the pipe. Nothing wakes the thread any more."""
        with self._lock:
            self._is_closed = True
            os.close(self.wake_fd)
            os.close(self._wake_write)
