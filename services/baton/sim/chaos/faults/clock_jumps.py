"""Moves clocks of processes forward, as after a live migration of their machine.

In addition every process has a clock with its own base and speed (`ClockModel`).
"""

from random import Random

from baton.sim.chaos.faults.storm_context import StormContext
from baton.sim.virtual_time import running_loop


async def move_clocks(storm: StormContext, rng: Random) -> None:
    """Move random clocks forward until the storm ends."""
    while await storm.next_fault(rng, storm.profile.clock_jumps_per_s):
        name = rng.choice(storm.processes())
        jump_s = rng.uniform(0.0, storm.profile.max_jump_s)
        if storm.may_fail(name):
            with storm.failing(name):
                storm.report.record_fault("clock-jump", f"{name} by {jump_s:.3f} s")
                running_loop().jump_clock(name, jump_s)
