"""`baton status`, `explain` and `drain` against a real gRPC server with a stub of the admin API."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli
from baton.core.client_api import AdminApi, Caller, ClusterStatus
from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.errors import Code, Failure, Reason, Refused
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import Tls
from tests.builders import cluster_status, decision_record, link, worker_report
from tests.certificates import Authority

pytestmark = pytest.mark.integration


class StubAdminApi(AdminApi):
    """Knows two workers and one request."""

    def __init__(self) -> None:
        self.drained: list[str] = []

    async def status(self, caller: Caller) -> ClusterStatus:
        remaining = [name for name in ("w0", "w1") if name not in self.drained]
        return cluster_status(
            *(worker_report(name, epoch=2**64 - 1, host="h", links=(link("w0"),)) for name in remaining)
        )

    async def explain(self, request_id: str | None, caller: Caller) -> tuple[DecisionRecord, ...]:
        if request_id not in (None, "7f3a"):
            raise Refused(
                Failure(
                    code=Code.NOT_FOUND,
                    reason=Reason.INVALID_REQUEST,
                    message=f"no decision about {request_id} is kept",
                )
            )
        return decision_record(), decision_record(1)

    async def drain(self, worker_id: str, caller: Caller, *, node_shutting_down: bool = False) -> None:
        self.drained.append(worker_id)

    async def clear_tenant(self, tenant: str, caller: Caller) -> tuple[str, ...]:
        return (tenant,)

    async def cache_stats(self, caller: Caller) -> CacheStats:
        return CacheStats()


@pytest.fixture
def admin() -> StubAdminApi:
    return StubAdminApi()


@pytest.fixture
def address(admin: StubAdminApi) -> Iterator[str]:
    with admin_server(admin) as address:
        yield address


@contextmanager
def admin_server(admin: StubAdminApi, tls: Tls | None = None) -> Iterator[str]:
    """Serve in a thread with its own event loop, because each command runs one."""
    ports: list[int] = []
    is_ready, can_stop = threading.Event(), threading.Event()

    async def serve() -> None:
        server = GrpcServer(heartbeat_s=30.0, tls=tls)
        server.add_admin(admin)
        ports.append(await server.start("127.0.0.1", 0))
        is_ready.set()
        await asyncio.to_thread(can_stop.wait)
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_ready.wait(20)
    try:
        yield f"127.0.0.1:{ports[0]}"
    finally:
        can_stop.set()
        thread.join()


def run(address: str, *args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, [*args, "--gateway", address], env=env)


def test_status_shows_the_processes_workers_and_links(address: str) -> None:
    shown = run(address, "status").stdout
    assert all(word in shown for word in ("g0", "s0", "w0", "w1", "w1 reads w0", "shared-memory"))


def test_explain_shows_every_attempt(address: str) -> None:
    for request_id in ("last", "7f3a"):
        shown = run(address, "explain", request_id).stdout
        assert "attempt 1: prefill w0, decode w1" in shown
        assert "attempt 2: prefill w0, decode w1" in shown


def test_gateway_refusal_is_shown_with_its_message(address: str) -> None:
    refused = run(address, "explain", "abcd")
    assert refused.exit_code == 1
    assert str(refused.exception) == "no decision about abcd is kept"


def test_drain_with_wait_returns_after_the_worker_has_ended(address: str, admin: StubAdminApi) -> None:
    done = run(address, "drain", "w1", "--wait")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "w1 has ended"
    assert admin.drained == ["w1"]


def test_commands_reach_a_gateway_with_a_certificate_over_tls(admin: StubAdminApi, tmp_path: Path) -> None:
    authority, other_authority = Authority.new(tmp_path / "authority"), Authority.new(tmp_path / "other_authority")
    with admin_server(admin, Tls(pair=authority.pair("front", "127.0.0.1", "gateway.example"))) as address:
        assert "w0" in run(address, "status", "--gateway-ca", str(authority.file)).stdout
        assert "w0" in run(address, "status", env={"BATON_GATEWAY_CA": str(authority.file)}).stdout
        assert (
            "w0" in run(address, "status", "--gateway-ca", "system", env={"SSL_CERT_FILE": str(authority.file)}).stdout
        )
        assert run(address, "drain", "w1", "--wait", "--gateway-ca", str(authority.file)).exit_code == 0
        assert admin.drained == ["w1"]
        with_name = ["--gateway-ca", str(authority.file), "--gateway-name"]
        assert "w0" in run(address, "status", *with_name, "gateway.example").stdout
        assert run(address, "status", *with_name, "other.example").exit_code != 0
        for flags in ([], ["--gateway-ca", str(other_authority.file)], ["--gateway-ca", "system"]):
            refused = run(address, "status", *flags, env={"SSL_CERT_FILE": str(other_authority.file)})
            assert refused.exit_code == 1
            assert str(refused.exception).startswith(f"no gateway answers at {address}")
            assert "--gateway-ca" in str(refused.exception)
