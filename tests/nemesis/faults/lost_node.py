"""Loses a node: all workers on it die at once, and start again when it is back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.nemesis.effect import NoEffect
from tests.nemesis.faults.kill import kill
from tests.nemesis.plan import ROLES, Fault
from tests.nemesis.world import World

AT_ONCE_S = 1.0
"""Time within which the workers of a lost node must have died. It allows for a busy machine."""


@asynccontextmanager
async def lost_node(world: World, fault: Fault) -> AsyncIterator[None]:
    """Kill a prefill and a decode worker in the same moment, as if their Ray node had died.

    The nemesis runs its processes without Ray. When a raylet dies, Ray's processes on its node die too, and
    the kernel kills the worker processes that they have started (`with_parent_death_signal`). So the rest of
    the cluster sees the same as here: several workers end by SIGKILL at once, without a drain, and come back
    later with new epochs. `tests/integration/fleet/test_lost_node.py` kills a real raylet, which needs root.

    Raises NoEffect if the targets are not of both roles, or did not die at once.
    """
    for role in ("prefill", "decode"):
        if not set(ROLES[role]) & set(fault.targets):
            raise NoEffect(f"the lost node {' '.join(fault.targets)} has no {role} worker")
    async with kill(world, fault):
        begins_s = [world.times.open_down[name] for name in fault.targets]
        if (apart_s := max(begins_s) - min(begins_s)) > AT_ONCE_S:
            raise NoEffect(f"the workers of a node were killed {apart_s:.1f} s apart")
        yield
