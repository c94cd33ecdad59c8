"""Whose first tokens come earliest? The five policies on 2 prefill and 2 decode workers that are emulated, with
a trace's shared prefixes.

python -m bench policies --out DIR [--trace FILE] [--policies kv_centric,prefix_aware,least_loaded,random]
[--repeats 3] [--json]

Each process is a real one (gateway, scheduler, workers, Redis; gRPC, NIXL), but a step lasts what
`EMULATED_COSTS` says: two and a half times as long as the default of --device emulated, which is about an 8B
model on a GPU, so that four workers do not want more than two cores have. The prompts are those of Mooncake's
conversation trace with all lengths divided by `SHRINK`, block for block, so that what is shared stays shared
(`loadgen plan mooncake --shrink`); the few that are longer than `MAX_TOKENS` are left out. Answers' own
tokens are not in the trace: only prompts share.

First the capacity of `least_loaded` for this load is found: the highest rate at which 90 % of all requests
keep `SLO`. Then the whole trace is played at `SHARE` of that, the same plan for each policy, every time on a
fresh cluster with empty caches; every other repeat goes through the policies backwards. A request's TTFT is
its mean over the repeats, and differences are paired by request: their intervals are 95 %, by a block
bootstrap over requests (`loadgen.measure.stats`). Predictions are compared with what came, from the placement
on. All results stay in DIR, and a bench that was stopped goes on where it was.
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
"""Of the demo model in bfloat16."""
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
"""In shorter answers the mean gap between tokens is mostly the handoff."""
OURS = "kv_centric"


class PolicyBench:
    """`known`: what was found so far."""

    def __init__(self, out: Path, arguments: argparse.Namespace) -> None:
        self._out = out
        self._arguments = arguments
        self.known = SavedFigures(out / "policies.json")

    def measure(self, policies: list[str]) -> None:
        if "machine" not in self.known:
            self.known["machine"] = machine("nixl", "grpcio")
        plan = self._plan()
        for repeat in range(self._arguments.repeats):
            for policy in policies if repeat % 2 == 0 else reversed(policies):
                if _key(repeat, policy) not in self.known:
                    self._play(plan, repeat, policy)

    def _plan(self) -> Path:
        """The trace, at a share of the capacity."""
        trace = ["mooncake", self._arguments.trace, "--shrink", SHRINK, "--max-tokens", MAX_TOKENS]
        if "capacity" not in self.known:
            given = self._arguments.capacity
            self.known["capacity"] = {"capacity_rps": given} if given else self._capacity(trace)
        path = self._out / "plan.jsonl"
        if not path.exists():
            own = self._out / "own_rate.jsonl"
            loadgen("plan", *trace, "-o", own)
            times = [request.at_s or 0.0 for request in read_plan(own).requests]
            offered_rps = self._arguments.share * self.known["capacity"]["capacity_rps"]
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
        if "best_hits" not in self.known:
            plan = read_plan(path)
            held = (PREFILL + DECODE) * KV_MIB * 2**20 // KV_TOKEN_BYTES
            best = {
                name: best_hits(plan, block_size_tokens=BLOCK_SIZE_TOKENS, capacity_tokens=size)
                for name, size in (("any", None), ("held", held))
            }
            self.known["best_hits"] = {name: use.hit_ratio for name, use in best.items()}
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
        self.known[_key(repeat, policy)] = {"busy_share": seen.busy_share, "late_ms": seen.late_ms}
        print(f"{_key(repeat, policy)}: mean TTFT {1e3 * np.nanmean(_ttfts(read(out))):.0f} ms", file=sys.stderr)

    def results(self, policy: str) -> list[Result]:
        keys = [_key(repeat, policy) for repeat in range(self._arguments.repeats)]
        return [read(self._out / key) for key in keys if key in self.known]


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
    """Of each request in the plan's order, NaN where there was no whole answer."""
    whole = {record.index for outcome in COMPLETE for record in outcomes(result)[outcome]}
    return np.array([(ttft_s(record) or np.nan) if record.index in whole else np.nan for record in result.records])


def _predicted_over_actual(records: list[Record]) -> dict[str, list[float]]:
    """TTFT from the placement on, and TPOT of answers that are long enough, where both are known."""
    ratios: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for record in records:
        told = record.timeline or {}
        if told.get("predicted_ttft_s") and told.get("ttft_s") and told["ttft_s"] > told["placed_s"]:
            ratios["ttft"].append(told["predicted_ttft_s"] / (told["ttft_s"] - told["placed_s"]))
        if told.get("predicted_tpot_s") and told.get("tpot_s") and record.planned_output_tokens >= MIN_TPOT_TOKENS:
            ratios["tpot"].append(told["predicted_tpot_s"] / told["tpot_s"])
    return ratios


def figures(bench: PolicyBench, policies: list[str]) -> dict[str, dict[str, Any]]:
    """By policy, over its repeats."""
    results = {policy: bench.results(policy) for policy in policies}
    means = {policy: np.mean([_ttfts(result) for result in of], axis=0) for policy, of in results.items() if of}
    found = {}
    for policy, ttfts in means.items():
        records = [record for result in results[policy] for record in result.records]
        both = ~np.isnan(ttfts) & ~np.isnan(means[OURS])
        interval = difference_interval(ttfts[both], means[OURS][both]) if policy != OURS else None
        ratios = _predicted_over_actual(records)
        sides = [bench.known[_key(repeat, policy)] for repeat in range(len(results[policy]))]
        found[policy] = {
            "mean_ttft_s": float(np.nanmean(ttfts)),
            "mean_ttft_s_by_repeat": [float(np.nanmean(_ttfts(result))) for result in results[policy]],
            "p50_ttft_s": percentile(ttfts[~np.isnan(ttfts)], 50),
            "p90_ttft_s": percentile(ttfts[~np.isnan(ttfts)], 90),
            "hit_ratio": sum(r.num_cached_tokens or 0 for r in records)
            / sum(r.num_prompt_tokens or 0 for r in records),
            "kv_centric_less_this_s": float(np.mean(means[OURS][both] - ttfts[both])),
            "interval_s": None if interval is None else [interval.low, interval.high],
            "predicted_over_actual": {
                term: {f"p{q}": percentile(values, q) for q in (50, 90)} for term, values in ratios.items() if values
            },
            "num_not_whole": sum(int(np.isnan(_ttfts(result)).sum()) for result in results[policy]),
            "num_invalid": sum(bool(result.run.invalid) for result in results[policy]),
            "send_lag_p99_ms": max(lag_p99_ms(result) for result in results[policy]),
            "busy_share": max(side["busy_share"] for side in sides),
            "late_ms": max(side["late_ms"] for side in sides),
        }
    return found


def show(bench: PolicyBench, found: dict[str, dict[str, Any]]) -> None:
    known = bench.known
    found_rps = known["capacity"]["capacity_rps"]
    print(f"{known['machine']}\n")
    print(
        f"capacity of least_loaded {found_rps:.3g} requests/s ({SLO}, {ATTAINMENT:.0%}); offered {bench._arguments.share:.0%} of it; "
        f"best prefix hit {known['best_hits']['any']:.1%}, of the cluster's size {known['best_hits']['held']:.1%}\n"
    )
    head = ["policy", "mean TTFT ms", "p50", "p90", "prefix hit", "kv_centric's less this one's ms"]
    head += ["predicted / actual TTFT p50", "p90", "TPOT p50", "p90"]
    rows = []
    for policy, one in found.items():
        gap = (
            ""
            if one["interval_s"] is None
            else f"{1e3 * one['kv_centric_less_this_s']:.0f} [{', '.join(f'{1e3 * edge:.0f}' for edge in one['interval_s'])}]"
        )
        ratios = [
            one["predicted_over_actual"].get(term, {}).get(q) for term in ("ttft", "tpot") for q in ("p50", "p90")
        ]
        ttfts = [f"{1e3 * one[name]:.0f}" for name in ("mean_ttft_s", "p50_ttft_s", "p90_ttft_s")]
        rows.append(
            [
                policy,
                *ttfts,
                f"{one['hit_ratio']:.1%}",
                gap,
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    print(table(head, rows))
    worst = {name: max(one[name] for one in found.values()) for name in ("send_lag_p99_ms", "busy_share", "late_ms")}
    print(
        f"\nsend lag p99 at most {worst['send_lag_p99_ms']:.1f} ms, {sum(one['num_invalid'] for one in found.values())} runs invalid, "
        f"{sum(one['num_not_whole'] for one in found.values())} requests not answered whole; cores at most {worst['busy_share']:.0%} busy, "
        f"a worker's timers in the mean at most {worst['late_ms']:.1f} ms late"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--policies", default="kv_centric,prefix_aware,least_loaded,random")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=SHARE, help="of the capacity of least_loaded, offered")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a trial of the search for the capacity")
    parser.add_argument("--capacity", type=float, help="of least_loaded in requests/s, where it is known")
    parser.add_argument("--limit", type=int, default=1_000_000, help="requests of the trace, at most")
    parser.add_argument("--json", action="store_true", help="print a last line that is one JSON object")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    policies = arguments.policies.split(",")
    if OURS not in policies:
        parser.error(f"--policies must have {OURS}, with which the others are compared")
    bench = PolicyBench(arguments.out, arguments)
    bench.measure(policies)
    found = figures(bench, policies)
    show(bench, found)
    if arguments.json:
        print(
            json.dumps({"capacity": bench.known["capacity"], "best_hits": bench.known["best_hits"], "policies": found})
        )


if __name__ == "__main__":
    main()
