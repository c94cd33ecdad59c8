"""GrpcServer and GrpcNetwork over real sockets: ports, health, reflection, connections and invalid peers."""

import asyncio
import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.placement import Placement
from baton.core.errors import ConfigError, StreamBroken
from baton.core.messages.jobs import Ack, Step
from baton.rpc import grpc_network, inference_rpc, peer_rpc, scheduler_rpc, worker_rpc
from baton.rpc.channel import open_channel
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.streams.grpc_streams import ACCEPTED
from baton.runtime.observability.health import Health
from baton.wire.v1 import scheduler_pb2_grpc
from tests import builders, malformed_connections
from tests.contract.networks import StubScheduler, StubWorker, UpdateQueue, echo, eventually, until_broken
from tests.free_port import free_port
from tests.unit.rpc.client_api_stubs import StubInference

HEARTBEAT_S = 10.0
"""No host vanishes here. Pings that are due more often would fail if this process is stalled."""
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    server = GrpcServer(heartbeat_s=HEARTBEAT_S)
    yield server
    await server.stop(0)


@pytest.fixture
async def network() -> AsyncIterator[GrpcNetwork]:
    network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=60.0, call_s=60.0)
    yield network
    await network.aclose()


@pytest.fixture
async def short_limits() -> AsyncIterator[GrpcNetwork]:
    """A network for servers that do not answer."""
    network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=0.5, call_s=0.5)
    yield network
    await network.aclose()


async def start(server: GrpcServer) -> str:
    return f"127.0.0.1:{await server.start('127.0.0.1', 0)}"


# Ports


async def test_used_port_is_an_error_that_names_port_and_flag(server: GrpcServer) -> None:
    port = await server.start("127.0.0.1", 0)
    second = GrpcServer(heartbeat_s=HEARTBEAT_S)
    with pytest.raises(ConfigError, match=f"port {port} .*--grpc-port"):
        await second.start("127.0.0.1", port, flag="--grpc-port")


async def test_second_server_with_reuseport_cannot_bind_the_same_port(server: GrpcServer) -> None:
    """With SO_REUSEPORT on both, each server would receive half of the calls."""
    port = await server.start("127.0.0.1", 0)
    other = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    with pytest.raises(RuntimeError):
        other.add_insecure_port(f"127.0.0.1:{port}")


async def test_port_can_be_bound_again_after_stop(server: GrpcServer) -> None:
    port = await server.start("127.0.0.1", free_port("127.0.0.1"))
    await server.stop(0)
    second = GrpcServer(heartbeat_s=HEARTBEAT_S)
    assert await second.start("127.0.0.1", port) == port
    await second.stop(0)


# Health and reflection


async def test_grpc_health_status_follows_the_process_health(server: GrpcServer) -> None:
    server.add_worker(StubWorker())
    health = Health("model")
    server.follow(health)
    async with grpc.aio.insecure_channel(await start(server)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status  # type: ignore[no-any-return]

        services = ("", worker_rpc.SERVICE, peer_rpc.SERVICE)
        assert [await status(service) for service in services] == [NOT_SERVING] * 3
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=worker_rpc.SERVICE))
        assert (await watch.read()).status == NOT_SERVING
        health.ready("model")
        assert (await watch.read()).status == SERVING
        assert [await status(service) for service in services] == [SERVING] * 3
        health.drain()
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status(scheduler_rpc.SERVICE)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def test_services_without_process_health_are_serving_until_stop(server: GrpcServer) -> None:
    server.add_scheduler(StubScheduler())
    async with grpc.aio.insecure_channel(await start(server)) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=scheduler_rpc.SERVICE))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop(60))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await stopping


async def reflected_services(address: str) -> set[str]:
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async with grpc.aio.insecure_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests)
        (answer,) = [each async for each in call]
        return {service.name for service in answer.list_services_response.service}


async def test_reflection_lists_client_services_and_no_internal_ones(server: GrpcServer) -> None:
    server.add_inference(StubInference())
    server.add_scheduler(StubScheduler())
    found = await reflected_services(await start(server))
    assert inference_rpc.SERVICE in found
    assert not [name for name in found if name.startswith("baton.wire")]


async def test_server_with_internal_services_only_has_no_reflection(server: GrpcServer) -> None:
    """The call is unary: a write to a stream that has ended may fail with another error than its status."""
    server.add_scheduler(StubScheduler())
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(await start(server)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary(REFLECT)(request.SerializeToString())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


# Connections


async def test_tcp_nodelay_is_set_on_both_ends(server: GrpcServer, network: GrpcNetwork) -> None:
    """With Nagle's algorithm, a step's tokens would wait for the acknowledgement of the previous step."""
    server.add_worker(StubWorker(session=echo_steps))
    address = await start(server)
    port = int(address.rsplit(":", 1)[1])
    session = await network.open_session(address)
    ends = [(sock, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for sock in own_tcp_sockets(port)]
    assert len(ends) == 2
    assert all(no_delay for _, no_delay in ends)
    for sock, _ in ends:
        sock.close()
    await session.aclose()


def is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(descriptor).st_mode)
    except OSError:  # closed since
        return False


def own_tcp_sockets(port: int) -> list[socket.socket]:
    """Return duplicates of this process's connected TCP sockets with `port` at one end."""
    found = []
    descriptors = [int(name) for name in os.listdir("/dev/fd") if is_socket(int(name))]  # before any is duplicated
    for descriptor in descriptors:
        try:
            sock = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        try:
            is_wanted = port in (sock.getsockname()[1], sock.getpeername()[1])
        except (OSError, IndexError, TypeError):
            is_wanted = False
        if is_wanted:
            found.append(sock)
        else:
            sock.close()
    return found


async def echo_steps(stream: object) -> None:
    await echo(stream)  # type: ignore[arg-type]


async def test_each_session_uses_its_own_connection(server: GrpcServer, network: GrpcNetwork) -> None:
    server.add_worker(StubWorker(session=until_broken))  # type: ignore[arg-type]
    address = await start(server)
    sessions = [await network.open_session(address) for _ in range(3)]
    sockets = own_tcp_sockets(int(address.rsplit(":", 1)[1]))
    assert len(sockets) == 6
    for sock in sockets:
        sock.close()
    for session in sessions:
        await session.aclose()


async def test_proxy_environment_variables_are_ignored(
    server: GrpcServer, network: GrpcNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.add_worker(StubWorker(session=lambda stream: echo(stream, lambda ack: Step(seq=ack.seq))))
    session = await network.open_session(await start(server))  # raises StreamBroken if it uses the proxy
    session.send(Ack(seq=7))
    assert await session.receive() == Step(seq=7)
    await session.aclose()


async def test_open_session_fails_if_the_connection_is_refused_or_never_answered(short_limits: GrpcNetwork) -> None:
    with pytest.raises(StreamBroken):
        await short_limits.open_session("127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StreamBroken, match="no answer"):
        await short_limits.open_session(f"127.0.0.1:{silent.getsockname()[1]}")


async def test_open_session_fails_if_the_server_lacks_the_service(server: GrpcServer, network: GrpcNetwork) -> None:
    server.add_scheduler(StubScheduler())
    address = await start(server)
    with pytest.raises(StreamBroken, match="UNIMPLEMENTED"):
        await network.open_session(address)


async def test_call_to_an_unresponsive_scheduler_times_out(server: GrpcServer, short_limits: GrpcNetwork) -> None:
    unresponsive = StubScheduler()

    async def place(_: object) -> None:
        await asyncio.Event().wait()

    unresponsive.place = place  # type: ignore[assignment, method-assign]
    server.add_scheduler(unresponsive)
    with pytest.raises(StreamBroken, match=r"no answer within 0\.5 s"):
        await short_limits.scheduler(await start(server)).place(builders.query())


@pytest.fixture
async def stalling() -> AsyncIterator[GrpcNetwork]:
    """A network with timeouts of 0.5 s, by a clock that counts almost all time as a stall."""
    loop = asyncio.get_running_loop()
    network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=0.5, call_s=0.5, awake_clock=lambda: loop.time() / 100)
    yield network
    await network.aclose()


async def stall(after_s: float) -> None:
    """Block the event loop for longer than the timeouts."""
    await asyncio.sleep(after_s)
    time.sleep(0.8)  # noqa: ASYNC251 - blocks the loop on purpose


async def test_stall_of_this_process_does_not_fail_a_call(server: GrpcServer, stalling: GrpcNetwork) -> None:
    """The scheduler, which is in this process here, answers only after the stall."""
    answering = StubScheduler()

    async def place(_: object) -> Placement:
        await asyncio.sleep(0.2)
        return builders.placement()

    answering.place = place  # type: ignore[assignment, method-assign]
    server.add_scheduler(answering)
    scheduler = stalling.scheduler(await start(server))
    placed, _ = await asyncio.gather(scheduler.place(builders.query()), stall(after_s=0.1))
    assert placed == builders.placement()


async def test_stall_of_this_process_does_not_fail_a_dial(server: GrpcServer, stalling: GrpcNetwork) -> None:
    """The worker's server, which is in this process here, accepts the stream only after the stall."""
    server.add_worker(StubWorker())
    session, _ = await asyncio.gather(stalling.open_session(await start(server)), stall(after_s=0.0))
    await session.aclose()


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[grpc.aio.Channel]:
    """Return the list of the channels that networks open, in order."""
    opened: list[grpc.aio.Channel] = []

    def recording_open(*args: Any) -> grpc.aio.Channel:
        opened.append(open_channel(*args))
        return opened[-1]

    monkeypatch.setattr(grpc_network, "open_channel", recording_open)
    return opened


def is_closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_channel_of_a_forgotten_scheduler_is_closed(
    server: GrpcServer, network: GrpcNetwork, channels: list[grpc.aio.Channel]
) -> None:
    server.add_scheduler(StubScheduler(()))
    address = await start(server)
    api = network.scheduler(address)
    await api.explain(None)
    network.forget_scheduler(address)
    await eventually(lambda: is_closed(channels[0]))
    await api.explain(None)  # a caller may still have the client
    await eventually(lambda: is_closed(channels[1]))
    assert await network.scheduler(address).explain(None) == ()
    assert [is_closed(channel) for channel in channels] == [True, True, False]
    network.forget_scheduler("127.0.0.1:9")  # unknown
    assert network._retired == []


async def test_running_calls_to_a_forgotten_scheduler_end_properly(
    server: GrpcServer, network: GrpcNetwork, channels: list[grpc.aio.Channel]
) -> None:
    is_asked, may_answer, updates = asyncio.Event(), asyncio.Event(), UpdateQueue()
    scheduler = StubScheduler(updates=updates)

    async def place(_: object) -> Placement:
        is_asked.set()
        await may_answer.wait()
        return builders.placement()

    scheduler.place = place  # type: ignore[assignment, method-assign]
    server.add_scheduler(scheduler)
    address = await start(server)
    watch = await network.scheduler(address).watch()
    placing = asyncio.create_task(network.scheduler(address).place(builders.query()))
    await is_asked.wait()
    network.forget_scheduler(address)
    may_answer.set()
    assert await placing == builders.placement()
    updates.put(ClusterUpdate(scheduler_id="s0", reports=()))
    assert (await watch.receive()).scheduler_id == "s0"
    assert not is_closed(channels[0])
    await watch.aclose()
    await eventually(lambda: is_closed(channels[0]))


async def test_closed_network_closes_the_channels_of_forgotten_schedulers(
    server: GrpcServer, network: GrpcNetwork, channels: list[grpc.aio.Channel]
) -> None:
    server.add_scheduler(StubScheduler(updates=UpdateQueue()))
    address = await start(server)
    watch = await network.scheduler(address).watch()
    network.forget_scheduler(address)
    await network.aclose()
    assert is_closed(channels[0])
    with pytest.raises(StreamBroken):
        await watch.receive()


async def test_client_reconnects_to_a_restarted_scheduler(server: GrpcServer, network: GrpcNetwork) -> None:
    server.add_scheduler(StubScheduler(()))
    port = await server.start("127.0.0.1", free_port("127.0.0.1"))
    client = network.scheduler(f"127.0.0.1:{port}")
    assert await client.explain(None) == ()
    await server.stop(0)
    with pytest.raises(StreamBroken):
        await client.explain(None)
    restarted = GrpcServer(heartbeat_s=HEARTBEAT_S)
    restarted.add_scheduler(StubScheduler(()))
    await restarted.start("127.0.0.1", port)
    async with asyncio.timeout(60):
        while True:
            try:
                assert await client.explain(None) == ()
                break
            except StreamBroken:
                await asyncio.sleep(0.05)
    await restarted.stop(0)


# Invalid input


@pytest.mark.parametrize("garbage", [b"\xff" * 20, b"\x80\x04\x95pickle.", b"", b"\x0a\x02\x08\x01"])
async def test_invalid_message_ends_only_its_own_stream(
    server: GrpcServer, network: GrpcNetwork, garbage: bytes
) -> None:
    stub = StubWorker(session=echo_steps)
    server.add_worker(stub)
    address = await start(server)
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream("/baton.wire.v1.Worker/Session")(garbage)  # a write could replace the status
        assert await asyncio.wait_for(call.code(), 60) is grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: stub.ended == 1)
    async with grpc.aio.insecure_channel(address) as channel:
        unary = channel.unary_unary("/baton.wire.v1.Worker/Session")
        with pytest.raises(grpc.aio.AioRpcError):
            await unary(garbage, timeout=60)


@pytest.mark.parametrize("garbage", [b"\xff" * 20, b"", b"\x0a\x01"])
async def test_invalid_call_is_refused_without_a_traceback(
    server: GrpcServer, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.add_scheduler(StubScheduler(()))
    address = await start(server)
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/baton.wire.v1.Scheduler/Place")(garbage)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in caplog.text
        assert await scheduler_pb2_grpc.SchedulerStub(channel).Explain(scheduler_rpc.pb.ExplainRequest()) is not None  # type: ignore[no-untyped-call]


async def test_server_accepts_sessions_after_connections_that_are_not_http2(
    server: GrpcServer, network: GrpcNetwork
) -> None:
    server.add_worker(StubWorker(session=lambda stream: echo(stream, lambda ack: Step(seq=ack.seq))))
    address = await start(server)
    for garbage in (
        b"\x80\x04\x95" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
    ):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(garbage)
        with suppress(ConnectionError):  # closed before all bytes were read
            await asyncio.wait_for(reader.read(-1), 60)
        writer.close()
    session = await network.open_session(address)
    session.send(Ack(seq=7))
    assert await session.receive() == Step(seq=7)
    await session.aclose()


async def test_message_above_the_size_limit_ends_the_stream(server: GrpcServer) -> None:
    """The client's call sends one message: a write to a stream that ends meanwhile may replace its status."""
    small = GrpcServer(heartbeat_s=HEARTBEAT_S, max_message_bytes=1000)
    stub = StubWorker(session=echo_steps)
    small.add_worker(stub)
    address = f"127.0.0.1:{await small.start('127.0.0.1', 0)}"
    async with grpc.aio.insecure_channel(address) as channel:
        job = worker_rpc.to_gateway_message(builders.prefill_job(range(1000)))
        call = channel.unary_stream("/baton.wire.v1.Worker/Session")(job.SerializeToString())
        assert await asyncio.wait_for(call.code(), 60) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await eventually(lambda: stub.ended == 1)
    await small.stop(0)


async def test_client_stream_breaks_on_an_invalid_message_from_the_server(network: GrpcNetwork) -> None:
    async def send_invalid_message(_: object, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        await context.send_initial_metadata(ACCEPTED)
        await context.write(b"\xff\xff")

    invalid_server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(send_invalid_message)  # type: ignore[arg-type]
    invalid_server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.wire.v1.Worker", {"Session": handler}),)
    )
    port = invalid_server.add_insecure_port("127.0.0.1:0")
    await invalid_server.start()
    session = await network.open_session(f"127.0.0.1:{port}")
    with pytest.raises(StreamBroken, match="not a valid message"):
        await asyncio.wait_for(session.receive(), 60)
    with pytest.raises(StreamBroken):
        session.send(Ack(seq=1))
    await invalid_server.stop(0)


async def test_call_with_an_undecodable_path_does_not_stop_the_server(server: GrpcServer, network: GrpcNetwork) -> None:
    """The server of grpc.aio stops accepting calls after such a path while its process keeps running."""
    server.add_worker(StubWorker(session=lambda stream: echo(stream, lambda ack: Step(seq=ack.seq))))
    address = await start(server)
    undecodable = malformed_connections.HTTP2_START + malformed_connections.grpc_call(
        "/", malformed_connections.grpc_message(b""), path=b"/\xff/\xfe"
    )
    for _ in range(3):
        assert not (await malformed_connections.exchange(int(address.rsplit(":", 1)[1]), [undecodable])).was_closed
    session = await network.open_session(address)
    session.send(Ack(seq=7))
    assert await session.receive() == Step(seq=7)
    await session.aclose()


async def test_unknown_method_is_refused_as_unimplemented(server: GrpcServer) -> None:
    server.add_scheduler(StubScheduler(()))
    async with grpc.aio.insecure_channel(await start(server)) as channel:
        for path in ("/", "/x", "/baton.wire.v1.Scheduler/Nothing", "/baton.wire.v1.Worker/Session", "/\u20ac/y"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary(path)(b"", timeout=60)
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
