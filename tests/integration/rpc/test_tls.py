"""TLS between services and for clients of the gateway: valid, invalid and renewed certificates."""

import asyncio
import os
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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
from baton.rpc import grpc_network as wire_network
from baton.rpc import scheduler_rpc as wire_scheduler
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import HANDSHAKE_S, channel_options, open_channel
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
from tests.contract.networks import StubScheduler, UpdateQueue, eventually, until_broken
from tests.integration.gateway.http_gateway import http_gateway
from tests.unit.rpc.client_api_stubs import StubAdmin, StubInference

pytestmark = pytest.mark.integration

PAST = datetime.now(UTC) - timedelta(days=1)
HEARTBEAT_S, LIMIT_S = 10.0, 30.0
"""Long enough for a busy machine. What is refused here is refused at once."""
MAX_TRIES = 5


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path / "authority")


@pytest.fixture
def other_authority(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path / "other_authority")


@asynccontextmanager
async def scheduler(
    tls: Tls | None, service: StubScheduler | None = None, handshake_s: float = HANDSHAKE_S
) -> AsyncIterator[str]:
    server = GrpcServer(heartbeat_s=HEARTBEAT_S, tls=tls, handshake_s=handshake_s)
    server.add_scheduler(service or StubScheduler(builders.placement(), report=until_broken))
    try:
        yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def network_of(tls: Tls | None) -> AsyncIterator[GrpcNetwork]:
    network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=LIMIT_S, call_s=LIMIT_S, tls=tls, certificate_check_s=0.0)
    try:
        yield network
    finally:
        await network.aclose()


async def is_accepted(address: str, tls: Tls | None) -> bool:
    """Return whether the scheduler accepts a call and a stream from a client with `tls`."""
    async with network_of(tls) as network:
        try:
            answer = await network.scheduler(address).place(builders.query())
            await (await network.open_report(address)).aclose()
        except StreamBroken:
            return False
    return isinstance(answer, Placement)


async def test_certificate_of_the_same_authority_is_accepted(authority: Authority) -> None:
    async with scheduler(authority.service()) as address:
        assert await is_accepted(address, authority.service("client"))


@pytest.mark.parametrize(
    "client_kind", ["plain text", "no certificate", "another authority", "another name", "expired"]
)
async def test_client_without_a_valid_certificate_is_refused(
    authority: Authority, other_authority: Authority, client_kind: str
) -> None:
    pairs = {
        "another authority": other_authority.pair("client", SERVICE_NAME),
        "another name": authority.pair("other", "example.org", f"*.{SERVICE_NAME}"),
        "expired": authority.pair("expired", SERVICE_NAME, ends=PAST),
    }
    tls = (
        None if client_kind == "plain text" else Tls(pair=pairs.get(client_kind), ca=authority.file, name=SERVICE_NAME)
    )
    async with scheduler(authority.service()) as address:
        assert not await is_accepted(address, tls)
        assert await is_accepted(address, authority.service("client")), "a valid client is still accepted"


async def test_certificate_with_another_name_is_refused_before_a_message_is_parsed(authority: Authority) -> None:
    other = Tls(pair=authority.pair("other", "example.org"), ca=authority.file, name=SERVICE_NAME)
    service = StubScheduler(builders.placement(), report=until_broken)
    async with (
        scheduler(authority.service(), service) as address,
        open_channel(address, channel_options(HEARTBEAT_S), other) as channel,
    ):
        health, ask = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        garbage = channel.unary_unary(f"/{wire_scheduler.SERVICE}/Place")(b"\xff")
        for call in (health.Check(ask), health.Watch(ask), garbage, scheduler_pb2_grpc.SchedulerStub(channel).Report()):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await call.details() == f"the caller's certificate does not name {SERVICE_NAME}"
    assert service.asked == []


async def test_certificate_with_several_names_is_accepted(authority: Authority) -> None:
    tls = Tls(
        pair=authority.pair("several", "example.org", SERVICE_NAME, "10.0.0.7"), ca=authority.file, name=SERVICE_NAME
    )
    async with scheduler(tls) as address:
        assert await is_accepted(address, tls)


@pytest.mark.parametrize("server_kind", ["plain text", "another authority", "another name", "expired"])
async def test_server_without_a_valid_certificate_is_refused(
    authority: Authority, other_authority: Authority, server_kind: str
) -> None:
    tls = {
        "plain text": None,
        "another authority": Tls(pair=other_authority.pair("service", SERVICE_NAME), ca=authority.file),
        "another name": Tls(pair=authority.pair("other", "example.org"), ca=authority.file),
        "expired": Tls(pair=authority.pair("expired", SERVICE_NAME, ends=PAST), ca=authority.file),
    }[server_kind]
    async with scheduler(tls) as address:
        assert not await is_accepted(address, authority.service("client"))


async def test_invalid_bytes_on_the_port_do_not_affect_other_connections(authority: Authority) -> None:
    async with scheduler(authority.service()) as address:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\xff\xff" + bytes(300)):
            _, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(garbage)
            writer.close()
        assert await is_accepted(address, authority.service("client"))


@pytest.mark.parametrize("first_bytes", [b"", b"\x16\x03\x01\x01\x00\x01"])
async def test_connection_with_an_unfinished_handshake_is_closed(authority: Authority, first_bytes: bytes) -> None:
    client = authority.service("client")
    async with scheduler(authority.service(), handshake_s=0.5) as address, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(first_bytes)
        with suppress(ConnectionError):  # a reset, if the server had not read the first bytes
            assert await reader.read() == b""
        writer.close()
        for _ in range(MAX_TRIES):  # on a busy machine a valid handshake may take too long as well
            if was_accepted := await is_accepted(address, client):
                break
        assert was_accepted


async def test_server_uses_a_renewed_certificate_for_new_connections(authority: Authority) -> None:
    """The old certificate has expired, so only the new one is accepted."""
    service = authority.service("service", ends=PAST)
    async with scheduler(service) as address:
        client = authority.service("client")
        assert not await is_accepted(address, client)
        authority.service("service")  # replaces the files
        os.utime(service.pair.certificate, ns=(1, 1))  # type: ignore[union-attr]  # it has a pair
        assert await is_accepted(address, client)
        await asyncio.to_thread(service.pair.certificate.write_text, "broken")  # type: ignore[union-attr]
        assert await is_accepted(address, client), "an unreadable file keeps the last certificate"


async def test_open_network_uses_a_renewed_client_certificate(authority: Authority) -> None:
    client = authority.service("client", ends=PAST)
    async with scheduler(authority.service()) as address, network_of(client) as network:
        api = network.scheduler(address)
        with pytest.raises(StreamBroken):
            await api.place(builders.query())
        authority.service("client")  # replaces the files
        assert isinstance(await api.place(builders.query()), Placement)
        await (await network.open_report(address)).aclose()


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[grpc.aio.Channel]:
    """Return the list of the channels that networks open, in order."""
    opened: list[grpc.aio.Channel] = []

    def recording_open(*args: Any) -> grpc.aio.Channel:
        opened.append(open_channel(*args))
        return opened[-1]

    monkeypatch.setattr(wire_network, "open_channel", recording_open)
    return opened


def is_closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_open_stream_keeps_its_channel_after_a_renewal(
    authority: Authority, channels: list[grpc.aio.Channel]
) -> None:
    client, updates = authority.service("client"), UpdateQueue()
    async with (
        scheduler(authority.service(), StubScheduler(builders.placement(), updates=updates)) as address,
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
                authority.service("client")
        await eventually(lambda: [is_closed(channel) for channel in channels] == [False, True, False], LIMIT_S)
        await watch.aclose()
        await eventually(lambda: [is_closed(channel) for channel in channels] == [True, True, False], LIMIT_S)


async def test_closed_network_closes_all_channels(authority: Authority, channels: list[grpc.aio.Channel]) -> None:
    client = authority.service("client")
    async with scheduler(authority.service(), StubScheduler(builders.placement(), updates=UpdateQueue())) as address:
        async with network_of(client) as network:
            api = network.scheduler(address)
            watch = await api.watch()
            authority.service("client")
            await api.place(builders.query())
            assert [is_closed(channel) for channel in channels] == [False, False]
        assert [is_closed(channel) for channel in channels] == [True, True]
        with pytest.raises(StreamBroken):
            await watch.receive()
        with pytest.raises(StreamBroken, match="has been closed"):
            await api.place(builders.query())
        assert len(channels) == 2


@pytest.mark.parametrize("broken_file", ["certificate", "key", "ca"])
async def test_incomplete_renewal_keeps_the_last_certificate(
    authority: Authority, broken_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that are replaced one by one do not match for a moment, while services connect."""
    client, service = authority.service("client"), authority.service()
    async with scheduler(service) as address, network_of(client) as network:
        for tls in (client, service):
            break_file(authority, tls, broken_file)
        for _ in range(3):
            assert isinstance(await network.scheduler(address).place(builders.query()), Placement)
            await (await network.open_report(address)).aclose()
        lines: list[Any] = [
            record.msg for record in caplog.records if record.name == "baton.runtime.process.watched_files"
        ]
        assert [line["event"] for line in lines] == ["certificate_reload_failed"] * 2, "once at each end"
        authority.service("client")
        authority.service()
        authority.ca.cert_pem.write_to_path(str(authority.file))
        assert await is_accepted(address, client)
        await (await network.open_report(address)).aclose()


def break_file(authority: Authority, tls: Tls, broken_file: str) -> None:
    """Replace one file by that of another pair, or truncate it."""
    assert tls.pair is not None
    other = authority.pair("other", SERVICE_NAME)
    match broken_file:
        case "certificate":
            other.certificate.replace(tls.pair.certificate)
        case "key":
            other.key.replace(tls.pair.key)
        case "ca":
            authority.file.write_bytes(authority.file.read_bytes()[:200])


@pytest.mark.parametrize("broken_file", ["certificate", "key", "ca"])
async def test_mismatched_files_at_start_are_an_error(authority: Authority, broken_file: str) -> None:
    tls = authority.service()
    break_file(authority, tls, broken_file)
    with pytest.raises(ConfigError, match=r"not a certificate and its key|contains no CA certificates"):
        GrpcNetwork(heartbeat_s=0.2, tls=tls)
    with pytest.raises(ConfigError, match=r"not a certificate and its key|contains no CA certificates"):
        async with scheduler(tls):
            pass


async def test_files_replaced_during_a_read_are_refused(authority: Authority) -> None:
    class ReplacedPair(CertificatePair):
        """Its files are replaced while they are checked."""

        def check(self) -> None:
            authority.pair("service", SERVICE_NAME)

    pair = authority.pair("service", SERVICE_NAME)
    with pytest.raises(ConfigError, match="are being replaced; try again"):
        ReplacedPair(certificate=pair.certificate, key=pair.key).read()


def test_encrypted_key_is_refused_without_a_password_prompt(authority: Authority) -> None:
    with pytest.raises(ConfigError, match=r"service\.key is encrypted, and its password cannot be entered"):
        locked(authority.pair("service", SERVICE_NAME)).check()


def test_missing_or_mismatched_file_is_named_in_the_error(
    authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    pair = authority.pair("service", SERVICE_NAME)
    with pytest.raises(ConfigError, match="tls_ca is missing"):
        load(SchedulerConfig, flags={"tls_cert": pair.certificate, "tls_key": pair.key}, environ={})
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        CertificatePair(certificate=pair.certificate, key=other_authority.pair("other", "x").key).check()
    with pytest.raises(ConfigError, match=r"missing\.pem: no such file"):
        CertificatePair(certificate=tmp_path / "missing.pem", key=pair.key).check()


def client_context(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


async def test_grpc_clients_of_the_gateway_need_no_certificate(
    authority: Authority, other_authority: Authority
) -> None:
    """A client may send a certificate. The names in it are not checked."""
    inference, admin = StubInference(), StubAdmin(builders.cluster_status())
    server = GrpcServer(heartbeat_s=HEARTBEAT_S, tls=Tls(pair=authority.pair("front", "localhost", "127.0.0.1")))
    server.add_inference(inference)
    server.add_admin(admin)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"

    async def is_answered(tls: Tls | None) -> bool:
        async with open_channel(address, channel_options(HEARTBEAT_S), tls) as channel:
            try:
                assert ModelInfo(model_id="other") in await InferenceClient(channel, address).models()
                return (await AdminClient(channel, address, call_s=LIMIT_S).status()).model == "demo"
            except StreamBroken:
                return False

    assert await is_answered(Tls(ca=authority.file))
    assert await is_answered(Tls(ca=authority.file, pair=authority.pair("client", "example.org")))
    num_calls = len(inference.calls)
    for tls in (None, Tls(ca=other_authority.file), Tls(ca=authority.file, name="example.org")):
        assert not await is_answered(tls)
    assert len(inference.calls) == num_calls
    await server.stop(0)


async def test_http_clients_of_the_gateway_accept_a_renewed_certificate(
    authority: Authority, other_authority: Authority
) -> None:
    reader_threads: set[int] = set()

    class RecordingPair(CertificatePair):
        def context(self) -> ssl.SSLContext:
            reader_threads.add(threading.get_ident())
            return super().context()

    issued = authority.pair("front", "localhost", "127.0.0.1", ends=PAST)
    pair = RecordingPair(certificate=issued.certificate, key=issued.key)
    async with http_gateway(("p0", "prefill"), ("d0", "decode"), tls=pair) as gateway:
        reader_threads.clear()
        reloading = asyncio.create_task(gateway.server.reload_certificate(interval_s=0.02))
        url = f"https://localhost:{gateway.port}/health"
        async with httpx.AsyncClient(verify=client_context(authority), timeout=LIMIT_S) as client:
            with pytest.raises(httpx.ConnectError, match="expired"):
                await client.get(url)
            await asyncio.to_thread(authority.pair, "front", "localhost", "127.0.0.1")
            async with asyncio.timeout(60):
                while True:
                    try:
                        assert (await client.get(url)).status_code == 200
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
            assert reader_threads
            assert threading.get_ident() not in reader_threads, "files are not read in the event loop's thread"
            await asyncio.to_thread(pair.key.unlink)
            await asyncio.sleep(0.1)
            async with httpx.AsyncClient(verify=client_context(authority), timeout=LIMIT_S) as by_address:
                response = await by_address.get(url.replace("localhost", "127.0.0.1"))
            assert response.status_code == 200, (
                "the address is in the certificate; a missing key file keeps the last pair"
            )
            body = {"prompt": "hello", "max_tokens": 4, "stream": True}
            answer = await client.post(f"https://localhost:{gateway.port}/v1/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(verify=client_context(other_authority), timeout=LIMIT_S) as client:
            with pytest.raises(httpx.ConnectError, match=r"self-signed|verify"):
                await client.get(url)
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"http://localhost:{gateway.port}/health")
        reloading.cancel()
