"""Keeps verdicts about this machine in the user's cache, so that they are not reached at each start."""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from baton.runtime import user_cache
from baton.runtime.logging import get_logger

log = get_logger(__name__)

MAX_VERDICTS = 64
"""Default number of verdicts that are kept. A verdict takes some kilobytes."""
MAX_VERDICT_BYTES = 1 << 16
_LOCK_POLL_S = 0.1


class VerdictCache:
    """Verdicts by the facts that they depend on, a file each. A cache that cannot be used is logged."""

    def __init__(self, directory: Path | None = None, *, max_verdicts: int = MAX_VERDICTS) -> None:
        """directory: None for the default. max_verdicts: that are kept, those used last."""
        self._directory = directory or user_cache.cache_directory("verdicts")
        self._max_verdicts = max_verdicts
        self._has_failed = False

    def path(self, facts: Mapping[str, str]) -> Path:
        """Return the file of the verdict for these facts."""
        text = json.dumps(dict(facts), sort_keys=True)
        return self._directory / f"{blake2b(text.encode(), digest_size=12).hexdigest()}.json"

    def find(self, facts: Mapping[str, str]) -> Mapping[str, Any] | None:
        """Return the verdict; None if there is none, or if its file is damaged, of other facts, or another
        user's."""
        path = self.path(facts)
        if not user_cache.use(path):
            return None
        try:
            with path.open("rb") as file:
                content = json.loads(file.read(MAX_VERDICT_BYTES + 1))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.get("facts") != dict(facts):
            return None
        verdict = content.get("verdict")
        return verdict if isinstance(verdict, dict) else None

    def keep(self, facts: Mapping[str, str], verdict: Mapping[str, Any]) -> None:
        """Store a verdict, and remove what was used longest ago beyond the limit.

        Locks count, too. A process that holds a removed one goes on, and another may reach the same verdict.
        If files cannot be written, only the first failure is logged.
        """
        path = self.path(facts)
        text = json.dumps({"facts": dict(facts), "verdict": dict(verdict)}, indent=1)
        if len(text) > MAX_VERDICT_BYTES:
            log.warning("verdict_not_kept", file=str(path), problem=f"{len(text)} bytes, at most {MAX_VERDICT_BYTES}")
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=self._directory, prefix="new-")
            with os.fdopen(fd, "w") as file:
                file.write(text)
            user_cache.publish(Path(name), path)
            kinds = ("*.json", "lock-*", "new-*")  # the last kind is of killed processes
            kept = [each for kind in kinds for each in self._directory.glob(kind)]
            user_cache.remove_oldest(kept, keep=path, max_number=self._max_verdicts)
        except OSError as error:
            if not self._has_failed:
                log.warning("verdict_not_kept", file=str(path), problem=str(error))
            self._has_failed = True

    @contextmanager
    def locked(
        self,
        name: str,
        wait_s: float,
        *,
        on_wait: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[None]:
        """Hold the lock of one kind of verdicts, so that workers that start together reach a verdict once.

        on_wait: called once if another process has the lock. After `wait_s`, or where there can be no lock,
        the block runs without it.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = (self._directory / f"lock-{name}").open("w")
        except OSError:
            yield
            return
        with file:
            ends_s = clock() + wait_s
            is_held = _lock(file.fileno())
            if not is_held:
                on_wait()
            while not is_held and clock() < ends_s:
                time.sleep(_LOCK_POLL_S)
                is_held = _lock(file.fileno())
            yield


def _lock(fd: int) -> bool:
    """Return False if another process holds the lock. A file system without locks counts as locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
