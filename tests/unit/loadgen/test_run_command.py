"""The summary, the exit code and the check of `loadgen run`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadgen.capacity.trials import trial_notes
from loadgen.commands import run_command
from loadgen.commands.option_types import ApiKey
from loadgen.commands.run_command import EXIT_DIFFERS, EXIT_INTERRUPTED, _recheck
from loadgen.commands.summary_text import summary_lines
from loadgen.measure.counts import Counts
from loadgen.measure.measures import Measures
from loadgen.measure.prefix_hits import CacheState, CacheVerdict
from loadgen.measure.records import Record
from loadgen.measure.summary import summarise
from loadgen.plan.plan import Plan
from loadgen.plan.sources.workloads import simple_plan
from loadgen.send.run import recheck
from loadgen.send.run.live import LiveView
from loadgen.send.run.processes import ProcessesResult
from loadgen.send.run.recheck import RecheckResult, ResponseDifference
from loadgen.send.run.run_plan import FinishedRun, RunSpec
from loadgen.send.server.idle import IdleResult
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


COLD = CacheVerdict(state=CacheState.COLD)
WARM = CacheVerdict(state=CacheState.WARM, num_hit_tokens=78, num_allowed_tokens=10, num_prompt_tokens=100)


def finished(*records: Record, cache: CacheVerdict = COLD, **changes: Any) -> FinishedRun:
    return FinishedRun(
        run=run(num_offered=len(records), **changes), records=records, rules=rules(), ended=ENDED, cache=cache
    )


def lines(done: FinishedRun, workload: Plan | None = None) -> dict[str, tuple[str, str]]:
    """Return {first word: (rest, colour)} of the summary."""
    found = summary_lines(done, workload or plan(request(0, (0, 8), output=3)), Path("out"))
    return {text.split()[0]: (text.split(maxsplit=1)[1], style) for text, style in found}


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


def test_summary_goodput_equals_the_reports() -> None:
    """A turn that was not sent because the previous one failed counts as offered."""
    given_up = record(4, tokens=(), intended_s=5.0, sent_s=None, ended_s=5.0, is_complete=False, left_early=True)
    done = finished(
        *(record(index, tokens=(index + 0.6,), intended_s=index + 0.5, sent_s=index + 0.5) for index in range(4)),
        given_up,
    )
    said = lines(done)["attainment"][0]
    goodput = summarise(Measures.of(done.records, done.rules)).goodput_rps
    assert goodput is not None
    assert f"goodput {goodput.value:.2f} requests/s" in said
    assert said.startswith("80.0%")


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


def test_warm_cache_is_amber_in_the_summary() -> None:
    said, style = lines(finished(record(), cache=WARM))["cache"]
    assert style == "yellow"
    assert said.startswith("warm cache: 78 % of the prompt tokens were prefix hits")
    assert "allows at most 10 %" in said
    assert "cache" not in lines(finished(record()))
    unknown = CacheVerdict(why="request 0 is a text")
    assert lines(finished(record(), cache=unknown))["cache"] == (
        "not known whether the cache was warm: request 0 is a text",
        "",
    )


def test_warm_cache_is_the_last_line_of_the_live_view(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(name="p", url="u", num_requests=1, planned_s=1.0, lag_limit_s=0.002) as view:
        view.warn(WARM.text)
    assert "warm cache: 78 %" in capsys.readouterr().err


def test_summary_explains_rate_seed_and_priority() -> None:
    drawn = simple_plan(rate_rps=4, seconds=30, input_tokens=8, output_tokens=2, seed=7)
    said = lines(finished(record(), machine={"priority": "high (slice 0.1 ms, nice -10)"}), drawn)
    assert said["plan"][0] == (
        f"4rps-8in-2out-seed7: rate 4 offered {len(drawn.requests)} requests in 30 s (Poisson draw; 120 on average); "
        "the same options with --seed 7 repeat it"
    )
    assert said["priority"][0] == "high (slice 0.1 ms, nice -10)"
    from_file = lines(finished(record(), flags={"plan": "chat.jsonl"}), drawn)["plan"][0]
    assert "--seed" not in from_file


def test_invalid_run_names_the_option_to_change() -> None:
    late = [record(i, tokens=(i + 0.2, i + 0.3), intended_s=float(i), sent_s=i + 0.01) for i in range(9)]
    done = finished(*late, machine={"priority": "high (nice not permitted)"}, invalid=("late",))
    found = [text for text, style in summary_lines(done, plan(request(0, (0, 8))), Path("out")) if style == "yellow"]
    assert [text.split()[:2] for text in found] == [["change", "--priority"], ["change", "--rate"]]
    assert "this run had high (nice not permitted)" in found[0]


def test_each_run_draws_a_new_seed_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Plan] = []

    def stop(ctx: object, given: dict[str, Any]) -> None:
        drawn.append(made(ctx, given))
        raise SystemExit(0)

    made = run_command._plan
    monkeypatch.setattr(run_command, "_run_spec", stop)
    for arguments in ([], [], ["--seed", "5"]):
        CliRunner().invoke(run_command.command, ["--rate", "20", *arguments])
    assert drawn[0].seed != drawn[1].seed
    assert drawn[0].name == f"20rps-128in-32out-seed{drawn[0].seed}"
    assert drawn[2] == simple_plan(rate_rps=20, seconds=30, input_tokens=128, output_tokens=32, seed=5)
    assert drawn[0].requests != drawn[1].requests


def test_warm_cache_is_noted_in_a_trial() -> None:
    idle = IdleResult(waited_s=3.0, is_idle=True)
    assert trial_notes(finished(record()), idle) == ()
    assert trial_notes(finished(record(), cache=WARM), replace(idle, is_idle=False)) == (
        "the server was not idle after waiting 3 s",
        WARM.text,
    )
