"""The scheduler's main without Redis or processes: its times, and how it keeps itself listed."""

import logging
from typing import Any

import pytest

from baton.core.apis import Member, MemberKind, Membership
from baton.core.errors import StoreUnavailable
from baton.runtime.settings import SchedulerConfig
from baton.scheduler.main import Announcements, times_of
from tests.times import TEST_TIMES

MEMBER = Member(kind=MemberKind.SCHEDULER, member_id="s0", epoch=1, address="h:1")


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


def test_times_follow_the_settings() -> None:
    config = SchedulerConfig(heartbeat_s=TEST_TIMES["heartbeat_s"], detection_s=TEST_TIMES["detection_s"])
    times = times_of(config)
    assert times.silence_s == config.detection_s
    assert times.reservation_s > config.detection_s, "a report has had every chance to count the placement"
    assert times.watch_interval_s < config.heartbeat_s / 2, "gateways see a change before they would miss a heartbeat"


async def test_a_store_that_goes_and_comes_is_logged_once_each_way(caplog: pytest.LogCaptureFixture) -> None:
    membership = Unsteady(True, False, False, True, True, False)
    announcements = Announcements(membership, MEMBER, ttl_s=5.0)
    with caplog.at_level(logging.INFO):
        for _ in range(6):
            await announcements.announce()
        await announcements.withdraw()
    events: list[Any] = [record.msg for record in caplog.records]
    assert [event["event"] for event in events] == ["store_away", "store_back", "store_away"]
    assert membership.ttls == [5.0] * 3


async def test_a_bug_in_the_store_is_not_taken_for_an_absence() -> None:
    with pytest.raises(IndexError):
        await Announcements(Unsteady(), MEMBER, ttl_s=5.0).announce()
