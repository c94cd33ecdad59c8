"""Finds out why a part of a prompt was not in the cache, for decision records."""

from collections import OrderedDict

from baton.core.cluster.decision_record import MissingPrefix, MissingReason
from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.kv.block_hash import BlockHash
from baton.prefix_index.eviction_record import EvictionRecord
from baton.prefix_index.index import PrefixOverlap
from baton.scheduler.decisions.decision_records import UnrecordedDecision

MAX_SEEN_BYTES = 8 * 2**20
"""Upper bound for the memory of the beginnings of prompts that were seen."""
SEEN_BYTES = 384
"""Memory of one beginning: its key and its places, without what was seen of it."""
ROOT_BYTES = 256
"""Memory of one first hash with tenant and model, without their names."""
MAX_ROOTS = 4
"""First hashes that are remembered of one beginning."""
SEARCHED_BLOCKS = 64
"""Blocks after the cached ones that are searched for evictions. Every worker announces one of them."""


class SeenBeginnings:
    """The tenants and models for which the beginning of a prompt was seen, by `PlacementQuery.prefix_key`.

    Equal tokens have other hashes for another tenant, model or salt. The longest unused are forgotten first.
    """

    def __init__(self, max_bytes: int = MAX_SEEN_BYTES) -> None:
        self._max_bytes = max_bytes
        self._roots: OrderedDict[bytes, dict[BlockHash, tuple[str, str]]] = OrderedDict()
        self.num_bytes = 0

    def other_root(self, query: PlacementQuery) -> MissingReason | None:
        """Return in what a prompt differs from an earlier one with equal first tokens, or None."""
        seen = self._roots.get(query.prefix_key, {})
        others = [named for first_hash, named in seen.items() if first_hash != query.block_hashes[0]]
        if not others:
            return None
        if (query.tenant, query.model) in others:
            return MissingReason.OTHER_SALT
        if any(tenant == query.tenant for tenant, _ in others):
            return MissingReason.OTHER_MODEL
        return MissingReason.OTHER_TENANT

    def add(self, query: PlacementQuery) -> None:
        """Remember the beginning of a prompt that has full blocks."""
        roots = self._roots.pop(query.prefix_key, {})
        self.num_bytes -= _bytes_of(roots)
        roots.pop(query.block_hashes[0], None)
        roots[query.block_hashes[0]] = (query.tenant, query.model)
        while len(roots) > MAX_ROOTS:
            del roots[next(iter(roots))]
        self._roots[query.prefix_key] = roots
        self.num_bytes += _bytes_of(roots)
        while self.num_bytes > self._max_bytes and self._roots:
            self.num_bytes -= _bytes_of(self._roots.popitem(last=False)[1])


class MissingPrefixes:
    """Explains missing prefixes of placed prompts."""

    def __init__(self, evictions: EvictionRecord) -> None:
        self._evictions = evictions
        self._seen = SeenBeginnings()

    def explain(self, decision: UnrecordedDecision, now_s: float) -> MissingPrefix | None:
        """Return what the prompt's worker must compute and why, or None if that is unknown or nothing.

        Remembers the prompt for later ones.
        """
        query, placed, cluster = decision.query, decision.answer, decision.cluster
        if not isinstance(placed, Placement) or cluster is None or not query.block_hashes:
            return None
        computing = placed.prefill or placed.decode
        view = next((w for w in cluster.workers if computing and w.worker.is_same_incarnation(computing)), None)
        if view is None:
            return None
        other_root = self._seen.other_root(query) if query.prefix_key else None
        if query.prefix_key:
            self._seen.add(query)
        usable = min(
            len(query.block_hashes), max(0, query.num_prompt_tokens - 1) // view.report.layout.block_size_tokens
        )
        own = placed.prefill_overlap_blocks if placed.prefill else placed.decode_overlap_blocks
        used = max(own, placed.prefix_source.num_blocks if placed.prefix_source else 0)
        if used >= usable:
            return None
        missing = usable - used
        holder = _longest_holder(decision, used)
        if holder is not None:
            worker_id, overlap = holder
            is_demoted = overlap.num_device_blocks <= used
            return MissingPrefix(
                num_blocks=missing,
                reason=MissingReason.DEMOTED if is_demoted else MissingReason.HELD_ELSEWHERE,
                worker_id=worker_id,
                known_blocks=min(missing, overlap.num_held_blocks - used),
            )
        evicted = self._evictions.last_of(query.block_hashes[used : min(usable, used + SEARCHED_BLOCKS)])
        if evicted is not None:
            position, eviction = evicted
            return MissingPrefix(
                num_blocks=missing,
                reason=MissingReason.EVICTED,
                worker_id=eviction.worker_id,
                known_blocks=position + 1,
                ago_s=max(0.0, now_s - eviction.at_s),
            )
        reason = other_root if other_root is not None and not used else MissingReason.NEVER_SEEN
        return MissingPrefix(num_blocks=missing, reason=reason)


def _longest_holder(decision: UnrecordedDecision, used: int) -> tuple[str, PrefixOverlap] | None:
    """Return the worker that holds most of the prompt, if it holds more than `used` blocks."""
    overlaps = decision.cluster.overlaps if decision.cluster is not None else {}
    holders = [
        (worker_id, overlap)
        for worker_id, overlap in sorted(overlaps.items())
        if isinstance(overlap, PrefixOverlap) and overlap.num_held_blocks > used
    ]
    return max(holders, key=lambda holder: holder[1].num_held_blocks, default=None)


def _bytes_of(roots: dict[BlockHash, tuple[str, str]]) -> int:
    if not roots:
        return 0
    return SEEN_BYTES + sum(ROOT_BYTES + len(tenant) + len(model) for tenant, model in roots.values())
