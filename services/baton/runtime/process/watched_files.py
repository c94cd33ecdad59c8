"""Files that may change while a process runs: a Secret that Kubernetes has updated, or a certificate that was
renewed."""

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
    """Changes when one of them does, its owner and mode included: who may read it now is news, too. None
    while one is missing."""
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((one.st_mtime_ns, one.st_ctime_ns, one.st_ino, one.st_size) for one in found)


class WatchedFiles(Generic[T]):
    """What `read` makes of `files`, and makes again when they have changed. What cannot be read changes
    nothing: half of a pair may be there, and the other half under way. Any thread may look."""

    def __init__(self, read: Callable[[], T], *files: Path, event: str) -> None:
        """`event`: what the log calls a change that cannot be read. Raises as `read` does, which is
        ConfigError alone."""
        self._read = read
        self._files = files
        self._event = event
        self._lock = Lock()
        self._last = self._told = version_of(
            *files
        )  # before they are read: what changes meanwhile is found by the next look
        self.value = read()

    def look(self) -> T | None:
        """The new value where there is one. A version that cannot be read is said once, and tried again at
        each look."""
        with self._lock:
            now = version_of(*self._files)
            if now == self._last:
                return None
            try:
                self.value = self._read()
            except ConfigError as error:
                if now != self._told:
                    log.warning(self._event, problem=str(error), hint="what was read before stays in use")
                self._told = now
                return None
            self._last = now
            return self.value
