"""Measures reads of KV between two processes of one machine over each transfer backend, beside memcpy.

python -m bench links [--repeats 5] [--out DIR]

The processes open the backends as `baton doctor` does: NIXL with CMA and with TCP (UCX_TLS), shared memory
and Gloo. Reads have the size of some chunks of KV. One above 8 MiB is several reads in flight, as in a
worker, and each is validated by its generation-table entries. The memory has 256 MiB; consecutive reads go
through it.

memcpy: numpy copies the same bytes within one process.

All take turns in each repeat, in random order. A figure of a repeat is the median of its reads; the table has
the median, the least and the greatest of all repeats.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.runtime.child.process_pair import ProcessPairFailed, run_pair
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.link_pair import KIB, LINKS, MIB, ROUNDS, time_copies

MEMCPY = "memcpy"
COLUMNS: Mapping[str, str] = {MEMCPY: MEMCPY, **{name: kind.title for name, kind in LINKS.items()}}
MODULE = "bench.systems.link_pair"
LINK_TIMEOUT_S = 180.0
REPOSITORY = Path(__file__).parents[3]

Figures = Mapping[str, Any]
"""Result of one repeat for memcpy or a link: `seconds` by size, and `transport`; or `problem`."""


def measure(name: str) -> Figures:
    """Measure a link, or memcpy."""
    if name == MEMCPY:
        return {"transport": "", "seconds": {str(size): each_s for size, each_s in time_copies().items()}}
    try:
        answer = run_pair([MODULE, name, "owner"], [MODULE, name, "reader"], LINK_TIMEOUT_S)
        found: Figures = json.loads(answer.splitlines()[-1])
        return found
    except ProcessPairFailed as error:
        return {"problem": str(error)}


def run(repeats: int, saved: SavedFigures) -> None:
    """Measure the missing repeats."""
    found: list[dict[str, Figures]] = saved.get("repeats", [])
    while len(found) < repeats:
        order = list(COLUMNS)
        random.Random(len(found)).shuffle(order)
        measured = {}
        for name in order:
            measured[name] = measure(name)
            print(len(found), name, measured[name], file=sys.stderr)
        found.append(measured)
        saved["repeats"] = found


def tables(repeats: Sequence[Mapping[str, Figures]]) -> str:
    """Return the times and speeds by size, and what else there is to say about links."""
    times, speeds = [], []
    for size in ROUNDS:
        seconds = {name: _seconds(repeats, name, size) for name in COLUMNS}
        times.append([size_text(size), *(spread([1e3 * each for each in found]) for found in seconds.values())])
        speeds.append([size_text(size), *(spread([size / each / 1e9 for each in found]) for found in seconds.values())])
    lines = [table(["ms", *COLUMNS.values()], times), "", table(["GB/s", *COLUMNS.values()], speeds), ""]
    for name, title in COLUMNS.items():
        transports = sorted({each[name]["transport"] for each in repeats if each[name].get("transport")})
        if transports:
            lines.append(f"{title}: transport {', '.join(transports)}")
        problems = sorted({each[name]["problem"] for each in repeats if "problem" in each[name]})
        lines += [f"{title}: failed: {problem}" for problem in problems]
    return "\n".join(lines)


def _seconds(repeats: Sequence[Mapping[str, Figures]], name: str, size: int) -> list[float]:
    return [each[name]["seconds"][str(size)] for each in repeats if "seconds" in each[name]]


def spread(values: Sequence[float]) -> str:
    """Return the median, and the least and the greatest value."""
    if not values:
        return "failed"
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def size_text(size: int) -> str:
    """Return a size in KiB or MiB."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each link (5)")
    parser.add_argument("--out", type=Path, help="directory that keeps all figures; an interrupted run goes on there")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; must be at least 1")
    # The processes of a pair do not search the current directory for modules.
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as directory:
        out = arguments.out or Path(directory)
        out.mkdir(parents=True, exist_ok=True)
        saved = SavedFigures(out / "links.json")
        saved.setdefault("machine", machine("torch", "nixl", "numpy"))
        run(arguments.repeats, saved)
    print(saved["machine"])
    print(f"load {os.getloadavg()[0]:.1f} at the end\n")
    print(tables(saved["repeats"]))


if __name__ == "__main__":
    main()
