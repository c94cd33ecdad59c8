"""Measures goodput at twice the capacity with admission control off, early and predictive.

python -m bench overload --out DIR [--repeats 3] [--json]

The cluster has 2 prefill and 2 decode workers. All processes are real, but the workers emulate the device: a
step lasts as long as `EMULATED_COSTS` predicts. Prefill has a little more capacity than decode. A prompt
takes a tenth of the TTFT SLO, so many prompts are in progress while a decode worker fills up. Admission by
the current load fails in this situation (Mooncake, arXiv 2407.00079, section 7).

The capacity is the highest rate at which 90 % of all requests meet `SLO` with admission off. Each mode and
repeat gets a new cluster, which runs `AT_CAPACITY_S` at the capacity and `OVERLOAD_S` at twice the capacity.

goodput: requests per second with a complete response within the SLO.
spread: standard deviation of the utilisation over windows of 5 s, without the first `RAMP_S`. The utilisation
  of prefill workers is the share of time spent in steps. That of decode workers is the mean batch size over
  `BATCH_AT_SLO`, the batch whose step takes the TPOT SLO.
wasted tokens: tokens that the workers computed (`baton_step_tokens_total`) minus those that the answered
  requests account for: uncached prompt tokens, and output tokens after the first. 0 means that rejected
  requests were rejected before any computation.

At the end, predictive admission gets ten times the capacity for a minute, then 70 % of it. DIR keeps all
results. An interrupted run continues where it stopped.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.support.loads import Sample, capacity, lag_p99_ms, loadgen, outcomes, read, run, watched
from bench.support.overload_chart import picture
from bench.support.saved_figures import SavedFigures, emptied
from bench.systems.baton_cluster import Processes, machine, processes_up, table
from loadgen.measure.records import Record
from loadgen.measure.records_file import Result
from loadgen.measure.request_metrics import RequestOutcome, ttft_s
from loadgen.measure.stats import percentile

EMULATED_COSTS = "step=20ms,prefill_token=600us,decode_seq=1.2ms"
SLO = "ttft=2500ms,tpot=40ms"
TTFT_SLO_S = 2.5
BATCH_AT_SLO = 16
"""A decode step with this batch takes 39.2 ms, a little less than the TPOT SLO of 40 ms."""
PREFILL, DECODE = 2, 2
WORKLOAD = [
    "shared-prefix",
    "--prefixes",
    "8",
    "--prefix-tokens",
    "128",
    "--input-tokens",
    "lognormal:mean=384,cv=0.4,max=2000",
]
WORKLOAD += ["--output-tokens", "lognormal:mean=128,cv=0.4,min=8,max=512"]
KV_MIB = 512
ATTAINMENT = 0.9
MODES = ("off", "early", "predictive")
START_RPS = 4.0
AT_CAPACITY_S, OVERLOAD_S, RAMP_S, WINDOW_S = 60.0, 90.0, 15.0, 5.0
OVERLOAD_TIMES, FLOOD_TIMES, AFTER_SHARE = 2.0, 10.0, 0.7
FLOOD_S, BACK_S, AFTER_S = 60.0, 5.0, 30.0
LOOK_S = 0.5
REFUSE_S = 0.050
REFUSED = (RequestOutcome.REJECTED_EARLY, RequestOutcome.REJECTED_LATE)


class OverloadBench:
    """Measures the missing results and keeps all of them in `saved`.

    --share shortens every load, to try the script.
    """

    def __init__(self, out: Path, arguments: argparse.Namespace) -> None:
        self._out = out
        self._repeats: int = arguments.repeats
        self._seconds: float = arguments.seconds
        self._share: float = arguments.share
        self.saved = SavedFigures(out / "overload.json")
        self._given_rps: float | None = arguments.capacity

    def measure(self) -> None:
        """Measure the capacity, every mode and repeat, and the flood."""
        if "machine" not in self.saved:
            self.saved["machine"] = machine("nixl", "grpcio")
        if self._given_rps is None and "capacity" not in self.saved:
            with processes_up(logs=self._out / "logs" / "capacity", **_settings("off")) as running:
                trial: dict[str, Any] = {
                    "slo": SLO,
                    "attainment": ATTAINMENT,
                    "seconds": self._seconds,
                    "start_rps": START_RPS,
                }
                self.saved["capacity"] = capacity(running.url, self._out / "capacity", *WORKLOAD, **trial)
        for repeat in range(self._repeats):
            for mode in MODES if repeat % 2 == 0 else reversed(MODES):
                if _key(repeat, mode) not in self.saved:
                    self.saved[_key(repeat, mode)] = self._mode(repeat, mode)
                    print(_key(repeat, mode), file=sys.stderr)
        if "flood" not in self.saved:
            self.saved["flood"] = self._flood()

    @property
    def capacity_rps(self) -> float:
        """Capacity without admission control in requests per second, measured or given by --capacity."""
        found: float = self.saved["capacity"]["capacity_rps"] if self._given_rps is None else self._given_rps
        return found

    def _mode(self, repeat: int, mode: str) -> dict[str, Any]:
        name = _key(repeat, mode)
        at_capacity = self._plan(f"at-capacity-{repeat}", f"{self.capacity_rps:.6g}", AT_CAPACITY_S, seed=10 + repeat)
        overload = self._plan(
            f"overload-{repeat}", f"{OVERLOAD_TIMES * self.capacity_rps:.6g}", OVERLOAD_S, seed=20 + repeat
        )
        with processes_up(logs=self._out / "logs" / name, **_settings(mode)) as running:
            first = self._run(running, at_capacity, f"{name}-at-capacity", is_first=True)[0]
            second, samples, side = self._run(running, overload, f"{name}-overload", is_first=False)
        return {
            "goodput_at_capacity_rps": _goodput_rps(first, AT_CAPACITY_S * self._share),
            "goodput_rps": _goodput_rps(second, OVERLOAD_S * self._share),
            "offered": {outcome.value: len(records) for outcome, records in outcomes(second).items() if records},
            "utilisation": _utilisation(samples, running, OVERLOAD_S * self._share),
            "tokens": _tokens(second, samples, running),
            "send_lag_p99_ms": [lag_p99_ms(first), lag_p99_ms(second)],
            "invalid": [*first.run.invalid, *second.run.invalid],
            **side,
        }

    def _flood(self) -> dict[str, Any]:
        """Offer ten times the capacity for a minute, then 70 % of it, with predictive admission."""
        flood_rps, after_rps = (times * self.capacity_rps for times in (FLOOD_TIMES, AFTER_SHARE))
        rates = f"steps:{flood_rps:.6g}@{FLOOD_S * self._share:g}s,{after_rps:.6g}@{BACK_S + AFTER_S:g}s"
        plan = self._plan("flood", rates, FLOOD_S + (BACK_S + AFTER_S) / self._share, seed=30)
        with processes_up(logs=self._out / "logs" / "flood", **_settings("predictive")) as running:
            result, samples, side = self._run(running, plan, "flood", is_first=True)
        flood_s = FLOOD_S * self._share
        during = [record for record in result.records if record.intended_s < flood_s]
        after = [record for record in result.records if record.intended_s >= flood_s + BACK_S]
        by_outcome = outcomes(result)
        good = {record.index for record in by_outcome[RequestOutcome.GOOD]}
        refused = [record for outcome in REFUSED for record in by_outcome[outcome] if record.intended_s < flood_s]
        took_s = [record.ended_s - record.sent_s for record in refused if record.sent_s is not None]
        ttfts = [at_s for record in during if (at_s := ttft_s(record)) is not None]
        return {
            "goodput_rps": sum(record.index in good for record in during) / flood_s,
            "num_offered": len(during),
            "outcomes": {outcome.value: len(records) for outcome, records in by_outcome.items() if records},
            "num_refused": len(refused),
            "num_refused_with_retry_after": sum(
                record.status == 429 and record.retry_after_s is not None for record in refused
            ),
            "refused_ms": {f"p{q}": 1e3 * percentile(took_s, q) for q in (50, 90, 99)},
            "refused_in_time": sum(seconds <= REFUSE_S for seconds in took_s) / max(1, len(took_s)),
            "queued": _queued(during, good, took_s),
            "admitted_ttft_p99_s": percentile(ttfts, 99),
            "attainment_after": sum(record.index in good for record in after) / max(1, len(after)),
            "tokens": _tokens(result, samples, running),
            "send_lag_p99_ms": [lag_p99_ms(result)],
            "invalid": list(result.run.invalid),
            **side,
        }

    def _plan(self, name: str, rate: str, seconds: float, *, seed: int) -> Path:
        path = self._out / f"{name}.jsonl"
        if not path.exists():
            source, *flags = WORKLOAD
            loadgen(
                "plan",
                source,
                *flags,
                "--rate",
                rate,
                "--seconds",
                f"{seconds * self._share:g}s",
                "--seed",
                seed,
                "--slo",
                SLO,
                "-o",
                path,
            )
        return path

    def _run(
        self, running: Processes, plan: Path, name: str, *, is_first: bool
    ) -> tuple[Result, list[Sample], dict[str, Any]]:
        out = emptied(self._out / "runs" / name)
        if is_first:  # a separate warm-up run, so that the token counts include the plan only
            warm = self._plan("warmup", "2", 10.0 / self._share, seed=99)
            run(running, warm, emptied(out.with_name(f"{name}-warmup")), label="warm-up", warmup=0)
        with watched(running, interval_s=LOOK_S) as seen:
            run(running, plan, out, label=name, warmup=0)
        side = {"busy_share": seen.busy_share, "late_ms": seen.late_ms, "rss_bytes": seen.rss_bytes}
        (out / "samples.json").write_text(json.dumps([asdict(sample) for sample in seen.samples]))
        return read(out), seen.samples, side


def _queued(records: Sequence[Record], good: Collection[int], refused_s: Sequence[float]) -> dict[str, int]:
    """Count what a refusal within `REFUSE_S` would change: requests that waited longer at the scheduler.

    good: those that met their SLO, which an immediate refusal would lose. late: those that completed and
    missed it. refused: those that were refused after the wait.
    """
    waited = [record for record in records if ((record.timeline or {}).get("waiting_s") or 0.0) > REFUSE_S]
    num_good = sum(record.index in good for record in waited)
    return {
        "good": num_good,
        "late": len(waited) - num_good,
        "refused": sum(seconds > REFUSE_S for seconds in refused_s),
    }


def _key(repeat: int, mode: str) -> str:
    return f"{repeat}-{mode}"


def _settings(mode: str) -> dict[str, Any]:
    return {
        "prefill": PREFILL,
        "decode": DECODE,
        "device": "emulated",
        "emulated_costs": EMULATED_COSTS,
        "policy": "kv_centric",
        "admission": mode,
        "slo": SLO,
        "kv_memory": KV_MIB * 2**20,
    }


def _goodput_rps(result: Result, seconds: float) -> float:
    return len(outcomes(result)[RequestOutcome.GOOD]) / seconds


def _tokens(result: Result, samples: Sequence[Sample], running: Processes) -> dict[str, int]:
    """Compare the tokens that workers computed with those that the answered requests account for.

    computed: tokens computed by all workers; `computed_by_prefill`: by prefill workers.
    accounted: uncached prompt tokens of the answered requests, and their output tokens after the first, which
        the prefill computes.
    """
    first, last = samples[0].step_tokens, samples[-1].step_tokens
    answered = [record for record in result.records if record.num_prompt_tokens is not None]
    prompts = {"p": 0, "d": 0}
    for record in answered:
        for leg in (record.timeline or {}).get("legs", ()):
            prompts[leg["worker_id"][0]] += leg["num_computed_tokens"]
    return {
        "computed": round(sum(last[name] - first[name] for name in last)),
        "accounted": sum(_new_tokens(record) + (record.num_output_tokens or 0) - 1 for record in answered),
        "computed_by_prefill": round(sum(last[name] - first[name] for name in running.workers("p"))),
        "prompts_of_answered_there": prompts["p"],
        "num_answered": len(answered),
        "num_not_answered_nor_refused": len(result.records)
        - len(answered)
        - sum(len(outcomes(result)[outcome]) for outcome in REFUSED),
    }


def _new_tokens(record: Record) -> int:
    return (record.num_prompt_tokens or 0) - (record.num_cached_tokens or 0)


def _utilisation(samples: Sequence[Sample], running: Processes, lasts_s: float) -> dict[str, list[float]]:
    """Return the utilisation of prefill and decode workers in each window of `WINDOW_S` seconds."""
    start_s = samples[0].at_s
    sides: dict[str, list[float]] = {"prefill": [], "decode": []}
    prefill, decode = running.workers("p"), running.workers("d")
    for number in range(int(lasts_s / WINDOW_S)):
        window = [s for s in samples if number * WINDOW_S <= s.at_s - start_s < (number + 1) * WINDOW_S + LOOK_S]
        if len(window) < 2:
            break
        took_s = window[-1].at_s - window[0].at_s
        busy_s = sum(window[-1].step_s[name] - window[0].step_s[name] for name in prefill)
        sides["prefill"].append(busy_s / took_s / len(prefill))
        batch = statistics.fmean(s.running_seqs[name] for s in window for name in decode)
        sides["decode"].append(batch / BATCH_AT_SLO)
    return sides


def spread(utilisation: Sequence[float]) -> float:
    """Return the standard deviation of the windows after the ramp."""
    steady = utilisation[int(RAMP_S / WINDOW_S) :]
    return statistics.stdev(steady) if len(steady) > 1 else float("nan")


def show(bench: OverloadBench, repeats: int, out: Path) -> dict[str, Any]:
    """Print all tables, write `overload.svg`, and return the results for --json."""
    saved = bench.saved
    found = {mode: [saved[_key(repeat, mode)] for repeat in range(repeats)] for mode in MODES}
    print(f"{saved['machine']}\n")
    print(f"capacity {bench.capacity_rps:.3g} requests/s with admission off ({SLO}, {ATTAINMENT:.0%})\n")
    head = ["admission", "goodput at capacity", "at twice that", "each repeat", "good", "late", "rejected", "other"]
    head += ["prefill spread", "decode spread", "wasted tokens"]
    rows = []
    for mode, repeated in found.items():
        at, over = ([one[name] for one in repeated] for name in ("goodput_at_capacity_rps", "goodput_rps"))
        counts = [sum(one["offered"].get(name, 0) for one in repeated) for name in ("good", "late", *REFUSED)]
        others = sum(sum(one["offered"].values()) for one in repeated) - sum(counts)
        spreads = [
            ", ".join(f"{spread(one['utilisation'][side]):.3f}" for one in repeated) for side in ("prefill", "decode")
        ]
        more = ", ".join(f"{one['tokens']['computed'] - one['tokens']['accounted']:,}" for one in repeated)
        medians = [
            f"{statistics.median(at):.2f}",
            f"{statistics.median(over):.2f}",
            ", ".join(f"{rate:.2f}" for rate in over),
        ]
        rows.append(
            [mode, *medians, *(f"{n:,}" for n in (counts[0], counts[1], sum(counts[2:]), others)), *spreads, more]
        )
    print(table(head, rows))
    best_rps = max(statistics.median(one["goodput_at_capacity_rps"] for one in repeated) for repeated in found.values())
    predictive_share = statistics.median(one["goodput_rps"] for one in found["predictive"]) / best_rps
    print(
        f"\npredictive at twice the capacity: {predictive_share:.0%} of the best goodput at capacity "
        f"({best_rps:.2f} requests/s)"
    )
    sides = [one for repeated in found.values() for one in repeated]
    print(
        f"send lag p99 at most {max(lag for one in sides for lag in one['send_lag_p99_ms']):.1f} ms, "
        f"{sum(bool(one['invalid']) for one in sides)} clusters with an invalid run; "
        f"cores at most {max(one['busy_share'] for one in sides):.0%} busy, "
        f"mean timer lag of a worker at most {max(one['late_ms'] for one in sides):.1f} ms"
    )
    _show_flood(saved["flood"], best_rps)
    panels = {
        f"{mode}: goodput {one[0]['goodput_rps']:.1f} requests/s": _points(one[0]["utilisation"])
        for mode, one in found.items()
    }
    (out / "overload.svg").write_text(picture(panels, OVERLOAD_S))
    return {
        "capacity_rps": bench.capacity_rps,
        "modes": found,
        "flood": saved["flood"],
        "predictive_of_best_goodput": predictive_share,
    }


def _points(utilisation: dict[str, list[float]]) -> dict[str, list[tuple[float, float]]]:
    return {
        side: [((number + 0.5) * WINDOW_S, share) for number, share in enumerate(values)]
        for side, values in utilisation.items()
    }


def _show_flood(flood: dict[str, Any], best_rps: float) -> None:
    grown = {name: (now - before) / 2**20 for name, (before, _, now) in flood["rss_bytes"].items()}
    most = {name: (most - before) / 2**20 for name, (before, most, _) in flood["rss_bytes"].items()}
    refused = flood["refused_ms"]
    rows = [
        ["goodput, share of the best at capacity", f"{flood['goodput_rps'] / best_rps:.0%}", "90 % or more"],
        ["offered, rejected", f"{flood['num_offered']:,}, {flood['num_refused']:,}", ""],
        [
            "outcomes, later requests included",
            ", ".join(f"{n:,} {outcome}" for outcome, n in flood["outcomes"].items()),
            "",
        ],
        ["rejected with 429 and Retry-After", f"{flood['num_refused_with_retry_after']:,}", "all"],
        ["rejection ms p50, p90, p99", ", ".join(f"{refused[q]:.0f}" for q in ("p50", "p90", "p99")), "50"],
        ["rejected within 50 ms", f"{flood['refused_in_time']:.1%}", "all"],
        [
            "waited longer than that: met the SLO, missed it, rejected",
            ", ".join(f"{flood['queued'][name]:,}" for name in ("good", "late", "refused")),
            "",
        ],
        ["TTFT p99 of admitted requests, ms", f"{1e3 * flood['admitted_ttft_p99_s']:.0f}", f"{2e3 * TTFT_SLO_S:.0f}"],
        [f"attainment from {BACK_S:g} s after the flood", f"{flood['attainment_after']:.1%}", "90 % or more"],
        ["wasted tokens", f"{flood['tokens']['computed'] - flood['tokens']['accounted']:,}", "0"],
        ["memory growth MiB, maximum", f"{max(most.values()):.0f} ({max(most, key=lambda name: most[name])})", ""],
        [
            "memory growth MiB, afterwards",
            f"{max(grown.values()):.0f} ({max(grown, key=lambda name: grown[name])})",
            "",
        ],
        ["send lag p99 ms", f"{flood['send_lag_p99_ms'][0]:.1f}", ""],
    ]
    print(f"\nten times the capacity for {FLOOD_S:g} s, predictive\n\n{table(['figure', 'measured', 'target'], rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all results and logs")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode (3)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a trial of the capacity search (60)")
    parser.add_argument("--capacity", type=float, help="capacity in requests/s if it is known; skips the search")
    parser.add_argument(
        "--share", type=float, default=1.0, help="factor for the length of every load, to try the script (1)"
    )
    parser.add_argument("--json", action="store_true", help="also print one line of JSON")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = OverloadBench(arguments.out, arguments)
    bench.measure()
    found = show(bench, arguments.repeats, arguments.out)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
