"""Seeds of the storm tests: fixed ones, those that have failed, and new ones for each state of the code."""

import hashlib
import subprocess
from pathlib import Path

from tests.scale import sized

ROOT = Path(__file__).parents[2]
PINNED = Path(__file__).with_name("pinned_seeds.txt")
SHORT_SEEDS = (1, 2, 240, 310, 440, 614843799, 1686069729, 3086585237)
"""The fixed seeds of `make test`. Together they have all tiers, windows, draft models, kinds of reads and
admission, and all policies but the round robin."""
NUM_FIXED, NUM_DRAWN = 120, sized(3, 120)
"""Numbers of first seeds in `make test-long`, and of drawn ones."""


def fixed_seeds() -> list[int]:
    """Return the seeds that are always the same: in `make test-long` the first ones, and the pinned ones.

    A line of the file is `SEED  reason`; `#` begins a comment.
    """
    lines = (line.partition("#")[0].split() for line in PINNED.read_text(encoding="utf-8").splitlines())
    pinned = [int(line[0]) for line in lines if line]
    return sized(list(SHORT_SEEDS), list(dict.fromkeys([*range(NUM_FIXED), *pinned])))


def drawn_seeds() -> list[int]:
    """Return seeds that follow from the hash of the code under `services`: new code explores new ones.

    Without git they are fixed.
    """
    first = int.from_bytes(hashlib.sha256(tree_hash().encode()).digest()[:4], "big")
    return [1_000_000 + first + number for number in range(NUM_DRAWN)]


def tree_hash() -> str:
    """Return the git hash of the committed tree `services`, or a constant if there is no git repository."""
    command = ["git", "rev-parse", "--verify", "HEAD:services"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no git"
