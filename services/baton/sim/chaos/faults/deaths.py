"""Kills processes of all kinds and starts them again: workers, schedulers and gateways."""

import asyncio
from random import Random

from baton.sim.chaos.faults.storm_context import StormContext
from baton.sim.chaos.report import Downtime
from baton.sim.sim_cluster import SimCluster
from baton.sim.virtual_time import running_loop


async def kill_processes(storm: StormContext, rng: Random) -> None:
    """Kill random processes until the storm ends."""
    async with asyncio.TaskGroup() as group:
        while await storm.next_fault(rng, storm.profile.deaths_per_s):
            name = rng.choice(storm.processes())
            if storm.may_fail(name):
                group.create_task(kill_and_restart(storm, name, rng.uniform(0.1, storm.profile.down_s)))


async def kill_and_restart(storm: StormContext, name: str, down_s: float) -> None:
    """Kill a process, and start it again after `down_s`."""
    cluster = storm.cluster
    role = cluster.workers[name].role if name in cluster.workers else None
    with storm.failing(name):
        storm.report.record_fault("kill", name)
        death = Downtime(process=name, start_s=running_loop().now_s)
        storm.report.deaths.append(death)
        await cluster.kill(name)
        await asyncio.sleep(down_s)
        death.end_s = running_loop().now_s
        if role is not None:
            cluster.start_worker(name, role)
        else:
            await _start_service(cluster, name)


async def _start_service(cluster: SimCluster, name: str) -> None:
    if name.startswith("scheduler"):
        cluster.start_scheduler(name)
    else:
        await cluster.start_gateway(name)
