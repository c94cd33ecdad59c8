"""What `loadgen run` makes of a run that has ended."""

from pathlib import Path

import pytest

from loadgen.commands.option_types import ApiKey
from loadgen.commands.run_command import EXIT_DIFFERS, EXIT_INTERRUPTED, _checked
from loadgen.commands.summary_text import lines
from loadgen.measure.counts import Counts
from loadgen.measure.measures import Measures
from loadgen.measure.records import Record
from loadgen.measure.summary import summarise
from loadgen.send.run import recheck as check
from loadgen.send.run.processes import Ended
from loadgen.send.run.recheck import Checked, Difference
from loadgen.send.run.run_plan import Finished, Order
from loadgen.send.target import Target
from tests.loadgen_builders import record, refused, run, terms
from tests.unit.loadgen.plans import plan, request

ENDED = Ended(
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


def finished(*records: Record) -> Finished:
    return Finished(run=run(num_offered=len(records)), records=records, terms=terms(), ended=ENDED)


def order(out: Path) -> Order:
    return Order(
        plan=plan(request(0, (0, 8), output=3)), target=Target(urls=("http://127.0.0.1:9",), model="demo"), out=out
    )


def test_a_server_that_is_gone_when_it_is_asked_again_takes_nothing_from_the_run(tmp_path: Path) -> None:
    before = finished(record(token_ids=(7, 8, 9)))
    after, code = _checked(order(tmp_path), before, is_quiet=True)
    assert code == EXIT_DIFFERS
    assert after.notes[0].startswith("check: not done: ")
    assert (after.run, after.records) == (before.run, before.records)


def test_neither_does_a_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "check", interrupted)
    after, code = _checked(order(tmp_path), finished(record()), is_quiet=True)
    assert (code, after.notes) == (EXIT_INTERRUPTED, ("check: interrupted while repeating requests",))


def test_its_goodput_is_the_reports(tmp_path: Path) -> None:
    """A turn that was never sent, since the one before it failed, was offered all the same."""
    given_up = record(4, tokens=(), intended_s=5.0, sent_s=None, ended_s=5.0, is_complete=False, left_early=True)
    done = finished(
        *(record(index, tokens=(index + 0.6,), intended_s=index + 0.5, sent_s=index + 0.5) for index in range(4)),
        given_up,
    )
    said = next(text for text, _ in lines(done, tmp_path) if text.startswith("attainment"))
    goodput = summarise(Measures.of(done.records, done.terms)).goodput_rps
    assert goodput is not None
    assert f"goodput {goodput.value:.2f} requests/s" in said
    assert said.startswith("attainment  80.0%")


@pytest.mark.parametrize(
    ("found", "is_same"),
    [
        (Checked(compared=3, failed=0, skipped=1, differing=()), True),
        (Checked(compared=3, failed=0, skipped=0, differing=(Difference(index=1, at=0),)), False),
        (Checked(compared=2, failed=1, skipped=0, differing=()), False),
        (Checked(compared=0, failed=0, skipped=3, differing=()), False),
    ],
)
def test_only_answers_that_came_again_are_the_same(found: Checked, is_same: bool) -> None:
    assert found.is_same is is_same


def test_a_key_from_a_file_is_sent_without_the_end_of_its_line() -> None:
    assert ApiKey().convert("sk-1\n", None, None) == "sk-1"


def test_what_was_refused_is_told_apart_from_what_was_slow() -> None:
    slow = record(0, tokens=(9.0, 9.1, 9.2))
    assert finished(slow).not_answered == ()
    told = finished(
        slow, refused(1), refused(2), record(3, tokens=(), status=400, error="too long", is_complete=False)
    ).not_answered
    assert told == ("3 of 4 requests have no complete response (2: rejected early: ttft_slo)",)
