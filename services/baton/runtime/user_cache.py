"""Keeps files that are expensive to make in the user's cache directory, safely for several processes.

A file is made under a temporary name, written to the disk, then renamed, so that nobody sees half of one. A
file that belongs to another user, or that others may write, is not used.
"""

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_directory(kind: str) -> Path:
    """Return the directory of one kind of files, below XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "baton" / kind


def is_trusted(facts: os.stat_result) -> bool:
    """True for a regular file of this user, or of root, that nobody else may write."""
    owners = {0, os.geteuid()}
    return stat.S_ISREG(facts.st_mode) and facts.st_uid in owners and not facts.st_mode & _WRITABLE_BY_OTHERS


def file_identity(path: Path) -> list[str | int]:
    """Return what changes when a file gets other content, or another file takes its place. Raises OSError.

    Programs that copy files can set the time of the content (mtime), but not that of the inode (ctime).
    """
    real = path.resolve()
    facts = real.stat()
    times = (facts.st_mtime_ns, facts.st_ctime_ns)
    return [str(real), facts.st_dev, facts.st_ino, facts.st_size, *times]


def use(path: Path) -> bool:
    """True if a trusted file is there. It then counts as used now, see `remove_oldest`."""
    try:
        if not is_trusted(path.lstat()):
            return False
    except OSError:
        return False
    with suppress(OSError):
        os.utime(path)
    return True


@contextmanager
def locked(path: Path, *, waits: bool = True) -> Iterator[None]:
    """Hold a lock among processes. It ends with the process that holds it. Its file is removed at the end.

    waits: False raises BlockingIOError if another process holds it. Raises OSError where there are no locks.
    """
    operation = fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        with path.open("w") as file:
            fcntl.flock(file, operation)
            if not _is_file_at(path, file.fileno()):
                continue  # it was removed meanwhile, and others lock the next one
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()  # still locked, so that it is not the file of another holder
            return


def _is_file_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def publish(made: Path, final: Path) -> None:
    """Give a finished file its final name, in place of what is there. Raises OSError."""
    made.chmod(made.stat().st_mode & ~_WRITABLE_BY_OTHERS)
    with made.open("rb") as file:
        os.fsync(file.fileno())  # else a power loss could leave an empty file under the final name
    os.replace(made, final)


def remove_oldest(
    paths: Iterable[Path], *, keep: Path, max_number: int | None = None, max_bytes: int | None = None
) -> list[Path]:
    """Remove the files that were used longest ago until both limits are met; return them.

    `keep` counts, and stays. A process that has mapped a removed file can still read it.
    """
    found = []
    for path in paths:
        with suppress(OSError):
            facts = path.lstat()
            found.append((path != keep, -facts.st_mtime_ns, facts.st_size, path))
    removed: list[Path] = []
    number = num_bytes = 0
    for is_other, _, size, path in sorted(found):
        number, num_bytes = number + 1, num_bytes + size
        is_over = (max_number is not None and number > max_number) or (max_bytes is not None and num_bytes > max_bytes)
        if is_other and is_over:
            number, num_bytes = number - 1, num_bytes - size
            with suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed
