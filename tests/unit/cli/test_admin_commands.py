"""`baton status`, `explain`, `drain` and `cache` with a fake gateway, and without a gateway."""

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.admin import admin_commands, locate_gateway
from baton.cli.admin.gateway_connection import AdminContext, GatewayAddress, Intervals
from baton.cli.main import cli, main
from baton.core.client_api import ClusterStatus, ProcessInfo
from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.cluster.worker_report import ReloadCounts, TierReport, WorkerReport
from baton.core.errors import BatonError, Code, Failure, Reason, Refused, StreamBroken
from baton.runtime.process.run_file import RunningCluster
from baton.sim import virtual_time
from tests.builders import blocks, cluster_status, decision_record, worker_report
from tests.free_port import free_port

UNAVAILABLE = Failure(code=Code.UNAVAILABLE, reason=Reason.SCHEDULER_LOST, message="no scheduler answers")


class FakeGateway:
    """Answers `status` from a list, whose last entry is repeated; exceptions in it are raised."""

    def __init__(self, *statuses: ClusterStatus | BaseException, records: Sequence[DecisionRecord] = ()) -> None:
        self.statuses = list(statuses)
        self.records = tuple(records)
        self.num_status_calls = 0
        self.explained: list[str | None] = []
        self.drained: list[str] = []
        self.drained_with_node: list[str] = []
        self.cleared: list[str] = []
        self.cache = CacheStats()
        self.asked: list[tuple[str, ...]] = []
        self.file = [b"header", b"blocks" * 1000]
        self.num_lost_bytes = 0
        self.imported = b""

    async def status(self) -> ClusterStatus:
        self.num_status_calls += 1
        answer = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def explain(self, request_id: str | None = None) -> tuple[DecisionRecord, ...]:
        self.explained.append(request_id)
        return self.records

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> None:
        self.drained.append(worker_id)
        if node_shutting_down:
            self.drained_with_node.append(worker_id)

    async def clear_tenant(self, tenant: str) -> tuple[str, ...]:
        self.cleared.append(tenant)
        return ("d0", "p0")

    async def cache_stats(self) -> CacheStats:
        return self.cache

    async def export_cache(
        self, tenant: str, prompt_json: str, write: Callable[[ExportedPrefix | bytes], Awaitable[None]]
    ) -> None:
        self.asked.append((tenant, prompt_json))
        if isinstance(answer := self.statuses[0], BaseException):
            raise answer
        num_bytes = sum(map(len, self.file))
        await write(ExportedPrefix(worker_id="p0", num_tokens=32, num_prompt_tokens=40, num_bytes=num_bytes))
        for part in self.file:
            await write(part[self.num_lost_bytes :])

    async def import_cache(self, tenant: str, worker_id: str, parts: AsyncIterator[bytes]) -> ImportedPrefix:
        self.asked.append((tenant, worker_id))
        self.imported = b"".join([part async for part in parts])
        return ImportedPrefix(worker_id="p0", num_tokens=32, num_cached_before=16, num_file_tokens=48)


def admin_context(
    *gateways: FakeGateway, own_addresses: frozenset[str] = frozenset(), find_s: float = 5.0, silence_s: float = 30.0
) -> AdminContext:
    """Connects to these gateways in turn, and to the last one from then on, with short intervals."""
    remaining = list(gateways)

    @asynccontextmanager
    async def connect(address: GatewayAddress) -> AsyncIterator[FakeGateway]:
        yield remaining.pop(0) if len(remaining) > 1 else remaining[0]

    return AdminContext(
        connect=connect,
        own_addresses=lambda: own_addresses,
        intervals=Intervals(watch_s=0.001, poll_s=0.001, retry_s=0.001, find_s=find_s, silence_s=silence_s),
    )


def run(gateway: FakeGateway, *args: str, context: AdminContext | None = None) -> Result:
    return CliRunner().invoke(cli, args, prog_name="baton", obj=context or admin_context(gateway))


@pytest.fixture
def exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands under virtual time, so that a limit cannot pass before the second attempt."""
    monkeypatch.setattr(admin_commands.asyncio, "run", virtual_time.run)


def reports_on(host: str, *worker_ids: str, epoch: int = 1) -> list[WorkerReport]:
    return [worker_report(worker_id, host=host, pid=7, epoch=epoch, running_seqs=1) for worker_id in worker_ids]


def test_status_prints_tables_or_json() -> None:
    gateway = FakeGateway(cluster_status(worker_report("w0", epoch=2**63)))
    assert "w0" in run(gateway, "status").stdout
    shown = json.loads(run(gateway, "status", "--json").stdout)
    assert shown["workers"][0]["worker"] == {"worker_id": "w0", "worker_epoch": hex(2**63), "address": "w0:1"}
    assert shown["scheduler"]["process_id"] == "s0"


def test_watch_continues_while_the_gateway_is_unreachable_and_ends_with_ctrl_c() -> None:
    found = cluster_status(worker_report("w0"))
    done = run(
        FakeGateway(found, StreamBroken("h:1: gone"), found, KeyboardInterrupt()),
        "status",
        "--watch",
        "--json",
    )
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("model") for line in lines] == ["demo", None, "demo"]
    assert "no gateway answers at h:1: gone" in lines[1]["error"]


def test_status_watch_without_json_shows_tables() -> None:
    done = run(FakeGateway(cluster_status(worker_report("w0")), KeyboardInterrupt()), "status", "--watch")
    assert done.exit_code == 0
    assert "w0" in done.stdout


def test_explain_accepts_a_request_id_or_last() -> None:
    gateway = FakeGateway(cluster_status(), records=[decision_record()])
    assert "prefill w0, decode w1" in run(gateway, "explain", "last").stdout
    run(gateway, "explain", "7f3a")
    assert gateway.explained == [None, "7f3a"]


def test_explain_without_a_record_is_an_error() -> None:
    done = run(FakeGateway(cluster_status()), "explain", "7f3a")
    assert isinstance(done.exception, BatonError)
    assert "7f3a" in str(done.exception)


def test_drain_by_name_prints_the_running_sequences() -> None:
    gateway = FakeGateway(cluster_status(*reports_on("a", "w0", "w1")))
    done = run(gateway, "drain", "w1")
    assert done.stdout == "w1 (hybrid, pid 7) drains 1 sequence\n"
    assert gateway.drained == ["w1"]
    assert gateway.drained_with_node == []


def test_clearing_the_cache_of_a_tenant_names_the_workers() -> None:
    gateway = FakeGateway(cluster_status())
    done = run(gateway, "cache", "clear", "--tenant", "search")
    assert done.stdout == "2 workers erase the KV of tenant search: d0, p0\n"
    assert gateway.cleared == ["search"]


def test_export_writes_a_private_file_and_import_sends_it(tmp_path: Path) -> None:
    gateway, out = FakeGateway(cluster_status()), tmp_path / "prefix.kv"
    out.write_bytes(b"an earlier file")
    done = run(gateway, "cache", "export", "--model", "demo", "--prompt", "import os", "--out", str(out))
    assert done.stdout == f"exported 32 of 40 prompt tokens from p0 to {out} (6006 bytes)\n"
    assert out.read_bytes() == b"".join(gateway.file)
    assert out.stat().st_mode & 0o777 == 0o600
    done = run(gateway, "cache", "import", str(out), "--worker", "p0", "--tenant", "search")
    assert done.stdout == f"32 of 48 tokens of {out} are cached at p0; 16 were before\n"
    assert "too few blocks were free" in done.stderr
    assert gateway.imported == b"".join(gateway.file)
    assert gateway.asked == [("default", '{"model": "demo", "prompt": "import os"}'), ("search", "p0")]
    assert list(tmp_path.iterdir()) == [out]


def test_export_takes_messages_or_the_body_of_a_chat(tmp_path: Path) -> None:
    gateway, chat = FakeGateway(cluster_status()), tmp_path / "chat.json"
    messages = [{"role": "user", "content": "hi"}]
    for content in (messages, {"messages": messages, "tools": [], "max_tokens": 3}):
        chat.write_text(json.dumps(content))
        run(gateway, "cache", "export", "--messages-file", str(chat), "--out", str(tmp_path / "out"))
    asked = [json.loads(body) for _, body in gateway.asked]
    assert asked == [{"messages": messages}, {"messages": messages, "tools": []}]
    for content, problem in (("[", "not valid JSON"), ("{}", "no list of messages")):
        chat.write_text(content)
        done = run(gateway, "cache", "export", "--messages-file", str(chat), "--out", str(tmp_path / "out"))
        assert problem in str(done.exception)
    done = run(gateway, "cache", "export", "--out", str(tmp_path / "out"))
    assert "exactly one of --prompt" in done.output


@pytest.mark.parametrize("fault", ["refused", "cut", "directory"])
def test_failed_export_leaves_the_earlier_file(tmp_path: Path, fault: str) -> None:
    gateway, out = FakeGateway(cluster_status()), tmp_path / "prefix.kv"
    out.write_bytes(b"an earlier file")
    gateway.num_lost_bytes = 1 if fault == "cut" else 0
    if fault == "refused":
        gateway.statuses = [Refused(UNAVAILABLE)]
    target = tmp_path / "none" / "out" if fault == "directory" else out
    done = run(gateway, "cache", "export", "--prompt", "import os", "--out", str(target))
    problem = {"refused": "no scheduler answers", "cut": "ended after 6004 bytes", "directory": "name another file"}
    assert problem[fault] in str(done.exception)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"an earlier file"]


def cached_gateway(sampled_share: float = 1.0) -> FakeGateway:
    """A gateway with two workers, of which one has a host tier and was used."""
    tiered = replace(
        worker_report("w0", blocks=blocks(total=8, cached=2, used=3)),
        tiers=(TierReport(tier="host", total=64, held=16),),
        reloads=ReloadCounts(complete=5, incomplete=1, late=2),
    )
    gateway = FakeGateway(cluster_status(tiered, worker_report("w1")))
    use = TokenReuse(worker_id="w0", num_requests=3, num_prompt_tokens=400, cached_tokens={"device": 100, "host": 60})
    gateway.cache = CacheStats(
        since_s=9.5, total=TokenReuse() + use, workers=(use,), ceiling_tokens=210.0, sampled_share=sampled_share
    )
    return gateway


def test_cache_stats_show_what_is_held_and_reused() -> None:
    shown = run(cached_gateway(), "cache", "stats")
    assert shown.exit_code == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["w0", "5", "1", "2"] in rows
    assert ["all", "3", "400", "25.0%", "15.0%", "0.0%", "60.0%"] in rows
    assert shown.stdout.splitlines()[-1] == (
        "reused 40.0% of the prompt tokens; an infinite cache would have reused 52.5%"
    )
    sampled = run(cached_gateway(0.25), "cache", "stats")
    assert "52.5% (estimated from 25.00% of" in " ".join(sampled.stdout.split())


def test_cache_stats_as_json() -> None:
    gateway = cached_gateway()
    block_bytes = gateway.statuses[0].workers[0].block_bytes  # type: ignore[union-attr]
    found = json.loads(run(gateway, "cache", "stats", "--json").stdout)
    first, second = found["workers"]
    assert first["tiers"] == [
        {
            "tier": tier,
            "total_slots": total,
            "held_slots": held,
            "total_bytes": total * block_bytes,
            "held_bytes": held * block_bytes,
        }
        for tier, total, held in (("device", 8, 5), ("host", 64, 16))
    ]
    assert first["reloads"] == {"complete": 5, "incomplete": 1, "late": 2}
    assert first["use"] == found["total"]
    assert found["total"]["tokens"] == {"device": 100, "host": 60, "disk": 0, "computed": 240}
    assert second["use"]["shares"]["device"] is None
    assert found["ceiling"] == {"cached_tokens": 210, "share": 0.525, "is_exact": True, "sampled_share": 1.0}


def test_cache_stats_without_requests_say_so() -> None:
    shown = run(FakeGateway(cluster_status(worker_report())), "cache", "stats")
    assert shown.stdout.splitlines()[-1] == "no request has completed since the start of the scheduler"


def test_drain_here_selects_the_workers_of_this_machine() -> None:
    gateway = FakeGateway(cluster_status(*reports_on(socket.gethostname(), "w0", "w2"), *reports_on("elsewhere", "w1")))
    assert run(gateway, "drain", "--here").exit_code == 0
    assert gateway.drained == gateway.drained_with_node == ["w0", "w2"]


def test_drain_here_selects_by_address_if_two_machines_share_a_host_name() -> None:
    own_addresses = frozenset({"10.0.0.1", "fd00::1"})
    here, elsewhere = reports_on(socket.gethostname(), "w0", "w1"), reports_on(socket.gethostname(), "w2")
    addresses = {"w0": "10.0.0.1:7", "w1": "[fd00::1]:7", "w2": "10.0.0.2:7"}
    reports = [replace(r, worker=replace(r.worker, address=addresses[r.worker.worker_id])) for r in (*here, *elsewhere)]
    gateway = FakeGateway(cluster_status(*reports))
    context = admin_context(gateway, own_addresses=own_addresses)
    assert run(gateway, "drain", "--here", context=context).exit_code == 0
    assert gateway.drained == ["w0", "w1"]


def test_drain_wait_exits_with_code_3_at_its_time_limit() -> None:
    gateway = FakeGateway(cluster_status(*reports_on("a", "w0", "w1")))
    done = run(gateway, "drain", "w1", "--wait", "--limit-s", "0.01")
    assert done.exit_code == admin_commands.NOT_GONE_EXIT_CODE == 3
    assert done.stderr == "baton: still running after 0.01 s: w1\n"


def test_drain_wait_ends_when_the_worker_has_a_new_epoch() -> None:
    before, after = cluster_status(*reports_on("a", "w0", epoch=1)), cluster_status(*reports_on("a", "w0", epoch=2))
    gateway = FakeGateway(before, before, StreamBroken("restarting"), before, after)
    done = run(gateway, "drain", "w0", "--wait")
    assert done.stdout.splitlines()[-1] == "w0 has ended"
    assert gateway.statuses == [after], "drain returned before the worker's epoch changed"


def test_drain_wait_does_not_trust_the_worker_list_of_a_new_scheduler_immediately() -> None:
    before = cluster_status(*reports_on("a", "w0"))
    new = replace(before, scheduler=ProcessInfo(process_id="another"))
    gone = [replace(new, workers=()), replace(new, workers=())]
    gateway = FakeGateway(
        before, before, replace(before, scheduler=None, workers=()), replace(new, workers=()), new, *gone
    )
    done = run(gateway, "drain", "w0", "--wait", context=admin_context(gateway, find_s=0.6))
    assert done.stdout.splitlines()[-1] == "w0 has ended"
    assert gateway.statuses == gone[-1:], "drain trusted the incomplete worker list of the new scheduler"


def test_drain_wait_fails_if_the_gateway_stays_unreachable() -> None:
    gateway = FakeGateway(cluster_status(*reports_on("a", "w0")), StreamBroken("gone"))
    done = run(gateway, "drain", "w0", "--wait", context=admin_context(gateway, silence_s=0.01))
    assert isinstance(done.exception, BatonError)
    assert "no gateway answers" in str(done.exception)


def test_drain_wait_retries_until_the_gateway_answers_and_knows_the_workers() -> None:
    here = cluster_status(*reports_on(socket.gethostname(), "w0"))
    not_yet = [
        StreamBroken("h:1: not yet"),
        replace(here, scheduler=None),
        Refused(UNAVAILABLE),
        cluster_status(*reports_on("elsewhere", "w1")),
    ]
    gateway = FakeGateway(*not_yet, here, here, cluster_status())
    context = admin_context(gateway, find_s=60.0)
    done = run(gateway, "drain", "--here", "--wait", "--limit-s", "60", context=context)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "w0 has ended"
    assert done.stderr == "baton: h:1: not yet; trying again for 60 s\n", "reported once"
    assert gateway.drained == ["w0"]


@pytest.mark.usefixtures("exact_times")
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (StreamBroken("h:1: gone"), "no gateway answers at h:1: gone"),
        (replace(cluster_status(), scheduler=None), "no scheduler"),
        (cluster_status(*reports_on("elsewhere", "w1")), "no worker on this machine"),
    ],
)
def test_drain_wait_stops_retrying_at_its_limit(answer: ClusterStatus | BaseException, problem: str) -> None:
    gateway = FakeGateway(answer)
    done = run(gateway, "drain", "--here", "--wait", "--limit-s", "0.5")
    assert isinstance(done.exception, BatonError)
    assert problem in str(done.exception)
    assert 499 <= gateway.num_status_calls <= 501, "each 0.001 s, for 0.5 s"


@pytest.mark.usefixtures("exact_times")
def test_drain_wait_stops_retrying_early_for_an_unknown_worker() -> None:
    gateway = FakeGateway(cluster_status(*reports_on("elsewhere", "w1")))
    done = run(gateway, "drain", "--here", "--wait", context=admin_context(gateway, find_s=0.5))
    assert "no worker on this machine" in str(done.exception)
    assert 499 <= gateway.num_status_calls <= 501, "each 0.001 s, for 0.5 s"


@pytest.mark.parametrize("args", [("w0",), ("--here",), ("w0", "--wait")])
def test_errors_that_retries_cannot_fix_are_reported_immediately(args: tuple[str, ...]) -> None:
    answer = (
        StreamBroken("h:1: gone")
        if "--wait" not in args
        else Refused(replace(UNAVAILABLE, code=Code.PERMISSION_DENIED))
    )
    gateway = FakeGateway(answer, cluster_status(*reports_on(socket.gethostname(), "w0")))
    done = run(gateway, "drain", *args)
    assert isinstance(done.exception, BatonError)
    assert gateway.drained == []


def test_drain_reconnects_after_a_call_without_an_answer() -> None:
    """The address may resolve to another gateway by then."""
    here = cluster_status(*reports_on(socket.gethostname(), "w0"))
    first, second = FakeGateway(StreamBroken("the first one is gone")), FakeGateway(here, here, cluster_status())
    context = admin_context(first, second)
    assert CliRunner().invoke(cli, ["drain", "--here", "--wait"], obj=context).exit_code == 0
    assert first.num_status_calls == 1
    assert second.drained == ["w0"]


def test_drain_of_an_unknown_worker_lists_the_known_workers() -> None:
    gateway = FakeGateway(cluster_status(*reports_on("a", "w0"), *reports_on("b", "w1")))
    done = run(gateway, "drain", "w9")
    assert str(done.exception) == "no worker 'w9'; the cluster has w0 on a, w1 on b"
    here = run(gateway, "drain", "--here")
    assert f"no worker on this machine ({socket.gethostname()})" in str(here.exception)
    assert gateway.drained == []


@pytest.mark.parametrize(
    "args", [["drain"], ["drain", "w0", "--here"], ["explain"], ["status", "--gateway", "http://h:1"]]
)
def test_contradictory_arguments_are_a_usage_error(args: list[str]) -> None:
    assert CliRunner().invoke(cli, args).exit_code == 2


def test_gateway_refusal_is_shown_verbatim() -> None:
    refused = Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message="no decision is kept"))
    assert str(run(FakeGateway(refused), "status").exception) == "no decision is kept"


@pytest.mark.parametrize("args", [["status"], ["explain", "last"], ["drain", "w0"], ["status", "--json"]])
def test_unreachable_gateway_gives_one_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(SystemExit) as end:
        main([*args, "--gateway", address])
    assert end.value.code == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"baton: no gateway answers at {address}")
    assert (
        "; none runs here. Start a cluster with `baton up`, or name a gateway with --gateway HOST:PORT, "
        "and the CA of its certificate" in output.err
    )
    assert output.err.count("\n") == 1


def test_gateway_options_are_read_from_environment_variables() -> None:
    connected: list[GatewayAddress] = []

    @asynccontextmanager
    async def connect(address: GatewayAddress) -> AsyncIterator[FakeGateway]:
        connected.append(address)
        yield FakeGateway(cluster_status())

    context = AdminContext(connect=connect)
    CliRunner().invoke(
        cli,
        ["status"],
        env={"BATON_GATEWAY": "h:1", "BATON_API_KEY": "k", "BATON_GATEWAY_CA": "ca.pem", "BATON_GATEWAY_NAME": "n"},
        obj=context,
    )
    CliRunner().invoke(cli, ["status", "--api-key", "other"], obj=context)
    CliRunner().invoke(cli, ["status", "--gateway-ca", "system"], obj=context)
    assert connected == [
        GatewayAddress("h:1", "k", "ca.pem", "n"),
        GatewayAddress("127.0.0.1:8001", "other"),
        GatewayAddress(locate_gateway.DEFAULT_GATEWAY, ca="system"),
    ]


def test_unreadable_ca_files_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for file, problem in (
        ("missing.pem", "cannot read {}: No such file"),
        ("empty.pem", "{} contains no CA certificates"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["status", "--gateway-ca", str(tmp_path / file)])
        assert end.value.code == 1
        assert capsys.readouterr().err.startswith(f"baton: {problem.format(tmp_path / file)}")


def running(port: int) -> RunningCluster:
    return RunningCluster(
        pid=port,
        identity="",
        started_s=0.0,
        cluster="default",
        model="demo",
        url=f"http://127.0.0.1:{port}",
        gateway=f"127.0.0.1:{port + 1}",
    )


def test_commands_without_flags_find_the_running_cluster_and_drain_does_not_guess() -> None:
    connected: list[str] = []
    gateway = FakeGateway(cluster_status(*reports_on("a", "w0")))

    @asynccontextmanager
    async def connect(address: GatewayAddress) -> AsyncIterator[FakeGateway]:
        connected.append(address.address)
        yield gateway

    one = AdminContext(connect=connect, running_clusters=lambda: [running(70)])
    assert run(gateway, "status", "--json", context=one).stderr == ""
    assert run(gateway, "drain", "w0", context=one).exit_code == 0
    two = replace(one, running_clusters=lambda: [running(80), running(70)])
    shown = run(gateway, "status", "--json", context=two)
    assert json.loads(shown.stdout)["model"] == "demo", "the note must not mix with the output"
    assert "127.0.0.1:71" in shown.stderr
    refused = run(gateway, "drain", "w0", context=two)
    assert isinstance(refused.exception, BatonError)
    assert run(gateway, "drain", "w0", "--url", "http://localhost:70", context=two).exit_code == 0
    assert connected == ["127.0.0.1:71", "127.0.0.1:71", "127.0.0.1:81", "127.0.0.1:71"]


def test_gateway_and_url_exclude_each_other_but_a_variable_yields_to_url() -> None:
    gateway = FakeGateway(cluster_status())
    both = run(gateway, "status", "--gateway", "h:1", "--url", "http://h:2")
    assert both.exit_code == 2
    context = replace(admin_context(gateway), running_clusters=lambda: [running(70)])
    arguments = ["status", "--url", "http://127.0.0.1:70"]
    done = CliRunner().invoke(cli, arguments, env={"BATON_GATEWAY": "h:1"}, obj=context)
    assert done.exit_code == 0


def test_http_url_as_gateway_names_the_right_option() -> None:
    done = run(FakeGateway(cluster_status()), "status", "--gateway", "http://127.0.0.1:8000")
    assert "--url takes its HTTP address" in done.stderr
