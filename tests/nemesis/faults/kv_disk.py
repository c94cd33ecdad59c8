"""Faults of the files in which workers keep KV: full, slow, damaged, or cut off by a kill in mid-copy."""

import asyncio
import errno
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

from tests.nemesis.effect import NoEffect
from tests.nemesis.faults.kill import kill
from tests.nemesis.plan import Fault
from tests.nemesis.world import World

SLOW_READ_S = 0.1
SETTLE_S = 0.5
"""Time for a write that began before the disk was full."""
WRITE_WAIT_S = 3.0
"""Longest wait for a worker to write to its file. Without a write it is killed between two."""
MAX_FLIPPED_BITS = 200


@asynccontextmanager
async def disk_full(world: World, fault: Fault) -> AsyncIterator[None]:
    """Let the targets write to no file beyond its first byte. Raises NoEffect if a file of KV is written."""
    pids = [world.cluster.pid(name) for name in fault.targets]
    limits = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    try:
        for pid, (_, hard) in zip(pids, limits, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
        await asyncio.sleep(SETTLE_S)
        before = [written_ns(pid) for pid in pids]
        yield
        for name, pid, was in zip(fault.targets, pids, before, strict=True):
            with suppress(FileNotFoundError):  # it has ended meanwhile
                if written_ns(pid) != was:
                    raise NoEffect(f"{name} has written to its file of KV on a full disk")
    finally:
        for pid, limit in zip(pids, limits, strict=True):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


@asynccontextmanager
async def disk_slow(world: World, fault: Fault) -> AsyncIterator[None]:
    """Delay each read of a file of KV. A target may read nothing meanwhile, so no effect is required."""
    for name in fault.targets:
        world.tools.delay_reads(name, SLOW_READ_S)
    try:
        yield
    finally:
        for name in fault.targets:
            world.tools.delay_reads(name, 0.0)


@asynccontextmanager
async def disk_damaged(world: World, fault: Fault) -> AsyncIterator[None]:
    """Kill the targets, and flip bits of their files or cut them off before they start again."""
    rng = Random(str(fault))
    paths = [kv_file(world.cluster.pid(name)) for name in fault.targets]
    async with kill(world, fault):
        for path in paths:
            damage(path, rng)
        yield


@asynccontextmanager
async def disk_killed(world: World, fault: Fault) -> AsyncIterator[None]:
    """Kill the targets at the moment at which the first of them writes to its file."""
    pid = world.cluster.pid(fault.targets[0])
    before = written_ns(pid)
    with suppress(TimeoutError):
        async with asyncio.timeout(WRITE_WAIT_S):
            while written_ns(pid) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    async with kill(world, fault):
        yield


def damage(path: Path, rng: Random) -> None:
    """Flip random bits of a file, or remove a random part at its end."""
    size = path.stat().st_size
    if rng.random() < 0.3:
        os.truncate(path, rng.randrange(size))
        return
    with path.open("r+b") as file:
        for _ in range(rng.randrange(1, MAX_FLIPPED_BITS + 1)):
            offset = rng.randrange(size)
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes((byte ^ 1 << rng.randrange(8),)))


def kv_file(pid: int) -> Path:
    """Return the file of KV that a process has open. Raises NoEffect if there is none."""
    directory = Path(f"/proc/{pid}/fd")
    for descriptor in directory.iterdir():
        try:
            target = descriptor.readlink()
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            continue
        if target.suffix == ".baton":
            return target
    raise NoEffect(f"process {pid} has no file of KV open")


def written_ns(pid: int) -> int:
    """Return when the file of KV of a process was last written."""
    return kv_file(pid).stat().st_mtime_ns
