"""Is the first request after a restart as fast as the tenth, and how long does a start take?

python -m bench restart --out DIR [--models demo,tiny-42m] [--repeats 5]

Each repeat starts `baton up` anew, with one hybrid worker of both cores, whose kernels and costs are kept
from the start before (the first start is not counted), and asks ten times for a token after a new prompt of
512, one after the other with a short rest between. A start lasts from its command until it is ready, so all
that is loaded, compiled, proven or measured is in it, or else in the first request.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from bench.scenarios.cluster.goodput import model_directory
from bench.scenarios.engine.engine_speed import FIRST_ID
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import ServedEngine, vocabulary
from bench.systems.serving_systems import SYSTEMS, SystemSetting

BOTH_CORES = next(way for way in SYSTEMS if way.name == "Baton 1 hybrid")
NUM_REQUESTS = 10
PROMPT_TOKENS = 512
REST_S = 0.5


def one_start(setting: SystemSetting, seed: int) -> dict[str, float]:
    """Seconds until ready, and of the first, the tenth, and the median of all but the first request until the
    first token."""
    rng, size = random.Random(seed), vocabulary(setting.model)
    began_s = time.perf_counter()
    with BOTH_CORES.run(setting) as url:
        start_s, ask = time.perf_counter() - began_s, ServedEngine(url)
        ttfts_s = []
        for _ in range(NUM_REQUESTS):
            time.sleep(REST_S)
            ttfts_s.append(ask([[rng.randrange(FIRST_ID, size) for _ in range(PROMPT_TOKENS)]], 2)[0][0])
    return {
        "start_s": start_s,
        "first_s": ttfts_s[0],
        "tenth_s": ttfts_s[-1],
        "median_s": statistics.median(ttfts_s[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="demo,tiny-42m")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    logs = arguments.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    known = SavedFigures(arguments.out / "restart.json")
    known.setdefault("machine", machine("torch", "transformers", "ray"))
    rows = []
    for model in arguments.models.split(","):
        directory = model_directory(model, arguments.out)
        setting = SystemSetting(model=directory, max_model_len=4096, cores=(0, 1), kv_gib=1, vllm=Path(), logs=logs)
        found = known.get(model, [])
        if len(found) < arguments.repeats:
            one_start(setting, 0)
        while len(found) < arguments.repeats:
            found.append(one_start(setting, 1 + len(found)))
            known[model] = found
        medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
        ratios = sorted(each["first_s"] / each["tenth_s"] for each in found)
        rows.append(
            [
                model,
                f"{medians['start_s']:.1f} s",
                *(f"{medians[name] * 1e3:.1f} ms" for name in ("first_s", "tenth_s", "median_s")),
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
            ]
        )
    print(known["machine"])
    print(
        table(["model", "until ready", "first TTFT", "tenth", "median of the second to tenth", "first to tenth"], rows)
    )


if __name__ == "__main__":
    main()
