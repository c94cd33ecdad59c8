"""The first line of `baton explain`: how a request went, compared with its prediction. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cli.formatting import seconds
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement

CLOSE_SHARE = 0.25
CLOSE_S = 0.002
"""A prediction counts as right if it is off by less than the larger of the share and the seconds."""
FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the time to first token. predicted_s is None for a part that no policy predicts."""

    name: str
    actual_s: float
    predicted_s: float | None = None

    @property
    def excess_s(self) -> float:
        """Seconds above the prediction."""
        return self.actual_s - (self.predicted_s or 0.0)


def verdict(records: Sequence[DecisionRecord]) -> str:
    """Say in one line whether a request was served as predicted, and what took the time.

    records: the decisions about one request, in order of attempts; not empty.
    """
    last = records[-1]
    attempts = f"{len(records)} attempts; " if len(records) > 1 else ""
    if last.rejection is not None:
        return f"{attempts}refused, {last.rejection.reason.value}: {last.rejection.message}"
    if last.placement is None:
        return f"{attempts}not placed"
    if not last.actuals:
        predicted = _or_none(last.placement.ttft_s)
        return f"{attempts}still running, or its gateway is gone" + (
            f"; predicted TTFT {predicted}" if predicted else ""
        )
    outcome = str(last.actuals.get("outcome", "unknown"))
    said = [] if outcome == FINISHED else [f"ended: {outcome}"]
    first = next((record for record in records if _seconds_of(record.actuals, "ttft_s") is not None), None)
    if first is not None and first.placement is not None:
        said.append(_ttft(first, first.placement))
    if (tpot_s := _seconds_of(last.actuals, "tpot_s")) is not None:
        said.append(f"TPOT {seconds(tpot_s)}{_compared(tpot_s, last.placement.tpot_s)}")
    for name, limit_s, actual_s in (
        ("TTFT", last.query.slo.ttft_s, _seconds_of(first.actuals, "ttft_s") if first is not None else None),
        ("TPOT", last.query.slo.tpot_s, tpot_s),
    ):
        if limit_s is not None and actual_s is not None and actual_s > limit_s:
            said.append(f"missed the {name} SLO of {seconds(limit_s)}")
    return attempts + ("; ".join(said) or outcome)


def parts_of_ttft(record: DecisionRecord, placement: Placement, ttft_s: float) -> list[Part]:
    """Divide a measured TTFT, which starts at the question to the scheduler; empty if no worker reported."""
    first = placement.prefill or placement.decode
    legs: Any = record.actuals.get("legs") or ()
    leg = next((leg for leg in legs if first is not None and leg.get("worker_id") == first.worker_id), None)
    if leg is None:
        return []
    waiting_s = placement.waiting_s
    queue_s, compute_s = (float(leg.get(name) or 0.0) for name in ("queue_s", "compute_s"))
    predicted_queue_s = _sum(placement.queue_s, placement.prefix_pull_s)
    queue = "queue and prefix pull" if placement.prefix_source is not None else "queue"
    return [
        Part(name="in the scheduler's queue", actual_s=waiting_s),
        Part(name=queue, actual_s=queue_s, predicted_s=predicted_queue_s),
        Part(name="prefill", actual_s=compute_s, predicted_s=placement.prefill_s),
        Part(name="between gateway and worker", actual_s=max(0.0, ttft_s - waiting_s - queue_s - compute_s)),
    ]


def _ttft(record: DecisionRecord, placement: Placement) -> str:
    ttft_s = _seconds_of(record.actuals, "ttft_s")
    assert ttft_s is not None
    text = f"TTFT {seconds(ttft_s)}{_compared(ttft_s, placement.ttft_s)}"
    parts = parts_of_ttft(record, placement, ttft_s)
    if not parts:
        return text
    if placement.ttft_s is None or _is_close(ttft_s, placement.ttft_s):
        largest = max(parts, key=lambda part: part.actual_s)
        return f"{text}: mostly {largest.name} ({seconds(largest.actual_s)})"
    if ttft_s < placement.ttft_s:
        least = min(parts, key=lambda part: part.excess_s)
        return f"{text}: {_instead(least)}"
    most = max(parts, key=lambda part: part.excess_s)
    return f"{text}: {_instead(most)}"


def _instead(part: Part) -> str:
    if part.predicted_s is None:
        return f"{seconds(part.actual_s)} of it {part.name}"
    return f"{part.name} {seconds(part.actual_s)} instead of {seconds(part.predicted_s)}"


def _compared(actual_s: float, predicted_s: float | None) -> str:
    if predicted_s is None:
        return ""
    return ", as predicted" if _is_close(actual_s, predicted_s) else f", predicted {seconds(predicted_s)}"


def _is_close(actual_s: float, predicted_s: float) -> bool:
    return abs(actual_s - predicted_s) <= max(CLOSE_S, CLOSE_SHARE * predicted_s)


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _or_none(value: float | None) -> str:
    return "" if value is None else seconds(value)


def _seconds_of(actuals: Mapping[str, Any], name: str) -> float | None:
    value = actuals.get(name)
    return float(value) if isinstance(value, int | float) else None
