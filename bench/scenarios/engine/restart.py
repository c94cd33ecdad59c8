"""Measures startup time, memory, and the TTFT of the first request after a restart against the tenth.

python -m bench restart --out DIR [--models demo,tiny-42m,qwen3-0.6b] [--weights auto|int8|int4] [--repeats 5]
[--system 'Baton 1 hybrid' | 'Baton 1P+1D']

Each repeat starts `baton up` with one hybrid worker on both cores, or one worker of each role. Compiled
kernels, packed weights and step memory are kept from an earlier start, which is not counted. Then ten
requests run one after the other with a short pause, each with a new prompt of 512 tokens. Startup is the time
from the command until the cluster is ready. All loading, compiling, verifying and measuring therefore counts
either as startup or in the first request. "Beyond Ray" is the startup without the phase in which `baton up`
starts Ray. "Memory" is that of all processes of the cluster after the requests; pages that several of them
share count once (PSS).
"""

import argparse
import random
import re
import statistics
import time
from contextlib import suppress
from pathlib import Path

import psutil

from bench.scenarios.cluster.goodput import model_directory
from bench.support.engine.engine_prompts import REST_S, random_prompts
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import ServedEngine, vocabulary
from bench.systems.serving_systems import SYSTEMS, ServingSystem, SystemSetting

BATON = {system.name: system for system in SYSTEMS if system.name in ("Baton 1 hybrid", "Baton 1P+1D")}
BOTH_CORES = "Baton 1 hybrid"
MODELS = "demo,tiny-42m,qwen3-0.6b"
NUM_REQUESTS = 10
PROMPT_TOKENS = 512
RAY_PHASE = "ray"
HEADINGS = [
    "model",
    "until ready",
    "beyond Ray",
    "first TTFT",
    "tenth",
    "median of second to tenth",
    "first to tenth",
    "memory",
]
_PHASE_LINE = re.compile(r"^(?P<name>[a-z][\w-]*) .* (?P<seconds>\d+\.\d) s$", re.MULTILINE)
"""A line that `baton up` prints when a phase of the start has ended."""


def phases_s(output: str) -> dict[str, float]:
    """Return the seconds of each phase that the output of `baton up` names. Phases run at the same time."""
    return {found["name"]: float(found["seconds"]) for found in _PHASE_LINE.finditer(output)}


def beyond_ray_s(start_s: float, output: str) -> float:
    """Return the startup time without Ray's own start. Raises ValueError if the output does not name it."""
    phases = phases_s(output)
    if RAY_PHASE not in phases:
        found = ", ".join(phases) or "none"
        raise ValueError(f"the output of `baton up` has no line for {RAY_PHASE!r}; it has {found}")
    return start_s - phases[RAY_PHASE]


def memory_bytes() -> int:
    """Return the memory of all child processes. Each has its share of pages that several of them map."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            total += process.memory_full_info().pss
    return total


def one_start(system: ServingSystem, setting: SystemSetting, seed: int) -> dict[str, float]:
    """Start the cluster once and return seconds: startup with and without Ray's, and TTFT of two requests.

    `median_s` is the median TTFT of all requests but the first. `memory_bytes` is in bytes.
    """
    rng, size = random.Random(seed), vocabulary(setting.model)
    began_s = time.perf_counter()
    with system.run(setting) as url:
        start_s, ask = time.perf_counter() - began_s, ServedEngine(url)
        (log,) = setting.logs.glob("baton-*.log")
        ttfts_s = []
        for _ in range(NUM_REQUESTS):
            time.sleep(REST_S)
            ttfts_s.append(ask(random_prompts(1, PROMPT_TOKENS, size, rng), 2)[0][0])
        used_bytes = memory_bytes()
    return {
        "start_s": start_s,
        "beyond_ray_s": beyond_ray_s(start_s, log.read_text(errors="replace")),
        "first_s": ttfts_s[0],
        "tenth_s": ttfts_s[-1],
        "median_s": statistics.median(ttfts_s[1:]),
        "memory_bytes": used_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures and logs")
    parser.add_argument("--models", default=MODELS, help=f"comma-separated ({MODELS})")
    parser.add_argument("--weights", default="auto", choices=("auto", "int8", "int4"), help="format of weights (auto)")
    parser.add_argument("--repeats", type=int, default=5, help="counted starts per model (5)")
    parser.add_argument("--system", default=BOTH_CORES, choices=BATON, help=f"({BOTH_CORES})")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    saved = SavedFigures(arguments.out / "restart.json")
    saved.setdefault("machine", machine("torch", "transformers", "ray"))
    rows = []
    for model in arguments.models.split(","):
        directory = model_directory(model, arguments.out)
        parts = [model, *([] if arguments.weights == "auto" else [arguments.weights])]
        name = ", ".join(parts if arguments.system == BOTH_CORES else [*parts, arguments.system])
        logs = arguments.out / "logs" / name.replace(", ", "-").replace(" ", "-")
        logs.mkdir(parents=True, exist_ok=True)
        setting = SystemSetting(
            model=directory,
            max_model_len=4096,
            cores=(0, 1),
            kv_gib=BATON[arguments.system].num_workers,
            vllm=Path(),
            logs=logs,
            weights=arguments.weights,
        )
        found = saved.get(name, [])
        if len(found) < arguments.repeats:
            one_start(BATON[arguments.system], setting, 0)
        while len(found) < arguments.repeats:
            found.append(one_start(BATON[arguments.system], setting, 1 + len(found)))
            saved[name] = found
        medians = {name: statistics.median(each[name] for each in found if name in each) for name in found[-1]}
        ratios = sorted(each["first_s"] / each["tenth_s"] for each in found)
        rows.append(
            [
                name,
                f"{medians['start_s']:.1f} s",
                f"{medians['beyond_ray_s']:.1f} s",
                *(f"{medians[name] * 1e3:.1f} ms" for name in ("first_s", "tenth_s", "median_s")),
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                f"{medians['memory_bytes'] / 2**30:.1f} GiB" if "memory_bytes" in medians else "",
            ]
        )
    print(saved["machine"])
    print(table(HEADINGS, rows))


if __name__ == "__main__":
    main()
