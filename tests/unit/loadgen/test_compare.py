"""Comparison of runs: differences by hand, verdicts on synthetic runs, and exit codes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from loadgen.commands.compare_command import command
from loadgen.measure.compare import Change, ComparisonVerdict, NotComparable, RegressionBound, compare, regressions
from loadgen.measure.prefix_hits import CacheVerdict
from loadgen.measure.records import Record
from loadgen.measure.records_file import RECORDS, Result, read_result, to_json
from loadgen.measure.result_plan import cache_of
from loadgen.measure.stats import Interval
from tests.loadgen_builders import record, refused, rules, run
from tests.loadgen_synthetic import warm, write_result


def answer(index: int, ttft: float, gap: float = 0.1) -> Record:
    """A response due at its index, sent immediately, with three tokens."""
    due = float(index)
    return record(index, tokens=(due + ttft, due + ttft + gap, due + ttft + 2 * gap), intended_s=due, sent_s=due)


def result(records: list[Record], name: str = "A", **changes: Any) -> Result:
    return Result(
        path=Path(f"/results/{name}"),
        run=run(num_offered=len(records), flags={"label": name}, **changes),
        records=tuple(records),
    )


def noisy(count: int, factor: float, seed: int = 1) -> list[Record]:
    """Very different records that are equal between calls except for `factor` and a little noise."""
    base = np.random.default_rng(0).lognormal(-2, 1, count)
    noise = np.random.default_rng(seed).lognormal(0, 0.02, count)
    return [answer(i, float(base[i] * factor * noise[i])) for i in range(count)]


def changes_of(found: Any) -> dict[str, Change]:
    return {change.metric: change for change in found.changes}


def test_means_medians_and_paired_differences_equal_values_by_hand() -> None:
    before = [answer(i, ttft) for i, ttft in enumerate((0.1, 0.2, 0.3))]
    after = [answer(i, ttft, 0.3) for i, ttft in enumerate((0.2, 0.3, 0.7))]
    found = changes_of(compare(result(before), result(after, "B"), rules=rules("ttft=250ms,tpot=1s")))
    assert (found["ttft_mean"].before, found["ttft_mean"].after) == pytest.approx((0.2, 0.4))
    assert found["ttft_mean"].difference == pytest.approx(0.2)
    assert found["ttft_mean"].relative == pytest.approx(1.0)
    assert (found["ttft_p50"].before, found["ttft_p50"].after) == pytest.approx((0.2, 0.3))
    assert (found["tpot_p99"].before, found["tpot_p99"].after) == pytest.approx((0.1, 0.3))
    assert (found["e2e_mean"].before, found["e2e_mean"].after) == pytest.approx((0.4, 1.0))
    assert (found["attainment"].before, found["attainment"].after) == pytest.approx((2 / 3, 1 / 3))
    assert (found["goodput"].before, found["goodput"].after) == pytest.approx((2 / 3, 1 / 3))


def test_pairing_detects_five_percent_in_large_noise() -> None:
    found = changes_of(compare(result(noisy(400, 1.0)), result(noisy(400, 1.05, seed=2), "B")))
    assert found["ttft_mean"].verdict is ComparisonVerdict.WORSE
    assert found["ttft_p50"].verdict is ComparisonVerdict.WORSE
    assert found["tpot_mean"].verdict is ComparisonVerdict.SAME
    assert found["attainment"].verdict in (ComparisonVerdict.SAME, ComparisonVerdict.WORSE)
    back = changes_of(compare(result(noisy(400, 1.05, seed=2)), result(noisy(400, 1.0), "B")))
    assert back["ttft_mean"].verdict is ComparisonVerdict.BETTER


def test_run_compared_with_itself_has_no_change() -> None:
    found = compare(result(noisy(100, 1.0)), result(noisy(100, 1.0), "B"))
    assert {change.verdict for change in found.changes} == {ComparisonVerdict.SAME}
    assert {change.difference for change in found.changes} == {0.0}
    assert regressions(found, 0.0) == []


def test_latencies_compare_pairs_and_rejections_lower_attainment() -> None:
    """B rejects the slow half of the requests. The rest is not faster, but attainment is lower."""
    before = [answer(i, 0.5 if i % 2 else 0.1) for i in range(60)]
    after = [
        refused(i, intended_s=float(i), sent_s=float(i), ended_s=i + 0.1) if i % 2 else answer(i, 0.1)
        for i in range(60)
    ]
    found = changes_of(compare(result(before), result(after, "B")))
    assert found["ttft_mean"].count == 30
    assert found["ttft_mean"].verdict is ComparisonVerdict.SAME
    assert found["attainment"].count == 60
    assert found["attainment"].difference == pytest.approx(-0.5)
    assert found["attainment"].verdict is ComparisonVerdict.WORSE
    assert found["goodput"].verdict is ComparisonVerdict.WORSE


def test_different_plans_need_unpaired() -> None:
    other = result(noisy(50, 1.0, seed=3), "B", plan_hash="other")
    with pytest.raises(NotComparable, match="different plans"):
        compare(result(noisy(50, 1.0)), other)
    found = compare(result(noisy(50, 1.0)), other, unpaired=True)
    assert not found.is_paired
    assert changes_of(found)["ttft_mean"].verdict is ComparisonVerdict.SAME


def test_requests_of_one_run_only_are_left_out_with_a_note() -> None:
    found = compare(
        result([answer(i, 0.1) for i in range(5)]), result([answer(i, 0.1) for i in range(3)], "B", interrupted=True)
    )
    assert changes_of(found)["attainment"].count == 3
    assert "only the 3 requests" in found.notes[0]
    with pytest.raises(NotComparable, match="no request in common"):
        compare(result([answer(0, 0.1)]), result([answer(1, 0.1)], "B"))


def test_too_few_values_are_unknown() -> None:
    found = changes_of(compare(result([answer(0, 0.1)]), result([answer(0, 0.2)], "B")))
    assert found["ttft_p50"].verdict is ComparisonVerdict.UNKNOWN
    nothing = changes_of(compare(result([refused(0), refused(1)]), result([refused(0), refused(1)], "B")))
    assert nothing["ttft_p50"].verdict is ComparisonVerdict.UNKNOWN
    assert math.isnan(nothing["ttft_p50"].before)


@pytest.mark.parametrize(
    ("metric", "low", "high", "expected"),
    [
        ("ttft_p50", 0.1, 0.2, ComparisonVerdict.WORSE),
        ("ttft_p50", -0.2, -0.1, ComparisonVerdict.BETTER),
        ("ttft_p50", -0.1, 0.1, ComparisonVerdict.SAME),
        ("ttft_p50", 0.1, None, ComparisonVerdict.WORSE),
        ("ttft_p50", -0.1, None, ComparisonVerdict.SAME),
        ("goodput", 0.1, 0.2, ComparisonVerdict.BETTER),
        ("attainment", -0.2, -0.1, ComparisonVerdict.WORSE),
    ],
)
def test_verdict_follows_from_the_interval(
    metric: str, low: float, high: float | None, expected: ComparisonVerdict
) -> None:
    assert (
        Change(metric=metric, before=1.0, after=1.1, interval=Interval(low=low, high=high), count=9).verdict is expected
    )


@pytest.mark.parametrize(
    ("text", "is_crossed"),
    [
        ("ttft_p50 > +40%", True),
        ("ttft_p50 > 60%", False),
        ("ttft_p50>90ms", True),
        ("ttft_p50 > 0.11s", False),
        ("attainment < -30pp", True),
        ("attainment < -40pp", False),
        ("goodput < -0.2rps", True),
        ("e2e_p99 < 0%", False),
    ],
)
def test_thresholds_compare_the_observed_change(text: str, is_crossed: bool) -> None:
    """ttft p50 changes from 0.2 to 0.3 s, attainment from 2/3 to 1/3, goodput similarly."""
    before = [answer(i, ttft) for i, ttft in enumerate((0.1, 0.2, 0.3))]
    after = [answer(i, ttft) for i, ttft in enumerate((0.2, 0.3, 0.7))]
    found = compare(result(before), result(after, "B"), rules=rules("ttft=250ms"))
    assert RegressionBound.parse(text).is_crossed(found) is is_crossed


def test_threshold_on_a_missing_metric_is_undecided() -> None:
    """B completed nothing, which does not make its latencies better."""
    before = [answer(i, 0.1) for i in range(9)]
    found = compare(
        result(before), result([refused(i, intended_s=float(i)) for i in range(9)], "B"), rules=rules("ttft=250ms")
    )
    assert RegressionBound.parse("ttft_p99 > +5%").is_crossed(found) is None
    assert RegressionBound.parse("e2e_mean > 20ms").is_crossed(found) is None
    assert RegressionBound.parse("attainment < -5pp").is_crossed(found) is True


def test_stricter_slo_also_tightens_the_lag_limit() -> None:
    """Each request is sent 50 ms late: valid for a TTFT bound of 10 s, invalid for 100 ms."""
    late = [record(i, tokens=(i + 0.2, i + 0.3), intended_s=float(i), sent_s=i + 0.05) for i in range(40)]
    easy = {"slos": rules("ttft=10s").slos}
    assert compare(result(late, **easy), result(late, "B", **easy)).invalid == ()
    found = compare(result(late, **easy), result(late, "B", **easy), rules=rules("ttft=100ms"))
    assert ["late" in reason for reason in found.invalid] == [True, True]


@pytest.mark.parametrize(
    "text", ["ttft_p50", "ttft_p42 > 5%", "ttft_p50 > 5pp", "attainment > 5ms", "goodput < 5%%", "ttft_p50 >= 5%"]
)
def test_invalid_thresholds_are_rejected(text: str) -> None:
    with pytest.raises(NotComparable):
        RegressionBound.parse(text)


def refusing(directory: Path) -> Path:
    """Return the run as if the server had rejected everything."""
    file = directory / RECORDS
    records = [
        replace(one, arrivals=(), status=429, is_complete=False, num_output_tokens=None)
        for one in read_result(directory).records
    ]
    file.write_bytes(b"".join(json.dumps(to_json(one)).encode() + b"\n" for one in records))
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {
        "fast": write_result(root / "fast", rate=5, seconds=20),
        "slow": write_result(root / "slow", rate=5, seconds=20, speed=0.8),
        "other": write_result(root / "other", rate=5, seconds=20, seed=2),
        "late": write_result(root / "late", rate=5, seconds=20, lag_s=0.01),
        "refusing": refusing(write_result(root / "refusing", rate=5, seconds=20)),
        "warm fast": warm(write_result(root / "warm fast", rate=5, seconds=20)),
        "warm slow": warm(write_result(root / "warm slow", rate=5, seconds=20, speed=0.8)),
    }


@pytest.mark.parametrize(
    ("before", "after", "flags", "code"),
    [
        ("fast", "fast", [], 0),
        ("fast", "slow", [], 1),
        ("slow", "fast", [], 0),
        ("fast", "slow", ["--max-regression", "900%"], 0),
        ("fast", "slow", ["--fail-if", "ttft_p50 > +500%"], 0),
        ("fast", "slow", ["--fail-if", "tpot_p50 > +5%"], 1),
        ("slow", "fast", ["--fail-if", "ttft_p50 < 0ms"], 1),
        ("fast", "refusing", ["--fail-if", "ttft_p99 > +5%"], 2),
        ("fast", "refusing", ["--fail-if", "ttft_p99 > +5%", "--fail-if", "attainment < -1pp"], 1),
        ("fast", "late", [], 2),
        ("slow", "warm fast", [], 2),
        ("slow", "warm fast", ["--allow-warm"], 0),
        ("fast", "warm fast", [], 2),
        ("fast", "warm slow", [], 1),
        ("warm fast", "slow", [], 2),
        ("warm fast", "slow", ["--allow-warm"], 1),
        ("warm fast", "slow", ["--max-regression", "900%"], 0),
        ("warm slow", "fast", [], 0),
        ("slow", "warm fast", ["--fail-if", "tpot_p50 > +5%"], 2),
        ("slow", "warm fast", ["--fail-if", "tpot_p50 > +5%", "--allow-warm"], 0),
        ("warm fast", "slow", ["--fail-if", "tpot_p50 > +5%"], 2),
        ("warm fast", "slow", ["--fail-if", "tpot_p50 > +500%"], 0),
        ("fast", "fast", ["--max-regression", "lots"], 2),
    ],
)
def test_exit_code_follows_from_thresholds_and_verdicts(
    runs: dict[str, Path], before: str, after: str, flags: list[str], code: int
) -> None:
    found = CliRunner().invoke(command, [str(runs[before]), str(runs[after]), *flags])
    assert found.exit_code == code, found.output
    if code == 1:
        assert "regression: " in found.output
    if after == "late":
        assert "INVALID" in found.output
    assert ("warm cache: " in found.output) == ("warm" in before + after)


def test_warm_run_is_not_called_better_nor_the_other_worse(runs: dict[str, Path]) -> None:
    def verdicts(before: str, after: str, **changes: Any) -> set[ComparisonVerdict]:
        sides = (read_result(runs[before]), read_result(runs[after]))
        found = compare(*sides, caches=(cache_of(sides[0]), cache_of(sides[1])), **changes)
        return {change.verdict for change in found.changes}

    assert ComparisonVerdict.BETTER in verdicts("slow", "fast")
    assert verdicts("slow", "warm fast").isdisjoint({ComparisonVerdict.BETTER})
    assert ComparisonVerdict.WARM in verdicts("slow", "warm fast")
    assert verdicts("warm fast", "slow").isdisjoint({ComparisonVerdict.WORSE})
    assert ComparisonVerdict.WORSE in verdicts("fast", "warm slow"), "slower in spite of its warm cache"
    assert ComparisonVerdict.BETTER in verdicts("warm slow", "fast"), "faster than even a warm run"
    assert ComparisonVerdict.BETTER in verdicts("slow", "warm fast", allow_warm=True)


def test_unknown_caches_are_noted_once(runs: dict[str, Path]) -> None:
    sides = (read_result(runs["fast"]), read_result(runs["slow"]))
    unknown = CacheVerdict(why="the plan is a text")
    found = compare(*sides, caches=(unknown, unknown))
    assert found.notes == ("fast and slow: not known whether the cache was warm: the plan is a text",)


def test_different_plans_end_the_command_with_an_error(runs: dict[str, Path]) -> None:
    found = CliRunner().invoke(command, [str(runs["fast"]), str(runs["other"])])
    assert isinstance(found.exception, NotComparable)
    assert (
        CliRunner()
        .invoke(command, [str(runs["fast"]), str(runs["other"]), "--unpaired", "--max-regression", "99%"])
        .exit_code
        == 0
    )


def test_invalid_run_decides_only_with_allow_invalid(runs: dict[str, Path]) -> None:
    found = CliRunner().invoke(
        command, [str(runs["late"]), str(runs["fast"]), "--allow-invalid", "--max-regression", "900%"]
    )
    assert found.exit_code == 0


def test_json_output_has_verdicts_and_changes(runs: dict[str, Path]) -> None:
    found = CliRunner().invoke(command, [str(runs["fast"]), str(runs["slow"]), "--json"])
    data = json.loads(found.output)
    assert data["loadgen_compare"] == 1
    assert data["paired"] is True
    assert any("ttft_mean is worse" in reason for reason in data["failed"])
    by_metric = {change["metric"]: change for change in data["changes"]}
    assert by_metric["tpot_mean"]["verdict"] == "worse"
    before, after = (read_result(runs[name]) for name in ("fast", "slow"))
    assert by_metric["tpot_mean"]["before"] == changes_of(compare(before, after))["tpot_mean"].before
