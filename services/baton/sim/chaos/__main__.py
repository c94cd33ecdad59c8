"""Replays storms: `python -m baton.sim.chaos --seed 17 18`. Prints faults and verdict of each seed."""

import argparse
import logging
import sys

from baton.core.errors import ConfigError
from baton.sim.chaos.report import ChaosReport
from baton.sim.chaos.run import StormFailed, run_seed


def main() -> int:
    """Run the seeds of the command line. Returns the number of those that failed, at most 100."""
    parser = argparse.ArgumentParser(prog="python -m baton.sim.chaos", description="Replay storms by seed.")
    parser.add_argument("--seed", type=int, nargs="+", required=True, metavar="N", help="seeds to run")
    parser.add_argument("--policy", metavar="NAME", help="policy to use instead of the drawn one, as in `baton up`")
    parser.add_argument("--transcript", action="store_true", help="print the ends of all requests, too")
    parser.add_argument("--until-failure", action="store_true", help="stop after the first seed that fails")
    parser.add_argument("--log", action="store_true", help="print the services' log")
    arguments = parser.parse_args()
    if not arguments.log:
        logging.disable(logging.CRITICAL)
    num_failed = 0
    for seed in arguments.seed:
        try:
            report, verdict = run_seed(seed, policy=arguments.policy), "passed"
        except ConfigError as error:
            parser.error(str(error))
        except StormFailed as failed:
            report, verdict = failed.report, f"FAILED: {failed.problem!r}"
            num_failed += 1
        _print(report, verdict, with_requests=arguments.transcript)
        if num_failed and arguments.until_failure:
            break
    return min(num_failed, 100)


def _print(report: ChaosReport, verdict: str, *, with_requests: bool) -> None:
    write = sys.stdout.write
    write(f"seed {report.seed}: {report.settings}\n")
    for line in report.transcript:
        if with_requests or (line[0].isdigit() and " request " not in line):
            write(f"  {line}\n")
    write(f"  outcomes {report.outcomes}\n  faults {report.faults}\nseed {report.seed}: {verdict}\n")


if __name__ == "__main__":
    sys.exit(main())
