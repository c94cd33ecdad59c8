"""Splits the test files into shards, so that `make test-long SHARD=1/3` runs a third of them, and mixes them.

A file is never split, because its tests may share a cluster. The same collection always gives the same
shards: each file goes to the shard with the least weight so far, the heaviest file first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLE = "BATON_TEST_SHARD"
_SHARD = re.compile(r"([1-9]\d*)/([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shards. `index` counts from 1."""

    index: int
    count: int

    @staticmethod
    def parse(text: str) -> "Shard":
        """Parse `i/n`. Raises ValueError if it is malformed or `i` is above `n`."""
        match = _SHARD.fullmatch(text)
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError(f"SHARD is {text!r}; write i/n with i from 1 to n, such as 1/3")
        return Shard(int(match[1]), int(match[2]))

    def files(self, weights: Mapping[str, float]) -> set[str]:
        """Return the files of this shard. `weights`: about how long each file takes, in any unit."""
        loads = [0.0] * self.count
        chosen = set()
        for file in sorted(weights, key=lambda name: (-weights[name], name)):
            lightest = loads.index(min(loads))
            loads[lightest] += weights[file]
            if lightest == self.index - 1:
                chosen.add(file)
        return chosen


def weight_of(path: str, num_tests: int) -> float:
    """Return about how long a test file takes. Tests with processes take some ten times as long as others."""
    return num_tests * (10.0 if "/integration/" in path or "/deploy/" in path else 1.0)


def mixed(files: Sequence[str]) -> list[str]:
    """Return the files in an order for several test processes: those that wait lie evenly among the others.

    Tests with clusters wait for a part of their time. If all test processes ran them at once, cores would be
    idle; the other files would come last, and none would have a core of its own.
    """
    waiting = [file for file in files if "/integration/" in file]
    others = [file for file in files if "/integration/" not in file]
    positions = {file: at / len(group) for group in (waiting, others) for at, file in enumerate(group)}
    return sorted(files, key=positions.__getitem__)
