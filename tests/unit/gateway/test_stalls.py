"""Stalls of the gateway's own process, which must not count as failures of schedulers and workers."""

import asyncio
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.placement import Placement
from baton.core.errors import StreamBroken
from baton.gateway.cluster.attempt_errors import WorkerLost
from baton.gateway.cluster.scheduler_pool import SchedulerPool, SchedulerPoolTimes
from baton.gateway.cluster.worker_session import SessionTimes, WorkerSession
from tests import builders
from tests.unit.gateway.virtual import virtual

CALL_S = 1.0
STALL_S = 5.0


class Stalls:
    """A clock as `AwakeClock`: `stall` passes time that it does not count."""

    def __init__(self) -> None:
        self._stalled_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() - self._stalled_s

    async def stall(self) -> None:
        self._stalled_s += STALL_S
        await asyncio.sleep(STALL_S)


class StallingScheduler:
    """Answers a call after a stall of the gateway, and, if it `hangs`, then never."""

    def __init__(self, clock: Stalls, hangs: bool) -> None:
        self._clock = clock
        self._hangs = hangs
        self.num_calls = 0

    async def _wait(self) -> None:
        self.num_calls += 1
        await self._clock.stall()
        if self._hangs:
            await asyncio.Event().wait()

    async def place(self, query: object) -> Placement:
        await self._wait()
        return builders.placement()

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        await self._wait()
        return True

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        await self._wait()
        return ()

    async def cache_stats(self) -> CacheStats:
        await self._wait()
        return CacheStats()

    async def watch(self) -> Any:
        await self._wait()
        return Mock(receive=asyncio.Event().wait, aclose=asyncio.Event().wait)


def pool(hangs: bool = False) -> tuple[SchedulerPool, StallingScheduler]:
    clock = Stalls()
    scheduler = StallingScheduler(clock, hangs)
    return SchedulerPool(
        Mock(scheduler=lambda address: scheduler),
        Mock(),
        addresses=["scheduler:1"],
        times=SchedulerPoolTimes(heartbeat_s=0.2, call_s=CALL_S, wait_s=2.0),
        rng=Random(0),
        awake_clock=clock,
    ), scheduler


@virtual
async def test_scheduler_whose_placement_comes_after_a_stall_has_not_failed() -> None:
    schedulers, scheduler = pool()
    query = builders.query()
    placed = await schedulers.place(lambda now_s, answer_s: query, is_first=False, deadline_s=1e6)
    assert placed == builders.placement()
    assert (schedulers._failed_at_s, scheduler.num_calls) == ({}, 1)


@virtual
async def test_scheduler_that_answers_a_drain_after_a_stall_has_not_failed() -> None:
    schedulers, _ = pool()
    assert await schedulers.drain("w0")
    assert schedulers._failed_at_s == {}


@virtual
async def test_scheduler_that_accepts_a_watch_after_a_stall_has_not_failed() -> None:
    schedulers, scheduler = pool()
    watching = asyncio.create_task(schedulers._watch_one("scheduler:1"))
    await asyncio.sleep(STALL_S + CALL_S / 2)
    assert (schedulers._failed_at_s, scheduler.num_calls) == ({}, 1)
    watching.cancel()


@virtual
async def test_scheduler_that_does_not_answer_after_a_stall_has_failed() -> None:
    schedulers, _ = pool(hangs=True)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    asked = await schedulers._call_first(lambda api, within_s: api.drain("w0"), until_s=began_s + 1e6, skip=())
    assert asked is None
    assert loop.time() - began_s == pytest.approx(STALL_S + CALL_S)
    assert schedulers._failed_at_s.keys() == {"scheduler:1"}


@virtual
async def test_worker_that_refuses_a_dial_during_a_stall_has_died() -> None:
    """A dial that takes long by the ordinary clock would be that of an unreachable worker."""
    clock = Stalls()

    async def open_session(address: str) -> None:
        await clock.stall()
        raise StreamBroken("connection refused")

    session = WorkerSession(
        builders.worker_ref("w0"),
        Mock(open_session=open_session),
        gateway_id="g0",
        session_id="s0",
        tokenizer_fingerprint="t0",
        times=SessionTimes(heartbeat_s=0.2, detection_s=1.0, stuck_s=10.0),
        on_end=lambda _: None,
        awake_clock=clock,
    )
    with pytest.raises(WorkerLost, match="connection refused") as lost:
        await session.next_message()
    assert lost.value.has_died
