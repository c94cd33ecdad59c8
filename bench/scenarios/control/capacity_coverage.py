"""Measures how often the intervals of `loadgen capacity` contain the true capacity of simulated servers.

python -m bench capacity_coverage [--searches 100] [--attainment 90] [--seconds 60] [--only NAME]

The servers are queueing models with a known capacity and run in virtual time, so the hardware does not
matter. For each server the table has its true capacity, the share of intervals that contain it, the share of
pairs of searches whose intervals overlap, the median relative width of the intervals, the mean relative error
and its standard deviation, and the number of trials and the time that a search takes.
"""

from __future__ import annotations

import argparse
import math
from statistics import fmean, median

from loadgen.capacity.trials import TrialLength
from tests.loadgen_simulated_servers import SYSTEMS, System, search, true_capacity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=100, help="searches per server (100)")
    parser.add_argument("--attainment", type=float, default=90.0, help="target SLO attainment in percent (90)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a trial (60)")
    parser.add_argument("--only", help="run only servers whose name contains this text")
    arguments = parser.parse_args()
    print(
        f"{arguments.searches} searches each, trials of {arguments.seconds:g} s, "
        f"{arguments.attainment:g} % attainment, 95 % confidence"
    )
    print(f"{'':24}  capacity   contains   two overlap   median width   error         trials   time")
    for name, system in SYSTEMS.items():
        if not arguments.only or arguments.only in name:
            print(
                f"{name:24} {row(system, arguments.searches, arguments.attainment / 100, arguments.seconds)}",
                flush=True,
            )


def row(system: System, searches: int, target: float, seconds: float) -> str:
    """Return the table row of one simulated server."""
    capacity_rps = true_capacity(system, seconds, target)
    if capacity_rps < TrialLength(seconds=seconds).min_rps(target):
        return f"{capacity_rps:9.2f} too low for trials of this length"
    found = [search(system, seconds, seed, target=target) for seed in range(searches)]
    known = [answer for answer, _ in found if answer.interval is not None]
    bounds = [(answer.interval.low, answer.interval.high or math.inf) for answer in known if answer.interval]
    contains = [low <= capacity_rps <= high for low, high in bounds]
    overlaps = [a[0] <= b[1] and b[0] <= a[1] for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    errors = [math.log(answer.capacity_rps / capacity_rps) for answer in known if answer.capacity_rps]
    spread = math.sqrt(fmean((error - fmean(errors)) ** 2 for error in errors))
    return (
        f"{capacity_rps:9.2f} {fmean(contains):10.1%} {fmean(overlaps):13.1%} "
        f"{median(high / low - 1 for low, high in bounds):14.0%}   "
        f"{fmean(errors):+5.1%} +- {spread:5.1%} {fmean(answer.num_trials for answer in known):7.1f} "
        f"{fmean(took for _, took in found) / seconds:6.1f} x {seconds:g} s"
    )


if __name__ == "__main__":
    main()
