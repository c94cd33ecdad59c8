"""Workloads of a search at any rate: newly drawn, never stretched, except traces by their time scale."""

import json
import math
from collections import Counter
from pathlib import Path

import click
import pytest

from loadgen.commands.capacity_plans import SimpleWorkload, maker_of
from loadgen.loadgen_errors import BadPlan, EmptyPlan, LoadgenError
from loadgen.plan.plan import Plan
from loadgen.plan.sources.workloads import DEFAULT_VOCABULARY

pytestmark = pytest.mark.slow


def times(plan: Plan) -> list[float]:
    return [request.at_s for request in plan.requests if request.at_s is not None]


def rate(plan: Plan) -> float:
    at_s = times(plan)
    return (len(at_s) - 1) / (at_s[-1] - at_s[0])


def trace(path: Path, rows: int = 600, gap_ms: int = 500) -> Path:
    lines = (
        json.dumps(
            {"timestamp": i * gap_ms, "input_length": 600 + i % 400, "output_length": 5, "hash_ids": [i, i + 10_000]}
        )
        for i in range(rows)
    )
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("workload", "unit"),
    [
        (["random", "--input-tokens", "16", "--output-tokens=4"], "requests"),
        (["shared-prefix", "--prefixes", "2", "--prefix-tokens", "32", "--slo", "ttft=1s"], "requests"),
        (["sessions", "--turns", "2", "--think", "1s"], "sessions"),
        (["random", "--arrivals", "gamma:cv=2"], "requests"),
    ],
)
def test_sources_make_plans_at_any_rate(workload: list[str], unit: str) -> None:
    maker = maker_of(workload, 200.0)
    assert maker.unit == unit
    assert maker.max_rps(200.0) == math.inf
    for rate_rps in (2.0, 11.3):
        plan = maker.make(rate_rps, 200.0, seed=5)
        assert rate(plan) == pytest.approx(rate_rps, rel=0.25)
        assert max(times(plan)) < 200
        assert plan.seed == 5
    again, other = maker.make(2.0, 50.0, seed=5), maker.make(2.0, 50.0, seed=6)
    assert again.requests == maker.make(2.0, 50.0, seed=5).requests
    assert times(other) != times(again)
    assert len(times(other)) != 2 * 50 or len(times(again)) != 2 * 50  # as many as chance has it
    slos = {"ttft_s": 1.0} if "--slo" in workload else {}
    assert plan.slos["default"].to_json() == slos


def test_default_workload_is_that_of_run_rate() -> None:
    plan = SimpleWorkload(16, 4, DEFAULT_VOCABULARY).make(5.0, 20.0, seed=1)
    assert Counter((plan.num_prompt_tokens(request), request.output_tokens) for request in plan.requests).keys() == {
        (16, 4)
    }
    with pytest.raises(EmptyPlan):
        SimpleWorkload(16, 4, DEFAULT_VOCABULARY).make(0.001, 1.0, seed=1)


def test_trace_is_scaled_in_time_and_each_seed_plays_another_part(tmp_path: Path) -> None:
    """The trace has 600 rows, two per second, for 300 s."""
    maker = maker_of(["mooncake", str(trace(tmp_path / "trace.jsonl")), "--tick", "500ms"], 20.0)
    assert maker.max_rps(20.0) == pytest.approx(600 / 20, rel=0.01)
    slow, fast = maker.make(1.0, 20.0, seed=1), maker.make(10.0, 20.0, seed=1)
    assert (len(slow.requests), len(fast.requests)) == (pytest.approx(20, abs=2), pytest.approx(200, abs=4))
    assert max(times(slow)) < 20.01
    assert max(times(fast)) < 20.01
    full_plan = maker.make(maker.max_rps(20.0), 20.0, seed=2)
    assert len(full_plan.requests) == pytest.approx(600, abs=3)
    lengths = [maker.make(1.0, 20.0, seed=seed).requests[0].segments for seed in range(6)]
    assert len(set(lengths)) > 3
    with pytest.raises(BadPlan, match="the trace lasts"):
        maker.make(40.0, 20.0, seed=1)


def test_sessions_never_exceed_recorded_conversations(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([{"conversations": said}] * 100))
    maker = maker_of(["sharegpt", str(file), "--output-tokens", "8"], 60.0)
    assert 50 < 60 * maker.max_rps(60.0) < 80
    for seed in range(20):
        maker.make(maker.max_rps(60.0), 60.0, seed=seed)


def test_servegen_clients_scale_together(tmp_path: Path) -> None:
    windows = tmp_path / "windows.csv"
    windows.write_text(
        "workload,client,window_start_s,rate_rps,cv,pattern,arg1,arg2\n"
        "w,1,0,0.3,1.5,Gamma,0.5,1\nw,2,0,0.1,1.0,Weibull,1.0,1\n"
    )
    maker = maker_of(["servegen", str(windows), "--output-tokens", "8"], 60.0)
    counts = [len(maker.make(10.0, 60.0, seed=seed).requests) for seed in range(8)]
    assert sum(counts) / len(counts) == pytest.approx(600, rel=0.08)
    assert len(set(counts)) > 1


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (["nonsense"], "not a workload"),
        (["show", "x.jsonl"], "not a workload"),
        (["random", "--rate", "5"], "--rate is not allowed"),
        (["random", "--seed=5"], "--seed is not allowed"),
        (["random", "-o", "x"], "-o is not allowed"),
        (["mooncake", "x", "--time-scale", "2"], "--time-scale is not allowed"),
        (["mooncake", "missing.jsonl"], "no such file"),
        (["mooncake", "x", "--start", "5s"], "--start is not allowed"),
        (["random", "--help"], "loadgen plan"),
    ],
)
def test_invalid_workloads_are_rejected(workload: list[str], message: str) -> None:
    with pytest.raises(LoadgenError) as raised:
        maker_of(workload, 10.0).make(1.0, 10.0, seed=1)
    assert message in str(raised.value)


def test_unknown_option_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError, match="--nonsense"):
        maker_of(["random", "--nonsense"], 10.0).make(1.0, 10.0, seed=1)
    with pytest.raises(BadPlan, match="not a distribution"):
        maker_of(["random", "--input-tokens", "many"], 10.0).make(1.0, 10.0, seed=1)
