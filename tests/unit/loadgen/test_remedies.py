"""What to change after an invalid run."""

import pytest

from loadgen.measure.records import Record
from loadgen.measure.remedies import remedies
from loadgen.send.run.priority import Priority, granted_text
from tests.loadgen_builders import record, rules, run

HIGH = "high (slice 0.1 ms, nice -10)"


def late(lag_s: float) -> list[Record]:
    """Requests at 2 per second, each sent this late."""
    return [record(i, tokens=(i / 2 + 0.2, i / 2 + 0.3), intended_s=i / 2, sent_s=i / 2 + lag_s) for i in range(9)]


def options(*, lag_s: float = 0.01, slo: str = "ttft=600ms", **changes: object) -> list[str]:
    found = remedies(run(**({"num_offered": 9} | changes)), late(lag_s), rules(slo))
    return [text.split()[0].rstrip(":,") for text in found]


def test_valid_run_needs_no_change() -> None:
    assert options(lag_s=0.0005) == []


def test_busy_sender_needs_more_processes() -> None:
    machine = {"cores": 8, "loadgen_cpu_s": 9.0, "priority": HIGH}
    found = remedies(run(machine=machine, duration_s=10.0), late(0.01), rules("ttft=600ms"))
    assert found[0] == "--processes 3: each sending process used 90% of a core"
    idle = machine | {"loadgen_cpu_s": 1.0}
    assert options(machine=idle, duration_s=10.0) == ["--priority", "--rate"]
    assert options(machine=machine | {"cores": 1}, duration_s=10.0) == ["--priority", "--rate"]


def test_too_many_processes_are_reduced() -> None:
    assert remedies(run(machine={"cores": 2}, processes=5), late(0.01), rules())[0] == "--processes 2: 5 share 2 cores"


def test_lost_records_and_connections_have_remedies() -> None:
    assert options(lag_s=0.0005, num_offered=10) == ["run"]
    unsent = record(0, tokens=(), sent_s=None, status=None, error="not sent: all 9 connections are in use")
    assert [text.split(",")[0] for text in remedies(run(), [unsent], rules())] == ["ulimit -n"]


def test_realtime_is_proposed_unless_it_was_used() -> None:
    assert options(machine={"priority": HIGH}) == ["--priority", "--rate"]
    assert options(machine={"priority": "realtime"}) == ["--rate"]
    denied = remedies(
        run(machine={"priority": "high (slice 0.1 ms, realtime not permitted)"}, flags={"priority": "realtime"}),
        late(0.01),
        rules("ttft=600ms"),
    )
    assert denied[0].startswith("run as root or with CAP_SYS_NICE: --priority realtime was not permitted")


def test_ttft_slo_is_proposed_if_there_is_none() -> None:
    found = remedies(run(machine={"priority": "realtime"}), late(0.004), rules("tpot=50ms"))
    assert found[0].startswith("--slo ttft=500ms, if that is your SLO")
    assert remedies(run(), late(0.004), rules("ttft=500ms")) == (), "the proposed SLO makes the run valid"
    assert options(lag_s=0.2, slo="tpot=50ms", machine={"priority": "realtime"}) == ["--rate"]


def test_rate_is_halved_or_the_plan_changed() -> None:
    found = remedies(run(machine={"priority": "realtime"}), late(0.01), rules("ttft=600ms"))
    assert found == ("--rate 1, or send from another machine",)
    assert options(machine={"priority": "realtime"}, flags={"plan": "chat.jsonl"}) == ["PLAN"]


@pytest.mark.parametrize(
    ("wanted", "has_slice", "is_nice", "text"),
    [
        (Priority.HIGH, True, True, "high (slice 0.1 ms, nice -10)"),
        (Priority.HIGH, True, False, "high (slice 0.1 ms, nice not permitted)"),
        (Priority.HIGH, False, False, "normal (nice not permitted)"),
        (Priority.REALTIME, False, True, "high (nice -10, realtime not permitted)"),
    ],
)
def test_priority_text_says_what_was_granted(wanted: Priority, has_slice: bool, is_nice: bool, text: str) -> None:
    assert granted_text(wanted, has_slice=has_slice, is_nice=is_nice) == text
