"""Pulls between processes on a network that loses, delays, duplicates and reorders packets, or is cut."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.integration.transfer.faulty_network import (
    CUT,
    Faults,
    FaultyNetwork,
    faulty_network_unavailable_reason,
)
from tests.integration.transfer.peers import PeerHandle, Peers, peers
from tests.integration.transfer.test_transfer_between_processes import (
    assert_clean,
    pull_prompt,
    pull_until_received,
    warm,
)
from tests.netns import Netns
from tests.scale import sized

SKIP_REASON = faulty_network_unavailable_reason()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON or "namespaces and TUN devices are available"),
]
KV_PORTS = (20_000, 20_999)
ENVIRON = {
    "UCX_TLS": "tcp",  # the processes share a kernel, so that UCX would use shared memory
    "UCX_TCP_PORT_RANGE": f"{KV_PORTS[0]}-{KV_PORTS[1]}",
    "PEER_LOOPBACK": "0",
}
UNRELIABLE = Faults(loss_share=0.01, duplicate_share=0.03, reorder_share=0.03, delay_s=(0.0002, 0.002))


@pytest.fixture
def network() -> Iterator[FaultyNetwork]:
    with FaultyNetwork(seed=16) as network:
        yield network


async def start(group: Peers, machine: Netns, worker_id: str, epoch: int, **environ: str) -> PeerHandle:
    """Start a process on its machine."""
    env = {**ENVIRON, "PEER_HOST": machine.address, **environ}
    return await group.start("nixl", worker_id, epoch, port=7000, env=env, netns=machine.name)


@pytest.mark.fault("F-16")
async def test_unreliable_packets_cause_no_error_and_no_wrong_block(network: FaultyNetwork) -> None:
    """All timeouts are ten times as long, because a retransmission may take longer than a short one."""
    network.faults = UNRELIABLE
    machines = [network.add() for _ in range(2)]
    async with peers() as group:
        owner, reader = await asyncio.gather(
            *(start(group, m, name, 7, PEER_TIME_FACTOR="10") for m, name in zip(machines, ("p0", "d0"), strict=True))
        )
        await warm(reader, owner)
        for request in range(sized(2, 20)):
            answers = await asyncio.gather(
                pull_prompt(owner, reader, 2 * request, f"t{2 * request}", num_tokens=203, chunks=3, chunk_s=0.01),
                pull_prompt(reader, owner, 2 * request + 1, f"t{2 * request + 1}", num_tokens=203),
            )
            assert [(a["outcome"], a["wrong"], a["transport"]) for a in answers] == [("received", 0, "tcp")] * 2
        for handle in (owner, reader):
            links = (await handle.ask("state"))["links"]
            assert [link["broken"] for link in links] == [False]
        await assert_clean(owner, reader)
    counts = network.counts
    assert min(counts.lost, counts.duplicated, counts.reordered) >= 10, counts


@pytest.mark.fault("F-15")
async def test_pair_without_a_data_path_times_out_and_is_used_again_after_healing(network: FaultyNetwork) -> None:
    """Only the ports of KV reads are cut. The control path works, so the owner counts as alive."""
    near, far, here = (network.add() for _ in range(3))
    async with peers() as group:
        cut_off, other, reader = await asyncio.gather(
            start(group, near, "p0", 7), start(group, far, "p1", 8), start(group, here, "d0", 9)
        )
        for owner in (cut_off, other):
            await warm(reader, owner)
            await pull_until_received(owner, reader, 1000 * owner.ref["worker_epoch"])
        network.set_link(near.address, here.address, Faults(loss_share=1.0, ports=KV_PORTS))
        assert (await pull_prompt(cut_off, reader, 20, "b"))["outcome"] == "transfer_timeout"
        state = await reader.ask("state")
        assert state["blocks"]["quarantined"] > 0
        assert {link["peer"]: link["broken"] for link in state["links"]} == {"p0": True, "p1": False}
        assert {link["peer"]: link["problem"] for link in state["links"]} == {"p0": "transfer_timeout", "p1": ""}
        refused = await reader.ask("pull", owner=cut_off.ref, request=21, text="c", num_tokens=803)
        assert refused["outcome"] == "transfer_timeout"  # at once, because the pair counts as broken
        await pull_until_received(other, reader, 100)
        network.set_link(near.address, here.address, None)
        await pull_until_received(cut_off, reader, 200)
        await assert_clean(cut_off, other, reader)


@pytest.mark.long  # `make test` covers this by tests/sim/test_storm.py, which cuts networks, and by the test above
@pytest.mark.fault("F-15")
async def test_cut_network_loses_pulls_and_leaks_nothing(network: FaultyNetwork) -> None:
    near, here = network.add(), network.add()
    async with peers() as group:
        owner, reader = await asyncio.gather(start(group, near, "p0", 7), start(group, here, "d0", 8))
        await warm(reader, owner)
        pull = asyncio.create_task(pull_prompt(owner, reader, 0, "a", chunks=10, chunk_s=0.05, is_held=True))
        await asyncio.sleep(0.2)
        network.faults = CUT
        await owner.ask("finish")
        assert (await pull)["outcome"] in ("transfer_timeout", "lease_lost", "worker_lost")
        network.faults = Faults()
        await pull_until_received(owner, reader, 10)
        await assert_clean(owner, reader)
