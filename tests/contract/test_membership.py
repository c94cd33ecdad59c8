"""Contract of `Membership` for each implementation."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.core.interfaces import Member, MemberKind, Membership
from tests.contract.stores import KINDS, open_stores, until_empty

pytestmark = pytest.mark.contract

LONG_S = 60.0


@pytest.fixture(params=KINDS)
async def membership(request: pytest.FixtureRequest) -> AsyncIterator[Membership]:
    async with open_stores(request.param, lambda: request.getfixturevalue("redis").url) as stores:
        yield stores.membership


def member(member_id: str = "w0", kind: MemberKind = MemberKind.WORKER, **changes: Any) -> Member:
    fields: dict[str, Any] = {"epoch": 1, "address": f"{member_id}:1", "info": (("pid", "7"), ("host", "here"))}
    return Member(kind=kind, member_id=member_id, **(fields | changes))


async def test_members_are_listed_by_kind_and_sorted_by_id(membership: Membership) -> None:
    for name in ("w2", "w10", "w1"):
        await membership.announce(member(name), LONG_S)
    await membership.announce(member("s1", MemberKind.SCHEDULER), LONG_S)
    assert await membership.members(MemberKind.WORKER) == (member("w1"), member("w10"), member("w2"))
    assert await membership.members(MemberKind.SCHEDULER) == (member("s1", MemberKind.SCHEDULER),)
    assert await membership.members(MemberKind.GATEWAY) == ()


async def test_any_epoch_and_id_is_stored_unchanged(membership: Membership) -> None:
    unusual = member('ä b:{c}*\n"d"', epoch=2**64 - 1, info=())
    await membership.announce(unusual, LONG_S)
    assert await membership.members(MemberKind.WORKER) == (unusual,)


async def test_second_announcement_replaces_the_first(membership: Membership) -> None:
    await membership.announce(member(address="old:1"), LONG_S)
    await membership.announce(member(address="new:1"), LONG_S)
    assert await membership.members(MemberKind.WORKER) == (member(address="new:1"),)


async def test_withdrawn_member_is_not_listed(membership: Membership) -> None:
    await membership.announce(member("w1"), LONG_S)
    await membership.announce(member("w2"), LONG_S)
    await membership.withdraw(member("w1"))
    await membership.withdraw(member("unknown"))
    assert await membership.members(MemberKind.WORKER) == (member("w2"),)


async def test_withdrawal_of_an_old_epoch_keeps_the_new_one(membership: Membership) -> None:
    await membership.announce(member(epoch=2**63), LONG_S)
    await membership.announce(member(epoch=2**63 + 1), LONG_S)
    await membership.withdraw(member(epoch=2**63))
    assert await membership.members(MemberKind.WORKER) == (member(epoch=2**63 + 1),)


async def test_member_that_stops_announcing_expires(membership: Membership) -> None:
    await membership.announce(member("brief", MemberKind.GATEWAY), 0.05)
    await membership.announce(member("lasting"), LONG_S)
    await until_empty(lambda: membership.members(MemberKind.GATEWAY))
    assert await membership.members(MemberKind.WORKER) == (member("lasting"),)


async def test_announcement_extends_the_expiry(membership: Membership) -> None:
    await membership.announce(member(), 0.05)
    await membership.announce(member("brief", MemberKind.GATEWAY), 0.05)
    await membership.announce(member(), LONG_S)
    await until_empty(lambda: membership.members(MemberKind.GATEWAY))
    assert await membership.members(MemberKind.WORKER) == (member(),)


async def test_expired_member_can_be_announced_again(membership: Membership) -> None:
    await membership.announce(member(), 0.01)
    await until_empty(lambda: membership.members(MemberKind.WORKER))
    await membership.announce(member(epoch=2), LONG_S)
    assert await membership.members(MemberKind.WORKER) == (member(epoch=2),)
