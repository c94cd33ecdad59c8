"""Reads the plan that a result stores."""

from __future__ import annotations

from loadgen.loadgen_errors import BadPlan
from loadgen.measure.prefix_hits import CacheVerdict, judge_cache
from loadgen.measure.records_file import Result
from loadgen.plan.plan import Plan
from loadgen.plan.plan_file import read_plan


def plan_of(result: Result) -> tuple[Plan | None, str]:
    """Return the result's plan, or None and why it cannot be read."""
    if result.plan_path is None:
        return None, "the result has no plan"
    try:
        return read_plan(result.plan_path), ""
    except BadPlan as error:
        return None, str(error)


def cache_of(result: Result) -> CacheVerdict:
    """Return whether the result's run began with a warm cache."""
    return judge_cache(result.records, *plan_of(result))
