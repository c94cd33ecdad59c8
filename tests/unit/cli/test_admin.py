"""`baton status`, `explain` and `drain` against a stand-in for a gateway, and against nobody."""

import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli import admin_commands
from baton.cli.main import cli, main
from baton.core.client_api import ClusterStatus, ProcessInfo
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import BatonError, Code, Failure, Reason, Refused, StreamBroken
from tests.builders import cluster_status, decision_record, worker_report

UNAVAILABLE = Failure(code=Code.UNAVAILABLE, reason=Reason.SCHEDULER_LOST, message="no scheduler answers")


class StandIn:
    """Answers `status` from a list, the last one for ever; an exception in it is raised."""

    def __init__(self, *statuses: ClusterStatus | BaseException, records: Sequence[DecisionRecord] = ()) -> None:
        self.statuses = list(statuses)
        self.records = tuple(records)
        self.num_asked = 0
        """How often for `status`."""
        self.explained: list[str | None] = []
        self.drained: list[str] = []
        self.leaving_nodes: list[str] = []
        """Whose machine leaves, of those."""

    async def status(self) -> ClusterStatus:
        self.num_asked += 1
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
            self.leaving_nodes.append(worker_id)


def asked(monkeypatch: pytest.MonkeyPatch, gateway: StandIn, *args: str, env: dict[str, str] | None = None) -> Result:
    @asynccontextmanager
    async def connect(where: admin_commands.Where) -> AsyncIterator[StandIn]:
        yield gateway

    monkeypatch.setattr(admin_commands, "connect", connect)
    for name in ("WAIT_POLL_S", "WATCH_S", "RETRY_S"):
        monkeypatch.setattr(admin_commands, name, 0.001)
    return CliRunner().invoke(cli, args, prog_name="baton", env=env)


def on(host: str, *worker_ids: str, epoch: int = 1) -> list[WorkerReport]:
    return [worker_report(worker_id, host=host, pid=7, epoch=epoch, running_seqs=1) for worker_id in worker_ids]


def test_status_as_tables_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = StandIn(cluster_status(worker_report("w0", epoch=2**63)))
    assert "w0" in asked(monkeypatch, gateway, "status").stdout
    shown = json.loads(asked(monkeypatch, gateway, "status", "--json").stdout)
    assert shown["workers"][0]["worker"] == {"worker_id": "w0", "worker_epoch": hex(2**63), "address": "w0:1"}
    assert shown["scheduler"]["process_id"] == "s0"


def test_a_watch_goes_on_while_the_gateway_is_away_and_ends_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster_status(worker_report("w0"))
    done = asked(
        monkeypatch,
        StandIn(found, StreamBroken("h:1: gone"), found, KeyboardInterrupt()),
        "status",
        "--watch",
        "--json",
    )
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("model") for line in lines] == ["demo", None, "demo"]
    assert "no gateway answers at h:1: gone" in lines[1]["error"]


def test_a_watch_shows_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    done = asked(monkeypatch, StandIn(cluster_status(worker_report("w0")), KeyboardInterrupt()), "status", "--watch")
    assert done.exit_code == 0
    assert "w0" in done.stdout


def test_explain_takes_an_id_or_last(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = StandIn(cluster_status(), records=[decision_record()])
    assert "prefill w0, decode w1" in asked(monkeypatch, gateway, "explain", "last").stdout
    asked(monkeypatch, gateway, "explain", "7f3a")
    assert gateway.explained == [None, "7f3a"]


def test_explain_without_a_record_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = asked(monkeypatch, StandIn(cluster_status()), "explain", "7f3a")
    assert isinstance(done.exception, BatonError)
    assert "7f3a" in str(done.exception)


def test_drain_by_name_says_what_is_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = StandIn(cluster_status(*on("a", "w0", "w1")))
    done = asked(monkeypatch, gateway, "drain", "w1")
    assert done.stdout == "w1 (hybrid, pid 7) finishes 1 sequence and leaves\n"
    assert gateway.drained == ["w1"]
    assert gateway.leaving_nodes == [], "its machine stays"


def test_drain_here_means_the_workers_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = StandIn(cluster_status(*on(socket.gethostname(), "w0", "w2"), *on("elsewhere", "w1")))
    assert asked(monkeypatch, gateway, "drain", "--here").exit_code == 0
    assert gateway.drained == gateway.leaving_nodes == ["w0", "w2"]


def test_drain_here_goes_by_the_address_where_two_machines_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_commands, "own_addresses", lambda: {"10.0.0.1", "fd00::1"})
    ours, theirs = on(socket.gethostname(), "w0", "w1"), on(socket.gethostname(), "w2")
    addresses = {"w0": "10.0.0.1:7", "w1": "[fd00::1]:7", "w2": "10.0.0.2:7"}
    reports = [replace(r, worker=replace(r.worker, address=addresses[r.worker.worker_id])) for r in (*ours, *theirs)]
    gateway = StandIn(cluster_status(*reports))
    assert asked(monkeypatch, gateway, "drain", "--here").exit_code == 0
    assert gateway.drained == ["w0", "w1"]


def test_waiting_has_a_limit_and_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = StandIn(cluster_status(*on("a", "w0", "w1")))
    done = asked(monkeypatch, gateway, "drain", "w1", "--wait", "--limit-s", "0.01")
    assert done.exit_code == admin_commands.NOT_GONE_EXIT_CODE == 3
    assert done.stderr == "baton: not gone within 0.01 s: w1\n"


def test_waiting_ends_when_that_life_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = cluster_status(*on("a", "w0", epoch=1)), cluster_status(*on("a", "w0", epoch=2))
    gateway = StandIn(before, before, StreamBroken("restarting"), before, after)
    done = asked(monkeypatch, gateway, "drain", "w0", "--wait")
    assert done.stdout.splitlines()[-1] == "w0 has left"
    assert gateway.statuses == [after], "it has waited for that status"


def test_a_scheduler_that_has_just_come_does_not_know_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_commands, "FIND_S", 0.6)
    before = cluster_status(*on("a", "w0"))
    new = replace(before, scheduler=ProcessInfo(process_id="another"))
    gone = [replace(new, workers=()), replace(new, workers=())]
    gateway = StandIn(before, before, replace(before, scheduler=None, workers=()), replace(new, workers=()), new, *gone)
    done = asked(monkeypatch, gateway, "drain", "w0", "--wait")
    assert done.stdout.splitlines()[-1] == "w0 has left"
    assert gateway.statuses == gone[-1:], "not when it was missing from what a new scheduler knew"


def test_waiting_ends_when_the_gateway_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_commands, "SILENCE_S", 0.01)
    gateway = StandIn(cluster_status(*on("a", "w0")), StreamBroken("gone"))
    done = asked(monkeypatch, gateway, "drain", "w0", "--wait")
    assert isinstance(done.exception, BatonError)
    assert "no gateway answers" in str(done.exception)


def test_who_waits_asks_again_until_a_gateway_answers_that_knows_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cluster_status(*on(socket.gethostname(), "w0"))
    not_yet = [
        StreamBroken("h:1: not yet"),
        replace(here, scheduler=None),
        Refused(UNAVAILABLE),
        cluster_status(*on("elsewhere", "w1")),
    ]
    gateway = StandIn(*not_yet, here, here, cluster_status())
    done = asked(monkeypatch, gateway, "drain", "--here", "--wait", "--limit-s", "5")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "w0 has left"
    assert done.stderr == "baton: h:1: not yet; trying again for 5 s\n", "said once"
    assert gateway.drained == ["w0"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (StreamBroken("h:1: gone"), "no gateway answers at h:1: gone"),
        (replace(cluster_status(), scheduler=None), "no scheduler"),
        (cluster_status(*on("elsewhere", "w1")), "no worker on this machine"),
    ],
)
def test_who_waits_asks_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, answer: ClusterStatus | BaseException, said: str
) -> None:
    gateway = StandIn(answer)
    done = asked(monkeypatch, gateway, "drain", "--here", "--wait", "--limit-s", "0.5")
    assert isinstance(done.exception, BatonError)
    assert said in str(done.exception)
    assert 1 < gateway.num_asked <= 501, "each 0.001 s, for 0.5 s"


def test_a_worker_that_no_scheduler_knows_is_asked_for_only_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_commands, "FIND_S", 0.5)
    gateway = StandIn(cluster_status(*on("elsewhere", "w1")))
    done = asked(monkeypatch, gateway, "drain", "--here", "--wait")
    assert "no worker on this machine" in str(done.exception)
    assert 1 < gateway.num_asked <= 501, "each 0.001 s, for 0.5 s"


@pytest.mark.parametrize("args", [("w0",), ("--here",), ("w0", "--wait")])
def test_what_no_patience_helps_is_said_at_once(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    answer = (
        StreamBroken("h:1: gone")
        if "--wait" not in args
        else Refused(replace(UNAVAILABLE, code=Code.PERMISSION_DENIED))
    )
    gateway = StandIn(answer, cluster_status(*on(socket.gethostname(), "w0")))
    done = asked(monkeypatch, gateway, "drain", *args)
    assert isinstance(done.exception, BatonError)
    assert gateway.drained == []


def test_a_gateway_that_did_not_answer_is_dialled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may have its name meanwhile."""
    here = cluster_status(*on(socket.gethostname(), "w0"))
    gateways = [StandIn(StreamBroken("the old one is gone")), StandIn(here, here, cluster_status())]
    dialled: list[StandIn] = []

    @asynccontextmanager
    async def connect(where: admin_commands.Where) -> AsyncIterator[StandIn]:
        dialled.append(gateways[len(dialled)])
        yield dialled[-1]

    monkeypatch.setattr(admin_commands, "connect", connect)
    for name in ("WAIT_POLL_S", "RETRY_S"):
        monkeypatch.setattr(admin_commands, name, 0.001)
    assert CliRunner().invoke(cli, ["drain", "--here", "--wait"]).exit_code == 0
    assert dialled == gateways


def test_a_worker_that_is_not_there_is_an_error_that_names_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = StandIn(cluster_status(*on("a", "w0"), *on("b", "w1")))
    done = asked(monkeypatch, gateway, "drain", "w9")
    assert str(done.exception) == "no worker 'w9'; there are w0 on a, w1 on b"
    here = asked(monkeypatch, gateway, "drain", "--here")
    assert f"no worker on this machine ({socket.gethostname()})" in str(here.exception)
    assert gateway.drained == []


@pytest.mark.parametrize(
    "args", [["drain"], ["drain", "w0", "--here"], ["explain"], ["status", "--gateway", "http://h:1"]]
)
def test_what_makes_no_sense_is_a_usage_error(args: list[str]) -> None:
    assert CliRunner().invoke(cli, args).exit_code == 2


def test_what_the_gateway_refuses_is_said_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message="no decision is kept"))
    assert str(asked(monkeypatch, StandIn(refused), "status").exception) == "no decision is kept"


@pytest.mark.parametrize("args", [["status"], ["explain", "last"], ["drain", "w0"], ["status", "--json"]])
def test_without_a_gateway_one_line_says_so_and_what_to_do(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(SystemExit) as end:
        main([*args, "--gateway", address])
    assert end.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"baton: no gateway answers at {address}")
    assert (
        "; start a cluster with `baton up`, or name a gateway with --gateway HOST:PORT, and with --gateway-ca FILE who"
        in said.err
    )
    assert said.err.count("\n") == 1


def test_the_gateway_may_come_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_at: list[admin_commands.Where] = []

    @asynccontextmanager
    async def connect(where: admin_commands.Where) -> AsyncIterator[StandIn]:
        asked_at.append(where)
        yield StandIn(cluster_status())

    monkeypatch.setattr(admin_commands, "connect", connect)
    CliRunner().invoke(
        cli,
        ["status"],
        env={"BATON_GATEWAY": "h:1", "BATON_API_KEY": "k", "BATON_GATEWAY_CA": "ca.pem", "BATON_GATEWAY_NAME": "n"},
    )
    CliRunner().invoke(cli, ["status", "--api-key", "other"])
    CliRunner().invoke(cli, ["status", "--gateway-ca", "system"])
    assert asked_at == [
        admin_commands.Where("h:1", "k", "ca.pem", "n"),
        admin_commands.Where("127.0.0.1:8001", "other"),
        admin_commands.Where(admin_commands.GATEWAY, ca="system"),
    ]


def test_authorities_that_cannot_be_read_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for file, problem in (
        ("missing.pem", "cannot read {}: No such file"),
        ("empty.pem", "{} contains no CA certificates"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["status", "--gateway-ca", str(tmp_path / file)])
        assert end.value.code == 1
        assert capsys.readouterr().err.startswith(f"baton: {problem.format(tmp_path / file)}")
