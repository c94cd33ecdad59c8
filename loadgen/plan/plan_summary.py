"""Summarizes a plan: number, rate and lengths of requests, and the best possible prefix hit ratio."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loadgen.plan.cache_model import best_hits
from loadgen.plan.plan import Plan, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Distribution of lengths in tokens."""

    mean: float
    p50: float
    p99: float
    max: int
    total: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        """Return the distribution of the values."""
        p50, p99 = np.percentile(values, (50, 99)).tolist()
        return cls(mean=sum(values) / len(values), p50=p50, p99=p99, max=max(values), total=sum(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """Summary of a plan.

    - `last_arrival_s`: of first turns
    - `rate_rps`, `gap_cv`: from the gaps between first turns; None for fewer than 3
    - `inputs`: prompt lengths; None if prompts are texts
    - `num_cancelled`: requests that the client cancels
    - `best_hit_ratio`: of prompt tokens with an infinite cache; None if prompts are texts
    - `lru_hit_ratio`: with a cache of `lru_tokens` in blocks of 16
    """

    name: str
    num_requests: int
    num_clients: int
    last_arrival_s: float
    rate_rps: float | None
    gap_cv: float | None
    inputs: Spread | None
    outputs: Spread
    num_cancelled: int
    num_text: int
    tenants: dict[str, int]
    priorities: dict[str, int]
    classes: dict[str, int]
    best_hit_ratio: float | None
    lru_tokens: int | None
    lru_hit_ratio: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


LRU_BLOCK_TOKENS = 16
"""Block size of the cache for `lru_hit_ratio`."""


def summarize(plan: Plan, *, lru_tokens: int | None = None) -> PlanSummary:
    """Summarize a plan. `lru_tokens` adds the hit ratio of a cache of this size."""
    requests = plan.requests
    first_turns = [request.at_s for request in requests if request.at_s is not None]
    gaps = np.diff(first_turns)
    num_text = sum(isinstance(request.segments[0], Text) for request in requests)
    inputs = [count for request in requests if (count := plan.num_prompt_tokens(request)) is not None]
    lru = None
    if lru_tokens is not None and not num_text:
        lru = best_hits(plan, block_size_tokens=LRU_BLOCK_TOKENS, capacity_tokens=lru_tokens).hit_ratio
    return PlanSummary(
        name=plan.name,
        num_requests=len(requests),
        num_clients=len({request.session or request.index for request in requests}),
        last_arrival_s=first_turns[-1],
        rate_rps=float(1 / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None,
        inputs=None if num_text else Spread.of(inputs),
        outputs=Spread.of([request.output_tokens for request in requests]),
        num_cancelled=sum(request.cancel_after_tokens is not None for request in requests),
        num_text=num_text,
        tenants=_counts([request.tenant for request in requests]),
        priorities=_counts([str(request.priority) for request in requests]),
        classes=_counts([request.slo_class for request in requests]),
        best_hit_ratio=None if num_text else best_hits(plan).hit_ratio,
        lru_tokens=lru_tokens,
        lru_hit_ratio=lru,
    )


def summary_lines(plan: Plan, summary: PlanSummary) -> list[str]:
    """Return the lines for the terminal."""
    s = summary
    sessions = f" of {s.num_clients:,} clients" if s.num_clients < s.num_requests else ""
    arrival_rate = ""
    if s.rate_rps is not None and s.gap_cv is not None:
        arrival_rate = f"; {s.rate_rps:.4g} {'arrivals' if sessions else 'requests'}/s, gaps with cv {s.gap_cv:.2f}"
    lines = [
        f"requests    {s.num_requests:,}{sessions}, the last {'arrival' if sessions else 'one'} at "
        f"{s.last_arrival_s:.1f} s{arrival_rate}",
        f"prompts     {_spread_text(s.inputs)}"
        if s.inputs
        else f"prompts     {s.num_text:,} texts, whose tokens only the server can count",
        f"responses   {_spread_text(s.outputs)}{'' if plan.ignore_eos else ', or fewer: responses may end at EOS'}",
    ]
    if s.best_hit_ratio is not None:
        lru = f", {s.lru_hit_ratio:.2%} with {s.lru_tokens:,} tokens (LRU)" if s.lru_hit_ratio is not None else ""
        lines.append(f"prefix hit  at best {s.best_hit_ratio:.2%} of prompt tokens (infinite cache){lru}")
    slos = {name: str(plan.slos[name]) or "no SLO" for name in sorted(plan.slos)}
    if len(slos) > 1 or slos != {"default": "no SLO"}:
        lines.append(
            "classes     " + "; ".join(f"{name} {s.classes.get(name, 0):,} ({slo})" for name, slo in slos.items())
        )
    for title, counts in (("tenants", s.tenants), ("priorities", s.priorities)):
        if len(counts) > 1:
            shown = list(counts.items())
            more = f" and {len(shown) - 8} more" if len(shown) > 9 else ""
            lines.append(
                f"{title:<11} "
                + ", ".join(f"{name or '(none)'} {count:,}" for name, count in shown[: 8 if more else 9])
                + more
            )
    if s.num_cancelled:
        lines.append(f"cancels     {s.num_cancelled:,} clients cancel before the end of the response")
    return lines


def _spread_text(spread: Spread) -> str:
    percentiles = f"p50 {spread.p50:,.0f}, p99 {spread.p99:,.0f}"
    return f"mean {spread.mean:,.1f}, {percentiles}, max {spread.max:,} tokens; {spread.total:,} in all"


def _counts(values: Sequence[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
