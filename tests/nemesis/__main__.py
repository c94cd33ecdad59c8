"""Runs the nemesis from a command line.

Exits with 1 if anything is wrong, and then keeps all files.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.nemesis.plan import KINDS
from tests.nemesis.run import SHORT_SHARE, Options, Result, run_nemesis, unavailable_reason

MAX_SHOWN = 50


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def replay_command(options: Options) -> str:
    """Return the command that repeats a run: the same faults and requests."""
    words = [f"--seconds {options.seconds!r} --seed {options.seed} --network {options.network}"]
    if options.transfer != "nixl":
        words.append(f"--transfer {options.transfer}")
    if options.kinds != tuple(KINDS):
        words.append(f"--kinds {','.join(options.kinds)}")
    if options.longest_s != Options.sized(options.seconds, seed=options.seed).longest_s:
        words.append(f"--longest-s {options.longest_s!r}")
    if options.short_share != SHORT_SHARE:
        words.append(f"--short-share {options.short_share!r}")
    return f"python -m tests.nemesis {' '.join(words)}"


def how_to_repeat(options: Options, directory: Path) -> str:
    """Return what a reader of a failed test needs: seed, files and command of the run."""
    return f"seed {options.seed}\nfiles of the run: {directory}\nagain: {replay_command(options)}"


def show(options: Options, result: Result, directory: Path) -> None:
    """Print what happened."""
    ends = ", ".join(f"{number} {name}" for name, number in sorted(result.ends.items()))
    say(f"{sum(result.ends.values())} requests under {result.num_faults} faults: {ends}")
    for role in result.goodput.roles if result.goodput else ():
        say(f"goodput: {role}")
    for problem in result.problems[:MAX_SHOWN]:
        say(f"FAIL {problem}")
    if result.problems:
        say(f"{len(result.problems)} problems; files of the run: {directory}")
    else:
        say("0 wrong, lost, doubled or truncated answers; all resources are back")
    say(f"again: {replay_command(options)}")


def parse(arguments: list[str]) -> tuple[Options, bool]:
    """Return the options of a run, and whether only its plan is wanted."""
    parser = argparse.ArgumentParser(prog="python -m tests.nemesis", description=__doc__)
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument("--minutes", type=float, default=30.0, help="duration of the faults")
    duration.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--seed", type=int, default=None, help="seed of faults and requests; default: a random one")
    parser.add_argument("--network", choices=("loopback", "namespaces"), default="loopback")
    parser.add_argument("--transfer", choices=("nixl", "local", "collective", "auto"), default="nixl")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated kinds of faults")
    parser.add_argument("--longest-s", type=float, help="longest duration of a fault, in seconds")
    parser.add_argument(
        "--short-share", type=float, default=SHORT_SHARE, help="share of requests with a short deadline"
    )
    parser.add_argument("--plan", action="store_true", help="only print the faults")
    parsed = parser.parse_args(arguments)
    longest = {} if parsed.longest_s is None else {"longest_s": parsed.longest_s}
    return (
        Options.sized(
            60.0 * parsed.minutes if parsed.seconds is None else parsed.seconds,
            seed=SystemRandom().randrange(2**31) if parsed.seed is None else parsed.seed,
            network=parsed.network,
            transfer=parsed.transfer,
            kinds=tuple(parsed.kinds.split(",")),
            short_share=parsed.short_share,
            **longest,
        ),
        parsed.plan,
    )


def main() -> int:
    options, only_plan = parse(sys.argv[1:])
    say(f"seed {options.seed}: {replay_command(options)}")
    if only_plan:
        for fault in options.plan():
            say(str(fault))
        return 0
    if reason := unavailable_reason(options.network):
        say(f"the nemesis cannot run here: {reason}")
        return 2
    directory = Path(tempfile.mkdtemp(prefix="bn-", dir="/tmp"))
    try:
        result = asyncio.run(run_nemesis(options, directory, say))
    except KeyboardInterrupt:
        say(f"interrupted, nothing was checked; files of the run: {directory}")
        return 130
    show(options, result, directory)
    if not result.problems:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
