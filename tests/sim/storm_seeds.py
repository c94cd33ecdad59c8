"""Seeds of the storm tests: fixed ones, those that have failed, and new ones for each state of the code."""

import hashlib
import subprocess
from pathlib import Path

from tests.scale import sized

ROOT = Path(__file__).parents[2]
PINNED = Path(__file__).with_name("pinned_seeds.txt")
NUM_SEEDS = sized(6, 120)
"""Number of fixed seeds, and of drawn ones."""


def fixed_seeds() -> list[int]:
    """Return the seeds that are always the same: the first ones, and the pinned ones.

    A line of the file is `SEED  reason`; `#` begins a comment.
    """
    lines = (line.partition("#")[0].split() for line in PINNED.read_text(encoding="utf-8").splitlines())
    pinned = [int(line[0]) for line in lines if line]
    return list(dict.fromkeys([*range(NUM_SEEDS), *pinned]))


def drawn_seeds() -> list[int]:
    """Return seeds that follow from the hash of the code under `services`: new code explores new ones.

    Without git they are fixed.
    """
    first = int.from_bytes(hashlib.sha256(tree_hash().encode()).digest()[:4], "big")
    return [1_000_000 + first + number for number in range(NUM_SEEDS)]


def tree_hash() -> str:
    """Return the git hash of the committed tree `services`, or a constant if there is no git repository."""
    command = ["git", "rev-parse", "--verify", "HEAD:services"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no git"
