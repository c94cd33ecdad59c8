"""What only the real thing has: ports, health, reflection, socket options, and other programs at the other
end."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.core.errors import ConfigError, StreamBroken
from baton.core.messages.jobs import Ack, Step
from baton.rpc import inference_rpc, peer_rpc, scheduler_rpc, worker_rpc
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_streams import ACCEPTED
from baton.runtime.observability.health import Health
from baton.wire.v1 import scheduler_pb2_grpc, worker_pb2_grpc
from tests import builders, hostile
from tests.contract.networks import StubScheduler, StubWorker, echo, eventually, until_broken
from tests.unit.rpc.front_stubs import StubInference

HEARTBEAT_S = 0.2
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    server = GrpcServer(heartbeat_s=HEARTBEAT_S)
    yield server
    await server.stop(0)


@pytest.fixture
async def network() -> AsyncIterator[GrpcNetwork]:
    network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=0.5, call_s=0.5)
    yield network
    await network.aclose()


async def started(server: GrpcServer) -> str:
    return f"127.0.0.1:{await server.start('127.0.0.1', 0)}"


# Ports


async def test_a_taken_port_is_an_error_that_names_port_and_flag(server: GrpcServer) -> None:
    port = await server.start("127.0.0.1", 0)
    second = GrpcServer(heartbeat_s=HEARTBEAT_S)
    with pytest.raises(ConfigError, match=f"port {port} .*--grpc-port"):
        await second.start("127.0.0.1", port, flag="--grpc-port")


async def test_two_servers_never_share_a_port(server: GrpcServer) -> None:
    """SO_REUSEPORT would let them, and give each half of the calls."""
    port = await server.start("127.0.0.1", 0)
    other = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    with pytest.raises(RuntimeError):
        other.add_insecure_port(f"127.0.0.1:{port}")


async def test_a_stopped_server_gives_its_port_back(server: GrpcServer) -> None:
    port = await server.start("127.0.0.1", 0)
    await server.stop(0)
    second = GrpcServer(heartbeat_s=HEARTBEAT_S)
    assert await second.start("127.0.0.1", port) == port
    await second.stop(0)


# Health and reflection


async def test_health_follows_the_process(server: GrpcServer) -> None:
    server.add_worker(StubWorker())
    health = Health("model")
    server.follow(health)
    async with grpc.aio.insecure_channel(await started(server)) as channel:
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


async def test_without_health_all_serve_until_the_server_stops(server: GrpcServer) -> None:
    server.add_scheduler(StubScheduler())
    async with grpc.aio.insecure_channel(await started(server)) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=scheduler_rpc.SERVICE))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop(0.1))
        assert (await watch.read()).status == NOT_SERVING
        await stopping


async def listed(address: str) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        return {service.name for service in answer.list_services_response.service}


async def test_reflection_shows_what_clients_call_and_nothing_else(server: GrpcServer) -> None:
    server.add_inference(StubInference())
    server.add_scheduler(StubScheduler())
    found = await listed(await started(server))
    assert inference_rpc.SERVICE in found
    assert not [name for name in found if name.startswith("baton.wire")]


async def test_a_server_for_services_only_has_no_reflection(server: GrpcServer) -> None:
    server.add_scheduler(StubScheduler())
    address = await started(server)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await listed(address)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


# Connections


async def test_nagles_delay_is_off_on_both_ends(server: GrpcServer, network: GrpcNetwork) -> None:
    """A step's tokens must not wait for the last step's acknowledgement."""
    server.add_worker(StubWorker(session=echo_steps))
    address = await started(server)
    port = int(address.rsplit(":", 1)[1])
    session = await network.open_session(address)
    ends = [(sock, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for sock in own_tcp_sockets(port)]
    assert len(ends) == 2
    assert all(no_delay for _, no_delay in ends)
    for sock, _ in ends:
        sock.close()
    await session.aclose()


def own_tcp_sockets(port: int) -> list[socket.socket]:
    """This process's connected TCP sockets with `port` at one end, as copies."""
    found = []
    for name in os.listdir("/dev/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
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


async def test_each_stream_has_a_connection_of_its_own(server: GrpcServer, network: GrpcNetwork) -> None:
    server.add_worker(StubWorker(session=until_broken))  # type: ignore[arg-type]
    address = await started(server)
    sessions = [await network.open_session(address) for _ in range(3)]
    sockets = own_tcp_sockets(int(address.rsplit(":", 1)[1]))
    assert len(sockets) == 6
    for sock in sockets:
        sock.close()
    for session in sessions:
        await session.aclose()


async def test_a_proxy_of_the_environment_is_not_asked(
    server: GrpcServer, network: GrpcNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.add_worker(StubWorker(session=until_broken))  # type: ignore[arg-type]
    session = await network.open_session(await started(server))
    await session.aclose()


async def test_a_refused_connection_and_a_silent_server_are_reported_in_time(network: GrpcNetwork) -> None:
    with pytest.raises(StreamBroken):
        await network.open_session("127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(StreamBroken, match="no answer"):
        await network.open_session(f"127.0.0.1:{deaf.getsockname()[1]}")


async def test_a_missing_service_is_reported(server: GrpcServer, network: GrpcNetwork) -> None:
    server.add_scheduler(StubScheduler())
    address = await started(server)
    with pytest.raises(StreamBroken, match="UNIMPLEMENTED"):
        await network.open_session(address)


async def test_unresponsive_scheduler_costs_at_most_the_timeout(server: GrpcServer, network: GrpcNetwork) -> None:
    never = StubScheduler()

    async def place(_: object) -> None:
        await asyncio.Event().wait()

    never.place = place  # type: ignore[assignment, method-assign]
    server.add_scheduler(never)
    with pytest.raises(StreamBroken, match="DEADLINE_EXCEEDED"):
        await network.scheduler(await started(server)).place(builders.query())


async def test_a_scheduler_that_comes_back_is_found_again(server: GrpcServer, network: GrpcNetwork) -> None:
    server.add_scheduler(StubScheduler(()))
    port = await server.start("127.0.0.1", 0)
    client = network.scheduler(f"127.0.0.1:{port}")
    assert await client.explain(None) == ()
    await server.stop(0)
    with pytest.raises(StreamBroken):
        await client.explain(None)
    again = GrpcServer(heartbeat_s=HEARTBEAT_S)
    again.add_scheduler(StubScheduler(()))
    await again.start("127.0.0.1", port)
    async with asyncio.timeout(5):
        while True:
            try:
                assert await client.explain(None) == ()
                break
            except StreamBroken:
                await asyncio.sleep(0.05)
    await again.stop(0)


# Garbage (F-22)


@pytest.mark.parametrize("garbage", [b"\xff" * 20, b"\x80\x04\x95pickle.", b"", b"\x0a\x02\x08\x01"])
async def test_garbage_ends_its_own_stream_only(server: GrpcServer, network: GrpcNetwork, garbage: bytes) -> None:
    stub = StubWorker(session=echo_steps)
    server.add_worker(stub)
    address = await started(server)
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/baton.wire.v1.Worker/Session")()
        await call.write(garbage)
        assert await asyncio.wait_for(call.code(), 2) is grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: stub.ended == 1)
    async with grpc.aio.insecure_channel(address) as channel:
        unary = channel.unary_unary("/baton.wire.v1.Worker/Session")
        with pytest.raises(grpc.aio.AioRpcError):
            await unary(garbage, timeout=1)


@pytest.mark.parametrize("garbage", [b"\xff" * 20, b"", b"\x0a\x01"])
async def test_garbage_in_a_call_is_refused(
    server: GrpcServer, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.add_scheduler(StubScheduler(()))
    address = await started(server)
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/baton.wire.v1.Scheduler/Place")(garbage)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in caplog.text
        assert await scheduler_pb2_grpc.SchedulerStub(channel).Explain(scheduler_rpc.pb.ExplainRequest()) is not None  # type: ignore[no-untyped-call]


async def test_bytes_that_are_not_http2_leave_the_server_alive(server: GrpcServer, network: GrpcNetwork) -> None:
    server.add_worker(StubWorker(session=until_broken))  # type: ignore[arg-type]
    address = await started(server)
    for garbage in (
        b"\x80\x04\x95" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
    ):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(garbage)
        await asyncio.wait_for(reader.read(-1), 5)
        writer.close()
    session = await network.open_session(address)
    await session.aclose()


async def test_a_message_that_is_too_large_ends_the_stream(server: GrpcServer) -> None:
    small = GrpcServer(heartbeat_s=HEARTBEAT_S, max_message_bytes=1000)
    stub = StubWorker(session=echo_steps)
    small.add_worker(stub)
    address = f"127.0.0.1:{await small.start('127.0.0.1', 0)}"
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()  # type: ignore[no-untyped-call]
        await call.write(worker_rpc.to_gateway_message(builders.prefill_job(range(1000))))
        assert await asyncio.wait_for(call.code(), 2) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await eventually(lambda: stub.ended == 1)
    await small.stop(0)


async def test_garbage_from_a_server_breaks_the_clients_stream(network: GrpcNetwork) -> None:
    async def babble(_: object, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        await context.send_initial_metadata(ACCEPTED)
        await context.write(b"\xff\xff")

    liar = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(babble)  # type: ignore[arg-type]
    liar.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.wire.v1.Worker", {"Session": handler}),))
    port = liar.add_insecure_port("127.0.0.1:0")
    await liar.start()
    session = await network.open_session(f"127.0.0.1:{port}")
    with pytest.raises(StreamBroken, match="not a valid message"):
        await asyncio.wait_for(session.receive(), 2)
    with pytest.raises(StreamBroken):
        session.send(Ack(seq=1))
    await liar.stop(0)


async def test_non_text_path_does_not_stop_the_server(server: GrpcServer, network: GrpcNetwork) -> None:
    """grpc's own server would stop for good, and leave a process that lives and serves nobody."""
    server.add_worker(StubWorker(session=lambda stream: echo(stream, lambda ack: Step(seq=ack.seq))))
    address = await started(server)
    no_text = hostile.BEGIN + hostile.grpc_call("/", hostile.grpc_message(b""), path=b"/\xff/\xfe")
    for _ in range(3):
        assert not (await hostile.say(int(address.rsplit(":", 1)[1]), [no_text])).was_closed
    session = await network.open_session(address)
    session.send(Ack(seq=7))
    assert await session.receive() == Step(seq=7)
    await session.aclose()


async def test_a_call_of_an_unknown_method_is_refused(server: GrpcServer) -> None:
    server.add_scheduler(StubScheduler(()))
    async with grpc.aio.insecure_channel(await started(server)) as channel:
        for path in ("/", "/x", "/baton.wire.v1.Scheduler/Nothing", "/baton.wire.v1.Worker/Session", "/\u20ac/y"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary(path)(b"", timeout=5)
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
