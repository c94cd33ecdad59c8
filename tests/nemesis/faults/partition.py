"""Cuts the link between two processes in both directions, and heals it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.nemesis.effect import NoEffect, until_true
from tests.nemesis.plan import Fault
from tests.nemesis.world import World

PROBE_S = 5.0


@asynccontextmanager
async def partition(world: World, fault: Fault) -> AsyncIterator[None]:
    """Cut the link between the two targets. Nothing arrives and no connection ends.

    Raises NoEffect if a new connection gets an answer meanwhile, or if none did before.
    """
    a, b = fault.targets
    network = world.network
    await until_true(lambda: network.passes(a, b, PROBE_S), f"bytes pass between {a} and {b} before the cut")
    network.cut(a, b)
    probe = asyncio.create_task(network.passes(a, b, fault.duration_s))
    try:
        yield
        if await probe:
            raise NoEffect(f"bytes passed between {a} and {b} during the cut")
    finally:
        network.heal(a, b)
        probe.cancel()
