"""Renders the output of `baton cache stats` as tables, or as plain JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.formatting import size, table
from baton.core.client_api import ClusterStatus, WorkerStatus
from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.kv.kv_events import Tier


def render_cache(status: ClusterStatus, stats: CacheStats) -> RenderableType:
    """Render what the workers hold by tier, what was reused, the reloads, and the ceiling."""
    workers = sorted(status.workers, key=lambda worker: worker.worker.worker_id)
    parts: list[RenderableType] = []
    if workers:
        parts += [_held(workers), ""]
    if any(worker.tiers for worker in workers):
        parts += [_reloads(workers), ""]
    if not stats.total.num_prompt_tokens:
        return Group(*parts, Text("no request has completed since the start of the scheduler"))
    return Group(*parts, _reused(stats), "", _ceiling(stats))


def cache_json(status: ClusterStatus, stats: CacheStats) -> dict[str, Any]:
    """Return the same as a JSON object. Shares are None without prompt tokens."""
    used = {use.worker_id: use for use in stats.workers}
    return {
        "since_s": stats.since_s,
        "workers": [
            {
                "worker_id": worker.worker.worker_id,
                "tiers": [
                    {
                        "tier": tier,
                        "total_slots": total,
                        "held_slots": held,
                        "total_bytes": total * worker.block_bytes,
                        "held_bytes": held * worker.block_bytes,
                    }
                    for tier, total, held in _tiers(worker)
                ],
                "reloads": {
                    "complete": worker.reloads.complete,
                    "incomplete": worker.reloads.incomplete,
                    "late": worker.reloads.late,
                },
                "use": _use_json(used.get(worker.worker.worker_id, TokenReuse())),
            }
            for worker in status.workers
        ],
        "total": _use_json(stats.total),
        "ceiling": {
            "cached_tokens": round(stats.ceiling_tokens),
            "share": _share(stats.ceiling_tokens, stats.total),
            "is_exact": stats.sampled_share >= 1,
            "sampled_share": stats.sampled_share,
        },
    }


def _tiers(worker: WorkerStatus) -> list[tuple[str, int, int]]:
    """Return (tier, slots, slots with content) of each tier of a worker, the device first."""
    blocks = worker.blocks
    device = (Tier.DEVICE.value, blocks.total, blocks.used + blocks.cached)
    return [device, *((tier.tier, tier.total, tier.held) for tier in worker.tiers)]


def _held(workers: Sequence[WorkerStatus]) -> Table:
    """Table of slots and bytes by worker and tier."""
    result = table("worker", "tier", ">held", ">slots", ">held bytes", ">bytes", title="KV by tier")
    for worker in workers:
        for tier, total, held in _tiers(worker):
            memory = (size(count * worker.block_bytes) for count in (held, total))
            result.add_row(worker.worker.worker_id, tier, f"{held:,}", f"{total:,}", *memory)
    return result


def _reloads(workers: Sequence[WorkerStatus]) -> Table:
    result = table("worker", ">complete", ">incomplete", ">late", title="Reloads from slower tiers")
    for worker in workers:
        counts = (worker.reloads.complete, worker.reloads.incomplete, worker.reloads.late)
        result.add_row(worker.worker.worker_id, *(f"{count:,}" for count in counts))
    return result


def _reused(stats: CacheStats) -> Table:
    """Table of prompt tokens and of their shares by tier; the last row is of all workers."""
    tiers = [tier.value for tier in Tier]
    names = ("worker", ">requests", ">prompt tokens", *(f">{tier}" for tier in tiers), ">computed")
    result = table(*names, title="Prompt tokens by where their KV came from")
    for use in (*stats.workers, stats.total):
        computed = use.num_prompt_tokens - use.num_cached_tokens
        result.add_row(
            use.worker_id or "all",
            f"{use.num_requests:,}",
            f"{use.num_prompt_tokens:,}",
            *(_percent(use.cached_tokens.get(tier, 0), use) for tier in tiers),
            _percent(computed, use),
        )
    return result


def _ceiling(stats: CacheStats) -> Text:
    estimated = "" if stats.sampled_share >= 1 else f" (estimated from {stats.sampled_share:.2%} of the blocks)"
    return Text(
        f"reused {_percent(stats.total.num_cached_tokens, stats.total)} of the prompt tokens; an infinite cache "
        f"would have reused {_percent(stats.ceiling_tokens, stats.total)}{estimated}"
    )


def _use_json(use: TokenReuse) -> dict[str, Any]:
    cached: Mapping[str, int] = {tier.value: use.cached_tokens.get(tier.value, 0) for tier in Tier}
    by_tier = {**cached, "computed": use.num_prompt_tokens - use.num_cached_tokens}
    return {
        "num_requests": use.num_requests,
        "prompt_tokens": use.num_prompt_tokens,
        "tokens": by_tier,
        "shares": {tier: _share(count, use) for tier, count in by_tier.items()},
    }


def _share(num_tokens: float, use: TokenReuse) -> float | None:
    return num_tokens / use.num_prompt_tokens if use.num_prompt_tokens else None


def _percent(num_tokens: float, use: TokenReuse) -> str:
    share = _share(num_tokens, use)
    return "" if share is None else f"{share:.1%}"
