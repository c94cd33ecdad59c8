import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli
from baton.fleet.doctor import findings as doctor_findings
from baton.fleet.doctor.doctor_check import Finding, fail, ok, warn


def run_doctor(monkeypatch: pytest.MonkeyPatch, found: list[Finding], *args: str) -> Result:
    def findings(_checks: object) -> Iterator[Finding]:
        yield from found

    monkeypatch.setattr(doctor_findings, "findings", findings)
    return CliRunner().invoke(cli, ["doctor", *args])


def test_doctor_prints_one_line_per_finding_with_its_advice_below(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_doctor(monkeypatch, [ok("cpu", "x86 [fast]"), warn("cores", "1 core", "get two")])
    assert done.stdout.splitlines() == [
        "ok    cpu                 x86 [fast]",
        "warn  cores               1 core",
        f"{'':<26}→ get two",
    ]


def test_doctor_json_is_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_doctor(monkeypatch, [warn("cores", "1 core", "get two")], "--json")
    assert json.loads(done.stdout) == [{"name": "cores", "verdict": "warn", "found": "1 core", "advice": "get two"}]


@pytest.mark.parametrize(("args", "is_all"), [([], True), (["links"], False)])
def test_doctor_links_runs_only_the_checks_of_transfers(
    monkeypatch: pytest.MonkeyPatch, args: list[str], is_all: bool
) -> None:
    ran: list[str] = []

    def findings(checks: dict[str, object]) -> Iterator[Finding]:
        ran.extend(checks)
        yield ok("cpu", "x")

    monkeypatch.setattr(doctor_findings, "findings", findings)
    assert CliRunner().invoke(cli, ["doctor", *args]).exit_code == 0
    assert ran == list(doctor_findings.CHECKS if is_all else doctor_findings.LINK_CHECKS)


@pytest.mark.parametrize(("last", "code"), [(warn("a", "b", "c"), 0), (fail("a", "b", "c"), 1)])
@pytest.mark.parametrize("output_flags", [[], ["--json"]])
def test_doctor_exits_with_1_only_if_a_check_failed(
    monkeypatch: pytest.MonkeyPatch, last: Finding, code: int, output_flags: list[str]
) -> None:
    assert run_doctor(monkeypatch, [ok("cpu", "x"), last], *output_flags).exit_code == code
