"""Bounds on what a process logs: repeated warnings are counted instead of written, and files rotate."""

import faulthandler
import logging
import logging.handlers
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

MAX_FILE_BYTES = 32 * 2**20
NUM_OLD_FILES = 2
"""A process keeps its current log file and this many older ones."""
MAX_REPEATS, WINDOW_S = 20, 60.0
"""Warnings and errors of one event that are written per window. Clients can cause most of them at will."""
MAX_EVENTS = 512
"""Number of events whose repeats are counted. The one that was logged least recently is forgotten."""


class RepeatLimit(logging.Filter):
    """Drops warnings and errors of an event that occurs too often.

    The first one of the next window has the field `suppressed`: the number that was dropped before.
    """

    def __init__(
        self, *, max_repeats: int = MAX_REPEATS, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._max_repeats = max_repeats
        self._window_s = window_s
        self._clock = clock
        self._seen: OrderedDict[tuple[str, str], list[float]] = OrderedDict()  # begin of the window, count

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False to drop the record."""
        if record.levelno < logging.WARNING:
            return True
        message = record.msg
        event = message.get("event", "") if isinstance(message, dict) else message
        key, now_s = (record.name, str(event)[:80]), self._clock()
        window = self._seen.setdefault(key, [now_s, 0])
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_EVENTS:
            self._seen.popitem(last=False)
        if now_s - window[0] > self._window_s:
            suppressed = int(window[1]) - self._max_repeats
            window[:] = [now_s, 0]
            if suppressed > 0 and isinstance(message, dict):
                message["suppressed"] = suppressed
        window[1] += 1
        return window[1] <= self._max_repeats


class BoundedLogFile(logging.handlers.RotatingFileHandler):
    """A log file that is renamed to `NAME.1` when it is full. Stacks of native crashes go to the current
    file.

    A line that cannot be written, for example to a full disk, is lost without an effect on the process.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Open the file for appending. Raises OSError if it cannot be opened."""
        super().__init__(path, encoding="utf-8", maxBytes=max_bytes, backupCount=NUM_OLD_FILES)
        self.num_lost = 0
        self._enable_faulthandler()

    def doRollover(self) -> None:  # noqa: N802 - overrides the base class
        faulthandler.disable()  # it would write to the closed descriptor
        super().doRollover()
        self._enable_faulthandler()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - overrides the base class
        self.num_lost += 1

    def _enable_faulthandler(self) -> None:
        if self.stream is not None:
            faulthandler.enable(self.stream)
