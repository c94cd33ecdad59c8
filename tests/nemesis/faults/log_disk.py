"""Fills the disk on which processes write their logs."""

import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.nemesis.plan import Fault
from tests.nemesis.world import World

PIECE = bytes(1 << 20)


@asynccontextmanager
async def log_disk(world: World, fault: Fault) -> AsyncIterator[None]:
    """Fill the file systems of the targets' logs.

    Without file systems of their own, the targets may write to no file beyond its first byte.
    """
    if world.tools.logs_are_mounted:
        fillers = [world.tools.log_dir(name) / "filler" for name in fault.targets]
        try:
            for filler in fillers:
                with suppress(OSError), filler.open("wb", buffering=0) as file:
                    while file.write(PIECE):
                        pass
            yield
        finally:
            for filler in fillers:
                filler.unlink()
        return
    pids = [world.cluster.pid(name) for name in fault.targets]
    limits = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    for pid, (_, hard) in zip(pids, limits, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        for pid, limit in zip(pids, limits, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
