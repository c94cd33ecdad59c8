"""`loadgen plan` from the command line to the file."""

import hashlib
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from loadgen.commands.plan_command import command
from loadgen.loadgen_errors import BadPlan, LoadgenError
from loadgen.plan.plan import Exact, Plan, Text, Vocabulary
from loadgen.plan.plan_file import plan_hash, read_plan, write_plan
from loadgen.plan.plan_summary import summarize
from loadgen.slo_target import SloTarget
from tests.unit.loadgen.plans import chat_plan, plan, request

ROOT = Path(__file__).resolve().parents[3]
EXCERPT = ROOT / "tests" / "data" / "mooncake_conversation_1000.jsonl.gz"
DEMO = ROOT / "services" / "baton" / "demo"


def loadgen_plan(*args: str | Path) -> str:
    """Run the command and return its output; exceptions are raised."""
    result = CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_plan(tmp_path: Path, *args: str | Path) -> Plan:
    out = tmp_path / "plan.jsonl"
    loadgen_plan(*args, "-o", out)
    return read_plan(out)


def error_of(*args: str | Path) -> str:
    """Return the error message of click or loadgen."""
    try:
        result = CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=False)
    except LoadgenError as error:
        return str(error)
    assert result.exit_code == 2
    return result.output


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,100,10\n2023-11-16 18:17:05,3000,8\n"
    )
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.json"
    messages = [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello to you"}] * 2
    path.write_text(
        json.dumps([{"conversations": messages}, {"conversations": messages}, {"conversations": messages[1:]}])
    )
    return path


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    path = tmp_path / "windows.csv"
    rows = ["w/a,3,0,1.5,2,Gamma,0.25,0.04", "w/a,4,0,2,2,Weibull,0.7,1", "w/b,1,0,1,1,Gamma,1,1"]
    path.write_text("\n".join(["workload,client,window_start_s,rate_rps,cv,pattern,arg1,arg2", *rows]))
    return path


def test_random_source_writes_its_plan(tmp_path: Path) -> None:
    args = (
        "random",
        "--rate",
        "5",
        "--seconds",
        "1m",
        "--input-tokens",
        "uniform:10-20",
        "--output-tokens",
        "7",
        "--seed",
        "3",
    )
    plan = run_plan(tmp_path, *args)
    assert 200 < len(plan.requests) < 400
    assert {r.output_tokens for r in plan.requests} == {7}
    assert {plan.num_prompt_tokens(r) for r in plan.requests} == set(range(10, 21))
    assert (plan.name, plan.seed, plan.ignore_eos) == ("random", 3, True)
    assert plan.vocabulary == Vocabulary(low=1000, high=4096)
    assert plan.made_by == {
        "source": "random",
        "rate": "5",
        "gaps": "poisson",
        "seconds": 60.0,
        "input_tokens": "uniform:10-20",
        "output_tokens": "7",
        "seed": 3,
        "cancel": 0.0,
    }


def test_same_arguments_make_the_same_file(tmp_path: Path) -> None:
    args = (
        "sessions",
        "--rate",
        "onoff:2@5s,0@5s,random",
        "--arrivals",
        "gamma:cv=2",
        "--sessions",
        "20",
        "--cancel",
        "0.5",
    )
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.jsonl", "elsewhere/b.jsonl.gz"):
        loadgen_plan(*args, "-o", tmp_path / name)
    loadgen_plan(*args, "--seed", "1", "-o", tmp_path / "c.jsonl")
    a, b, c = (plan_hash(tmp_path / name) for name in ("a.jsonl", "elsewhere/b.jsonl.gz", "c.jsonl"))
    assert a == b == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert a != c


def test_shared_prefix_source_writes_its_plan(tmp_path: Path) -> None:
    output = loadgen_plan(
        "shared-prefix", "--rate", "5", "--requests", "100", "--prefixes", "2", "--prefix-tokens", "90", "--zipf", "0",
        "--input-tokens", "10", "-o", tmp_path / "p.jsonl",
    )  # fmt: skip
    assert "prefix hit  at best 88.20% of prompt tokens (infinite cache)" in output  # 98 of 100 times 90 of 100 tokens


def test_sessions_source_writes_its_plan(tmp_path: Path) -> None:
    plan = run_plan(
        tmp_path, "sessions", "--rate", "1", "--sessions", "10", "--turns", "3", "--think", "2s",
        "--first-input-tokens", "50",
        "--input-tokens", "5", "--output-tokens", "4", "--prefixes", "1", "--prefix-tokens", "7", "--max-context", "75",
    )  # fmt: skip
    assert sorted(plan.num_prompt_tokens(r) or 0 for r in plan.requests) == [57] * 10 + [66] * 10, (
        "a third turn has 75 + 4 tokens"
    )
    assert {r.think_s for r in plan.requests} == {0, 2}


def test_mooncake_source_writes_its_plan(tmp_path: Path) -> None:
    output = loadgen_plan(
        "mooncake", EXCERPT, "--max-tokens", "60000", "--cache-tokens", "100000", "-o", tmp_path / "p.jsonl.gz"
    )
    plan = read_plan(tmp_path / "p.jsonl.gz")
    assert f"left out    {1000 - len(plan.requests)} requests longer than --max-tokens" in output
    assert plan.made_by["file"] == {"file": "mooncake_conversation_1000.jsonl", "sha256": plan_hash(EXCERPT)}
    assert "(infinite cache), " in output
    assert "with 100,000 tokens (LRU)" in output
    small = run_plan(
        tmp_path,
        "mooncake",
        EXCERPT,
        "--shrink",
        "16",
        "--tick",
        "0",
        "--seconds",
        "30s",
        "--time-scale",
        "2",
        "--limit",
        "50",
    )
    assert len(small.requests) == 50
    assert {r.at_s for r in small.requests} <= {
        2 * t / 1e3 for t in (0, 2999, 3000, 5999, 6000, 8999, 9000, 11999, 12000, 14999, 15000, 18000)
    }
    assert max(small.num_prompt_tokens(r) or 0 for r in small.requests) < 10_000


def test_azure_source_writes_its_plan(tmp_path: Path, azure: Path) -> None:
    plan = run_plan(tmp_path, "azure", azure, "--time-scale", "0.1")
    assert [(r.at_s, plan.num_prompt_tokens(r), r.output_tokens) for r in plan.requests] == [
        (0.0, 100, 10),
        (0.15, 3000, 8),
    ]


def test_servegen_source_writes_its_plan(tmp_path: Path, windows: Path) -> None:
    plan = run_plan(tmp_path, "servegen", windows, "--workload", "w/a", "--seconds", "100s", "--output-tokens", "3")
    assert {r.tenant for r in plan.requests} == {"client-3", "client-4"}
    assert 200 < len(plan.requests) < 550
    alone = run_plan(
        tmp_path, "servegen", windows, "--workload", "w/a", "--seconds", "100s", "--clients", "4", "--rate-scale", "2"
    )
    assert {r.tenant for r in alone.requests} == {"client-4"}
    assert (
        error_of("servegen", windows, "--seconds", "1s", "-o", tmp_path / "x")
        == "the file has several workloads; give --workload, one of w/a, w/b"
    )
    assert (
        error_of("servegen", windows, "--seconds", "1s", "--clients", "a", "-o", tmp_path / "x")
        == "--clients: `a` is not an integer"
    )


def test_sharegpt_source_writes_its_plan(tmp_path: Path, chats: Path) -> None:
    args = ("sharegpt", chats, "--rate", "1", "--sessions", "2")
    texts = run_plan(tmp_path, *args, "--output-tokens", "9")
    assert all(isinstance(segment, Text) for r in texts.requests for segment in r.segments)
    tokens = run_plan(tmp_path, *args, "--tokenizer", DEMO, "--max-turns", "1")
    assert [isinstance(r.segments[0], Exact) for r in tokens.requests] == [True, True]
    output = loadgen_plan(*args, "--output-tokens", "9", "-o", tmp_path / "p.jsonl")
    assert "left out    1 conversations that do not start with a user's text and a response" in output
    assert "prompts     4 texts, whose tokens only the server can count" in output


def test_arrivals_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "times").write_text("0.5\n1\n7\n")
    args = ("random", "--arrivals", f"file:{tmp_path}/times")
    assert [r.at_s for r in run_plan(tmp_path, *args).requests] == [0.5, 1.0, 7.0]
    assert [r.at_s for r in run_plan(tmp_path, *args, "--seconds", "5s", "--requests", "1").requests] == [0.5]
    assert "--rate cannot be combined with" in error_of(*args, "--rate", "5", "-o", tmp_path / "x")


def test_client_mixes_and_slos_are_in_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    output = loadgen_plan(
        "random", "--rate", "5", "--requests", "1000", "--slo-class", "chat:0.7:ttft=500ms,tpot=50ms",
        "--slo-class", "batch:0.3",
        "--tenants", "a:3,b:1", "--priorities", "0:1,5:1", "--cancel", "0.1", "--stop-at-eos",
        "--name", "mixed", "-o", out,
    )  # fmt: skip
    plan = read_plan(out)
    assert plan.slos == {"chat": SloTarget(ttft_s=0.5, tpot_s=0.05), "batch": SloTarget()}
    assert (plan.name, plan.ignore_eos) == ("mixed", False)
    summary = summarize(plan)
    assert summary.classes["chat"] == pytest.approx(700, abs=60)
    assert summary.tenants["a"] == pytest.approx(750, abs=60)
    assert summary.priorities["5"] == pytest.approx(500, abs=65)
    assert summary.num_cancelled == pytest.approx(100, abs=40)
    assert (
        f"classes     batch {summary.classes['batch']} (no SLO); chat {summary.classes['chat']} (ttft=500ms,tpot=50ms)"
        in output
    )
    assert f"cancels     {summary.num_cancelled} clients cancel before the end of the response" in output
    assert "or fewer: responses may end at EOS" in output
    one = run_plan(tmp_path, "random", "--rate", "5", "--requests", "1", "--slo", "e2e=10s")
    assert one.slos == {"default": SloTarget(e2e_s=10)}


def test_vocabulary_options_set_the_vocabulary(tmp_path: Path) -> None:
    args = ("random", "--rate", "5", "--requests", "1")
    assert run_plan(tmp_path, *args, "--tokenizer", DEMO).vocabulary == Vocabulary(low=3, high=4096)
    assert run_plan(tmp_path, *args, "--tokenizer", DEMO).made_by["tokenizer"]["file"] == "tokenizer.json"
    assert run_plan(tmp_path, *args, "--vocab-size", "32000").vocabulary == Vocabulary(low=1000, high=32_000)
    assert run_plan(tmp_path, *args, "--vocab-size", "900", "--first-token-id", "3").vocabulary == Vocabulary(
        low=3, high=900
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["random"], "the rate is missing; give --rate, such as 5 or ramp:1-10@60s"),
        (["random", "--rate", "5"], "the plan has no end; give --seconds"),
        (["random", "--rate", "fast", "--seconds", "5"], "`fast` is not a rate"),
        (["random", "--rate", "5", "--seconds", "5", "--arrivals", "normal"], "`normal` is not an arrival process"),
        (["random", "--rate", "5", "--seconds", "5", "--input-tokens", "many"], "`many` is not a distribution"),
        (["random", "--rate", "steps:1@5s", "--requests", "500"], "of 500 arrive before the rate `steps:1@5s` ends"),
        (["random", "--rate", "0.001", "--seconds", "1ms"], "no request arrives in this time"),
        (["random", "--rate", "5", "--seconds", "5", "--slo", "ttft"], "`ttft` is not an SLO"),
        (
            ["random", "--rate", "5", "--seconds", "5", "--slo", "ttft=1s", "--slo-class", "a:1"],
            "--slo applies to all requests",
        ),
        (
            ["random", "--rate", "5", "--seconds", "5", "--vocab-size", "500"],
            "a vocabulary of 500 has fewer than two ids from 1000 on",
        ),
        (
            ["random", "--rate", "5", "--seconds", "5", "--first-token-id", "5"],
            "--first-token-id needs --vocab-size",
        ),
        (
            ["random", "--rate", "5", "--seconds", "5", "--tokenizer", "nowhere"],
            "nowhere: no such file; give a model's directory",
        ),
        (
            ["random", "--rate", "5", "--seconds", "5", "--tokenizer", "x", "--vocab-size", "9"],
            "cannot be combined with --tokenizer",
        ),
        (["random", "--rate", "5", "--seconds", "5", "--cancel", "2"], "2.0 is not in the range 0<=x<=1"),
        (["random", "--rate", "5", "--seconds", "0s"], "`0s` must be more than zero"),
        (["mooncake", "nothing.jsonl"], "nothing.jsonl: no such file"),
        (["azure", "nothing.csv"], "nothing.csv: no such file"),
        (["sharegpt", "nothing.json", "--rate", "1", "--sessions", "1"], "nothing.json: no such file"),
    ],
)
def test_invalid_arguments_are_reported_and_nothing_is_written(tmp_path: Path, args: list[str], message: str) -> None:
    assert message in error_of(*args, "-o", tmp_path / "plan.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_show_prints_the_summary(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    sha256 = write_plan(chat_plan(slos={"default": SloTarget(ttft_s=0.5)}), path)
    assert loadgen_plan("show", path).splitlines() == [
        f"plan        {path}    test, seed 0",
        f"sha256      {sha256}",
        "requests    3 of 2 clients, the last arrival at 1.0 s",
        "prompts     mean 68.3, p50 70, p99 75, max 75 tokens; 205 in all",
        "responses   mean 8.7, p50 8, p99 10, max 10 tokens; 26 in all",
        "prefix hit  at best 53.17% of prompt tokens (infinite cache)",
        "classes     default 3 (ttft=500ms)",
    ]
    shown: dict[str, Any] = json.loads(loadgen_plan("show", path, "--json", "--cache-tokens", "64"))
    assert (shown["sha256"], shown["num_requests"], shown["num_clients"], shown["inputs"]["total"]) == (
        sha256,
        3,
        2,
        205,
    )
    assert shown["best_hit_ratio"] == pytest.approx(109 / 205)
    assert shown["lru_hit_ratio"] == pytest.approx(64 / 205)
    path.write_text("{}")
    with pytest.raises(BadPlan, match=r"p\.jsonl:1: not a plan; the first line has no `format`"):
        loadgen_plan("show", path)


def test_rate_counts_arrivals() -> None:
    summary = summarize(plan(*(request(i, (i, 5), at_s=i / 4) for i in range(5)), request(5, (9, 1), at_s=1.0)))
    assert (summary.rate_rps, summary.last_arrival_s) == (5.0, 1.0)
    assert summary.gap_cv == pytest.approx(0.5)
    assert summarize(plan(request(0, (0, 1)))).rate_rps is None


def test_every_option_has_a_help_text() -> None:
    assert isinstance(command, click.Group)
    for subcommand in command.commands.values():
        assert subcommand.help
        assert all(not isinstance(param, click.Option) or param.help for param in subcommand.params)
