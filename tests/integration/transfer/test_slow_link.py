"""Faults during a running read. A link of 40 Mbit/s makes the read take seconds."""

import asyncio
import signal

import pytest

from tests.integration.transfer import slow_link
from tests.integration.transfer.peers import PeerDied, PeerHandle, Peers, peers
from tests.integration.transfer.slow_link import LinkEnd, sent_bytes
from tests.integration.transfer.test_transfer_between_processes import (
    TOKENS,
    assert_clean,
    pull_until_received,
    warm,
)

SKIP_REASON = slow_link.skip_reason()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(110),
    pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON or "a slow link is available"),
]
RATE = "40mbit"


async def start_pair(group: Peers, ends: tuple[LinkEnd, LinkEnd]) -> tuple[PeerHandle, PeerHandle]:
    """Start two processes with a probed link. Returns (owner, reader)."""
    owner, reader = await asyncio.gather(
        group.start("nixl", "p0", 7, port=7001, env=ends[0].env, netns=ends[0].netns),
        group.start("nixl", "d0", 8, port=7002, env=ends[1].env, netns=ends[1].netns),
    )
    await warm(reader, owner)
    return owner, reader


async def start_slow_pull(owner: PeerHandle, reader: PeerHandle, ends: tuple[LinkEnd, LinkEnd]) -> "asyncio.Task[dict]":
    """Start a pull that takes seconds. Returns when 2 MB have been sent.

    Another pull is started if one has ended before that was noticed.
    """
    for request in range(3):
        before = sent_bytes(ends[0])
        prompt = {"request": request, "text": "a" * (request + 1), "num_tokens": TOKENS}
        await owner.ask("prefill", reader=reader.ref, **prompt)
        pull = asyncio.create_task(reader.ask("pull", owner=owner.ref, **prompt))
        while not pull.done():
            if sent_bytes(ends[0]) - before > 2_000_000:
                return pull
            await asyncio.sleep(0.02)
    pytest.fail(f"each pull ended at once: {await pull}")


@pytest.mark.fault("F-3")
async def test_late_write_of_a_paused_owner_hits_only_quarantined_blocks() -> None:
    with slow_link.slow_link(RATE) as ends:
        async with peers() as group:
            owner, reader = await start_pair(group, ends)
            pull = await start_slow_pull(owner, reader, ends)
            owner.signal(signal.SIGSTOP)
            result = await pull
            assert result["outcome"] in ("transfer_timeout", "lease_lost")
            for _attempt in range(200):  # a lease may end before the read's deadline
                state = await reader.ask("state")
                if state["blocks"]["receiving"] == 0:
                    break
                await asyncio.sleep(0.1)
            assert 0 < state["blocks"]["quarantined"] <= 1024 * 0.02
            assert [link["broken"] for link in state["links"]] in ([True], [])
            await reader.ask("reuse", text="reused")
            owner.signal(signal.SIGCONT)
            for _attempt in range(300):
                state = await reader.ask("state")
                if not state["blocks"]["quarantined"]:
                    break
                await asyncio.sleep(0.1)
            assert state["blocks"]["quarantined"] == 0
            reused = await reader.ask("check_reused")
            assert reused["damaged"] == 0
            assert reused["blocks"] > 900
            await owner.ask("reuse", text="other")
            await pull_until_received(owner, reader, 10)
            await assert_clean(owner, reader)


@pytest.mark.long  # `make test` covers this by tests/sim/test_slow_link.py and tests/unit/transfer/test_link_refusal.py
@pytest.mark.fault("F-17")
async def test_link_slower_than_required_is_refused_before_anything_is_pulled() -> None:
    with slow_link.slow_link(RATE) as ends:
        async with peers() as group:
            owner, reader = await asyncio.gather(
                group.start("nixl", "p0", 7, port=7001, env=ends[0].env, netns=ends[0].netns),
                group.start(
                    "nixl", "d0", 8, port=7002, env={**ends[1].env, "PEER_MIN_LINK_GBPS": "0.2"}, netns=ends[1].netns
                ),
            )
            assert not (await reader.ask("warm", owner=owner.ref))["is_warm"]
            (link,) = (await reader.ask("state"))["links"]
            assert link["broken"]
            assert link["problem"].startswith("refused: measured 0.0")
            before = sent_bytes(ends[0])
            prefill = asyncio.create_task(
                owner.ask("prefill", request=0, text="a", num_tokens=TOKENS, reader=reader.ref)
            )
            result = await reader.ask("pull", owner=owner.ref, request=0, text="a", num_tokens=TOKENS)
            assert result["outcome"] == "transfer_failed"
            await prefill
            assert sent_bytes(ends[0]) - before < 64 * 1024  # less than one block
            await assert_clean(owner, reader)


@pytest.mark.fault("F-2")
@pytest.mark.long
async def test_owner_killed_during_a_read_leaks_no_block_at_the_reader() -> None:
    with slow_link.slow_link(RATE) as ends:
        async with peers() as group:
            owner, reader = await start_pair(group, ends)
            pull = await start_slow_pull(owner, reader, ends)
            await owner.kill()
            result = await pull
            assert result["outcome"] in ("transfer_failed", "lease_lost", "worker_lost")
            await assert_clean(reader)
            owner = await group.start("nixl", "p0", 9, port=7001, env=ends[0].env, netns=ends[0].netns)
            await pull_until_received(owner, reader, 10)


@pytest.mark.fault("F-6")
@pytest.mark.long
async def test_reader_killed_during_a_read_does_not_affect_the_owner() -> None:
    with slow_link.slow_link(RATE) as ends:
        async with peers() as group:
            owner, reader = await start_pair(group, ends)
            pull = await start_slow_pull(owner, reader, ends)
            await reader.kill()
            with pytest.raises(PeerDied):
                await pull
            reader = await group.start("nixl", "d0", 9, port=7003, env=ends[1].env, netns=ends[1].netns)
            await pull_until_received(owner, reader, 10)
            await assert_clean(owner, reader)
