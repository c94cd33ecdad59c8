"""Partitions two processes: their messages, or the KV bytes between two workers."""

import asyncio
from random import Random

from baton.sim.chaos.faults.storm_context import StormContext


async def partition_processes(storm: StormContext, rng: Random) -> None:
    """Partition the messages of random pairs of processes until the storm ends."""
    async with asyncio.TaskGroup() as group:
        while await storm.next_fault(rng, storm.profile.partitions_per_s):
            first, second = rng.sample(storm.processes(), 2)
            duration_s = rng.uniform(*storm.profile.partition_s)
            if storm.may_fail(first, second):
                group.create_task(_partition(storm, first, second, duration_s))


async def partition_data(storm: StormContext, rng: Random) -> None:
    """Partition the KV reads of random pairs of workers until the storm ends. Their messages still arrive."""
    async with asyncio.TaskGroup() as group:
        while await storm.next_fault(rng, storm.profile.data_partitions_per_s):
            first, second = rng.sample(sorted(storm.cluster.workers), 2)
            duration_s = rng.uniform(*storm.profile.partition_s)
            if storm.may_fail(first, second):
                group.create_task(_partition_data(storm, first, second, duration_s))


async def _partition(storm: StormContext, first: str, second: str, duration_s: float) -> None:
    with storm.failing(first, second):
        storm.report.record_fault("partition", f"{first} {second} for {duration_s:.3f} s")
        storm.cluster.network.partition(first, second)
        await asyncio.sleep(duration_s)
        storm.cluster.network.heal(first, second)


async def _partition_data(storm: StormContext, first: str, second: str, duration_s: float) -> None:
    with storm.failing(first, second):
        storm.report.record_fault("data-partition", f"{first} {second} for {duration_s:.3f} s")
        storm.cluster.fabric.partition(first, second)
        await asyncio.sleep(duration_s)
        storm.cluster.fabric.heal(first, second)
