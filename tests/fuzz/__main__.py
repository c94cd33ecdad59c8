"""Fuzzes all targets, as many at a time as there are processors, each for its share of the minutes.

python -m tests.fuzz MINUTES

New inputs stay in `build/fuzz/`. An input that fails is kept there too, with the command that repeats it.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.run_target import TARGETS

SEEDS = Path(__file__).parent / "corpus"
BUILD = Path("build/fuzz")
MAX_RESIDENT_MIB = 2048
HANG_S = 600
"""Wall time of one input that counts as a hang. CPU time is checked for each input."""


def main(minutes: float) -> int:
    """Fuzz all targets, for `minutes` of processor time in all. Return the number of those that failed."""
    seconds = max(1, round(minutes * 60 / len(TARGETS)))
    with ThreadPoolExecutor(min(len(TARGETS), os.cpu_count() or 1)) as pool:
        has_passed = list(pool.map(lambda target: fuzz(target, seconds), TARGETS))
    failed = [target for target, passed in zip(TARGETS, has_passed, strict=True) if not passed]
    say(f"{len(TARGETS) - len(failed)} of {len(TARGETS)} targets passed {' '.join(failed)}")
    return len(failed)


def fuzz(target: str, seconds: int) -> bool:
    """Fuzz one target in a process of its own. Return whether it passed."""
    folder = BUILD / target
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.run_target", target]
    options = [
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={MAX_RESIDENT_MIB}",
        f"-timeout={HANG_S}",
        f"-artifact_prefix={folder}-",
        "-print_final_stats=1",
        "-max_len=65536",
        "-verbosity=0",
    ]
    say(target)
    done = subprocess.run([*command, *options, str(folder), str(SEEDS / target)], check=False)
    if done.returncode:
        say(f"repeat it: PYTHONPATH=build/atheris {' '.join(command)} {folder}-crash-…")
    return not done.returncode


def say(text: str) -> None:
    sys.stdout.write(f"fuzzing    {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
