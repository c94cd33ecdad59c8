"""Makes disks full or slow, damages their files, and kills workers while they copy blocks to a disk."""

import asyncio
from contextlib import suppress
from functools import partial
from random import Random

from baton.sim.chaos.faults.deaths import kill_and_restart
from baton.sim.chaos.faults.storm_context import StormContext
from baton.sim.sim_disk import SimDisk

KINDS = ("full", "slow", "flipped-bits", "truncated", "killed")
SLOW_READ_S = 0.1
MAX_FLIPPED_BITS = 12
MAX_WAIT_S = 1.0
"""Longest wait for a write to begin. Without one the worker is killed between two writes."""


async def break_disks(storm: StormContext, rng: Random) -> None:
    """Break random disks until the storm ends, each in one way at a time."""
    disks = storm.cluster.disks
    failing: set[str] = set()
    async with asyncio.TaskGroup() as group:
        while disks and await storm.next_fault(rng, storm.profile.disk_faults_per_s):
            name, kind = rng.choice(sorted(disks)), rng.choice(KINDS)
            duration_s, seed = rng.uniform(*storm.profile.disk_fault_s), rng.getrandbits(32)
            if name not in failing:
                failing.add(name)
                task = group.create_task(_break(storm, name, kind, duration_s, Random(seed)))
                task.add_done_callback(partial(_forget, failing, name))


def _forget(failing: set[str], name: str, _: object) -> None:
    failing.discard(name)


async def _break(storm: StormContext, name: str, kind: str, duration_s: float, rng: Random) -> None:
    disk = storm.cluster.disks[name]
    if kind == "killed":
        await _kill_in_mid_copy(storm, name, duration_s, rng)
    elif kind in ("full", "slow"):
        storm.report.record_fault(f"disk-{kind}", f"{name} for {duration_s:.3f} s")
        usual_s = disk.latency_s
        disk.file.is_full, disk.latency_s = kind == "full", SLOW_READ_S if kind == "slow" else usual_s
        await asyncio.sleep(duration_s)
        disk.file.is_full, disk.latency_s = False, usual_s
    else:
        storm.report.record_fault(f"disk-{kind}", name)
        _damage(disk, kind, rng)


async def _kill_in_mid_copy(storm: StormContext, name: str, down_s: float, rng: Random) -> None:
    """Kill a worker when a write to its disk begins. Half of the time its file is then damaged."""
    disk = storm.cluster.disks[name]
    disk.write_begun.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_WAIT_S):
            await disk.write_begun.wait()
    if name not in storm.cluster.workers or not storm.may_fail(name):
        return
    storm.report.record_fault("disk-killed", name)
    restarted = asyncio.create_task(kill_and_restart(storm, name, min(down_s, storm.profile.down_s)))
    await asyncio.sleep(0)
    if rng.random() < 0.5:
        _damage(disk, rng.choice(("flipped-bits", "truncated")), rng)
    await restarted


def _damage(disk: SimDisk, kind: str, rng: Random) -> None:
    if kind == "truncated":
        disk.file.truncate(rng)
    else:
        disk.file.flip_bits(rng, rng.randrange(1, MAX_FLIPPED_BITS + 1))
