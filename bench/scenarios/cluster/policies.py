"""Measures TTFT under the scheduling policies on a trace with shared prefixes, against kv_centric.

python -m bench policies --out DIR [--trace FILE] [--policies kv_centric,prefix_aware,least_loaded,random]
[--repeats 3] [--json]

The cluster has 2 prefill and 2 decode workers. All processes are real (gateway, scheduler, workers, Redis;
gRPC and NIXL), but the workers emulate the device: a step lasts as long as `EMULATED_COSTS` predicts. That is
2.5 times the default of --device emulated, which resembles an 8B model on a GPU, so that two cores suffice
for four workers.

The prompts come from Mooncake's conversation trace. All lengths are divided by `SHRINK` block by block, which
keeps the shared prefixes (`loadgen plan mooncake --shrink`). Prompts over `MAX_TOKENS` are left out. The
trace has no output tokens, so only prompts share prefixes.

First, the capacity of `least_loaded` is searched: the highest rate at which 90 % of all requests meet `SLO`.
Then the trace is sent at `SHARE` of that rate. Every policy gets the same plan and, in each repeat, a new
cluster with empty caches. The order of the policies alternates. The TTFT of a request is its mean over the
repeats. Differences are paired by request, with 95 % intervals from a block bootstrap over requests
(`loadgen.measure.stats`). Predictions are compared with the actual times from the placement on. DIR keeps all
results. An interrupted run continues where it stopped.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.loads import capacity, lag_p99_ms, loadgen, outcomes, read, run, watched
from bench.support.saved_figures import SavedFigures, emptied
from bench.systems.baton_cluster import machine, processes_up, table
from loadgen.measure.records import Record
from loadgen.measure.records_file import Result
from loadgen.measure.request_metrics import COMPLETE, ttft_s
from loadgen.measure.stats import difference_interval, percentile
from loadgen.plan.cache_model import best_hits
from loadgen.plan.plan_file import read_plan

TRACE = Path(__file__).parents[3] / "tests/data/mooncake_conversation_1000.jsonl.gz"
SHRINK = 8
MAX_TOKENS = 8000
KV_MIB = 512
KV_TOKEN_BYTES = 3072
"""KV bytes per token of the demo model in bfloat16."""
EMULATED_COSTS = "step=20ms,prefill_token=150us,prefill_attended=5ns,decode_seq=125us,decode_context=150ns"
PREFILL, DECODE = 2, 2
SLO = "ttft=2s,tpot=60ms"
ATTAINMENT = 0.9
SHARE = 0.7
SECONDS = 60.0
START_RPS = 4.0
WARMUP = 4
BLOCK_SIZE_TOKENS = 16
MIN_TPOT_TOKENS = 8
"""Responses below this length are left out: their mean gap between tokens is mostly the handoff."""
REFERENCE_POLICY = "kv_centric"


class PolicyBench:
    """Measures the missing results and keeps all of them in `saved`."""

    def __init__(self, out: Path, arguments: argparse.Namespace) -> None:
        self._out = out
        self._arguments = arguments
        self.saved = SavedFigures(out / "policies.json")

    def measure(self, policies: list[str]) -> None:
        """Run every policy and repeat that is missing."""
        if "machine" not in self.saved:
            self.saved["machine"] = machine("nixl", "grpcio")
        plan = self._plan()
        for repeat in range(self._arguments.repeats):
            for policy in policies if repeat % 2 == 0 else reversed(policies):
                if _key(repeat, policy) not in self.saved:
                    self._play(plan, repeat, policy)

    def _plan(self) -> Path:
        """Create the plan: the trace at a share of the capacity."""
        trace = ["mooncake", self._arguments.trace, "--shrink", SHRINK, "--max-tokens", MAX_TOKENS]
        if "capacity" not in self.saved:
            given = self._arguments.capacity
            self.saved["capacity"] = {"capacity_rps": given} if given else self._capacity(trace)
        path = self._out / "plan.jsonl"
        if not path.exists():
            own = self._out / "own_rate.jsonl"
            loadgen("plan", *trace, "-o", own)
            times = [request.at_s or 0.0 for request in read_plan(own).requests]
            offered_rps = self._arguments.share * self.saved["capacity"]["capacity_rps"]
            scale = (len(times) - 1) / max(times) / offered_rps
            loadgen(
                "plan",
                *trace,
                "--limit",
                self._arguments.limit,
                "--time-scale",
                f"{scale:.6g}",
                "--slo",
                SLO,
                "-o",
                path,
            )
        if "best_hits" not in self.saved:
            plan = read_plan(path)
            held = (PREFILL + DECODE) * KV_MIB * 2**20 // KV_TOKEN_BYTES
            best = {
                name: best_hits(plan, block_size_tokens=BLOCK_SIZE_TOKENS, capacity_tokens=size)
                for name, size in (("any", None), ("held", held))
            }
            self.saved["best_hits"] = {name: use.hit_ratio for name, use in best.items()}
        return path

    def _capacity(self, trace: list[Any]) -> dict[str, Any]:
        with processes_up(logs=self._out / "logs" / "capacity", **_settings("least_loaded")) as running:
            return capacity(
                running.url,
                self._out / "capacity",
                *trace,
                slo=SLO,
                attainment=ATTAINMENT,
                seconds=self._arguments.seconds,
                start_rps=START_RPS,
            )

    def _play(self, plan: Path, repeat: int, policy: str) -> None:
        out = emptied(self._out / _key(repeat, policy))
        logs = self._out / "logs" / _key(repeat, policy)
        with processes_up(logs=logs, **_settings(policy)) as running, watched(running, interval_s=10.0) as seen:
            run(running, plan, out, label=policy, warmup=WARMUP)
        self.saved[_key(repeat, policy)] = {"busy_share": seen.busy_share, "late_ms": seen.late_ms}
        print(f"{_key(repeat, policy)}: mean TTFT {1e3 * np.nanmean(_ttfts(read(out))):.0f} ms", file=sys.stderr)

    def results(self, policy: str) -> list[Result]:
        """Return the results of all repeats of one policy."""
        keys = [_key(repeat, policy) for repeat in range(self._arguments.repeats)]
        return [read(self._out / key) for key in keys if key in self.saved]


def _key(repeat: int, policy: str) -> str:
    return f"runs/{repeat}-{policy}"


def _settings(policy: str) -> dict[str, Any]:
    return {
        "prefill": PREFILL,
        "decode": DECODE,
        "device": "emulated",
        "emulated_costs": EMULATED_COSTS,
        "policy": policy,
        "kv_memory": KV_MIB * 2**20,
    }


def _ttfts(result: Result) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the TTFT of each request in the order of the plan; NaN if its response is not complete."""
    complete = {record.index for outcome in COMPLETE for record in outcomes(result)[outcome]}
    return np.array([(ttft_s(record) or np.nan) if record.index in complete else np.nan for record in result.records])


def _predicted_over_actual(records: list[Record]) -> dict[str, list[float]]:
    """Return predicted / actual TTFT (from the placement on) and TPOT (of long responses), if known."""
    ratios: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for record in records:
        timeline = record.timeline or {}
        if timeline.get("predicted_ttft_s") and timeline.get("ttft_s") and timeline["ttft_s"] > timeline["placed_s"]:
            ratios["ttft"].append(timeline["predicted_ttft_s"] / (timeline["ttft_s"] - timeline["placed_s"]))
        if (
            timeline.get("predicted_tpot_s")
            and timeline.get("tpot_s")
            and record.planned_output_tokens >= MIN_TPOT_TOKENS
        ):
            ratios["tpot"].append(timeline["predicted_tpot_s"] / timeline["tpot_s"])
    return ratios


def figures(bench: PolicyBench, policies: list[str]) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy over its repeats."""
    results = {policy: bench.results(policy) for policy in policies}
    means = {policy: np.mean([_ttfts(result) for result in of], axis=0) for policy, of in results.items() if of}
    found = {}
    for policy, ttfts in means.items():
        records = [record for result in results[policy] for record in result.records]
        both = ~np.isnan(ttfts) & ~np.isnan(means[REFERENCE_POLICY])
        interval = (
            difference_interval(ttfts[both], means[REFERENCE_POLICY][both]) if policy != REFERENCE_POLICY else None
        )
        ratios = _predicted_over_actual(records)
        sides = [bench.saved[_key(repeat, policy)] for repeat in range(len(results[policy]))]
        found[policy] = {
            "mean_ttft_s": float(np.nanmean(ttfts)),
            "mean_ttft_s_by_repeat": [float(np.nanmean(_ttfts(result))) for result in results[policy]],
            "p50_ttft_s": percentile(ttfts[~np.isnan(ttfts)], 50),
            "p90_ttft_s": percentile(ttfts[~np.isnan(ttfts)], 90),
            "hit_ratio": sum(r.num_cached_tokens or 0 for r in records)
            / sum(r.num_prompt_tokens or 0 for r in records),
            "kv_centric_minus_this_s": float(np.mean(means[REFERENCE_POLICY][both] - ttfts[both])),
            "interval_s": None if interval is None else [interval.low, interval.high],
            "predicted_over_actual": {
                term: {f"p{q}": percentile(values, q) for q in (50, 90)} for term, values in ratios.items() if values
            },
            "num_incomplete": sum(int(np.isnan(_ttfts(result)).sum()) for result in results[policy]),
            "num_invalid": sum(bool(result.run.invalid) for result in results[policy]),
            "send_lag_p99_ms": max(lag_p99_ms(result) for result in results[policy]),
            "busy_share": max(side["busy_share"] for side in sides),
            "late_ms": max(side["late_ms"] for side in sides),
        }
    return found


def show(bench: PolicyBench, found: dict[str, dict[str, Any]]) -> None:
    """Print the table of all policies."""
    saved = bench.saved
    found_rps = saved["capacity"]["capacity_rps"]
    print(f"{saved['machine']}\n")
    print(
        f"capacity of least_loaded {found_rps:.3g} requests/s ({SLO}, {ATTAINMENT:.0%}); "
        f"offered {bench._arguments.share:.0%} of it; "
        f"best possible prefix hit {saved['best_hits']['any']:.1%}, "
        f"with the cluster's KV memory {saved['best_hits']['held']:.1%}\n"
    )
    head = ["policy", "mean TTFT ms", "p50", "p90", "prefix hit", "kv_centric minus this, ms"]
    head += ["predicted / actual TTFT p50", "p90", "TPOT p50", "p90"]
    rows = []
    for policy, one in found.items():
        difference = ""
        if one["interval_s"] is not None:
            interval = ", ".join(f"{1e3 * edge:.0f}" for edge in one["interval_s"])
            difference = f"{1e3 * one['kv_centric_minus_this_s']:.0f} [{interval}]"
        ratios = [
            one["predicted_over_actual"].get(term, {}).get(q) for term in ("ttft", "tpot") for q in ("p50", "p90")
        ]
        ttfts = [f"{1e3 * one[name]:.0f}" for name in ("mean_ttft_s", "p50_ttft_s", "p90_ttft_s")]
        rows.append(
            [
                policy,
                *ttfts,
                f"{one['hit_ratio']:.1%}",
                difference,
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    print(table(head, rows))
    worst = {name: max(one[name] for one in found.values()) for name in ("send_lag_p99_ms", "busy_share", "late_ms")}
    print(
        f"\nsend lag p99 at most {worst['send_lag_p99_ms']:.1f} ms, "
        f"{sum(one['num_invalid'] for one in found.values())} runs invalid, "
        f"{sum(one['num_incomplete'] for one in found.values())} incomplete responses; "
        f"cores at most {worst['busy_share']:.0%} busy, "
        f"mean timer lag of a worker at most {worst['late_ms']:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all results and logs")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake trace (the first 1,000 conversations)")
    policies_default = "kv_centric,prefix_aware,least_loaded,random"
    parser.add_argument("--policies", default=policies_default, help=f"comma-separated ({policies_default})")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each policy (3)")
    parser.add_argument("--share", type=float, default=SHARE, help=f"offered rate over the capacity ({SHARE:g})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a trial of the capacity search (60)")
    parser.add_argument("--capacity", type=float, help="capacity of least_loaded in requests/s; skips the search")
    parser.add_argument("--limit", type=int, default=1_000_000, help="maximum number of requests of the trace")
    parser.add_argument("--json", action="store_true", help="also print one line of JSON")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    policies = arguments.policies.split(",")
    if REFERENCE_POLICY not in policies:
        parser.error(f"--policies must include {REFERENCE_POLICY}, the policy that the others are compared with")
    bench = PolicyBench(arguments.out, arguments)
    bench.measure(policies)
    found = figures(bench, policies)
    show(bench, found)
    if arguments.json:
        print(
            json.dumps({"capacity": bench.saved["capacity"], "best_hits": bench.saved["best_hits"], "policies": found})
        )


if __name__ == "__main__":
    main()
