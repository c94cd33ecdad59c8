"""Steps the wall clock of processes by an hour, forward or back, and sets it right again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from random import Random

from tests.nemesis.effect import until_true
from tests.nemesis.plan import Fault
from tests.nemesis.world import World

STEP_S = 3600.0


@asynccontextmanager
async def clock(world: World, fault: Fault) -> AsyncIterator[None]:
    """Step the clocks of the targets. Other processes keep theirs, so that clocks are also skewed.

    Raises NoEffect if a target reads no stepped clock meanwhile.
    """
    step_s = Random(str(fault)).choice((-STEP_S, STEP_S))
    for name in fault.targets:
        world.tools.step_clock(name, step_s)

    try:
        yield
        for name in fault.targets:
            await until_true(partial(_has_read, world, name), f"{name} reads a clock that is off by {step_s:g} s")
    finally:
        for name in fault.targets:
            world.tools.step_clock(name, 0.0)


async def _has_read(world: World, name: str) -> bool:
    return world.tools.num_stepped_reads(name) > 0
