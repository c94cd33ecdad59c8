"""How a process stays listed: how often it says so, for how long that holds, and what it says of a store that
is away."""

import asyncio
import logging
from typing import Any

import pytest

from baton.core.errors import StoreUnavailable
from baton.core.interfaces import Member, MemberKind, Membership
from baton.runtime.network.announcements import TTL_HEARTBEATS, Announcements
from baton.sim import virtual_time
from baton.store.memory.memory_stores import MemoryMembership

MEMBER = Member(kind=MemberKind.SCHEDULER, member_id="s0", epoch=1, address="h:1")
HEARTBEAT_S = 2.0


class Unsteady(Membership):
    """Is away whenever the next entry of `answers` says so."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.ttls: list[float] = []

    async def announce(self, member: Member, ttl_s: float) -> None:
        if not self.answers.pop(0):
            raise StoreUnavailable("redis is away")
        self.ttls.append(ttl_s)

    async def withdraw(self, member: Member) -> None:
        raise StoreUnavailable("redis is away")

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        raise AssertionError("nobody asks here")


class Counting(MemoryMembership):
    """Takes down when it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.announced_s: list[float] = []

    async def announce(self, member: Member, ttl_s: float) -> None:
        self.announced_s.append(asyncio.get_running_loop().time())
        await super().announce(member, ttl_s)


async def test_a_store_that_goes_and_comes_is_logged_once_each_way(caplog: pytest.LogCaptureFixture) -> None:
    membership = Unsteady(True, False, False, True, True, False)
    announcements = Announcements(membership, MEMBER, heartbeat_s=HEARTBEAT_S, ttl_s=5.0)
    with caplog.at_level(logging.INFO):
        for _ in range(6):
            await announcements.announce()
        await announcements.withdraw()
    events: list[Any] = [record.msg for record in caplog.records]
    assert [event["event"] for event in events] == [
        "store_became_unavailable",
        "store_recovered",
        "store_became_unavailable",
    ]
    assert {event["member"] for event in events} == {"s0"}
    assert membership.ttls == [5.0] * 3


async def test_a_bug_in_the_store_is_not_taken_for_an_absence() -> None:
    with pytest.raises(IndexError):
        await Announcements(Unsteady(), MEMBER, heartbeat_s=HEARTBEAT_S).announce()


async def test_two_heartbeats_may_be_lost_where_no_time_is_asked_for() -> None:
    membership = Unsteady(True)
    await Announcements(membership, MEMBER, heartbeat_s=HEARTBEAT_S).announce()
    assert membership.ttls == [TTL_HEARTBEATS * HEARTBEAT_S]


@pytest.mark.parametrize(("is_first_made", "announced_s"), [(False, [0.0, 2.0, 4.0]), (True, [2.0, 4.0])])
def test_one_announcement_a_heartbeat_until_it_is_withdrawn(is_first_made: bool, announced_s: list[float]) -> None:
    async def scenario() -> None:
        membership = Counting()
        announcements = Announcements(membership, MEMBER, heartbeat_s=HEARTBEAT_S)
        keeping = asyncio.create_task(
            announcements.reannounce_forever() if is_first_made else announcements.announce_forever()
        )
        await asyncio.sleep(2.5 * HEARTBEAT_S)
        assert membership.announced_s == announced_s
        assert await membership.members(MemberKind.SCHEDULER) == (MEMBER,)
        keeping.cancel()
        await announcements.withdraw()
        assert await membership.members(MemberKind.SCHEDULER) == ()

    virtual_time.run(scenario())
