"""Simulates sessions whose working set exceeds all tiers, evicted by value and least recently used first.

python -m bench session_cache [--seconds 600] [--workers 2] [--ratio 1.5] [--seeds 1,2,3] [--json]

The cluster is simulated (`baton.sim`): gateway, scheduler and workers are real, and devices, links and copies
take virtual time. The true costs of steps deviate by 30 % from the model that policies predict with, and each
step deviates at random by as much. A reload is 8 times as fast as computing. Device and host tier of a worker
are of equal size, so that the working set is `--ratio` times all tiers.

The sessions have pauses of 5 s at the median and 81 s at the 99th percentile. 30 % of the variance of their
logarithm is between sessions, as in public traces of coding agents. The first third of each run fills the
tiers and does not count.

hits: share of prompt tokens that were reused. bound: that of an ideal least recently used cache of the same
  size that holds each block once (`loadgen.plan.cache_model`).
flood: share of a session's prompt that its next turn reuses after one-off prompts that fill all tiers four
  times and ask for retention themselves.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.request_limits import MAX_RETAIN_S
from bench.support.sessions.session_plans import planned_times_s, session_plan, working_set_tokens
from bench.support.sessions.session_sim import (
    BLOCK_SIZE_TOKENS,
    ONE_OFF_TOKENS,
    Eviction,
    Played,
    SimTiers,
    flood,
    play,
    with_blocks,
)
from loadgen.plan.cache_model import best_hits
from loadgen.plan.plan import Plan

POLICIES: tuple[Eviction, ...] = ("value", "lru")
RATE_RPS = 0.35
"""Sessions that arrive per second and worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one policy over the requests that count."""

    hits: float
    bound: float
    median_ttft_s: float
    mean_ttft_s: float
    p90_ttft_s: float

    @property
    def share_of_bound(self) -> float:
        """Hits relative to the bound."""
        return self.hits / self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A plan, tiers for it, and the indices of the requests that count."""

    plan: Plan
    tiers: SimTiers
    counted: Sequence[int]
    bound: float


def setup(*, seconds: float, workers: int, ratio: float, seed: int) -> Setup:
    """Return a plan with tiers such that its working set is `ratio` times as large."""
    plan = session_plan(rate_rps=RATE_RPS * workers, seconds=seconds, seed=seed)
    tokens = working_set_tokens(plan, seconds / 3, seconds)
    tiers = with_blocks(
        SimTiers(workers=workers, device_blocks=0, host_blocks=0), int(tokens / ratio / BLOCK_SIZE_TOKENS)
    )
    counted = [index for index, at_s in enumerate(planned_times_s(plan)) if seconds / 3 <= at_s < seconds]
    ideal = best_hits(plan, block_size_tokens=BLOCK_SIZE_TOKENS, capacity_tokens=tiers.num_tokens)
    bound = sum(ideal.num_cached_tokens[i] for i in counted) / sum(ideal.num_prompt_tokens[i] for i in counted)
    return Setup(plan=plan, tiers=tiers, counted=counted, bound=bound)


def figures(given: Setup, played: Sequence[Played]) -> Figures:
    """Return the figures of a run."""
    counted = [played[index] for index in given.counted]
    ttfts_s = sorted(each.ttft_s for each in counted)
    return Figures(
        hits=sum(each.num_cached_tokens for each in counted) / sum(each.num_prompt_tokens for each in counted),
        bound=given.bound,
        median_ttft_s=statistics.median(ttfts_s),
        mean_ttft_s=statistics.fmean(ttfts_s),
        p90_ttft_s=ttfts_s[int(0.9 * len(ttfts_s))],
    )


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="arrivals of sessions, in virtual seconds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=1.5, help="working set over the size of all tiers")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for seed in map(int, arguments.seeds.split(",")):
        given = setup(seconds=arguments.seconds, workers=arguments.workers, ratio=arguments.ratio, seed=seed)
        num_prompts = 4 * given.tiers.num_tokens // ONE_OFF_TOKENS
        for policy in POLICIES:
            found = figures(given, play(given.plan, given.tiers, policy, seed=seed))
            kept = flood(given.tiers, policy, retain_s=MAX_RETAIN_S, num_prompts=num_prompts, seed=seed)
            lost = flood(given.tiers, policy, retain_s=None, num_prompts=num_prompts, seed=seed)
            rows.append(
                {
                    "seed": seed,
                    "eviction": policy,
                    "requests": len(given.counted),
                    "hits": round(found.hits, 4),
                    "bound": round(found.bound, 4),
                    "share_of_bound": round(found.share_of_bound, 4),
                    "median_ttft_ms": round(1e3 * found.median_ttft_s, 2),
                    "mean_ttft_ms": round(1e3 * found.mean_ttft_s, 2),
                    "p90_ttft_ms": round(1e3 * found.p90_ttft_s, 2),
                    "flood_hits_retained": round(kept.hit_ratio, 3),
                    "flood_hits": round(lost.hit_ratio, 3),
                    "most_retained_blocks": kept.most_retained_blocks,
                }
            )
            print(rows[-1] if not arguments.json else json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
