"""Explains why a plan has other than rate × time requests: arrivals are drawn at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.plan.plan import Plan


def offered_text(plan: Plan, verb: str = "offered") -> str:
    """Return a statement such as `rate 4 offered 97 requests in 30 s (Poisson draw; 120 on average)`.

    Empty if the plan was not made from a rate and a time.
    """
    made = plan.made_by
    rate, seconds = str(made.get("rate", "")), made.get("seconds")
    if not rate or not isinstance(seconds, int | float) or any(made.get(count) for count in ("requests", "sessions")):
        return ""
    firsts = sum(request.after is None for request in plan.requests)
    total = f"{len(plan.requests):,} request{'' if len(plan.requests) == 1 else 's'}"
    if firsts < len(plan.requests):
        total = f"{firsts:,} session{'' if firsts == 1 else 's'} with {total}"
    return f"rate {rate} {verb} {total} in {seconds:g} s{_draw(made, rate, seconds)}"


def _draw(made: Mapping[str, Any], rate: str, seconds: float) -> str:
    gaps = str(made.get("gaps", "poisson"))
    if gaps == "constant":
        return ""
    name = "Poisson" if gaps == "poisson" else gaps
    try:
        return f" ({name} draw; {float(rate) * seconds:.4g} on average)"
    except ValueError:  # a rate that varies
        return f" ({name} draw)"
