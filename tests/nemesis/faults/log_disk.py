"""Fills the disk on which processes write their logs."""

import errno
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.nemesis.effect import NoEffect
from tests.nemesis.plan import Fault
from tests.nemesis.world import World

PIECE = bytes(1 << 20)


@asynccontextmanager
async def log_disk(world: World, fault: Fault) -> AsyncIterator[None]:
    """Fill the file systems of the targets' logs.

    Without file systems of their own, the targets may write to no file beyond its first byte. Raises NoEffect
    if a file system is not full, or if a log without one grows.
    """
    directories = [world.tools.log_dir(name) for name in fault.targets]
    if world.tools.logs_are_mounted:
        fillers = [directory / "filler" for directory in directories]
        try:
            for filler in fillers:
                fill(filler)
            yield
        finally:
            for filler in fillers:
                filler.unlink(missing_ok=True)
        return
    pids = [world.cluster.pid(name) for name in fault.targets]
    limits = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    try:
        for pid, (_, hard) in zip(pids, limits, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
        before = [log_bytes(directory) for directory in directories]
        yield
        for directory, was in zip(directories, before, strict=True):
            if (now := log_bytes(directory)) > was:
                raise NoEffect(f"the log in {directory} has grown from {was} to {now} bytes on a full disk")
    finally:
        for pid, limit in zip(pids, limits, strict=True):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def fill(filler: Path) -> None:
    """Write to a file until its file system is full. Raises NoEffect if another file can still be written."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(PIECE):
            pass
    probe = filler.with_name("probe")
    try:
        probe.write_bytes(b"x")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    else:
        raise NoEffect(f"{filler.parent} is not full: a byte can be written")
    finally:
        probe.unlink(missing_ok=True)


def log_bytes(directory: Path) -> int:
    """Return the size of all files in a directory. A file that is rotated away meanwhile counts nothing."""
    total = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
