"""Cuts the link between two processes in both directions, and heals it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.nemesis.plan import Fault
from tests.nemesis.world import World


@asynccontextmanager
async def partition(world: World, fault: Fault) -> AsyncIterator[None]:
    """Cut the link between the two targets. Nothing arrives and no connection ends."""
    a, b = fault.targets
    world.network.cut(a, b)
    try:
        yield
    finally:
        world.network.heal(a, b)
