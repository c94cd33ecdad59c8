"""Measures loadgen's own timing error against a server that reports when it sent what.

The scripted server runs in its own process, and on its own core if there are several. At increasing rates,
one loadgen process sends Poisson arrivals of short prompts and receives streams with one token in each
message. Two errors are measured on one shared clock: the send lag, and the delay of each event from the
server's timestamp to the client. A rate passes if the 99th percentile of both is at most 2 ms and every
request was sent and completed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loadgen.loadgen_errors import LoadgenError
from loadgen.measure import request_metrics
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import RequestOutcome
from loadgen.measure.stats import percentiles
from loadgen.plan.sources.workloads import simple_plan
from loadgen.send.run.live import SilentView
from loadgen.send.run.priority import Priority
from loadgen.send.run.run_plan import FinishedRun, RunSpec, run
from loadgen.send.selftest.calibration import Calibration, new_calibration
from loadgen.send.target import Target

RATES = (25, 50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 800, 1000, 1200, 1500, 2000)
LIMIT_S = 0.002
"""Largest accepted 99th percentile of each error, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestRate:
    """Result at one rate.

    - `lag_s`, `event_s`: (median, 99th percentile) of the send lag and the event delay, in seconds
    - `cpu_share`: share of one core
    - `cpu_per_request_s`: processor time per request
    """

    rate_rps: float
    num_requests: int
    num_dropped: int
    lag_s: tuple[float, float]
    event_s: tuple[float, float]
    achieved_rps: float
    cpu_share: float
    cpu_per_request_s: float

    @property
    def passed(self) -> bool:
        """True if this rate passes."""
        return self.num_dropped == 0 and self.lag_s[1] <= LIMIT_S and self.event_s[1] <= LIMIT_S


def selftest(
    *,
    seconds: float,
    output_tokens: int,
    gap_s: float,
    rates: Sequence[float],
    priority: Priority,
    attempts: int,
    on_trial: Callable[[SelftestRate], None],
) -> Calibration | None:
    """Return the highest rate that passes, or None if the lowest one fails.

    Each rate gets up to `attempts` trials, because other load on the machine may disturb one. `on_trial` is
    called with each trial. Raises LoadgenError.
    """
    workload = _Workload(seconds=seconds, output_tokens=output_tokens, priority=priority)
    best = 0.0
    cores = sorted(_usable_cores())
    with _server(gap_s, cores[0] if len(cores) > 1 else None, priority) as url:
        for rate_rps in rates:
            for attempt in range(attempts):
                trial = _trial(url, rate_rps, workload, cores[-1:] if len(cores) > 1 else (), seed=attempt)
                on_trial(trial)
                if trial.passed:
                    best = rate_rps
                    break
            if best < rate_rps:
                break
    return (
        new_calibration(best, output_tokens, priority.value, datetime.now(UTC).isoformat(timespec="seconds"))
        if best
        else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    seconds: float
    output_tokens: int
    priority: Priority


def _trial(url: str, rate_rps: float, workload: _Workload, cores: Sequence[int], *, seed: int) -> SelftestRate:
    plan = simple_plan(
        rate_rps=rate_rps, seconds=workload.seconds, input_tokens=64, output_tokens=workload.output_tokens, seed=seed
    )
    target = Target(urls=(url,), model="scripted", dialect="baton", timeout_s=60.0)
    with tempfile.TemporaryDirectory(prefix="loadgen-selftest-") as directory:
        out = Path(directory) / "run"
        spec = RunSpec(plan=plan, target=target, out=out, warm_ups=20, cores=cores, priority=workload.priority)
        finished = run(spec, SilentView())
    if finished.run.interrupted:
        raise LoadgenError("interrupted")
    return _rate_result(rate_rps, finished)


def _rate_result(rate_rps: float, finished: FinishedRun) -> SelftestRate:
    records = finished.records
    sent = request_metrics.sending(records)
    lags = [lag for record in records if (lag := request_metrics.send_lag_s(record)) is not None]
    events = [error for record in records for error in event_errors_s(record, finished.ended.started_s)]
    nothing = (float("inf"), float("inf"))
    return SelftestRate(
        rate_rps=rate_rps,
        num_requests=len(records),
        num_dropped=len(records) - finished.outcomes[RequestOutcome.GOOD],
        lag_s=_p50_p99(lags) if lags else nothing,
        event_s=_p50_p99(events) if events else nothing,
        achieved_rps=sent.achieved_rps or 0.0,
        cpu_share=finished.ended.counts.cpu_s / max(finished.run.duration_s, 1e-9),
        cpu_per_request_s=finished.ended.counts.cpu_s / max(1, len(records)),
    )


def event_errors_s(record: Record, started_s: float) -> list[float]:
    """Return the delay of each of a record's events from the scripted server to the client, in seconds.

    `started_s` is the run's start by the machine's clock.
    """
    stamps = (record.timeline or {}).get("sent_s", ())
    return [started_s + arrival.at_s - stamp for arrival, stamp in zip(record.arrivals, stamps, strict=False)]


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    p50, p99 = percentiles(values, (50, 99))
    return p50, p99


@contextlib.contextmanager
def _server(gap_s: float, core: int | None, priority: Priority) -> Iterator[str]:
    """Run a scripted server in its own process and yield its address."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "loadgen.send.selftest.scripted_server",
        "--gap",
        f"{gap_s}s",
        "--priority",
        priority.value,
    ]
    command += [] if core is None else ["--core", str(core)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise LoadgenError("the scripted server did not start")
            yield url
        finally:
            process.kill()


def _usable_cores() -> set[int]:
    import os

    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
