"""Streams break if the other process is killed, or stopped with its connections open (F-18)."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from baton.core.errors import StreamBroken
from baton.core.messages.jobs import Ack, Step
from baton.core.messages.peer_messages import Renew, Renewed
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from tests import builders
from tests.contract.networks import StubWorker, echo, eventually, until_broken
from tests.integration.transfer.faulty_network import CUT, FaultyNetwork, faulty_network_unavailable_reason
from tests.netns import tool

pytestmark = pytest.mark.integration

NETWORK_REASON = faulty_network_unavailable_reason()
HEARTBEAT_S = 2.0
"""Long enough that a busy machine breaks no stream, not even by stopping one process for two seconds."""
DETECTION_LIMIT_S = 30.0
"""Limit for noticing a lost process. An idle machine needs two heartbeats and 0.5 s, a busy one longer."""

SERVER = f"""
import asyncio, sys
from baton.core.messages.peer_messages import Renewed
from baton.rpc.grpc_server import GrpcServer
from tests import builders
from tests.contract.networks import StubScheduler, StubWorker, echo
from tests.integration.rpc.test_lost_processes import step

async def main():
    server = GrpcServer(heartbeat_s={HEARTBEAT_S})
    server.add_worker(
        StubWorker(lambda s: echo(s, step), lambda s: echo(s, lambda renew: Renewed(renewal=renew.renewal)))
    )
    server.add_scheduler(StubScheduler(()))
    print(await server.start(sys.argv[1], 0), flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""

CLIENT = f"""
import asyncio, sys
from baton.core.messages.jobs import Ack
from baton.rpc.grpc_network import GrpcNetwork

async def main():
    network = GrpcNetwork(heartbeat_s={HEARTBEAT_S}, dial_s=60.0)
    session = await network.open_session(sys.argv[1])
    session.send(Ack(seq=1))
    await session.receive()
    print("connected", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


def step(ack: Ack) -> Step:
    return Step(seq=ack.seq, deltas=(builders.token_delta(ack.seq),))


@contextmanager
def python_process(code: str, *arguments: str, inside: Sequence[str] = ()) -> Iterator["subprocess.Popen[str]"]:
    """Run Python code. `inside`: words before the command, such as those that enter a network namespace."""
    command = [*inside, sys.executable, "-c", code, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def read_line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.fixture
async def network() -> AsyncIterator[GrpcNetwork]:
    network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=60.0, call_s=60.0)
    yield network
    await network.aclose()


async def check_is_broken(waiting: Awaitable[object]) -> None:
    with pytest.raises(StreamBroken):
        await waiting


async def check_cannot_dial(address: str) -> None:
    network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=1.0)
    try:
        with pytest.raises(StreamBroken):
            await network.open_session(address)
    finally:
        await network.aclose()


@pytest.mark.fault("F-18")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_killed_or_stopped_server_breaks_all_client_streams(network: GrpcNetwork, signum: signal.Signals) -> None:
    with python_process(SERVER, "127.0.0.1") as server:
        address = f"127.0.0.1:{read_line(server)}"
        session, peer = await network.open_session(address), await network.open_peer(address)
        scheduler = network.scheduler(address)
        assert await scheduler.explain(None) == ()
        session.send(Ack(seq=1))
        assert await session.receive() == step(Ack(seq=1))
        peer.send(Renew(renewal=1))
        assert await peer.receive() == Renewed(renewal=1)
        server.send_signal(signum)
        async with asyncio.timeout(DETECTION_LIMIT_S):
            await asyncio.gather(
                check_is_broken(session.receive()),
                check_is_broken(peer.receive()),
                check_is_broken(scheduler.explain(None)),
                check_cannot_dial(address),
            )


@pytest.mark.fault("F-18")
@pytest.mark.skipif(bool(NETWORK_REASON), reason=NETWORK_REASON or "namespaces and TUN devices are available")
async def test_vanished_host_breaks_all_client_streams(network: GrpcNetwork) -> None:
    """All packets are lost from one moment on, so that no connection is closed."""
    with FaultyNetwork(seed=18) as wires:
        machine = wires.add()
        wires.join_this_process()
        inside = (tool("ip"), "netns", "exec", machine.name)
        with python_process(SERVER, machine.address, inside=inside) as server:
            address = f"{machine.address}:{await asyncio.to_thread(read_line, server)}"
            session, peer = await network.open_session(address), await network.open_peer(address)
            session.send(Ack(seq=1))
            assert await session.receive() == step(Ack(seq=1))
            peer.send(Renew(renewal=1))
            assert await peer.receive() == Renewed(renewal=1)
            wires.faults = CUT
            async with asyncio.timeout(DETECTION_LIMIT_S):
                await asyncio.gather(
                    check_is_broken(session.receive()), check_is_broken(peer.receive()), check_cannot_dial(address)
                )


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_killed_or_stopped_client_breaks_its_streams_at_the_server(signum: signal.Signals) -> None:
    worker = StubWorker(session=lambda stream: echo(stream, step))
    server = GrpcServer(heartbeat_s=HEARTBEAT_S)
    server.add_worker(worker)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    with python_process(CLIENT, address) as client:
        assert await asyncio.to_thread(read_line, client) == "connected"
        client.send_signal(signum)
        await eventually(lambda: worker.ended == 1, DETECTION_LIMIT_S)
    await server.stop(0)


async def test_idle_stream_stays_open(network: GrpcNetwork) -> None:
    """The peer accepts keepalive pings at the heartbeat rate."""
    with python_process(SERVER, "127.0.0.1") as server:
        session = await network.open_session(f"127.0.0.1:{read_line(server)}")
        await asyncio.sleep(3 * HEARTBEAT_S)
        session.send(Ack(seq=1))
        assert await session.receive() == step(Ack(seq=1))
        await session.aclose()
        assert await until_broken(session) == []
