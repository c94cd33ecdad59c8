"""Faults during a real read, which a link of 40 Mbit/s makes long enough."""

import asyncio
import signal

import pytest

from tests.integration.transfer import slow_link
from tests.integration.transfer.peers import PeerDied, PeerHandle, Peers, peers
from tests.integration.transfer.slow_link import Side, sent_bytes
from tests.integration.transfer.test_transfer_between_processes import TOKENS, assert_clean, handed_over

WHY_NOT = slow_link.why_not()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(110),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is one"),
]
RATE = "40mbit"


async def pair(group: Peers, sides: tuple[Side, Side]) -> tuple[PeerHandle, PeerHandle]:
    """(owner, reader), warm."""
    owner, reader = await asyncio.gather(
        group.start("nixl", "p0", 7, port=7001, env=sides[0].env, netns=sides[0].netns),
        group.start("nixl", "d0", 8, port=7002, env=sides[1].env, netns=sides[1].netns),
    )
    assert (await reader.ask("warm", owner=owner.ref))["is_warm"]
    return owner, reader


async def in_mid_read(owner: PeerHandle, reader: PeerHandle, sides: tuple[Side, Side]) -> "asyncio.Task[dict]":
    """Start a transfer that takes seconds. Returns once bytes of it were sent."""
    before = sent_bytes(sides[0])
    await owner.ask("prefill", request=0, text="a", num_tokens=TOKENS, reader=reader.ref)
    handover = asyncio.create_task(reader.ask("pull", owner=owner.ref, request=0, text="a", num_tokens=TOKENS))
    for _attempt in range(1000):
        if sent_bytes(sides[0]) - before > 2_000_000:
            break
        await asyncio.sleep(0.02)
    assert not handover.done()
    return handover


async def works_again(owner: PeerHandle, reader: PeerHandle, request: int) -> None:
    """Wait until the link was probed and works again."""
    for attempt in range(40):
        answer = await handed_over(owner, reader, request + attempt, f"b{attempt}")
        if answer["outcome"] == "received":
            assert answer["wrong"] == 0
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"the pair stays unusable: {answer}")


@pytest.mark.fault("F-3")
async def test_late_write_of_a_paused_owner_hits_only_quarantined_blocks() -> None:
    with slow_link.slow_link(RATE) as sides:
        async with peers() as group:
            owner, reader = await pair(group, sides)
            handover = await in_mid_read(owner, reader, sides)
            owner.signal(signal.SIGSTOP)
            answer = await handover
            assert answer["outcome"] in ("transfer_timeout", "lease_lost")
            for _attempt in range(40):  # a lease may end before the read's deadline
                state = await reader.ask("state")
                if state["blocks"]["receiving"] == 0:
                    break
                await asyncio.sleep(0.1)
            assert 0 < state["blocks"]["quarantined"] <= 1024 * 0.02
            assert [link["broken"] for link in state["links"]] in ([True], [])
            await reader.ask("reuse", text="canary")
            owner.signal(signal.SIGCONT)
            for _attempt in range(100):
                state = await reader.ask("state")
                if not state["blocks"]["quarantined"]:
                    break
                await asyncio.sleep(0.1)
            assert state["blocks"]["quarantined"] == 0
            canary = await reader.ask("canary")
            assert canary["damaged"] == 0
            assert canary["blocks"] > 900
            await owner.ask("reuse", text="other")
            await works_again(owner, reader, 10)
            await assert_clean(owner, reader)


@pytest.mark.fault("F-2")
@pytest.mark.long
async def test_owner_killed_during_a_read_leaves_nothing_behind() -> None:
    with slow_link.slow_link(RATE) as sides:
        async with peers() as group:
            owner, reader = await pair(group, sides)
            handover = await in_mid_read(owner, reader, sides)
            await owner.kill()
            answer = await handover
            assert answer["outcome"] in ("transfer_failed", "lease_lost", "worker_lost")
            await assert_clean(reader)
            owner = await group.start("nixl", "p0", 9, port=7001, env=sides[0].env, netns=sides[0].netns)
            await works_again(owner, reader, 10)


@pytest.mark.fault("F-6")
@pytest.mark.long
async def test_reader_killed_during_a_read_does_not_affect_the_owner() -> None:
    with slow_link.slow_link(RATE) as sides:
        async with peers() as group:
            owner, reader = await pair(group, sides)
            handover = await in_mid_read(owner, reader, sides)
            await reader.kill()
            with pytest.raises(PeerDied):
                await handover
            reader = await group.start("nixl", "d0", 9, port=7003, env=sides[1].env, netns=sides[1].netns)
            await works_again(owner, reader, 10)
            await assert_clean(owner, reader)
