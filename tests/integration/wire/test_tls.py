"""TLS between services, and for clients of the front door: who is let in, who is not, and certificates that are renewed meanwhile."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from baton.core.cluster import Placement
from baton.core.errors import ConfigError, StreamBroken
from baton.gateway.openai_api import server as http_server
from baton.runtime.config import load
from baton.runtime.settings import SchedulerConfig
from baton.runtime.tls import Pair
from baton.wire.network import GrpcNetwork
from baton.wire.server import GrpcServer
from baton.wire.tls import SERVICE_NAME, Tls
from tests import builders
from tests.certificates import Authority
from tests.contract.networks import StubScheduler, until_broken
from tests.integration.gateway.http_gateway import http_gateway

pytestmark = pytest.mark.integration

PAST = datetime.now(UTC) - timedelta(days=1)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path / "theirs")


@asynccontextmanager
async def scheduler(tls: Tls | None) -> AsyncIterator[str]:
    server = GrpcServer(heartbeat_s=0.2, tls=tls)
    server.add_scheduler(StubScheduler(builders.placement(), report=until_broken))
    try:
        yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    finally:
        await server.stop(0)


async def asked(address: str, tls: Tls | None) -> bool:
    """Whether the scheduler there answers one who comes with `tls`, to a call and to a stream."""
    network = GrpcNetwork(heartbeat_s=0.2, dial_s=1.0, call_s=1.0, tls=tls)
    try:
        answer = await network.scheduler(address).place(builders.query())
        await (await network.open_report(address)).aclose()
    except StreamBroken:
        return False
    finally:
        await network.aclose()
    return isinstance(answer, Placement)


async def test_services_of_one_cluster_talk(ours: Authority) -> None:
    async with scheduler(ours.service()) as address:
        assert await asked(address, ours.service("client"))


@pytest.mark.parametrize("who", ["plain text", "no certificate", "another authority", "expired"])
async def test_nobody_else_is_heard(ours: Authority, theirs: Authority, who: str) -> None:
    pairs = {"another authority": theirs.pair("client", SERVICE_NAME), "expired": ours.pair("expired", SERVICE_NAME, ends=PAST)}
    tls = None if who == "plain text" else Tls(pair=pairs.get(who), ca=ours.file, name=SERVICE_NAME)
    async with scheduler(ours.service()) as address:
        assert not await asked(address, tls)
        assert await asked(address, ours.service("client")), "and the others still are"


@pytest.mark.parametrize("what", ["plain text", "another authority", "another name", "expired"])
async def test_nobody_else_is_believed(ours: Authority, theirs: Authority, what: str) -> None:
    tls = {
        "plain text": None,
        "another authority": Tls(pair=theirs.pair("service", SERVICE_NAME), ca=ours.file),
        "another name": Tls(pair=ours.pair("other", "example.org"), ca=ours.file),
        "expired": Tls(pair=ours.pair("expired", SERVICE_NAME, ends=PAST), ca=ours.file),
    }[what]
    async with scheduler(tls) as address:
        assert not await asked(address, ours.service("client"))


async def test_garbage_at_the_port_harms_nobody(ours: Authority) -> None:
    async with scheduler(ours.service()) as address:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\xff\xff" + bytes(300)):
            _, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(garbage)
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


def test_half_of_it_is_refused_by_name(ours: Authority, theirs: Authority, tmp_path: Path) -> None:
    pair = ours.pair("service", SERVICE_NAME)
    with pytest.raises(ConfigError, match="tls_ca is missing"):
        load(SchedulerConfig, flags={"tls_cert": pair.certificate, "tls_key": pair.key}, environ={})
    with pytest.raises(ConfigError, match="no certificate and its key"):
        Pair(certificate=pair.certificate, key=theirs.pair("other", "x").key).check()
    with pytest.raises(ConfigError, match=r"missing\.pem: there is no such file"):
        Pair(certificate=tmp_path / "missing.pem", key=pair.key).check()


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


async def test_clients_of_the_front_door(ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "RENEW_S", 0.02)
    pair = ours.pair("front", "localhost", ends=PAST)
    async with http_gateway(("p0", "prefill"), ("d0", "decode"), tls=pair) as gateway:
        following = asyncio.create_task(gateway.server.follow_certificate())
        url = f"https://localhost:{gateway.port}/health"
        async with httpx.AsyncClient(verify=trusting(ours)) as client:
            with pytest.raises(httpx.ConnectError, match="expired"):
                await client.get(url)
            await asyncio.to_thread(ours.pair, "front", "localhost")
            async with asyncio.timeout(10):
                while True:
                    try:
                        assert (await client.get(url)).status_code == 200
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
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
