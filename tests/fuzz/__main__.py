"""Fuzzes all targets one after the other, each for its share of the time.

python -m tests.fuzz MINUTES

New inputs stay in `build/fuzz/`. An input that fails is kept there too, with the command that repeats it.
"""

import subprocess
import sys
from pathlib import Path

from tests.fuzz.run_target import TARGETS

SEEDS = Path(__file__).parent / "corpus"
BUILD = Path("build/fuzz")
MAX_RESIDENT_MIB = 2048
HANG_S = 600
"""Wall time of one input that counts as a hang. CPU time is checked for each input."""


def main(minutes: float) -> int:
    """Fuzz all targets. Return the number of those that failed."""
    failed = []
    for target in TARGETS:
        folder = BUILD / target
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.fuzz.run_target", target]
        options = [
            f"-max_total_time={max(1, round(minutes * 60 / len(TARGETS)))}",
            f"-rss_limit_mb={MAX_RESIDENT_MIB}",
            f"-timeout={HANG_S}",
            f"-artifact_prefix={folder}-",
            "-print_final_stats=1",
            "-max_len=65536",
            "-verbosity=0",
        ]
        say(target)
        if subprocess.run([*command, *options, str(folder), str(SEEDS / target)], check=False).returncode:
            failed.append(target)
            say(f"repeat it: PYTHONPATH=build/atheris {' '.join(command)} {folder}-crash-…")
    say(f"{len(TARGETS) - len(failed)} of {len(TARGETS)} targets passed {' '.join(failed)}")
    return len(failed)


def say(text: str) -> None:
    sys.stdout.write(f"fuzzing    {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
