"""Compares predicted TTFT and TPOT with what clients measure, on real and emulated workers.

python -m bench prediction --out DIR [--systems real-1p1d,real-hybrid,emulated-1p1d,emulated-hybrid]
[--seconds 12]

Each system is a cluster of `baton up`: one prefill and one decode worker, or one hybrid worker. Its capacity
is the rate at which it completes a burst of `BURST` requests. Then it gets Poisson arrivals at each of
`LOADS` of that rate. The first `SETTLE_S` of each run are left out: the load of a benchmark changes abruptly,
and the TPOT prediction follows the prompts of the last 20 s.

Predictions come from the timelines of the responses. Actual times are the client's, from the send on. A
predicted TTFT counts only the queue and the prefill at the worker. The rest of the actual TTFT is shown as
*not counted*: HTTP, tokenization, placement, and the event loops of gateway and worker. Errors are absolute
values. DIR/prediction.json keeps all figures; an interrupted run continues with the next system.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.support.loads import INVALID, lag_p99_ms, loadgen, read
from bench.support.saved_figures import SavedFigures, emptied
from bench.systems.baton_cluster import baton_up, machine, table
from loadgen.measure.records import Record
from loadgen.measure.records_file import Result
from loadgen.measure.request_metrics import tpot_s, ttft_s
from loadgen.measure.stats import percentile
from loadgen.measure.timeline import Stages

WORKERS = {"1p1d": ("--prefill", "1", "--decode", "1"), "hybrid": ("--prefill", "0", "--decode", "0", "--hybrid", "1")}
DEVICES = {"real": ("--device", "cpu"), "emulated": ("--device", "emulated")}
SYSTEMS = {f"{device}-{workers}": (*DEVICES[device], *WORKERS[workers]) for device in DEVICES for workers in WORKERS}
LENGTHS = ("--input-tokens", "lognormal:mean=384,cv=0.6,min=32,max=2000", "--output-tokens", "uniform:32-96")
LOADS = (0.3, 0.6, 0.9)
BURST, BURST_PER_S = 100, 500
SETTLE_S = 4.0


def send(url: str, out: Path, *workload: object) -> Result:
    """Send a new workload to the cluster and return its result. `out` is emptied first."""
    plan = emptied(out).with_suffix(".jsonl")
    loadgen("plan", "random", *workload, *LENGTHS, "-o", plan)
    loadgen("run", plan, "--url", url, "--out", out, "--quiet", "--warmup", 2, may_exit=(0, INVALID))
    return read(out)


def measure(system: str, out: Path, seconds: float) -> dict[str, Any]:
    """Start a system, find its capacity and return its figures at each load."""
    with baton_up(*SYSTEMS[system], "--kv-memory", "256MiB", "--log-dir", str(out / "logs" / system)) as url:
        burst = send(url, out / system / "burst", "--rate", BURST_PER_S, "--requests", BURST)
        done = [record for record in burst.records if record.is_complete]
        took_s = max(record.ended_s for record in done) - min(record.intended_s for record in done)
        found: dict[str, Any] = {"capacity_rps": len(done) / took_s, "loads": {}}
        for load in LOADS:
            rate = ("--rate", f"{load * found['capacity_rps']:.4g}", "--seconds", f"{seconds:g}s")
            result = send(url, out / system / f"{load:.0%}", *rate, "--seed", round(100 * load))
            found["loads"][f"{load:.0%}"] = figures(result)
    return found


def figures(result: Result) -> dict[str, Any]:
    """Return the figures of one run: percentiles in ms, and relative errors."""
    begin_s = min(record.intended_s for record in result.records) + SETTLE_S
    records = [record for record in result.records if record.is_complete and record.intended_s >= begin_s]
    stages = [Stages.of(record.timeline) for record in records]
    pairs = {
        "ttft": [
            (one.predicted_ttft_s, ttft_s(r, from_intended=False)) for r, one in zip(records, stages, strict=True)
        ],
        "tpot": [(one.predicted_tpot_s, tpot_s(r)) for r, one in zip(records, stages, strict=True)],
    }
    return {
        "num_requests": len(records),
        "is_invalid": bool(result.run.invalid),
        "send_lag_p99_ms": lag_p99_ms(result),
        **{metric: errors([(p, a) for p, a in of if p is not None and a]) for metric, of in pairs.items()},
        "ttft_not_counted_ms": quantiles([1e3 * s for s in map(not_counted_s, records, stages) if s is not None]),
    }


def not_counted_s(record: Record, stages: Stages) -> float | None:
    """Return the part of the client's TTFT that is neither queue nor prefill at the worker."""
    actual_s = ttft_s(record, from_intended=False)
    if actual_s is None or stages.queue_s is None or stages.prefill_s is None:
        return None
    return actual_s - stages.queue_s - stages.prefill_s


def errors(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Compare (predicted, actual) seconds."""
    return {
        "predicted_ms": quantiles([1e3 * predicted for predicted, _ in pairs]),
        "actual_ms": quantiles([1e3 * actual for _, actual in pairs]),
        "predicted_over_actual": quantiles([predicted / actual for predicted, actual in pairs]),
        "error_ms": quantiles([1e3 * abs(predicted - actual) for predicted, actual in pairs]),
        "relative_error": quantiles([abs(predicted / actual - 1) for predicted, actual in pairs]),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 90th percentile."""
    return {f"p{q}": percentile(values, q) for q in (50, 90)}


def show(saved: SavedFigures) -> None:
    """Print one row for each system, load and metric."""
    print(f"{saved['machine']}\n")
    head = ["system", "load", "requests", "", "predicted ms", "actual ms", "predicted / actual p50, p90"]
    head += ["error ms p50, p90", "error p50, p90", "not counted ms p50, p90"]
    rows = []
    for system in (name for name in SYSTEMS if name in saved):
        for load, at_load in saved[system]["loads"].items():
            for metric in ("ttft", "tpot"):
                one, rest = at_load[metric], at_load["ttft_not_counted_ms"] if metric == "ttft" else None
                row = [system, load, str(at_load["num_requests"]), metric.upper()]
                row += [f"{one[name]['p50']:.1f}" for name in ("predicted_ms", "actual_ms")]
                row += ["{p50:.2f}, {p90:.2f}".format(**one["predicted_over_actual"])]
                row += ["{p50:.1f}, {p90:.1f}".format(**one["error_ms"])]
                row += ["{p50:.0%}, {p90:.0%}".format(**one["relative_error"])]
                rows.append([*row, "" if rest is None else "{p50:.1f}, {p90:.1f}".format(**rest)])
    print(table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all results and logs")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated (all)")
    parser.add_argument("--seconds", type=float, default=12.0, help=f"length of each run, above {SETTLE_S:g} (12)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    saved = SavedFigures(arguments.out / "prediction.json")
    saved["machine"] = saved.get("machine") or machine("torch", "grpcio")
    for system in arguments.systems.split(","):
        if system not in saved:
            saved[system] = measure(system, arguments.out, arguments.seconds)
        print(f"{system}: capacity {saved[system]['capacity_rps']:.3g} requests/s", file=sys.stderr)
    show(saved)


if __name__ == "__main__":
    main()
