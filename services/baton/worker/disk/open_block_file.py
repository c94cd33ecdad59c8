"""Finds or makes the file of KV blocks of one worker in a directory that workers of a machine share.

Each worker locks one file. It takes a file of its layout and model that no other process has locked, so a
worker that is restarted gets a file with content, whatever its name. Otherwise it takes the first file that
is not locked, and empties it.
"""

import fcntl
import os
import secrets
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError
from baton.runtime.logging import get_logger
from baton.worker.disk.disk_format import PAGE_BYTES, DiskDefect, FileShape, encode_superblock, read_superblock

log = get_logger(__name__)

MAX_FILES = 256
"""Most files of one directory: the most workers of a machine that use it."""
_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedFile:
    """A file that this process has locked.

    fd: its descriptor, which holds the lock. file_id: see `encode_superblock`. defects: what was found.
    """

    path: Path
    fd: int
    file_id: int
    defects: "Counter[DiskDefect]"


def lock_block_file(directory: Path, shape: FileShape) -> LockedFile:
    """Lock a file of this shape. One that has another shape, or is damaged, is emptied.

    Raises ConfigError if the directory cannot be used, OSError if the disk is full or fails.
    """
    try:
        directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        paths = [directory / f"kv-{number}.baton" for number in range(MAX_FILES)]
        for path in paths:
            if path.exists() and (fd := _lock(path)) is not None:
                if (found := _reopened(path, fd, shape)) is not None:
                    return found
                os.close(fd)
        for path in paths:
            if (fd := _lock(path)) is not None:
                # Another worker of this model may have written it since the first look.
                return _reopened(path, fd, shape) or _emptied(path, fd, shape)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"--disk-kv {directory} cannot be used: {error}") from error
    raise ConfigError(f"--disk-kv {directory}: all of its {MAX_FILES} files are used by other workers")


def _lock(path: Path) -> int | None:
    """Open and lock a file. Returns None if another process has locked it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PermissionError(f"{path} is no regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, _FILE_MODE)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reopened(path: Path, fd: int, shape: FileShape) -> LockedFile | None:
    """Return a file with its content; None if it has another shape or is damaged. Closes it on an error."""
    defects: Counter[DiskDefect] = Counter()
    try:
        file_id, defect = read_superblock(os.pread(fd, PAGE_BYTES, 0), shape)
        if defect is not None:
            return None
        if os.fstat(fd).st_size < shape.file_bytes:
            defects[DiskDefect.TRUNCATED] += 1
            log.warning("disk_kv_truncated", path=str(path), size=os.fstat(fd).st_size, expected=shape.file_bytes)
            _allocate(fd, shape.file_bytes)
    except OSError:
        os.close(fd)
        raise
    return LockedFile(path=path, fd=fd, file_id=file_id, defects=defects)


def _emptied(path: Path, fd: int, shape: FileShape) -> LockedFile:
    """Give a file the shape, without content. A power loss before the end leaves a file that is emptied
    again."""
    defects: Counter[DiskDefect] = Counter()
    try:
        if os.fstat(fd).st_size:
            _, defect = read_superblock(os.pread(fd, PAGE_BYTES, 0), shape)
            defects[defect or DiskDefect.FOREIGN_FILE] += 1
            log.warning("disk_kv_emptied", path=str(path), reason=(defect or DiskDefect.FOREIGN_FILE).value)
            os.ftruncate(fd, 0)
        _allocate(fd, shape.file_bytes)
        os.fsync(fd)
        file_id = secrets.randbits(64)
        os.pwrite(fd, encode_superblock(shape, file_id), 0)
        os.fsync(fd)
    except OSError:
        os.ftruncate(fd, 0)  # a file that does not fit must not keep the disk full
        os.close(fd)
        raise
    return LockedFile(path=path, fd=fd, file_id=file_id, defects=defects)


def _allocate(fd: int, num_bytes: int) -> None:
    """Reserve the bytes of a file, so that the disk cannot become full later. New ones are zeros."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        os.ftruncate(fd, num_bytes)
