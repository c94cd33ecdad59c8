"""Steps the wall clock of processes by an hour, forward or back, and sets it right again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from tests.nemesis.plan import Fault
from tests.nemesis.world import World

STEP_S = 3600.0


@asynccontextmanager
async def clock(world: World, fault: Fault) -> AsyncIterator[None]:
    """Step the clocks of the targets. Other processes keep theirs, so that clocks are also skewed."""
    step_s = Random(str(fault)).choice((-STEP_S, STEP_S))
    for name in fault.targets:
        world.tools.step_clock(name, step_s)
    try:
        yield
    finally:
        for name in fault.targets:
            world.tools.step_clock(name, 0.0)
