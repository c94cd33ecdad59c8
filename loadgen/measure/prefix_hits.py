"""Compares a run's prefix hits with those that its plan allows: the best ratios, and whether the cache was
warm.

An empty cache can serve a token only if an earlier request of the plan brought it. The plan allows at most
the hits of an ideal cache: infinite, in blocks of one token (`loadgen.plan.cache_model`). Two corrections
keep this an upper bound. If the server counts a prompt in other tokens than the plan, hits scale with the
count. Tokens that the server adds (a chat template) may all be hits. A retried request is left out, because
it can hit what its own first attempt computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loadgen.loadgen_errors import BadPlan
from loadgen.measure.records import Record
from loadgen.measure.timeline import Stages
from loadgen.plan.cache_model import CacheUse, best_hits
from loadgen.plan.plan import Plan

TOLERANCE = 0.01
"""Hits above the allowed ones count only beyond this share of the prompt tokens."""
INFINITE = "plan's best, infinite cache"
"""Name of the ideal cache without a limit in `best_ratios`."""


class CacheState(StrEnum):
    """State of the server's prefix cache when a run began."""

    COLD = "cold"
    """The hits fit an empty cache."""
    WARM = "warm"
    """More hits than an empty cache can give: the server had seen these prompts before."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheVerdict:
    """Verdict on the cache at the start of a run, in tokens of the requests whose hits are known.

    `num_allowed_tokens` is None if unknown or not needed. `why` is the reason if the state is unknown.
    """

    state: CacheState = CacheState.UNKNOWN
    num_hit_tokens: int = 0
    num_allowed_tokens: int | None = None
    num_prompt_tokens: int = 0
    why: str = ""

    @property
    def is_warm(self) -> bool:
        """True if the cache was warm."""
        return self.state is CacheState.WARM

    @property
    def text(self) -> str:
        """One statement for the user; empty for a cold cache."""
        if self.state is CacheState.UNKNOWN:
            return f"not known whether the cache was warm: {self.why}"
        if self.state is CacheState.COLD or self.num_allowed_tokens is None:
            return ""
        hits, allowed = (
            f"{100 * tokens / self.num_prompt_tokens:.3g} %"
            for tokens in (self.num_hit_tokens, self.num_allowed_tokens)
        )
        return (
            f"warm cache: {hits} of the prompt tokens were prefix hits, but from an empty cache the plan allows at "
            f"most {allowed}; use a new seed or restart the server"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "state": str(self.state),
            "hit_tokens": self.num_hit_tokens,
            "allowed_tokens": self.num_allowed_tokens,
            "prompt_tokens": self.num_prompt_tokens,
            "text": self.text,
        }


def judge_cache(records: Sequence[Record], plan: Plan | None, why_no_plan: str = "") -> CacheVerdict:
    """Return whether the cache was warm when the run of `plan` began."""
    known = [record for record in reported(records) if (Stages.of(record.timeline).attempts or 1) == 1]
    if not known:
        return CacheVerdict(why="the server did not report cached prompt tokens")
    num_hits = sum(record.num_cached_tokens or 0 for record in known)
    num_prompt = sum(record.num_prompt_tokens or 0 for record in known)
    counted = CacheVerdict(state=CacheState.COLD, num_hit_tokens=num_hits, num_prompt_tokens=num_prompt)
    if num_hits <= TOLERANCE * num_prompt:
        return counted
    try:
        if plan is None:
            raise BadPlan(why_no_plan or "the result has no plan")
        if any(record.index >= len(plan.requests) for record in known):
            raise BadPlan(f"the stored plan is not that of the records: it has only {len(plan.requests)} requests")
        use = best_hits(plan)
    except BadPlan as error:
        return CacheVerdict(num_hit_tokens=num_hits, num_prompt_tokens=num_prompt, why=str(error))
    num_allowed = int(sum(_allowed(record, use) for record in known))
    return CacheVerdict(
        state=CacheState.WARM if num_hits > num_allowed + TOLERANCE * num_prompt else CacheState.COLD,
        num_hit_tokens=num_hits,
        num_allowed_tokens=num_allowed,
        num_prompt_tokens=num_prompt,
    )


def best_ratios(
    records: Sequence[Record], plan: Plan, *, block_size_tokens: int, capacity_tokens: int | None
) -> dict[str, float]:
    """Return the best possible hit ratios of the requests whose hits the server reported, by cache name.

    Empty if it reported none, or if the plan has texts or is not that of the records.
    """
    known = reported(records)
    if not known or any(record.index >= len(plan.requests) for record in known):
        return {}
    sizes: dict[str, int | None] = {INFINITE: None}
    if capacity_tokens is not None and capacity_tokens >= block_size_tokens:
        sizes[f"plan's best, LRU of {capacity_tokens:,} tokens"] = capacity_tokens
    ratios = {}
    for name, size in sizes.items():
        try:
            use = best_hits(plan, block_size_tokens=block_size_tokens, capacity_tokens=size)
        except BadPlan:
            return {}
        prompt = sum(use.num_prompt_tokens[record.index] for record in known)
        ratios[name] = sum(use.num_cached_tokens[record.index] for record in known) / prompt
    return ratios


def reported(records: Sequence[Record]) -> list[Record]:
    """Return the records whose prefix hits the server reported."""
    return [record for record in records if record.num_cached_tokens is not None and record.num_prompt_tokens]


def _allowed(record: Record, use: CacheUse) -> float:
    planned, counted = use.num_prompt_tokens[record.index], record.num_prompt_tokens or 0
    shared = use.num_shared_tokens[record.index] * counted / planned
    return min(float(counted), shared + max(0, counted - planned))
