"""Pauses processes, as SIGSTOP does: no message in or out, then all at once."""

import asyncio
from random import Random

from baton.sim.chaos.faults.storm_context import StormContext
from baton.sim.chaos.report import Downtime
from baton.sim.virtual_time import running_loop


async def pause_processes(storm: StormContext, rng: Random) -> None:
    """Pause random processes until the storm ends. Half of the pauses are shorter than a lease."""
    shortest_s, longest_s = storm.profile.pause_s
    async with asyncio.TaskGroup() as group:
        while await storm.next_fault(rng, storm.profile.pauses_per_s):
            name = rng.choice(storm.processes())
            pause_s = rng.uniform(shortest_s, rng.choice((2.0, longest_s)))
            reads_stop = rng.random() < 0.5
            if storm.may_fail(name):
                group.create_task(_pause(storm, name, pause_s, reads_stop=reads_stop))


async def _pause(storm: StormContext, name: str, pause_s: float, *, reads_stop: bool) -> None:
    with storm.failing(name):
        storm.report.record_fault("pause", f"{name} for {pause_s:.3f} s")
        pause = Downtime(process=name, start_s=running_loop().now_s)
        storm.report.pauses.append(pause)
        storm.cluster.pause(name, reads_stop=reads_stop and name in storm.cluster.workers)
        await asyncio.sleep(pause_s)
        storm.cluster.resume(name)
        pause.end_s = running_loop().now_s
        storm.report.note(f"resume {name}")
