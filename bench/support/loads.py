"""Runs `loadgen` against the clusters of a benchmark, and samples the workers and the machine meanwhile."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.systems.baton_cluster import Processes
from loadgen.measure.records import Record
from loadgen.measure.records_file import Result, read_result
from loadgen.measure.request_metrics import OutcomeRules, RequestOutcome, classify, send_lag_s
from loadgen.measure.stats import percentile

INVALID = 3
"""Exit code of `loadgen run` for an invalid run: the generator was late. The result is kept and marked."""
IDLE_TIMEOUT_S, IDLE_POLL_S = 120.0, 0.2


def loadgen(*arguments: object, may_exit: Sequence[int] = (0,)) -> None:
    """Run `loadgen`. Raises SystemExit with its output if the exit code is not in `may_exit`."""
    command = [str(Path(sys.executable).parent / "loadgen"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in may_exit:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def capacity(
    url: str, out: Path, *workload: object, slo: str, attainment: float, seconds: float, start_rps: float
) -> dict[str, Any]:
    """Run `loadgen capacity` and return its answer with `capacity_rps`, `low_rps` and `high_rps`.

    `out` is emptied first. Raises SystemExit if the search fails.
    """
    shutil.rmtree(out, ignore_errors=True)
    settings = [
        "--url",
        url,
        "--out",
        out,
        "--quiet",
        "--slo",
        slo,
        "--attainment",
        f"{100 * attainment:g}",
        "--seconds",
        f"{seconds:g}s",
    ]
    loadgen("capacity", *settings, "--start-rate", f"{start_rps:g}", "--seed", 1, *workload, may_exit=(0, INVALID))
    point = json.loads((out / "capacity.json").read_text())["points"][0]
    if point["error"] or not point["answers"]:
        raise SystemExit(f"the capacity search failed: {point['error']}; see {out}")
    answer: dict[str, Any] = point["answers"][0]
    return answer


def run(running: Processes, plan: Path, out: Path, *, label: str, warmup: int) -> None:
    """Send a plan with `loadgen run`, then wait until the workers are idle. `out` must not exist."""
    flags = [
        "--out",
        out,
        "--label",
        label,
        "--warmup",
        warmup,
        "--workers",
        len(running.workers("p") + running.workers("d")),
    ]
    loadgen("run", plan, "--url", running.url, "--quiet", *flags, may_exit=(0, INVALID))
    wait_idle(running)


def wait_idle(running: Processes) -> None:
    """Wait until no worker has a sequence or a lease. Raises SystemExit after `IDLE_TIMEOUT_S`."""
    end_s = time.monotonic() + IDLE_TIMEOUT_S
    busy = ("baton_running_seqs", "baton_waiting_seqs", "baton_open_leases")
    while any(
        running.metrics(name)[metric] for name in (*running.workers("p"), *running.workers("d")) for metric in busy
    ):
        if time.monotonic() > end_s:
            raise SystemExit(f"the workers are not idle {IDLE_TIMEOUT_S:g} s after the load")
        time.sleep(IDLE_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Metrics of all workers at one time, by worker name.

    at_s: monotonic clock.
    step_s: seconds spent in steps since the start.
    running_seqs: sequences in the batch.
    step_tokens: tokens computed since the start.
    """

    at_s: float
    step_s: Mapping[str, float]
    running_seqs: Mapping[str, float]
    step_tokens: Mapping[str, float]


@dataclass(slots=True)
class ClusterMeasurements:
    """Measurements taken while a block ran.

    busy_share: CPU use of all cores, 0 to 1.
    late_ms: mean lag of the timers in a worker's event loop; the worst worker.
    rss_bytes: resident memory of each process: before, maximum, after.
    """

    samples: list[Sample] = field(default_factory=list)
    busy_share: float = 0.0
    late_ms: float = 0.0
    rss_bytes: dict[str, tuple[int, int, int]] = field(default_factory=dict)


@contextmanager
def watched(running: Processes, interval_s: float) -> Iterator[ClusterMeasurements]:
    """Sample the cluster every `interval_s` while the block runs.

    A sample costs a worker some milliseconds.
    """
    found, stop = ClusterMeasurements(), threading.Event()
    workers = [*running.workers("p"), *running.workers("d")]
    processes = {name: psutil.Process(pid) for name, pid in running.pids.items()}

    def rss() -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in processes.items()}

    def take_sample() -> None:
        found.samples.append(_sample(running, workers))
        for name, now in rss().items():
            most[name] = max(most[name], now)

    def sample_until_stopped() -> None:
        while not stop.wait(interval_s):
            take_sample()

    before, most, times, lags = rss(), rss(), psutil.cpu_times(), {name: _lag(running, name) for name in workers}
    take_sample()
    sampler = threading.Thread(target=sample_until_stopped, name="watched")
    sampler.start()
    try:
        yield found
    finally:
        stop.set()
        sampler.join()
    take_sample()
    spent = [now - then for now, then in zip(psutil.cpu_times()[:8], times[:8], strict=True)]
    idle = psutil.cpu_times().idle - times.idle
    found.busy_share = 1 - idle / sum(spent) if sum(spent) else 0.0
    after = {name: _lag(running, name) for name in workers}
    found.late_ms = max(
        1e3 * (after[name][0] - lags[name][0]) / max(1.0, after[name][1] - lags[name][1]) for name in workers
    )
    now = rss()
    found.rss_bytes = {name: (before[name], most[name], now[name]) for name in processes}


def outcomes(result: Result) -> dict[RequestOutcome, list[Record]]:
    """Return the offered requests by their outcome."""
    rules = OutcomeRules(slos=result.run.slos, ignore_eos=result.run.ignore_eos)
    by_outcome: dict[RequestOutcome, list[Record]] = {outcome: [] for outcome in RequestOutcome}
    for record in result.records:
        by_outcome[classify(record, rules)].append(record)
    return by_outcome


def lag_p99_ms(result: Result) -> float:
    """Return the 99th percentile of the send lag."""
    return 1e3 * percentile([lag_s for record in result.records if (lag_s := send_lag_s(record)) is not None], 99)


def read(directory: Path) -> Result:
    """Read a result of `loadgen run`."""
    return read_result(directory)


def _sample(running: Processes, workers: Sequence[str]) -> Sample:
    at_s = time.monotonic()
    pages = {name: running.metrics(name) for name in workers}
    return Sample(
        at_s=at_s,
        step_s={name: page["baton_step_seconds_sum"] for name, page in pages.items()},
        running_seqs={name: page["baton_running_seqs"] for name, page in pages.items()},
        step_tokens={name: page["baton_step_tokens_total"] for name, page in pages.items()},
    )


def _lag(running: Processes, name: str) -> tuple[float, float]:
    page = running.metrics(name)
    return page["baton_event_loop_lag_seconds_sum"], page["baton_event_loop_lag_seconds_count"]
