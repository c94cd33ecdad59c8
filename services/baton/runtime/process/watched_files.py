"""Reloads files that may change while a process runs, such as Kubernetes Secrets and renewed certificates."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Generic, TypeAlias, TypeVar

from baton.core.errors import ConfigError
from baton.runtime.logging import get_logger

log = get_logger(__name__)

T = TypeVar("T")

Version: TypeAlias = tuple[tuple[int, int, int, int], ...]


def version_of(*files: Path) -> Version | None:
    """Return a value that changes when one of the files changes, or None if one is missing.

    A change of owner or mode counts too, because it may make a file readable.
    """
    try:
        stats = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size) for stat in stats)


class WatchedFiles(Generic[T]):
    """Value read from files, and read again when they change. Thread-safe.

    If a change cannot be read, the last value stays in use: of a certificate and its key, one may already be
    replaced and the other not yet.
    """

    def __init__(self, read: Callable[[], T], *files: Path, event: str) -> None:
        """Read the files once. `event` is the log event for a change that cannot be read.

        `read` may raise only ConfigError, which the constructor propagates.
        """
        self._read = read
        self._files = files
        self._event = event
        self._lock = Lock()
        # taken before reading, so that the next check finds a change made during the read
        self._last = self._logged = version_of(*files)
        self.value = read()

    def reload_if_changed(self) -> T | None:
        """Return the new value if the files have changed and can be read, else None.

        An unreadable version is logged once and tried again at each call.
        """
        with self._lock:
            now = version_of(*self._files)
            if now == self._last:
                return None
            try:
                self.value = self._read()
            except ConfigError as error:
                if now != self._logged:
                    log.warning(self._event, problem=str(error), hint="the last readable version stays in use")
                self._logged = now
                return None
            self._last = now
            return self.value
