"""Probes of a cluster whose Redis takes no more writes, or has lost everything."""

import asyncio

import redis.asyncio

from tests.probes.result import Finding
from tests.probes.target import Target

FULL_S = 40.0
"""Longer than the announcement of a scheduler lives."""


async def full_store(target: Target) -> list[Finding]:
    """Make Redis refuse all writes, and send one request a second."""
    if target.redis_url is None:
        return []
    async with redis.asyncio.from_url(target.redis_url) as store:
        before = (await store.config_get("maxmemory"))["maxmemory"]
        used = (await store.info("memory"))["used_memory"]
        await store.config_set("maxmemory", max(1, used // 2))
        try:
            failed = await failures_for(target, FULL_S)
        finally:
            await store.config_set("maxmemory", before)
    return [Finding("requests that failed", failed, 0, "")]


async def flushed_store(target: Target) -> list[Finding]:
    """Delete all keys of Redis, and send one request a second."""
    if target.redis_url is None:
        return []
    async with redis.asyncio.from_url(target.redis_url) as store:
        await store.flushall()
        failed = await failures_for(target, 10.0)
    return [Finding("requests that failed", failed, 0, "")]


async def failures_for(target: Target, seconds: float) -> int:
    """Send small requests, one a second. Return how many were not answered."""
    loop = asyncio.get_running_loop()
    end_s, failed = loop.time() + seconds, 0
    while loop.time() < end_s:
        failed += not await target.is_serving()
        await asyncio.sleep(1.0)
    return failed
