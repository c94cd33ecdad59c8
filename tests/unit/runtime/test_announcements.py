"""Announcements of a process in the store: interval, TTL and logging while the store is unavailable."""

import asyncio
import logging
from typing import Any

import pytest

from baton.core.errors import StoreUnavailable
from baton.core.interfaces import Member, MemberKind, Membership
from baton.runtime.network import announcements as announcements_module
from baton.runtime.network.announcements import TTL_HEARTBEATS, Announcements
from baton.sim import virtual_time
from baton.store.memory.memory_stores import MemoryMembership

MEMBER = Member(kind=MemberKind.SCHEDULER, member_id="s0", epoch=1, address="h:1")
HEARTBEAT_S = 2.0


class FailingMembership(Membership):
    """Fails an announcement if the next entry of `answers` is False, and records the TTL of the others."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.ttls: list[float] = []

    async def announce(self, member: Member, ttl_s: float) -> None:
        if not self.answers.pop(0):
            raise StoreUnavailable("redis is unreachable")
        self.ttls.append(ttl_s)

    async def withdraw(self, member: Member) -> None:
        raise StoreUnavailable("redis is unreachable")

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        raise AssertionError("members() must not be called")


class RecordingMembership(MemoryMembership):
    """Records the time of each announcement."""

    def __init__(self) -> None:
        super().__init__()
        self.announced_s: list[float] = []

    async def announce(self, member: Member, ttl_s: float) -> None:
        self.announced_s.append(asyncio.get_running_loop().time())
        await super().announce(member, ttl_s)


async def test_store_outage_and_recovery_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    membership = FailingMembership(True, False, False, True, True, False)
    listed_at: list[int] = []
    announcements = Announcements(
        membership,
        MEMBER,
        heartbeat_s=HEARTBEAT_S,
        ttl_s=5.0,
        on_listed=lambda: listed_at.append(len(membership.answers)),
    )
    with caplog.at_level(logging.INFO):
        for _ in range(6):
            await announcements.announce()
        assert listed_at == [5, 2]
        await announcements.withdraw()
    events: list[Any] = [record.msg for record in caplog.records if record.name == announcements_module.__name__]
    assert [event["event"] for event in events] == [
        "store_became_unavailable",
        "store_recovered",
        "store_became_unavailable",
    ]
    assert {(event["use"], event["member"]) for event in events} == {("membership", "s0")}
    assert membership.ttls == [5.0] * 3


async def test_member_is_listed_at_the_first_announcement_that_the_store_accepts() -> None:
    listed_at: list[int] = []
    membership = FailingMembership(False, False, True, True)
    announcements = Announcements(
        membership, MEMBER, heartbeat_s=HEARTBEAT_S, on_listed=lambda: listed_at.append(len(membership.answers))
    )
    for _ in range(4):
        await announcements.announce()
    assert listed_at == [1]


async def test_unexpected_store_error_is_raised() -> None:
    with pytest.raises(IndexError):
        await Announcements(FailingMembership(), MEMBER, heartbeat_s=HEARTBEAT_S).announce()


async def test_default_ttl_is_a_multiple_of_the_heartbeat() -> None:
    membership = FailingMembership(True)
    await Announcements(membership, MEMBER, heartbeat_s=HEARTBEAT_S).announce()
    assert membership.ttls == [TTL_HEARTBEATS * HEARTBEAT_S]


@pytest.mark.parametrize(("already_announced", "announced_s"), [(False, [0.0, 2.0, 4.0]), (True, [2.0, 4.0])])
def test_member_is_announced_once_per_heartbeat_until_withdrawn(
    already_announced: bool, announced_s: list[float]
) -> None:
    async def scenario() -> None:
        membership = RecordingMembership()
        announcements = Announcements(membership, MEMBER, heartbeat_s=HEARTBEAT_S)
        announcing = asyncio.create_task(
            announcements.reannounce_forever() if already_announced else announcements.announce_forever()
        )
        await asyncio.sleep(2.5 * HEARTBEAT_S)
        assert membership.announced_s == announced_s
        assert await membership.members(MemberKind.SCHEDULER) == (MEMBER,)
        announcing.cancel()
        await announcements.withdraw()
        assert await membership.members(MemberKind.SCHEDULER) == ()

    virtual_time.run(scenario())
