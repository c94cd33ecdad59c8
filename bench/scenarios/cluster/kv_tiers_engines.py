"""Measures what slower tiers save with real engines, for sessions that exceed device memory.

python -m bench kv_tiers_engines --out DIR [--model tiny-42m] [--repeats 3] [--seconds 240] [--rate 0.2]
[--ratio 1.3] [--cells none,host] [--json]

One prefill and one decode worker run the model on this machine. The sessions are those of `kv_tiers`, and
their working set is `--ratio` times the device memory of both workers. The clusters of all cells take turns;
each starts empty and gets the same plan. The first third of each run fills the tiers and does not count. TTFT
counts from the intended send.

none: no slower tier. host: a host tier of four times the device's KV memory. disk: a disk tier of that size,
  whose file may stay in the page cache of the system.
reload p10, p50, p90: predicted over actual seconds of the reloads that were complete.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from bench.scenarios.cluster.goodput import model_directory
from bench.scenarios.cluster.kv_tiers import LARGE_TIER
from bench.support.loads import run
from bench.support.sessions.reload_ratios import deciles, reload_ratios
from bench.support.sessions.session_plans import MAX_CONTEXT, planned_times_s, session_plan, working_set_tokens
from bench.systems.baton_cluster import Processes, machine, processes_up, table
from loadgen.measure.records_file import read_result
from loadgen.measure.request_metrics import ttft_s
from loadgen.plan.plan import Plan
from loadgen.plan.plan_file import write_plan

CELLS = ("none", "host", "disk")
BLOCK_SIZE_TOKENS = 16
NUM_WORKERS = 2
MEASURED_SHARE = 2 / 3
"""Share of a run that counts: its end."""
FIRST_KV_BYTES = 2**28
"""KV memory of the cluster that is asked for the size of a block."""


def settings_of(model: Path, kv_memory: int, cell: str, disk: Path) -> dict[str, object]:
    """Return the settings of a cell's processes. `disk`: directory for the files of a disk tier."""
    return {
        "model": str(model),
        "kv_memory": kv_memory,
        "host_kv_memory": LARGE_TIER * kv_memory if cell == "host" else 0,
        **({"disk_kv": str(disk), "disk_kv_size": LARGE_TIER * kv_memory} if cell == "disk" else {}),
        "block_size_tokens": BLOCK_SIZE_TOKENS,
        "max_model_len": 2 * MAX_CONTEXT,
    }


def block_bytes(running: Processes) -> int:
    """Return the size of a device block of the workers."""

    async def ask() -> int:
        async with open_channel(running.grpc_address, channel_options(5.0)) as channel:
            status = await AdminClient(channel, running.grpc_address).status()
        return status.workers[0].block_bytes

    return asyncio.run(ask())


def figures(plan: Plan, result: Path, seconds: float) -> dict[str, float]:
    """Return the figures of the requests that count. Raises SystemExit if one of them failed."""
    times_s = planned_times_s(plan)
    counted = [r for r in read_result(result).records if times_s[r.index] >= (1 - MEASURED_SHARE) * seconds]
    ttfts_s = [first_s for record in counted if (first_s := ttft_s(record)) is not None]
    if len(ttfts_s) < len(counted):
        raise SystemExit(f"{len(counted) - len(ttfts_s)} of {len(counted)} requests have no token; see {result}")
    prompt_tokens = sum(record.num_prompt_tokens or 0 for record in counted)
    return {
        "requests": len(counted),
        "hits": sum(record.num_cached_tokens or 0 for record in counted) / prompt_tokens,
        "mean_ttft_ms": 1e3 * statistics.fmean(ttfts_s),
        "median_ttft_ms": 1e3 * statistics.median(ttfts_s),
    }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the repeats."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    """Run the benchmark and print a row for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps the model, logs and results")
    parser.add_argument("--model", default="tiny-42m", help="demo, or a shape of `baton model init` (tiny-42m)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each cell (3)")
    parser.add_argument("--seconds", type=float, default=240.0, help="arrivals of sessions (240)")
    parser.add_argument("--rate", type=float, default=0.2, help="sessions per second (0.2)")
    parser.add_argument("--ratio", type=float, default=1.3, help="working set over the memory of both devices")
    parser.add_argument("--cells", default="none,host", help=f"comma-separated, of {','.join(CELLS)} (none,host)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="also print one line of JSON for each run")
    arguments = parser.parse_args()
    print(f"{machine('torch', 'nixl')}\n")
    arguments.out.mkdir(parents=True, exist_ok=True)
    model, seconds = model_directory(arguments.model, arguments.out), arguments.seconds
    plan = session_plan(rate_rps=arguments.rate, seconds=seconds, seed=arguments.seed)
    plan_path = arguments.out / "plan.jsonl.gz"
    write_plan(plan, plan_path)
    out = Path(tempfile.mkdtemp(prefix="run-", dir=arguments.out))
    with processes_up(prefill=1, decode=1, logs=out, **settings_of(model, FIRST_KV_BYTES, "none", out)) as running:
        num_bytes = block_bytes(running)
    tokens = working_set_tokens(plan, (1 - MEASURED_SHARE) * seconds, seconds) / arguments.ratio
    kv_memory = num_bytes * max(2 * MAX_CONTEXT // BLOCK_SIZE_TOKENS, int(tokens / NUM_WORKERS / BLOCK_SIZE_TOKENS))
    cells = arguments.cells.split(",")
    rows: dict[str, list[dict[str, float]]] = {cell: [] for cell in cells}
    ratios: dict[str, list[float]] = {cell: [] for cell in cells}
    for repeat in range(arguments.repeats):
        for cell in cells if repeat % 2 == 0 else cells[::-1]:
            result = out / f"{cell}-{repeat}"
            logs = out / f"logs-{cell}-{repeat}"
            settings = settings_of(model, kv_memory, cell, out / f"kv-{cell}-{repeat}")
            with processes_up(prefill=1, decode=1, logs=logs, **settings) as running:
                run(running, plan_path, result, label=cell, warmup=0)
            rows[cell].append(figures(plan, result, seconds))
            ratios[cell] += reload_ratios(logs)
            if arguments.json:
                print(json.dumps({"cell": cell, "repeat": repeat, **rows[cell][-1]}), flush=True)
    found = {cell: medians(rows[cell]) for cell in cells}
    head = ["cell", "requests", "hits %", "mean TTFT ms", "median TTFT ms", "reloads", "reload p10", "p50", "p90"]
    lines = [
        [
            cell,
            f"{of['requests']:.0f}",
            f"{100 * of['hits']:.1f}",
            f"{of['mean_ttft_ms']:.0f}",
            f"{of['median_ttft_ms']:.0f}",
            f"{len(ratios[cell])}",
            *(f"{each:.2f}" for each in deciles(ratios[cell])),
        ]
        for cell, of in found.items()
    ]
    print(table(head, lines))
    print(f"\nKV memory of each device: {kv_memory / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
