"""Counts reused prompt tokens of completed requests by worker and tier, and their ceiling."""

from collections import OrderedDict
from collections.abc import Mapping

from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.cluster.decision_record import MissingReason
from baton.core.cluster.placement import Placement
from baton.core.kv.kv_events import Tier
from baton.core.request import RequestActuals
from baton.prefix_index.index import PrefixOverlap
from baton.scheduler.decisions.decision_records import UnrecordedDecision
from baton.scheduler.decisions.infinite_cache import InfiniteCache
from baton.scheduler.decisions.prediction_accuracy import FINISHED
from baton.scheduler.state.open_placements import OpenPlacement

MAX_WORKERS = 1024
"""Workers to count for. Beyond that, the one whose request ended longest ago is left out."""
_TIERS = frozenset(tier.value for tier in Tier)


class CacheUseCounter:
    """Cache use of one scheduler's requests since its start.

    The ceiling counts a prompt when it is placed: what an infinite cache would have had at that time. Blocks
    of answers are in no query. They count as soon as a later prompt has them, if a worker still has them, or
    if the scheduler knows that one has evicted them. Without that they count as new, so the ceiling may be
    too low, never too high, apart from sampling.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._seen = InfiniteCache()
        self._total = TokenReuse()
        self._workers: OrderedDict[str, TokenReuse] = OrderedDict()
        self._ceiling_tokens = 0.0

    def placed(self, decision: UnrecordedDecision) -> float:
        """Remember a placed prompt. Return how many of its tokens an infinite cache would have had."""
        query, cluster, placed = decision.query, decision.cluster, decision.answer
        computing = (placed.prefill or placed.decode) if isinstance(placed, Placement) else None
        views = cluster.workers if cluster is not None else ()
        view = next((view for view in views if computing and view.worker.is_same_incarnation(computing)), None)
        if view is None:
            return 0.0
        size = view.report.layout.block_size_tokens
        num_usable = min(len(query.block_hashes), max(0, query.num_prompt_tokens - 1) // size)
        num_known = _num_known_blocks(decision, num_usable)
        return size * self._seen.add(query.block_hashes, num_known=num_known, num_usable=num_usable)

    def finished(self, ended: OpenPlacement, actuals: RequestActuals) -> None:
        """Count a placement that has ended, if its attempt was completed."""
        computing = ended.placement.prefill or ended.placement.decode
        if actuals.outcome != FINISHED or computing is None:
            return
        use = TokenReuse(
            worker_id=computing.worker_id,
            num_requests=1,
            num_prompt_tokens=ended.num_prompt_tokens,
            cached_tokens=_of_known_tiers(actuals.cached_tokens_by_tier),
        )
        self._total += use
        self._ceiling_tokens += ended.ceiling_tokens
        known = self._workers.pop(use.worker_id, None)
        self._workers[use.worker_id] = use if known is None else known + use
        if len(self._workers) > MAX_WORKERS:
            self._workers.popitem(last=False)

    def stats(self, now_s: float) -> CacheStats:
        """Return the counts since the start."""
        return CacheStats(
            since_s=now_s - self._began_s,
            total=self._total,
            workers=tuple(self._workers[worker_id] for worker_id in sorted(self._workers)),
            ceiling_tokens=min(max(0.0, self._ceiling_tokens), float(self._total.num_prompt_tokens)),
            sampled_share=self._seen.sampled_share,
        )


def _num_known_blocks(decision: UnrecordedDecision, num_usable: int) -> int:
    """Return how many leading blocks of the prompt a worker has, or is known to have evicted."""
    overlaps = decision.cluster.overlaps if decision.cluster is not None else {}
    held = (each.num_held_blocks for each in overlaps.values() if isinstance(each, PrefixOverlap))
    num_known, missing = max(held, default=0), decision.missing
    if missing is not None and missing.reason is MissingReason.EVICTED:
        num_known = max(num_known, num_usable - missing.num_blocks + missing.known_blocks)
    return num_known


def _of_known_tiers(cached_tokens: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of tiers that this release knows, so that the number of tiers is bounded."""
    return {tier: count for tier, count in cached_tokens.items() if tier in _TIERS}
