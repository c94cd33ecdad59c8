"""`baton status`, `explain` and `drain` against the real service on a real port, as a gateway has it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli
from baton.core.client_api import AdminApi, Caller, ClusterStatus
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.errors import Code, Failure, Reason, Refused
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import Tls
from tests.builders import cluster_status, decision_record, link, worker_report
from tests.certificates import Authority

pytestmark = pytest.mark.integration


class Operator(AdminApi):
    """Knows two workers and one request."""

    def __init__(self) -> None:
        self.drained: list[str] = []

    async def status(self, caller: Caller) -> ClusterStatus:
        left = [name for name in ("w0", "w1") if name not in self.drained]
        return cluster_status(*(worker_report(name, epoch=2**64 - 1, host="h", links=(link("w0"),)) for name in left))

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


@pytest.fixture
def operator() -> Operator:
    return Operator()


@pytest.fixture
def address(operator: Operator) -> Iterator[str]:
    with serving(operator) as address:
        yield address


@contextmanager
def serving(operator: Operator, tls: Tls | None = None) -> Iterator[str]:
    """In a thread with a loop of its own: the commands make theirs."""
    ports: list[int] = []
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = GrpcServer(heartbeat_s=1.0, tls=tls)
        server.add_admin(operator)
        ports.append(await server.start("127.0.0.1", 0))
        is_up.set()
        await asyncio.to_thread(is_over.wait)
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_up.wait(20)
    try:
        yield f"127.0.0.1:{ports[0]}"
    finally:
        is_over.set()
        thread.join()


def run(address: str, *args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, [*args, "--gateway", address], env=env)


def test_what_is_shown_is_what_the_gateway_knows(address: str) -> None:
    shown = run(address, "status").stdout
    assert all(word in shown for word in ("g0", "s0", "w0", "w1", "ffffffff", "w1 reads w0", "shared-memory"))


def test_every_attempt_is_explained(address: str) -> None:
    for which in ("last", "7f3a"):
        shown = run(address, "explain", which).stdout
        assert "attempt 1: prefill w0, decode w1" in shown
        assert "attempt 2: prefill w0, decode w1" in shown


def test_gateway_refusal_is_shown_with_its_message(address: str) -> None:
    refused = run(address, "explain", "abcd")
    assert refused.exit_code == 1
    assert str(refused.exception) == "no decision about abcd is kept"


def test_a_worker_is_drained_and_waited_for(address: str, operator: Operator) -> None:
    done = run(address, "drain", "w1", "--wait")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "w1 has ended"
    assert operator.drained == ["w1"]


def test_a_gateway_with_a_certificate_is_asked_over_tls(operator: Operator, tmp_path: Path) -> None:
    ours, theirs = Authority.new(tmp_path / "ours"), Authority.new(tmp_path / "theirs")
    with serving(operator, Tls(pair=ours.pair("front", "127.0.0.1", "gateway.example"))) as address:
        assert "w0" in run(address, "status", "--gateway-ca", str(ours.file)).stdout
        assert "w0" in run(address, "status", env={"BATON_GATEWAY_CA": str(ours.file)}).stdout
        assert "w0" in run(address, "status", "--gateway-ca", "system", env={"SSL_CERT_FILE": str(ours.file)}).stdout
        assert run(address, "drain", "w1", "--wait", "--gateway-ca", str(ours.file)).exit_code == 0
        assert operator.drained == ["w1"]
        named = ["--gateway-ca", str(ours.file), "--gateway-name"]
        assert "w0" in run(address, "status", *named, "gateway.example").stdout
        assert run(address, "status", *named, "other.example").exit_code != 0
        for others in ([], ["--gateway-ca", str(theirs.file)], ["--gateway-ca", "system"]):
            refused = run(address, "status", *others, env={"SSL_CERT_FILE": str(theirs.file)})
            assert refused.exit_code == 1
            assert str(refused.exception).startswith(f"no gateway answers at {address}")
            assert "--gateway-ca" in str(refused.exception)
