"""How often the intervals of `loadgen capacity` hold the truth, on simulated servers: `python -m
bench.capacity_coverage`."""

from __future__ import annotations

import argparse
import math
from statistics import fmean, median

from loadgen.capacity.trials import TrialLength
from tests.loadgen_queues import SYSTEMS, System, search, truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--attainment", type=float, default=90.0, help="percent")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a trial")
    parser.add_argument("--only", help="a part of a system's name")
    given = parser.parse_args()
    print(
        f"{given.searches} searches each, trials of {given.seconds:g} s, {given.attainment:g} % attainment, 95 % confidence"
    )
    print(f"{'':24}  capacity   holds it   two overlap   median width   error         trials   time")
    for name, system in SYSTEMS.items():
        if not given.only or given.only in name:
            print(f"{name:24} {row(system, given.searches, given.attainment / 100, given.seconds)}", flush=True)


def row(system: System, searches: int, target: float, seconds: float) -> str:
    capacity_rps = truth(system, seconds, target)
    if capacity_rps < TrialLength(seconds=seconds).min_rps(target):
        return f"{capacity_rps:9.2f} too low to be told by trials so short"
    found = [search(system, seconds, seed, target=target) for seed in range(searches)]
    known = [answer for answer, _ in found if answer.interval is not None]
    bounds = [(answer.interval.low, answer.interval.high or math.inf) for answer in known if answer.interval]
    holds = [low <= capacity_rps <= high for low, high in bounds]
    overlaps = [a[0] <= b[1] and b[0] <= a[1] for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    errors = [math.log(answer.capacity_rps / capacity_rps) for answer in known if answer.capacity_rps]
    spread = math.sqrt(fmean((error - fmean(errors)) ** 2 for error in errors))
    return (
        f"{capacity_rps:9.2f} {fmean(holds):10.1%} {fmean(overlaps):13.1%} {median(high / low - 1 for low, high in bounds):14.0%}   "
        f"{fmean(errors):+5.1%} +- {spread:5.1%} {fmean(answer.num_trials for answer in known):7.1f} "
        f"{fmean(took for _, took in found) / seconds:6.1f} x {seconds:g} s"
    )


if __name__ == "__main__":
    main()
