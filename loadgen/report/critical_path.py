"""Splits a request's latency into stages from the intended send to the last token. The stages sum to e2e.

Server stages come from the timeline. `other` is the rest before the first token (network, tokenization,
messages, a retried attempt), `decode` the rest after the handoff. If a timeline reports more time than the
client saw, the stage that does not fit is shortened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.measure import request_metrics
from loadgen.measure.measures import Measures
from loadgen.measure.records import Record
from loadgen.measure.stats import percentiles
from loadgen.measure.summary import in_flight_when_due
from loadgen.measure.timeline import Stages

STAGES = {
    "send lag": "st-lag",
    "waiting at the scheduler": "st-wait",
    "placement": "st-place",
    "queue": "st-queue",
    "prefill": "st-prefill",
    "other, to the first token": "st-other",
    "to the first token": "st-first",
    "exposed transfer": "st-transfer",
    "admission": "st-admit",
    "first decode step": "st-step",
    "decode": "st-decode",
    "no complete response": "st-none",
}
"""All stages in chronological order with their CSS classes. `to the first token` replaces the five before it
if there is no timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Mean seconds of each stage over `count` requests, with `low` to `high` other requests in flight."""

    low: int
    high: int
    count: int
    stages: dict[str, float]


def path_of(record: Record, stages: Stages) -> list[tuple[str, float]]:
    """Return (stage, seconds) in order for a response with tokens; empty for one without."""
    ttft, e2e, lag = request_metrics.ttft_s(record), request_metrics.e2e_s(record), request_metrics.send_lag_s(record)
    if ttft is None or e2e is None:
        return []
    before = _fit([("send lag", lag)], ttft)
    left = ttft - sum(seconds for _, seconds in before)
    if stages.prefill_s is not None:
        known = [("placement", stages.placement_s), ("queue", stages.queue_s), ("prefill", stages.prefill_s)]
        inside = _fit([("waiting at the scheduler", stages.waiting_s or None), *known], left)
        before += inside
        before.append(("other, to the first token", left - sum(seconds for _, seconds in inside)))
    else:
        before.append(("to the first token", left))
    handed_off = [
        ("exposed transfer", stages.exposed_s),
        ("admission", stages.admission_s),
        ("first decode step", stages.first_decode_s),
    ]
    after = _fit(handed_off, e2e - ttft)
    after.append(("decode", e2e - ttft - sum(seconds for _, seconds in after)))
    return [*before, *after]


def path_by_load(measures: Measures, bins: int = 6) -> list[Load]:
    """Return the mean stages of complete responses by number of requests in flight.

    Only responses with a timeline are included. The bins have similar numbers of responses.
    """
    load = in_flight_when_due(measures)
    rows = [row for row in map(int, np.flatnonzero(measures.complete)) if measures.stages[row].prefill_s is not None]
    if not rows:
        return []
    edges = sorted(
        {int(edge) for edge in percentiles(load[rows], np.linspace(0, 100, min(bins, len(rows)) + 1).tolist())}
    )
    found: list[Load] = []
    for number, low in enumerate(edges[:-1] or edges):
        is_last = number + 2 >= len(edges)
        high = int(load[rows].max()) if is_last else edges[number + 1] - 1
        inside = [row for row in rows if low <= load[row] <= high]
        if inside:
            found.append(Load(low=low, high=high, count=len(inside), stages=mean_path(measures, inside)))
    return found


def mean_path(measures: Measures, rows: list[int]) -> dict[str, float]:
    """Return the mean seconds of each stage. A stage that a request lacks counts as zero."""
    sums: dict[str, float] = {}
    for row in rows:
        for stage, seconds in path_of(measures.records[row], measures.stages[row]):
            sums[stage] = sums.get(stage, 0.0) + seconds
    return {stage: sums[stage] / len(rows) for stage in STAGES if stage in sums}


def _fit(wanted: list[tuple[str, float | None]], available: float) -> list[tuple[str, float]]:
    """Return the known stages, each shortened to what is left of `available`."""
    found: list[tuple[str, float]] = []
    for stage, seconds in wanted:
        if seconds is not None:
            taken = min(max(seconds, 0.0), max(available, 0.0))
            found.append((stage, taken))
            available -= taken
    return found
