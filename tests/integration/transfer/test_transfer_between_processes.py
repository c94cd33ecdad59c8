"""Pulls between processes over NIXL and shared memory make no wrong block visible after kills and pauses."""

import asyncio
import os
import signal
import sys
from random import Random

import psutil
import pytest

from tests.integration.transfer.peers import PeerDied, PeerHandle, peers
from tests.scale import sized
from tests.times import TEST_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(sized(100, 400))]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs NIXL, /dev/shm and /proc, which only Linux has")
NOTICED_S = 5.0
"""Longest time until a reader has noticed that its owner is dead: the default of `detection_s`."""
NIXL = pytest.param("nixl", marks=on_linux)
COLLECTIVE = pytest.param("collective", marks=pytest.mark.long)
BACKENDS = [NIXL, pytest.param("local", marks=pytest.mark.long), COLLECTIVE]
TOKENS = 4 * 200 + 3  # 201 blocks of 64 KiB: more than is in flight at a time
LEASE_S = TEST_TIMES["lease_s"]
LONG_LIMITS = {"PEER_TIME_FACTOR": "10"}
"""For tests of no fault: a process that stands still for seconds must not end a lease or a connection."""


async def pull_prompt(
    owner: PeerHandle,
    reader: PeerHandle,
    request: int = 0,
    text: str = "a",
    *,
    num_tokens: int = TOKENS,
    **options: object,
) -> dict:
    """Compute one prompt at the owner and pull it at the reader."""
    prefill = asyncio.create_task(
        owner.ask("prefill", request=request, text=text, num_tokens=num_tokens, reader=reader.ref, **options)
    )
    result = await reader.ask("pull", owner=owner.ref, request=request, text=text, num_tokens=num_tokens)
    await prefill
    return result


async def warm(reader: PeerHandle, owner: PeerHandle) -> None:
    """Connect a reader to an owner. A probe that has timed out is repeated."""
    for _attempt in range(50):
        if (await reader.ask("warm", owner=owner.ref))["is_warm"]:
            return
        await asyncio.sleep(0.2)
    pytest.fail("the link is not usable")


async def pull_until_received(owner: PeerHandle, reader: PeerHandle, request: int) -> None:
    """Pull until the link has been probed and a pull succeeds. Takes up to 50 request numbers."""
    for attempt in range(50):
        result = await pull_prompt(owner, reader, request + attempt, "~" * (attempt + 1))
        if result["outcome"] == "received":
            assert result["wrong"] == 0
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"no pull succeeded: {result}")


async def assert_clean(*handles: PeerHandle) -> None:
    """Check that all blocks are freed within four seconds and no wrong block is visible."""
    for handle in handles:
        for _attempt in range(40):
            state = await handle.ask("state")
            counts = state["blocks"]
            assert state["audit"] == 0
            if counts["free"] + counts["cached"] == counts["total"] and not state["open_leases"]:
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail(f"{handle.ref['worker_id']} is not clean: {state}")


async def until_idle(handle: PeerHandle, within_s: float) -> dict:
    """Wait until no sequence has blocks and no block is being received. Returns the state of the process."""
    for _attempt in range(int(within_s / 0.05)):
        state: dict = await handle.ask("state")
        if state["blocks"]["receiving"] == state["blocks"]["used"] == 0:
            return state
        await asyncio.sleep(0.05)
    pytest.fail(f"{handle.ref['worker_id']} is not idle within {within_s:g} s: {state}")


async def until_no_more_than(was: dict, handle: PeerHandle) -> None:
    """Wait until a process has as few threads, descriptors and tasks as before. Some end late."""
    for _attempt in range(100):
        now = await handle.ask("state")
        more = {key: (was[key], now[key]) for key in ("threads", "fds", "tasks") if now[key] > was[key]}
        if not more:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{handle.ref['worker_id']} has more than before: {more}")


@pytest.mark.parametrize("backend", BACKENDS)
async def test_transfers_in_both_directions_are_exact_and_leak_nothing(backend: str) -> None:
    async with peers() as group:
        one, two = await asyncio.gather(
            group.start(backend, "h0", 7, env=LONG_LIMITS), group.start(backend, "h1", 8, env=LONG_LIMITS)
        )
        await warm(two, one)
        result = await pull_prompt(one, two, chunks=4, chunk_s=0.01)
        assert (result["outcome"], result["wrong"], result["bytes"]) == ("received", 0, 201 * 65536)
        assert result["first_tokens"] == [0]
        (link,) = (await two.ask("state"))["links"]
        assert link["transport"] == result["transport"] in ("shared-memory", "cma", "tcp", "gloo")
        assert link["bytes_per_s"] > 0
        before: list[dict] = []
        for request in range(1, sized(4, 60)):
            both = [(one, two, 2 * request), (two, one, 2 * request + 1)]
            answers = await asyncio.gather(*(pull_prompt(a, b, number, f"t{number}") for a, b, number in both))
            assert [(a["outcome"], a["wrong"]) for a in answers] == [("received", 0)] * 2
            if not before:
                await assert_clean(one, two)
                before = [await handle.ask("state") for handle in (one, two)]
        await assert_clean(one, two)
        for was, handle in zip(before, (one, two), strict=True):
            await until_no_more_than(was, handle)
        for handle in (two, one):
            await handle.ask("close")
            assert handle.process.stdin is not None
            handle.process.stdin.close()
            assert await asyncio.wait_for(handle.process.wait(), 60) == 0


@pytest.mark.fault("F-2")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_owner_killed_at_any_point_leaves_only_valid_blocks(backend: str) -> None:
    """A pull from the old epoch of a process restarted on the same address is refused, too."""
    rng = Random(5)
    async with peers() as group:
        reader, owner = await asyncio.gather(group.start(backend, "d0", 8), group.start(backend, "p0", 100))
        for round_number in range(sized(1, 10)):
            await warm(reader, owner)
            pull = asyncio.create_task(
                pull_prompt(owner, reader, round_number, f"k{round_number}", chunks=20, chunk_s=0.02, is_held=True)
            )
            await asyncio.sleep(rng.uniform(0.02, 0.25))
            before = owner.ref
            await owner.kill()
            with pytest.raises(PeerDied):
                await pull  # its prefill command
            state = await until_idle(reader, NOTICED_S)
            assert state["blocks"]["quarantined"] == 0
            await assert_clean(reader)
            owner = await group.start(backend, "p0", 101 + round_number, port=int(before["address"].rsplit(":", 1)[1]))
            stale = await reader.ask("pull", owner=before, request=1000, text="a", num_tokens=TOKENS)
            # "transfer_failed": a read has failed, and the reader has not reconnected yet.
            assert stale["outcome"] in ("wrong_epoch", "worker_lost", "transfer_failed")
            await pull_until_received(owner, reader, 2000 + 100 * round_number)
            await assert_clean(owner, reader)


@pytest.mark.fault("F-6")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_reader_killed_at_any_point_frees_the_owner_within_a_lease(backend: str) -> None:
    rng = Random(6)
    async with peers() as group:
        owner = await group.start(backend, "p0", 7)
        for round_number in range(sized(1, 10)):
            reader = await group.start(backend, "d0", 100 + round_number)
            pull = asyncio.create_task(
                pull_prompt(owner, reader, round_number, f"k{round_number}", chunks=20, chunk_s=0.01, is_held=True)
            )
            await asyncio.sleep(rng.uniform(0.05, 0.25))
            await reader.kill()
            with pytest.raises(PeerDied):
                await pull
            await owner.ask("finish")
            await asyncio.sleep(0.5)
            await assert_clean(owner)
        reader = await group.start(backend, "d0", 999)
        await pull_until_received(owner, reader, 99)


@pytest.mark.fault("F-3")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_owner_paused_for_three_leases_serves_no_stale_block(backend: str) -> None:
    async with peers() as group:
        owner, reader = await asyncio.gather(group.start(backend, "p0", 7), group.start(backend, "d0", 8))
        await warm(reader, owner)
        pull = asyncio.create_task(pull_prompt(owner, reader, 0, "a", chunks=20, chunk_s=0.02, is_held=True))
        await asyncio.sleep(0.2)
        owner.signal(signal.SIGSTOP)
        await asyncio.sleep(3 * LEASE_S)
        owner.signal(signal.SIGCONT)
        await owner.ask("finish")
        result = await pull
        assert result["outcome"] in ("lease_lost", "worker_lost", "transfer_timeout", "transfer_failed")
        await asyncio.sleep(0.3)
        await owner.ask("reuse", text="other")
        await assert_clean(owner, reader)
        await pull_until_received(owner, reader, 10)
        await assert_clean(owner, reader)


async def assert_no_lasting_file(before: set[str]) -> None:
    """Check that no new file stays in /dev/shm. Other test processes have files there for a short time."""
    lasting = set(os.listdir("/dev/shm")) - before
    for _attempt in range(300):
        if not lasting:
            return
        await asyncio.sleep(0.1)
        lasting &= set(os.listdir("/dev/shm"))
    pytest.fail(f"files stay in /dev/shm: {lasting}")


@on_linux
async def test_shared_memory_leaves_no_file_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    async with peers() as group:
        owner, reader = await asyncio.gather(
            group.start("local", "p0", 7, env=LONG_LIMITS), group.start("local", "d0", 8, env=LONG_LIMITS)
        )
        assert (await pull_prompt(owner, reader))["outcome"] == "received"
        await assert_no_lasting_file(before)
        await owner.kill()
        await reader.kill()
    await assert_no_lasting_file(before)


@on_linux
async def test_owner_over_tcp_serves_a_pull_and_uses_little_cpu_when_idle() -> None:
    tcp = {"UCX_TLS": "tcp", **LONG_LIMITS}
    async with peers() as group:
        owner, reader = await asyncio.gather(
            group.start("nixl", "p0", 7, env=tcp), group.start("nixl", "d0", 8, env=tcp)
        )
        result = await pull_prompt(owner, reader, chunks=4, chunk_s=0.01)
        assert (result["outcome"], result["wrong"], result["transport"]) == ("received", 0, "tcp")
        await asyncio.sleep(LEASE_S)
        before = (await owner.ask("state"))["cpu_s"]
        await asyncio.sleep(1.0)
        after = (await owner.ask("state"))["cpu_s"]
        assert after - before < 0.5  # a spinning thread would use 1 s; `state` itself uses some
        await assert_clean(owner, reader)


@on_linux
async def test_each_pair_shows_its_own_transport_if_local_and_tcp_peers_are_mixed() -> None:
    """UCX logs a transport only for the first peer of a kind, and names no peer.

    First reads that overlap, because one takes more than a second, show no transport. Then another reader
    tries.
    """
    tcp = {"UCX_TLS": "tcp"}
    async with peers() as group:
        alone, local, *others = await asyncio.gather(
            group.start("nixl", "d0", 1, env=LONG_LIMITS),
            group.start("nixl", "p0", 3, env=LONG_LIMITS),
            *(group.start("nixl", f"p{number}", 3 + number, env=LONG_LIMITS | tcp) for number in (1, 2)),
            group.start("nixl", "p3", 9, env=LONG_LIMITS),
        )
        await warm(alone, local)
        (expected,) = (await alone.ask("state"))["links"]
        right = {"p0": expected["transport"], "p1": "tcp", "p2": "tcp", "p3": expected["transport"]}
        links: dict[str, str] = {}
        for number in range(1, 4):
            reader = await group.start("nixl", f"d{number}", 10 + number, env=LONG_LIMITS)
            await asyncio.gather(*(warm(reader, owner) for owner in (local, *others)))
            links = {link["peer"]: link["transport"] for link in (await reader.ask("state"))["links"]}
            assert all(links[peer] in (transport, "unknown") for peer, transport in right.items())
            if links == right:
                break
        assert links == right


@on_linux
def test_no_peer_process_is_running_after_the_tests() -> None:
    def words_of(child: psutil.Process) -> list[str]:
        try:
            return child.cmdline()
        except psutil.NoSuchProcess:  # also a zombie, such as a server of another test
            return []

    children = psutil.Process().children(recursive=True)
    assert not [child.pid for child in children if any("peer_process" in word for word in words_of(child))]
