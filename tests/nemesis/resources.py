"""What must be back at the end of a run: blocks, leases, open requests, descriptors, tasks, keys, memory."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.fleet.processes.supervisor import Child
from tests.nemesis import memory_growth
from tests.nemesis.memory_growth import Memory
from tests.nemesis.plan import GATEWAYS, REDIS, SERVICES
from tests.nemesis.world import World

SLACK = 12
"""Allowed growth of a count. Connections to peers that restarted meanwhile end late."""
SETTLE_S = 120.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources of one process. tasks: tasks of its event loop by function; none for Redis."""

    files: int
    threads: int
    tasks: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUsage:
    """What Redis holds.

    immortal: keys without expiry.
    workers: incarnations with block events, as `{worker_id}:{epoch}`.
    """

    memory_bytes: int
    immortal: tuple[str, ...]
    workers: frozenset[str]


def memory_of(world: World) -> dict[str, Memory]:
    """Return the resident memory of each living process."""
    found = {}
    for name, child in _living(world):
        with suppress(psutil.NoSuchProcess):  # it ends at this moment
            found[name] = Memory(child.pid, psutil.Process(child.pid).memory_info().rss)
    return found


async def usage_of(world: World) -> dict[str, Usage]:
    """Return the resources of each living process."""
    found = {}
    for name, child in _living(world):
        process = psutil.Process(child.pid)
        tasks: Counter[str] = Counter()
        if name != REDIS:
            for sample in await samples(world, name, "baton_event_loop_tasks"):
                tasks[sample.labels["function"]] = int(sample.value)
        found[name] = Usage(
            files=process.num_fds(),
            threads=process.num_threads(),
            tasks=tasks,
        )
    return found


async def metric(world: World, name: str, wanted: str) -> float:
    """Return the sum of a metric's samples of one process."""
    return sum(sample.value for sample in await samples(world, name, wanted))


async def samples(world: World, name: str, wanted: str) -> list[Sample]:
    """Return a metric's samples of one process."""
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        text = (await client.get(f"http://{world.network.metrics_address(name)}/metrics")).text
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples if sample.name == wanted]


async def redis_usage(world: World) -> RedisUsage:
    """Return what Redis holds."""
    async with world.redis() as client:
        keys = [key.decode() async for key in client.scan_iter(count=1000)]
        async with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.pttl(key)
            lifetimes = await pipeline.execute() if keys else []
        memory_bytes = int((await client.info("memory"))["used_memory"])
    parts = [key.split(":") for key in keys]
    return RedisUsage(
        memory_bytes=memory_bytes,
        immortal=tuple(key for key, left_ms in zip(keys, lifetimes, strict=True) if left_ms == -1),
        workers=frozenset(":".join(p[3:5]) for p in parts if len(p) > 4 and p[2] in ("kv", "kv-snapshot")),
    )


def grown(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> list[str]:
    """Return each count that is above its value before the faults by more than `SLACK`."""
    return [
        f"{name} has {now} {what}, {was} before"
        for name, usage in sorted(after.items())
        for what, was, now in (
            ("open files", before[name].files, usage.files),
            ("threads", before[name].threads, usage.threads),
            (f"tasks ({_more(before[name].tasks, usage.tasks)})", before[name].tasks.total(), usage.tasks.total()),
        )
        if now > was + SLACK
    ]


def _more(before: Counter[str], after: Counter[str]) -> str:
    """Return the functions of which more tasks run, and how many more."""
    return ", ".join(f"{number} more {function}" for function, number in sorted((after - before).items()))


async def leftovers(
    world: World, before: Mapping[str, Usage], redis_before: RedisUsage, *, dead_workers_are_gone: bool
) -> list[str]:
    """Wait until everything is back. Return what is not after `SETTLE_S`.

    dead_workers_are_gone: also wait until the block events of dead workers have expired.
    """
    found: Sequence[str] = ()
    end_s = world.now_s() + SETTLE_S
    while True:
        try:
            found = await _present_leftovers(world, before, redis_before, dead_workers_are_gone=dead_workers_are_gone)
        except (httpx.HTTPError, psutil.NoSuchProcess) as error:
            found = [f"a process does not answer: {error!r}"]
        if not found or world.now_s() > end_s:
            return list(found)
        await asyncio.sleep(POLL_S)


async def _present_leftovers(
    world: World, before: Mapping[str, Usage], redis_before: RedisUsage, *, dead_workers_are_gone: bool
) -> list[str]:
    after, redis_after = await usage_of(world), await redis_usage(world)
    found = grown(before, after)
    found += [f"{name} is not running" for name in (*SERVICES, REDIS) if name not in after]
    for name in GATEWAYS:
        if num_open := int(await metric(world, name, "baton_open_requests")):
            found.append(f"{name} has {num_open} open requests")
    if redis_after.immortal:
        found.append(f"Redis keys without expiry: {redis_after.immortal}")
    if text := memory_growth.grown("the data of Redis", redis_before.memory_bytes, redis_after.memory_bytes):
        found.append(text)
    status = await world.cluster.status()
    living = {f"{w.worker.worker_id}:{w.worker.worker_epoch:016x}" for w in status.workers}
    if dead_workers_are_gone and redis_after.workers - living:
        found.append(f"block events of dead workers: {sorted(redis_after.workers - living)}")
    return found


def _living(world: World) -> list[tuple[str, Child]]:
    return [(name, child) for name, child in world.cluster.children.items() if child.exit_code is None]
