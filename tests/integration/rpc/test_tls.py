"""TLS between services, and for clients of the front door: who is let in, who is not, and certificates that
are renewed meanwhile."""

import asyncio
import os
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.client_api import ModelInfo
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.placement import Placement
from baton.core.errors import ConfigError, StreamBroken
from baton.rpc import channel as wire_channel
from baton.rpc import grpc_network as wire_network
from baton.rpc import scheduler_rpc as wire_scheduler
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import SERVICE_NAME, Tls
from baton.rpc.inference_rpc import InferenceClient
from baton.runtime.config.config_base import load
from baton.runtime.config.settings import SchedulerConfig
from baton.runtime.network.tls_files import CertificatePair
from baton.wire.v1 import scheduler_pb2_grpc
from tests import builders
from tests.certificates import Authority, locked
from tests.contract.networks import StubScheduler, eventually, until_broken
from tests.contract.test_network import Updates
from tests.integration.gateway.http_gateway import http_gateway
from tests.unit.rpc.client_api_stubs import StubAdmin, StubInference

pytestmark = pytest.mark.integration

PAST = datetime.now(UTC) - timedelta(days=1)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path / "theirs")


@asynccontextmanager
async def scheduler(tls: Tls | None, service: StubScheduler | None = None) -> AsyncIterator[str]:
    server = GrpcServer(heartbeat_s=0.2, tls=tls)
    server.add_scheduler(service or StubScheduler(builders.placement(), report=until_broken))
    try:
        yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def network_of(tls: Tls | None) -> AsyncIterator[GrpcNetwork]:
    network = GrpcNetwork(heartbeat_s=0.2, dial_s=1.0, call_s=1.0, tls=tls, certificate_check_s=0.0)
    try:
        yield network
    finally:
        await network.aclose()


async def asked(address: str, tls: Tls | None) -> bool:
    """Whether the scheduler there answers one who comes with `tls`, to a call and to a stream."""
    async with network_of(tls) as network:
        try:
            answer = await network.scheduler(address).place(builders.query())
            await (await network.open_report(address)).aclose()
        except StreamBroken:
            return False
    return isinstance(answer, Placement)


async def test_services_of_one_cluster_talk(ours: Authority) -> None:
    async with scheduler(ours.service()) as address:
        assert await asked(address, ours.service("client"))


@pytest.mark.parametrize("who", ["plain text", "no certificate", "another authority", "another name", "expired"])
async def test_calls_from_other_certificates_are_refused(ours: Authority, theirs: Authority, who: str) -> None:
    pairs = {
        "another authority": theirs.pair("client", SERVICE_NAME),
        "another name": ours.pair("other", "example.org", f"*.{SERVICE_NAME}"),
        "expired": ours.pair("expired", SERVICE_NAME, ends=PAST),
    }
    tls = None if who == "plain text" else Tls(pair=pairs.get(who), ca=ours.file, name=SERVICE_NAME)
    async with scheduler(ours.service()) as address:
        assert not await asked(address, tls)
        assert await asked(address, ours.service("client")), "and the others still are"


async def test_another_name_is_refused_before_any_message_is_looked_at(ours: Authority) -> None:
    other = Tls(pair=ours.pair("other", "example.org"), ca=ours.file, name=SERVICE_NAME)
    service = StubScheduler(builders.placement(), report=until_broken)
    async with (
        scheduler(ours.service(), service) as address,
        open_channel(address, channel_options(0.2), other) as channel,
    ):
        health, ask = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        garbage = channel.unary_unary(f"/{wire_scheduler.SERVICE}/Place")(b"\xff")
        for call in (health.Check(ask), health.Watch(ask), garbage, scheduler_pb2_grpc.SchedulerStub(channel).Report()):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await call.details() == f"the caller's certificate does not name {SERVICE_NAME}"
    assert service.asked == []


async def test_one_name_of_several_is_enough(ours: Authority) -> None:
    tls = Tls(pair=ours.pair("several", "example.org", SERVICE_NAME, "10.0.0.7"), ca=ours.file, name=SERVICE_NAME)
    async with scheduler(tls) as address:
        assert await asked(address, tls)


@pytest.mark.parametrize("what", ["plain text", "another authority", "another name", "expired"])
async def test_servers_with_other_certificates_are_refused(ours: Authority, theirs: Authority, what: str) -> None:
    tls = {
        "plain text": None,
        "another authority": Tls(pair=theirs.pair("service", SERVICE_NAME), ca=ours.file),
        "another name": Tls(pair=ours.pair("other", "example.org"), ca=ours.file),
        "expired": Tls(pair=ours.pair("expired", SERVICE_NAME, ends=PAST), ca=ours.file),
    }[what]
    async with scheduler(tls) as address:
        assert not await asked(address, ours.service("client"))


async def test_garbage_at_the_port_harms_no_other_connection(ours: Authority) -> None:
    async with scheduler(ours.service()) as address:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\xff\xff" + bytes(300)):
            _, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(garbage)
            writer.close()
        assert await asked(address, ours.service("client"))


@pytest.mark.parametrize("begins", [b"", b"\x16\x03\x01\x01\x00\x01"])
async def test_who_does_not_go_on_with_the_handshake_is_closed(
    ours: Authority, monkeypatch: pytest.MonkeyPatch, begins: bytes
) -> None:
    monkeypatch.setattr(wire_channel, "HANDSHAKE_S", 0.5)
    async with scheduler(ours.service()) as address, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(begins)
        assert await reader.read() == b""
        writer.close()
        assert await asked(address, ours.service("client"))


async def test_a_renewed_certificate_is_used_for_new_connections(ours: Authority) -> None:
    """The old one has expired, so who still used it would not be believed."""
    service = ours.service("service", ends=PAST)
    async with scheduler(service) as address:
        client = ours.service("client")
        assert not await asked(address, client)
        ours.service("service")  # over the same files
        os.utime(service.pair.certificate, ns=(1, 1))  # type: ignore[union-attr]  # it has a pair
        assert await asked(address, client)
        await asyncio.to_thread(service.pair.certificate.write_text, "broken")  # type: ignore[union-attr]
        assert await asked(address, client), "what cannot be read changes nothing"


async def test_a_network_that_lives_long_uses_a_renewed_certificate(ours: Authority) -> None:
    client = ours.service("client", ends=PAST)
    async with scheduler(ours.service()) as address, network_of(client) as network:
        api = network.scheduler(address)
        with pytest.raises(StreamBroken):
            await api.place(builders.query())
        ours.service("client")  # over the same files
        assert isinstance(await api.place(builders.query()), Placement)
        await (await network.open_report(address)).aclose()


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[grpc.aio.Channel]:
    """Those that networks open, in order."""
    opened: list[grpc.aio.Channel] = []

    def kept(*args: Any) -> grpc.aio.Channel:
        opened.append(open_channel(*args))
        return opened[-1]

    monkeypatch.setattr(wire_network, "open_channel", kept)
    return opened


def is_closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_what_is_under_way_ends_on_the_channel_on_which_it_began(
    ours: Authority, channels: list[grpc.aio.Channel]
) -> None:
    client, updates = ours.service("client"), Updates()
    async with (
        scheduler(ours.service(), StubScheduler(builders.placement(), updates=updates)) as address,
        network_of(client) as network,
    ):
        api = network.scheduler(address)
        watch = await api.watch()
        for i in range(3):
            for _ in range(2):
                await api.place(builders.query())
            updates.put(ClusterUpdate(scheduler_id=f"s{i}", reports=()))
            assert (await watch.receive()).scheduler_id == f"s{i}"
            if i < 2:
                ours.service("client")
        await eventually(lambda: [is_closed(channel) for channel in channels] == [False, True, False])
        await watch.aclose()
        await eventually(lambda: [is_closed(channel) for channel in channels] == [True, True, False])


async def test_a_network_that_closes_leaves_no_channel_open(ours: Authority, channels: list[grpc.aio.Channel]) -> None:
    client = ours.service("client")
    async with scheduler(ours.service(), StubScheduler(builders.placement(), updates=Updates())) as address:
        async with network_of(client) as network:
            api = network.scheduler(address)
            watch = await api.watch()
            ours.service("client")
            await api.place(builders.query())
            assert [is_closed(channel) for channel in channels] == [False, False]
        assert [is_closed(channel) for channel in channels] == [True, True]
        with pytest.raises(StreamBroken):
            await watch.receive()
        with pytest.raises(StreamBroken, match="has been closed"):
            await api.place(builders.query())
        assert len(channels) == 2


@pytest.mark.parametrize("half", ["certificate", "key", "ca"])
async def test_half_of_a_renewal_changes_nothing(ours: Authority, half: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is there for a moment wherever files are replaced one by one; services dial and are dialled
    meanwhile."""
    client, service = ours.service("client"), ours.service()
    async with scheduler(service) as address, network_of(client) as network:
        for tls in (client, service):
            break_half(ours, tls, half)
        for _ in range(3):
            assert isinstance(await network.scheduler(address).place(builders.query()), Placement)
            await (await network.open_report(address)).aclose()
        said: list[Any] = [
            record.msg for record in caplog.records if record.name == "baton.runtime.process.watched_files"
        ]
        assert [line["event"] for line in said] == ["certificate_reload_failed"] * 2, "once at either end"
        ours.service("client")
        ours.service()
        ours.ca.cert_pem.write_to_path(str(ours.file))
        assert await asked(address, client)
        await (await network.open_report(address)).aclose()


def break_half(authority: Authority, tls: Tls, half: str) -> None:
    """`half` is not of the same renewal as the rest, or not all there."""
    assert tls.pair is not None
    other = authority.pair("other", SERVICE_NAME)
    match half:
        case "certificate":
            other.certificate.replace(tls.pair.certificate)
        case "key":
            other.key.replace(tls.pair.key)
        case "ca":
            authority.file.write_bytes(authority.file.read_bytes()[:200])


@pytest.mark.parametrize("half", ["certificate", "key", "ca"])
async def test_at_the_start_half_is_an_error(ours: Authority, half: str) -> None:
    tls = ours.service()
    break_half(ours, tls, half)
    with pytest.raises(ConfigError, match=r"not a certificate and its key|contains no CA certificates"):
        GrpcNetwork(heartbeat_s=0.2, tls=tls)
    with pytest.raises(ConfigError, match=r"not a certificate and its key|contains no CA certificates"):
        async with scheduler(tls):
            pass


async def test_files_that_are_replaced_while_they_are_read_are_not_taken(
    ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ours.pair("service", SERVICE_NAME)

    def check(self: CertificatePair) -> None:
        ours.pair("service", SERVICE_NAME)

    monkeypatch.setattr(CertificatePair, "check", check)
    with pytest.raises(ConfigError, match="are being replaced; try again"):
        pair.read()


def test_a_key_behind_a_password_is_refused_without_asking_for_it(ours: Authority) -> None:
    with pytest.raises(ConfigError, match=r"service\.key is encrypted, and its password cannot be entered"):
        locked(ours.pair("service", SERVICE_NAME)).check()


def test_half_of_it_is_refused_by_name(ours: Authority, theirs: Authority, tmp_path: Path) -> None:
    pair = ours.pair("service", SERVICE_NAME)
    with pytest.raises(ConfigError, match="tls_ca is missing"):
        load(SchedulerConfig, flags={"tls_cert": pair.certificate, "tls_key": pair.key}, environ={})
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        CertificatePair(certificate=pair.certificate, key=theirs.pair("other", "x").key).check()
    with pytest.raises(ConfigError, match=r"missing\.pem: no such file"):
        CertificatePair(certificate=tmp_path / "missing.pem", key=pair.key).check()


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


async def test_clients_of_the_front_door_over_grpc(ours: Authority, theirs: Authority) -> None:
    """They need no certificate, and whom theirs names matters to nobody."""
    inference, admin = StubInference(), StubAdmin(builders.cluster_status())
    server = GrpcServer(heartbeat_s=0.2, tls=Tls(pair=ours.pair("front", "localhost", "127.0.0.1")))
    server.add_inference(inference)
    server.add_admin(admin)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"

    async def answered(tls: Tls | None) -> bool:
        async with open_channel(address, channel_options(1.0), tls) as channel:
            try:
                assert ModelInfo(model_id="other") in await InferenceClient(channel, address).models()
                return (await AdminClient(channel, address, call_s=2.0).status()).model == "demo"
            except StreamBroken:
                return False

    assert await answered(Tls(ca=ours.file))
    assert await answered(Tls(ca=ours.file, pair=ours.pair("client", "example.org")))
    num_asked = len(inference.calls)
    for stranger in (None, Tls(ca=theirs.file), Tls(ca=ours.file, name="example.org")):
        assert not await answered(stranger)
    assert len(inference.calls) == num_asked
    await server.stop(0)


async def test_clients_of_the_front_door(ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = ours.pair("front", "localhost", "127.0.0.1", ends=PAST)
    readers: set[int] = set()
    read = CertificatePair.context

    def seen(self: CertificatePair) -> ssl.SSLContext:
        readers.add(threading.get_ident())
        return read(self)

    monkeypatch.setattr(CertificatePair, "context", seen)
    async with http_gateway(("p0", "prefill"), ("d0", "decode"), tls=pair) as gateway:
        readers.clear()
        following = asyncio.create_task(gateway.server.reload_certificate(interval_s=0.02))
        url = f"https://localhost:{gateway.port}/health"
        async with httpx.AsyncClient(verify=trusting(ours)) as client:
            with pytest.raises(httpx.ConnectError, match="expired"):
                await client.get(url)
            await asyncio.to_thread(ours.pair, "front", "localhost", "127.0.0.1")
            async with asyncio.timeout(10):
                while True:
                    try:
                        assert (await client.get(url)).status_code == 200
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
            assert readers
            assert threading.get_ident() not in readers, "the loop waits for no disk"
            await asyncio.to_thread(pair.key.unlink)
            await asyncio.sleep(0.1)
            async with httpx.AsyncClient(verify=trusting(ours)) as another:
                by_number = await another.get(url.replace("localhost", "127.0.0.1"))
            assert by_number.status_code == 200, "by number, no name is asked for; and half a pair changes nothing"
            body = {"prompt": "hello", "max_tokens": 4, "stream": True}
            answer = await client.post(f"https://localhost:{gateway.port}/v1/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(verify=trusting(theirs)) as client:
            with pytest.raises(httpx.ConnectError, match=r"self-signed|verify"):
                await client.get(url)
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"http://localhost:{gateway.port}/health")
        following.cancel()
