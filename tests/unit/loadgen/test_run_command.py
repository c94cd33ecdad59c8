"""The summary, the exit code and the check of `loadgen run`."""

from pathlib import Path

import pytest

from loadgen.commands.option_types import ApiKey
from loadgen.commands.run_command import EXIT_DIFFERS, EXIT_INTERRUPTED, _recheck
from loadgen.commands.summary_text import summary_lines
from loadgen.measure.counts import Counts
from loadgen.measure.measures import Measures
from loadgen.measure.records import Record
from loadgen.measure.summary import summarise
from loadgen.send.run import recheck
from loadgen.send.run.processes import ProcessesResult
from loadgen.send.run.recheck import RecheckResult, ResponseDifference
from loadgen.send.run.run_plan import FinishedRun, RunSpec
from loadgen.send.target import Target
from tests.loadgen_builders import record, refused, rules, run
from tests.unit.loadgen.plans import plan, request

ENDED = ProcessesResult(
    counts=Counts(),
    started_s=0.0,
    ended_s=1.0,
    is_interrupted=False,
    problems=(),
    warm_ups=0,
    warm_ups_failed=0,
    warm_up_error="",
    max_connections=1,
    priority="normal",
)


def finished(*records: Record) -> FinishedRun:
    return FinishedRun(run=run(num_offered=len(records)), records=records, rules=rules(), ended=ENDED)


def spec(out: Path) -> RunSpec:
    return RunSpec(
        plan=plan(request(0, (0, 8), output=3)), target=Target(urls=("http://127.0.0.1:9",), model="demo"), out=out
    )


def test_unreachable_server_in_check_keeps_the_run(tmp_path: Path) -> None:
    before = finished(record(token_ids=(7, 8, 9)))
    after, code = _recheck(spec(tmp_path), before, is_quiet=True)
    assert code == EXIT_DIFFERS
    assert after.notes[0].startswith("check: not done: ")
    assert (after.run, after.records) == (before.run, before.records)


def test_ctrl_c_in_check_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recheck, "check", interrupted)
    after, code = _recheck(spec(tmp_path), finished(record()), is_quiet=True)
    assert (code, after.notes) == (EXIT_INTERRUPTED, ("check: interrupted while repeating requests",))


def test_summary_goodput_equals_the_reports(tmp_path: Path) -> None:
    """A turn that was not sent because the previous one failed counts as offered."""
    given_up = record(4, tokens=(), intended_s=5.0, sent_s=None, ended_s=5.0, is_complete=False, left_early=True)
    done = finished(
        *(record(index, tokens=(index + 0.6,), intended_s=index + 0.5, sent_s=index + 0.5) for index in range(4)),
        given_up,
    )
    said = next(text for text, _ in summary_lines(done, tmp_path) if text.startswith("attainment"))
    goodput = summarise(Measures.of(done.records, done.rules)).goodput_rps
    assert goodput is not None
    assert f"goodput {goodput.value:.2f} requests/s" in said
    assert said.startswith("attainment  80.0%")


@pytest.mark.parametrize(
    ("found", "is_same"),
    [
        (RecheckResult(compared=3, failed=0, skipped=1, differing=()), True),
        (RecheckResult(compared=3, failed=0, skipped=0, differing=(ResponseDifference(index=1, at=0),)), False),
        (RecheckResult(compared=2, failed=1, skipped=0, differing=()), False),
        (RecheckResult(compared=0, failed=0, skipped=3, differing=()), False),
    ],
)
def test_check_needs_equal_responses(found: RecheckResult, is_same: bool) -> None:
    assert found.is_same is is_same


def test_api_key_is_stripped() -> None:
    assert ApiKey().convert("sk-1\n", None, None) == "sk-1"


def test_rejections_are_listed_separately_from_slow_responses() -> None:
    slow = record(0, tokens=(9.0, 9.1, 9.2))
    assert finished(slow).not_answered == ()
    notes = finished(
        slow, refused(1), refused(2), record(3, tokens=(), status=400, error="too long", is_complete=False)
    ).not_answered
    assert notes == ("3 of 4 requests have no complete response (2: rejected early: ttft_slo)",)
