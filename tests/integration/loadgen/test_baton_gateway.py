"""Baton's gateway with stub workers: HTTP and gRPC give the same results for one plan, including
rejections."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.client_api import ProcessInfo
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.cluster.worker_report import WorkerState
from baton.core.errors import Reason
from baton.gateway.grpc.inference_service import AdminService, InferenceService
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import Tls
from baton.runtime.network.tls_files import CertificatePair
from baton.runtime.process.process_identity import process_identity
from baton.runtime.process.run_file import RunningCluster, write_run_file
from loadgen.commands import target_options
from loadgen.commands.run_command import command
from loadgen.commands.target_options import server_facts, target_of
from loadgen.loadgen_errors import LoadgenError, Unreachable, UntrustedCertificate
from loadgen.measure.request_metrics import RequestOutcome
from loadgen.measure.timeline import Stages
from loadgen.plan.plan import Plan, Vocabulary
from loadgen.send.client import ResolvedRequest
from loadgen.send.grpc.grpc_channel import GRPCS_OWN, OPENSSLS
from loadgen.send.grpc.grpc_client import GrpcClient, GrpcSettings
from loadgen.send.server.discover import discover_grpc, discover_http
from loadgen.send.server.server_process import grpc_probe, http_probe
from loadgen.send.target import Target
from loadgen.slo_target import SloTarget
from tests.builders import blocks, layout
from tests.certificates import Authority
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway
from tests.integration.loadgen.rig import Measured, measure
from tests.unit.gateway.fakes import until
from tests.unit.loadgen.plans import plan, request

PD = (("p0", "prefill"), ("d0", "decode"))
LETTERS = Vocabulary(low=97, high=123)
"""Of the stub's tokenizer, whose tokens are bytes."""


@asynccontextmanager
async def gateway_targets(
    *, has_admin: bool = True, tls: CertificatePair | None = None
) -> AsyncIterator[tuple[HttpGateway, Target, Target]]:
    """Run a gateway and yield it with its HTTP and gRPC targets. `tls` is the certificate of both."""
    async with http_gateway(*PD, tls=tls) as gateway:
        server = GrpcServer(heartbeat_s=30.0, tls=None if tls is None else Tls(pair=tls))
        server.add_inference(InferenceService(gateway.cluster.gateway))
        process = ProcessInfo(process_id="gateway-0", address=f"10.0.0.1:{gateway.port}")
        if has_admin:
            server.add_admin(AdminService(gateway.cluster.gateway, process))
        port = await server.start("127.0.0.1", 0)
        try:
            yield (
                gateway,
                Target(
                    urls=(gateway.url if tls is None else f"https://127.0.0.1:{gateway.port}",),
                    model="demo",
                    dialect="baton",
                ),
                Target(
                    urls=(f"{'' if tls is None else 'https://'}127.0.0.1:{port}",),
                    model="demo",
                    dialect="baton",
                    protocol="grpc",
                ),
            )
        finally:
            await server.stop(0.1)


def conversation(**fields: object) -> Plan:
    return plan(
        request(0, (0, 12), at_s=0.0, output=6, session="s"),
        request(1, (1, 20), at_s=0.05, output=9),
        request(2, (0, 12), 0, (2, 4), output=5, session="s", turn=1, after=0, think_s=0.05),
        vocabulary=LETTERS,
        **fields,
    )


async def test_http_and_grpc_give_the_same_tokens_for_one_plan() -> None:
    async with gateway_targets() as (gateway, http, grpc):
        scheduler = gateway.cluster.scheduler

        def predicted(query: PlacementQuery) -> Placement:
            answer = scheduler.place_by_role(query)
            assert isinstance(answer, Placement)
            return replace(answer, ttft_s=0.25)

        scheduler.answer = predicted
        runs = [await measure(conversation(), target) for target in (http, grpc)]
    for run in runs:
        assert run.outcomes == [RequestOutcome.GOOD] * 3
        assert [record.num_prompt_tokens for record in run.records] == [12, 20, 22]
        assert [record.num_output_tokens for record in run.records] == [6, 9, 5]
        assert all(len(record.request_id) == 32 and record.finish_reason == "length" for record in run.records)
        stages = [Stages.of(record.timeline) for record in run.records]
        assert [(one.attempts, one.predicted_ttft_s, one.predicted_tpot_s) for one in stages] == [(1, 0.25, None)] * 3
    one, other = ([record.token_ids for record in run.records] for run in runs)
    assert one == other
    assert [len(tokens) for tokens in one] == [6, 9, 5]


async def test_http_and_grpc_report_the_same_rejection() -> None:
    async with gateway_targets() as (gateway, http, grpc):
        gateway.cluster.scheduler.answer = lambda _: Rejection(
            reason=Reason.TTFT_SLO, message="too long a queue", retry_after_s=3.0
        )
        planned = plan(request(0, (0, 12), output=6), vocabulary=LETTERS, slos={"default": SloTarget(ttft_s=20.0)})
        runs: list[Measured] = [await measure(planned, target) for target in (http, grpc)]
    for run in runs:
        (record,) = run.records
        assert run.outcomes == [RequestOutcome.REJECTED_EARLY]
        assert (record.status, record.reason, record.retry_after_s, record.arrivals) == (429, "ttft_slo", 3.0, ())
        assert "too long a queue" in record.error


async def test_bad_requests_fail_and_client_cancels_are_recorded() -> None:
    planned = plan(
        request(0, (0, 12), at_s=0.0, output=200_000_000),
        request(1, (1, 20), at_s=0.0, output=400, cancel_after_tokens=5),
        vocabulary=LETTERS,
    )
    async with gateway_targets() as (_, http, grpc):
        runs = [await measure(planned, target) for target in (http, grpc)]
    for run in runs:
        assert run.outcomes == [RequestOutcome.FAILED, RequestOutcome.CANCELLED]
        assert (run.records[0].status, run.records[0].reason) == (400, "context_length_exceeded")
        assert 5 <= len(run.records[1].token_ids) < 400


async def test_discovery_reads_models_over_http_and_grpc() -> None:
    async with gateway_targets() as (_, http, grpc):
        by_http = await asyncio.to_thread(discover_http, http.urls[0], {})
        by_grpc = await asyncio.to_thread(discover_grpc, grpc.urls[0], {})
    assert (by_http.models, by_http.kind, by_grpc.models, by_grpc.kind) == (["demo"], "baton", ["demo"], "baton")
    with pytest.raises(match="no Baton gRPC server"):
        await asyncio.to_thread(discover_grpc, grpc.urls[0], {})


def server_facts_of(*arguments: str) -> dict[str, Any]:
    """Return the server facts that `loadgen run` with these arguments records."""
    given = command.make_context("run", ["--rate", "1", *arguments]).params
    _, server = target_of(given)
    return server_facts(given, server)


async def test_cluster_facts_have_workers_and_kv_cache_size() -> None:
    """They are read over gRPC, or from --gateway with HTTP. The user's own values take precedence."""
    async with gateway_targets() as (gateway, http, grpc):
        admin = grpc.urls[0]
        by_grpc = await asyncio.to_thread(server_facts_of, "--protocol", "grpc", "--url", admin)
        by_http = await asyncio.to_thread(server_facts_of, "--url", http.urls[0], "--gateway", admin)
        alone = await asyncio.to_thread(server_facts_of, "--url", http.urls[0])
        problems = await asyncio.to_thread(
            server_facts_of, "--url", http.urls[0], "--admin", admin, "--workers", "7", "--kv-tokens", "640"
        )
        with pytest.raises(LoadgenError, match="serves demo, not other"):
            await asyncio.to_thread(server_facts_of, "--url", http.urls[0], "--admin", admin, "--model", "other")
        prefill, view = gateway.cluster.scheduler.workers[0], gateway.cluster.gateway.view
        prefill.report = replace(prefill.report, state=WorkerState.DRAINING)
        gateway.cluster.scheduler.publish()
        await until(lambda: any(report.state is WorkerState.DRAINING for report in view.reports))
        without = await asyncio.to_thread(server_facts_of, "--protocol", "grpc", "--url", admin)
    tokens = blocks().total * layout().block_size_tokens
    for facts in (by_grpc, by_http):
        assert (facts["workers"], facts["roles"], facts["kv_tokens"]) == (2, {"decode": 1, "prefill": 1}, 2 * tokens)
        assert facts["block_size_tokens"] == layout().block_size_tokens
    assert not {"workers", "kv_tokens"} & alone.keys(), "nobody has said where to ask"
    assert (problems["workers"], problems["kv_tokens"]) == (7, 640)
    assert (without["workers"], without["roles"], without["kv_tokens"]) == (1, {"decode": 1}, tokens)


async def test_admin_address_must_answer_only_if_given_by_the_user() -> None:
    async with http_gateway(*PD) as gateway:
        with pytest.raises(Unreachable, match="no Baton gRPC server"):
            await asyncio.to_thread(server_facts_of, "--url", gateway.url, "--admin", "127.0.0.1:9")
    async with gateway_targets(has_admin=False) as (_, _, grpc):
        facts = await asyncio.to_thread(server_facts_of, "--protocol", "grpc", "--url", grpc.urls[0])
    assert facts["cluster"].startswith("unknown: ")
    assert "workers" not in facts


def target_urls_of(*arguments: str) -> tuple[str, ...]:
    target, _ = target_of(command.make_context("run", ["--rate", "1", *arguments]).params)
    return target.urls


async def test_gateway_option_alone_is_enough_for_both_protocols() -> None:
    async with gateway_targets() as (gateway, _, grpc):
        admin = grpc.urls[0]
        assert await asyncio.to_thread(target_urls_of, "--gateway", admin) == (f"http://127.0.0.1:{gateway.port}",)
        assert await asyncio.to_thread(target_urls_of, "--gateway", admin, "--protocol", "grpc") == (admin,)


async def test_without_options_the_newest_cluster_of_this_user_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path))
    target_options._newest_cluster.cache_clear()
    facts = {"pid": os.getpid(), "identity": process_identity(os.getpid()), "cluster": "c", "model": "demo"}
    try:
        async with gateway_targets() as (_, http, grpc):
            url, admin = http.urls[0], grpc.urls[0]
            ours = RunningCluster(**facts, started_s=2.0, url=url, gateway=admin)
            write_run_file(replace(ours, started_s=1.0, url="http://127.0.0.1:9", gateway="127.0.0.1:9"), [tmp_path])
            write_run_file(ours, [tmp_path])
            assert await asyncio.to_thread(target_urls_of) == (url,)
            write_run_file(replace(ours, started_s=3.0, url="http://127.0.0.1:10"), [tmp_path])
            assert await asyncio.to_thread(target_urls_of, "--protocol", "grpc") == (admin,), "chosen once"
            assert (await asyncio.to_thread(server_facts_of, "--url", url))["workers"] == 2, "its gateway is known"
    finally:
        target_options._newest_cluster.cache_clear()
    assert capsys.readouterr().err.count("2 clusters of this user run") == 1


@pytest.fixture
def trusted_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """A certificate authority that no test trusts yet."""
    for variable in (GRPCS_OWN, OPENSSLS):
        monkeypatch.delenv(variable, raising=False)
    return Authority.new(tmp_path / "ours")


def front(authority: Authority) -> CertificatePair:
    return authority.pair("front", "localhost", "127.0.0.1")


async def test_one_ca_file_works_for_http_and_grpc(
    trusted_authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted_authority.file))
    async with gateway_targets(tls=front(trusted_authority)) as (_, http, grpc):
        assert all(target.urls[0].startswith("https://") for target in (http, grpc))
        runs = [await measure(conversation(), target) for target in (http, grpc)]
        facts = await asyncio.to_thread(server_facts_of, "--protocol", "grpc", "--url", grpc.urls[0])
        by_http = await asyncio.to_thread(server_facts_of, "--url", http.urls[0], "--admin", grpc.urls[0])
        assert await asyncio.to_thread(grpc_probe(grpc.urls[0], {}, is_insecure=False)) == 200
    one, other = runs
    assert one.outcomes == other.outcomes == [RequestOutcome.GOOD] * 3
    assert [record.token_ids for record in one.records] == [record.token_ids for record in other.records]
    assert facts["workers"] == by_http["workers"] == 2


async def test_cluster_of_this_user_is_trusted_by_the_authority_of_its_run_file(
    trusted_authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "")  # restored at the end
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    async with gateway_targets(tls=front(trusted_authority)) as (_, http, grpc):
        url, gateway = http.urls[0], grpc.urls[0].removeprefix("https://")
        identity = process_identity(os.getpid())
        running = RunningCluster(
            pid=os.getpid(),
            identity=identity,
            started_s=1.0,
            cluster="c",
            model="demo",
            url=url,
            gateway=gateway,
            ca=str(trusted_authority.file),
        )
        write_run_file(running, [tmp_path / "run"])
        assert (await asyncio.to_thread(server_facts_of, "--url", url))["workers"] == 2
        assert await asyncio.to_thread(target_urls_of, "--url", url, "--protocol", "grpc") == (f"https://{gateway}",)


async def test_grpc_ca_variable_takes_precedence(
    trusted_authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_authority = Authority.new(tmp_path / "theirs")
    for variable, authority in zip((GRPCS_OWN, OPENSSLS), (trusted_authority, other_authority), strict=True):
        monkeypatch.setenv(variable, str(authority.file))
    async with gateway_targets(tls=front(trusted_authority)) as (_, _, grpc):
        assert (await asyncio.to_thread(discover_grpc, grpc.urls[0], {})).models == ["demo"]
    async with gateway_targets(tls=front(other_authority)) as (_, _, grpc):
        with pytest.raises(
            UntrustedCertificate, match="name a file of its authorities in GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
        ):
            await asyncio.to_thread(discover_grpc, grpc.urls[0], {})


async def test_untrusted_certificate_is_reported_as_such(
    trusted_authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(Authority.new(tmp_path / "theirs").file))
    async with gateway_targets(tls=front(trusted_authority)) as (_, http, grpc):
        words = (
            f"answers at {grpc.urls[0]}; its certificate is not trusted; "
            "name a file of its authorities in SSL_CERT_FILE"
        )
        with pytest.raises(UntrustedCertificate, match=words):
            await asyncio.to_thread(discover_grpc, grpc.urls[0], {})
        with pytest.raises(UntrustedCertificate, match=words):
            await GrpcClient(GrpcSettings(targets=grpc.urls, model="demo", open_timeout_s=3.0)).open()
        with pytest.raises(
            UntrustedCertificate,
            match=f"{http.urls[0]} is not trusted .*name a file of its authorities in SSL_CERT_FILE, or accept",
        ):
            await asyncio.to_thread(discover_http, http.urls[0], {})
        for probe in (http_probe(http.urls[0], {}, is_insecure=False), grpc_probe(grpc.urls[0], {}, is_insecure=False)):
            with pytest.raises(
                UntrustedCertificate
            ):  # `capacity --command` need not wait until its server is ready: this one never is
                await asyncio.to_thread(probe)
        assert await asyncio.to_thread(http_probe(http.urls[0], {}, is_insecure=True)) == 200
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted_authority.file))
    async with gateway_targets(tls=trusted_authority.pair("other", "elsewhere")) as (_, _, grpc):
        with pytest.raises(UntrustedCertificate, match="its certificate is for another host name"):
            await asyncio.to_thread(discover_grpc, grpc.urls[0], {})


async def test_tls_mismatch_is_explained(trusted_authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted_authority.file))
    async with gateway_targets() as (_, _, grpc):
        with pytest.raises(Unreachable, match="does not use TLS"):
            await asyncio.to_thread(discover_grpc, f"https://{grpc.urls[0]}", {})
    async with gateway_targets(tls=front(trusted_authority)) as (_, _, grpc):
        with pytest.raises(Unreachable, match="if it uses TLS"):
            await asyncio.to_thread(discover_grpc, grpc.urls[0].removeprefix("https://"), {})


async def test_insecure_is_rejected_for_grpc_over_tls(trusted_authority: Authority) -> None:
    refusal = (
        "--insecure is not supported over gRPC, which always checks certificates; name the authorities of https://"
    )
    async with gateway_targets(tls=front(trusted_authority)) as (_, http, grpc):
        for arguments in (
            ("--protocol", "grpc", "--url", grpc.urls[0]),
            ("--url", http.urls[0], "--admin", grpc.urls[0]),
        ):
            with pytest.raises(LoadgenError, match=refusal):
                await asyncio.to_thread(server_facts_of, *arguments, "--insecure")
        with pytest.raises(LoadgenError, match=refusal):
            await measure(conversation(), replace(grpc, is_insecure=True))
        with pytest.raises(LoadgenError, match=refusal):
            await asyncio.to_thread(grpc_probe(grpc.urls[0], {}, is_insecure=True))
    async with gateway_targets() as (_, _, grpc):
        assert (await asyncio.to_thread(server_facts_of, "--protocol", "grpc", "--url", grpc.urls[0], "--insecure"))[
            "workers"
        ] == 2


@pytest.mark.parametrize("text", [None, "", "no certificate"])
@pytest.mark.usefixtures("trusted_authority")
def test_unreadable_ca_file_is_named(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(LoadgenError, match=f"SSL_CERT_FILE names {file}, which contains no CA certificates"):
        discover_grpc("https://127.0.0.1:9", {})


@pytest.mark.parametrize("url", ["grpcs://127.0.0.1:9", "ftp://127.0.0.1:9", "https://", ""])
def test_invalid_grpc_address_is_rejected(url: str) -> None:
    with pytest.raises(LoadgenError, match="is not a gRPC address"):
        discover_grpc(url, {})


async def test_unknown_grpc_field_is_rejected_before_the_run() -> None:
    with pytest.raises(LoadgenError, match="does not have"):
        GrpcClient(GrpcSettings(targets=("127.0.0.1:1",), model="demo", more={"best_of": 2}))


@pytest.mark.parametrize("value", [None, False])
def test_grpc_body_field_can_be_unset(value: bool | None) -> None:
    """Merging messages alone would keep loadgen's own value."""
    client = GrpcClient(GrpcSettings(targets=("127.0.0.1:1",), model="demo", more={"ignore_eos": value, "priority": 3}))
    _, message = client.prepare(ResolvedRequest(index=0, token_ids=(5, 6), max_tokens=9, ignore_eos=True, priority=1))
    assert (message.ignore_eos, message.priority, message.max_tokens) == (False, 3, 9)
