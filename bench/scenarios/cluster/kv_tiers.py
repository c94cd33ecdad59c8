"""Simulates a working set that exceeds device memory, with and without slower tiers.

python -m bench kv_tiers [--load sessions|trace|no_reuse|documents] [--trace FILE] [--seconds 300]
[--ratio 1.3] [--gain 8] [--cells none,host,host_blind,host_small,host_disk] [--seeds 1,2,3] [--json]

The cluster is simulated (`baton.sim`), with 2 prefill and 2 decode workers. Gateway, scheduler and workers
are real; devices, links, copies and disks take virtual time. The true costs of steps deviate by 30 % from the
model that policies predict with, and each step and each copy deviates at random by as much. The working set
is `--ratio` times the memory of all devices. A block is reloaded from host memory `--gain` times faster than
it is computed; from a disk, that takes four times as long.

none: no slower tier. host: a host tier of four times the device's KV memory, about as host memory is to GPU
  memory in servers. host_blind: the same, placed without knowledge of slower tiers. host_small: a host
  tier of the size of the device. host_disk: the same, and a disk tier of four times that size.
sessions: conversations whose turns follow each other. trace: a conversation trace in Mooncake's format, with
  lengths divided by 32. no_reuse: prompts that share nothing. documents: one question each about a long
  document that another prompt had before.
reload_ratio: predicted over actual seconds of the reloads that were complete.
"""

import argparse
import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, Overlap
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.scheduler.policies.kv_centric import kv_centric
from baton.scheduler.policies.policy_types import Choice, PolicyContext
from bench.support.sessions.reload_ratios import deciles
from bench.support.sessions.session_plans import VOCABULARY, planned_times_s, session_plan, working_set_tokens
from bench.support.sessions.session_sim import (
    BLOCK_SIZE_TOKENS,
    DEVIATION,
    DISK_GAIN,
    RELOAD_GAIN,
    Played,
    SimTiers,
    play,
)
from loadgen.plan import draws
from loadgen.plan.arrivals import poisson
from loadgen.plan.plan import Generated, Plan, PlannedRequest
from loadgen.plan.sources.trace import Cut, read_mooncake, replay_mooncake

TRACE = Path(__file__).parents[3] / "tests/data/mooncake_conversation_1000.jsonl.gz"
SHRINK, MAX_TOKENS = 32, 1000
PAIRS = 2
SESSIONS_RPS, PROMPTS_RPS = 1.4, 6.0
DOCUMENT_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 800, 32, 8
LOADS = ("sessions", "trace", "no_reuse", "documents")
CELLS = ("none", "host", "host_blind", "host_small", "host_disk")
LARGE_TIER = 4
"""Size of the host tier, or of the disk tier below a smaller host tier, over the device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOverlap:
    """Implements `Overlap` for the blocks that a worker has on its device."""

    num_blocks: int
    num_held_blocks: int
    num_reloaded_blocks: int = 0
    num_disk_blocks: int = 0


def place_tier_blind(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
    """Place as `kv_centric` does if no worker has announced a block of a slower tier."""
    overlaps = {worker: _on_device(overlap) for worker, overlap in cluster.overlaps.items()}
    return kv_centric(query, replace(cluster, overlaps=overlaps), context)


def _on_device(overlap: Overlap) -> DeviceOverlap:
    reloaded = overlap.num_reloaded_blocks
    return DeviceOverlap(
        num_blocks=max(0, overlap.num_blocks - reloaded), num_held_blocks=max(0, overlap.num_held_blocks - reloaded)
    )


class ReloadRatios(logging.Handler):
    """Collects predicted over actual seconds of each reload from the log of the workers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.values: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        event: Any = record.msg
        if isinstance(event, dict) and event.get("event") == "prefix_reloaded":
            predicted_s, took_s = event["predicted_s"], event["took_s"]
            if predicted_s is not None and took_s > 0:
                self.values.append(predicted_s / took_s)


def plan_of(load: str, *, trace: Path, seconds: float, seed: int) -> Plan:
    """Return the plan of a load."""
    if load == "sessions":
        return session_plan(rate_rps=SESSIONS_RPS, seconds=seconds, seed=seed)
    if load == "trace":
        cut = Cut(duration_s=seconds, max_tokens=MAX_TOKENS)
        requests = replay_mooncake(read_mooncake(trace), cut, seed=seed, shrink=SHRINK).requests
        return Plan(name=load, seed=seed, vocabulary=VOCABULARY, requests=tuple(requests))
    times_s = poisson(draws.stream(seed, "arrivals"), rate_rps=PROMPTS_RPS, until_s=seconds)
    num_documents = max(1, len(times_s) // 2)
    requests = [
        PlannedRequest(
            index=index,
            at_s=at_s,
            segments=(
                Generated(
                    segment_id=index % num_documents if load == "documents" else index, num_tokens=DOCUMENT_TOKENS
                ),
                Generated(segment_id=len(times_s) + index, num_tokens=QUESTION_TOKENS),
            ),
            output_tokens=OUTPUT_TOKENS,
        )
        for index, at_s in enumerate(times_s)
    ]
    return Plan(name=load, seed=seed, vocabulary=VOCABULARY, requests=tuple(requests))


def working_set(plan: Plan, seconds: float) -> float:
    """Return the tokens that a cache must hold to reuse all that the plan can reuse, once it is warm."""
    if any(request.session for request in plan.requests):
        return working_set_tokens(plan, seconds / 3, seconds)
    sizes = {
        each.segment_id: each.num_tokens for r in plan.requests for each in r.segments if isinstance(each, Generated)
    }
    return float(sum(sizes.values()))


def tiers_of(cell: str, device_blocks: int, gain: float) -> SimTiers:
    """Return the tiers of a cell. `gain`: that of reloads from host memory."""
    tiers = SimTiers(workers=0, pairs=PAIRS, device_blocks=device_blocks, host_blocks=0)
    tiers = replace(tiers, reload_gain=gain, disk_gain=gain * DISK_GAIN / RELOAD_GAIN, copy_deviation=DEVIATION)
    if cell in ("host_small", "host_disk"):
        return replace(
            tiers, host_blocks=device_blocks, disk_blocks=LARGE_TIER * device_blocks if cell == "host_disk" else 0
        )
    if cell == "none":
        return tiers
    policy = "bench.scenarios.cluster.kv_tiers:place_tier_blind" if cell == "host_blind" else tiers.policy
    return replace(tiers, host_blocks=LARGE_TIER * device_blocks, policy=policy)


def row(plan: Plan, played: Sequence[Played], ratios: Sequence[float], seconds: float) -> dict[str, float | int]:
    """Return the figures of the requests after the first third, which fills the tiers."""
    counted = [each for each, at_s in zip(played, planned_times_s(plan), strict=True) if at_s >= seconds / 3]
    ttfts_s = sorted(float(each.ttft_s) for each in counted)
    p10, p50, p90 = deciles(ratios)
    return {
        "requests": len(counted),
        "hits": round(sum(e.num_cached_tokens for e in counted) / sum(e.num_prompt_tokens for e in counted), 4),
        "mean_ttft_ms": round(1e3 * statistics.fmean(ttfts_s), 2),
        "median_ttft_ms": round(1e3 * statistics.median(ttfts_s), 2),
        "p90_ttft_ms": round(1e3 * ttfts_s[int(0.9 * len(ttfts_s))], 2),
        "reloads": len(ratios),
        "reload_ratio_p10": round(p10, 3),
        "reload_ratio_p50": round(p50, 3),
        "reload_ratio_p90": round(p90, 3),
    }


def main() -> None:
    """Run the benchmark and print a row for each seed and cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default="sessions")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--seconds", type=float, default=300.0, help="arrivals, in virtual seconds")
    parser.add_argument("--ratio", type=float, default=1.3, help="working set over the memory of all devices")
    parser.add_argument(
        "--gain", type=float, default=RELOAD_GAIN, help="time to compute a block over that to reload it"
    )
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("baton").handlers = [logging.NullHandler()]
    logging.getLogger("baton").propagate = False
    logger = logging.getLogger("baton.worker.tiers.reloads")
    logger.setLevel(logging.INFO)
    for seed in map(int, arguments.seeds.split(",")):
        plan = plan_of(arguments.load, trace=arguments.trace, seconds=arguments.seconds, seed=seed)
        tokens = working_set(plan, arguments.seconds) / arguments.ratio
        device_blocks = max(80, int(tokens / (2 * PAIRS) / BLOCK_SIZE_TOKENS))
        for cell in arguments.cells.split(","):
            logger.handlers = [ratios := ReloadRatios()]
            played = play(plan, tiers_of(cell, device_blocks, arguments.gain), "value", seed=seed)
            found = {"seed": seed, "load": arguments.load, "cell": cell, "device_blocks": device_blocks}
            found |= row(plan, played, ratios.values, arguments.seconds)
            print(json.dumps(found) if arguments.json else found, flush=True)


if __name__ == "__main__":
    main()
