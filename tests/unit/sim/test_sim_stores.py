"""Faults of the simulated store server: each looks to its callers as that of a Redis server."""

import asyncio
from random import Random

import pytest

from baton.core.errors import StoreUnavailable
from baton.core.interfaces import Member, MemberKind
from baton.core.kv.kv_events import KvSnapshot
from baton.sim import virtual_time
from baton.sim.sim_stores import CALL_S, SimStores, StoreFault
from tests.builders import worker_ref

SCHEDULER = Member(kind=MemberKind.SCHEDULER, member_id="s", epoch=1, address="s:1")


def stores() -> SimStores:
    return SimStores(Random(0), asyncio.get_running_loop().time)


async def listed(server: SimStores) -> tuple[Member, ...]:
    return await server.membership.members(MemberKind.SCHEDULER)


def test_full_store_refuses_writes_and_still_answers() -> None:
    async def main() -> None:
        server = stores()
        await server.membership.announce(SCHEDULER, 1.0)
        server.fault = StoreFault.FULL
        with pytest.raises(StoreUnavailable, match="out of memory"):
            await server.membership.announce(SCHEDULER, 1.0)
        assert await listed(server) == (SCHEDULER,)
        await asyncio.sleep(1.5)
        assert await listed(server) == (), "the announcement has expired"

    virtual_time.run(main())


def test_full_store_loses_the_events_of_a_worker_whose_write_it_refuses() -> None:
    async def main() -> None:
        server = stores()
        worker = worker_ref("w0")
        held = KvSnapshot(worker=worker, event_seq=1, block_size_tokens=16, hashes={})
        await server.feed.reset(held, 60.0)
        server.fault = StoreFault.FULL
        assert await server.feed.snapshot(worker) == held
        with pytest.raises(StoreUnavailable, match="out of memory"):
            await server.feed.publish(worker, [], 60.0)
        assert await server.feed.snapshot(worker) is None

    virtual_time.run(main())


def test_hanging_store_fails_calls_after_their_time_limit() -> None:
    async def main() -> None:
        server = stores()
        server.fault = StoreFault.HANGING
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await listed(server)
        assert asyncio.get_running_loop().time() == pytest.approx(CALL_S)
        call = asyncio.create_task(listed(server))
        await asyncio.sleep(CALL_S / 2)
        server.fault = StoreFault.NONE
        assert await call == ()

    virtual_time.run(main())


def test_flushed_and_refusing_stores() -> None:
    async def main() -> None:
        server = stores()
        await server.membership.announce(SCHEDULER, 10.0)
        server.flush()
        assert await listed(server) == ()
        server.fault = StoreFault.DOWN
        with pytest.raises(StoreUnavailable, match="refuses"):
            await listed(server)

    virtual_time.run(main())


def test_unstable_store_may_have_done_a_call_that_failed() -> None:
    async def main() -> None:
        server = stores()
        server.fault = StoreFault.UNSTABLE
        done_although_failed = 0
        for number in range(40):
            member = Member(kind=MemberKind.SCHEDULER, member_id=f"{number}", epoch=1, address="s:1")
            try:
                await server.membership.announce(member, 10.0)
            except StoreUnavailable:
                server.fault = StoreFault.NONE
                done_although_failed += member in await listed(server)
                server.fault = StoreFault.UNSTABLE
        assert 0 < done_although_failed < 40

    virtual_time.run(main())
