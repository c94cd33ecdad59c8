"""Measures whether the memory of an idle cluster grows: resident memory and glibc's heap of each process.

python -m bench idle_memory [--minutes 25] [--settle-minutes 5] [--interval-s 30] [--out FILE] [UP FLAGS]

Starts `baton up`, sends no request after its own first one, and reads every process of the cluster at an
interval. A preloaded library, compiled from `bench/support/malloc_stats.c`, writes glibc's statistics in
each process. The rows show MiB at the end of the settle time and at the end, and the growth between
them per minute, as a least-squares slope.

anon: private memory that is resident (RssAnon). heap: memory that malloc has taken from the system.
allocated: part of it that is in use. If anon grows and allocated does not, no object leaks.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.systems.baton_cluster import baton_up, machine, table

SOURCE = Path(__file__).parents[2] / "support" / "malloc_stats.c"
MIB = 2**20


@dataclass(slots=True)
class Series:
    """Measurements of one process. Each list has one entry per sample; bytes, except `at_s` (monotonic)."""

    name: str
    at_s: list[float] = field(default_factory=list)
    anon: list[int] = field(default_factory=list)
    heap: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)


def preload_library(directory: Path) -> Path:
    """Compile the library that writes malloc statistics. Raises SystemExit if there is no C compiler."""
    library = directory / "malloc_stats.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(library), str(SOURCE)]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"cannot compile {SOURCE}: {error}; install a C compiler") from error
    return library


def process_name(process: psutil.Process) -> str:
    """Return a short name: the service or the title of a Ray process."""
    command = process.cmdline()
    text = " ".join(command)
    for service in ("gateway", "scheduler", "fleet", "worker", "up"):
        if service in command[1:] and "baton" in text:
            return f"baton {service}"
    return text.split()[0].rpartition("/")[2][:40] if text else process.name()


def sample(statistics: Path, found: dict[int, Series]) -> None:
    """Add one sample of each process that has written statistics and still runs."""
    for file in statistics.iterdir():
        pid = int(file.name)
        try:
            process = psutil.Process(pid)
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            _, arena, mapped, allocated, _ = map(int, file.read_text().splitlines()[-1].split())
            series = found.setdefault(pid, Series(name=process_name(process)))
        except (psutil.NoSuchProcess, FileNotFoundError, IndexError, ValueError):
            continue  # it has ended, or is writing its first line
        series.at_s.append(time.monotonic())
        series.anon.append(int(status["RssAnon"].split()[0]) * 1024)
        series.heap.append(arena + mapped)
        series.allocated.append(allocated + mapped)


def slope_per_minute(at_s: Sequence[float], values: Sequence[int]) -> float:
    """Return the least-squares slope of `values` per minute; 0 for fewer than two samples."""
    if len(at_s) < 2:
        return 0.0
    mean_s, mean = sum(at_s) / len(at_s), sum(values) / len(values)
    spread = sum((s - mean_s) ** 2 for s in at_s)
    return 60 * sum((s - mean_s) * (v - mean) for s, v in zip(at_s, values, strict=True)) / spread


def rows(found: Mapping[int, Series], settle_s: float) -> Iterator[list[str]]:
    """Yield one table row per process that lived through the whole measurement, the largest first."""
    num_samples = max((len(series.at_s) for series in found.values()), default=0)
    complete = [(pid, s) for pid, s in found.items() if len(s.at_s) >= num_samples - 1]
    for pid, series in sorted(complete, key=lambda each: -each[1].anon[-1]):
        first = next((i for i, s in enumerate(series.at_s) if s - series.at_s[0] >= settle_s), 0)
        at_s = series.at_s[first:]
        cells = []
        for values in (series.anon[first:], series.heap[first:], series.allocated[first:]):
            slope = slope_per_minute(at_s, values) / MIB
            cells += [f"{values[0] / MIB:.1f}", f"{values[-1] / MIB:.1f}", f"{slope:+.3f}"]
        yield [series.name, str(pid), *cells]


def measure(minutes: float, interval_s: float, flags: Sequence[str]) -> tuple[dict[int, Series], str]:
    """Run an idle cluster for `minutes`. Returns the samples by process id, and a line about the machine."""
    found: dict[int, Series] = {}
    with tempfile.TemporaryDirectory(prefix="baton-idle-") as directory:
        statistics = Path(directory) / "statistics"
        statistics.mkdir()
        os.environ |= {
            "LD_PRELOAD": str(preload_library(Path(directory))),
            "MALLOC_STATS_DIR": str(statistics),
            "MALLOC_STATS_INTERVAL_S": str(max(1, round(interval_s))),
        }
        with baton_up(*flags):
            head, end_s = machine("grpcio", "ray", "torch"), time.monotonic() + 60 * minutes
            while time.monotonic() < end_s:
                time.sleep(interval_s)
                sample(statistics, found)
    return found, head


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench idle_memory", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="length of the measurement")
    parser.add_argument("--settle-minutes", type=float, default=5.0, help="time before growth counts")
    parser.add_argument("--interval-s", type=float, default=30.0, help="time between samples")
    parser.add_argument("--out", type=Path, help="file for all samples, as JSON")
    options, flags = parser.parse_known_args()
    found, head = measure(options.minutes, options.interval_s, flags)
    print(f"{head}\n")
    columns = [f"{name} {what}" for name in ("anon", "heap", "allocated") for what in ("MiB", "end MiB", "MiB/min")]
    print(table(["process", "pid", *columns], list(rows(found, 60 * options.settle_minutes))))
    if options.out is not None:
        samples = [
            {"pid": pid, "name": s.name, "at_s": s.at_s, "anon": s.anon, "heap": s.heap, "allocated": s.allocated}
            for pid, s in found.items()
        ]
        options.out.write_text(json.dumps(samples) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
