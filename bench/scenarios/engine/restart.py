"""Measures the startup time and the TTFT of the first request after a restart against the tenth.

python -m bench restart --out DIR [--models demo,tiny-42m,qwen3-0.6b] [--weights auto|int8|int4] [--repeats 5]

Each repeat starts `baton up` with one hybrid worker on both cores. Compiled kernels, packed weights and step
costs are kept from an earlier start, which is not counted. Then ten requests run one after the other with a
short pause, each with a new prompt of 512 tokens. Startup is the time from the command until the cluster is
ready. All loading, compiling, verifying and measuring therefore counts either as startup or in the first
request. "Beyond Ray" is the startup without the phase in which `baton up` starts Ray.
"""

import argparse
import random
import re
import statistics
import time
from pathlib import Path

from bench.scenarios.cluster.goodput import model_directory
from bench.support.engine.engine_prompts import REST_S, random_prompts
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import ServedEngine, vocabulary
from bench.systems.serving_systems import SYSTEMS, SystemSetting

BOTH_CORES = next(system for system in SYSTEMS if system.name == "Baton 1 hybrid")
MODELS = "demo,tiny-42m,qwen3-0.6b"
NUM_REQUESTS = 10
PROMPT_TOKENS = 512
RAY_PHASE = "ray"
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


def one_start(setting: SystemSetting, seed: int) -> dict[str, float]:
    """Start the cluster once and return seconds: startup with and without Ray's, and TTFT of two requests.

    `median_s` is the median TTFT of all requests but the first.
    """
    rng, size = random.Random(seed), vocabulary(setting.model)
    began_s = time.perf_counter()
    with BOTH_CORES.run(setting) as url:
        start_s, ask = time.perf_counter() - began_s, ServedEngine(url)
        (log,) = setting.logs.glob("baton-*.log")
        ttfts_s = []
        for _ in range(NUM_REQUESTS):
            time.sleep(REST_S)
            ttfts_s.append(ask(random_prompts(1, PROMPT_TOKENS, size, rng), 2)[0][0])
    return {
        "start_s": start_s,
        "beyond_ray_s": beyond_ray_s(start_s, log.read_text(errors="replace")),
        "first_s": ttfts_s[0],
        "tenth_s": ttfts_s[-1],
        "median_s": statistics.median(ttfts_s[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures and logs")
    parser.add_argument("--models", default=MODELS, help=f"comma-separated ({MODELS})")
    parser.add_argument("--weights", default="auto", choices=("auto", "int8", "int4"), help="format of weights (auto)")
    parser.add_argument("--repeats", type=int, default=5, help="counted starts per model (5)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    saved = SavedFigures(arguments.out / "restart.json")
    saved.setdefault("machine", machine("torch", "transformers", "ray"))
    rows = []
    for model in arguments.models.split(","):
        directory = model_directory(model, arguments.out)
        name = model if arguments.weights == "auto" else f"{model}, {arguments.weights}"
        logs = arguments.out / "logs" / name.replace(", ", "-")
        logs.mkdir(parents=True, exist_ok=True)
        setting = SystemSetting(
            model=directory,
            max_model_len=4096,
            cores=(0, 1),
            kv_gib=1,
            vllm=Path(),
            logs=logs,
            weights=arguments.weights,
        )
        found = saved.get(name, [])
        if len(found) < arguments.repeats:
            one_start(setting, 0)
        while len(found) < arguments.repeats:
            found.append(one_start(setting, 1 + len(found)))
            saved[name] = found
        medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
        ratios = sorted(each["first_s"] / each["tenth_s"] for each in found)
        rows.append(
            [
                name,
                f"{medians['start_s']:.1f} s",
                f"{medians['beyond_ray_s']:.1f} s",
                *(f"{medians[name] * 1e3:.1f} ms" for name in ("first_s", "tenth_s", "median_s")),
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
            ]
        )
    print(saved["machine"])
    print(
        table(
            [
                "model",
                "until ready",
                "beyond Ray",
                "first TTFT",
                "tenth",
                "median of second to tenth",
                "first to tenth",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
