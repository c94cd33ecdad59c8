"""Tables of a run by class, tenant, endpoint and worker, and of its errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loadgen.measure.measures import Measures
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import COMPLETE, RequestOutcome
from loadgen.measure.stats import percentiles
from loadgen.measure.summary import attainments
from loadgen.measure.timeline import Stages
from loadgen.report.run_view import RunView

MOST = 100
"""Most rows of a table; the largest groups are kept."""
TEXT = 200


def by(run: RunView, key: Callable[[Record], str]) -> list[dict[str, Any]]:
    """Return one row for each group of requests, largest first, at most `MOST`."""
    rows: dict[str, list[int]] = {}
    for row, record in enumerate(run.measures.records):
        rows.setdefault(key(record), []).append(row)
    largest = sorted(rows.items(), key=lambda item: (-len(item[1]), item[0]))[:MOST]
    return [{"name": name, **_group(run, run.measures.select(members))} for name, members in largest]


def workers(run: RunView) -> list[dict[str, Any]]:
    """Return one row for each role and worker in the timelines. Requests without a timeline are in no row."""
    rows: dict[tuple[str, str], list[int]] = {}
    for row, stages in enumerate(run.measures.stages):
        for role, worker in (("prefill", stages.prefill_worker), ("decode", stages.decode_worker)):
            if worker:
                rows.setdefault((role, worker), []).append(row)
    return [
        _worker(run, role, worker, run.measures.select(members))
        for (role, worker), members in sorted(rows.items(), key=_by_role)
    ]


def errors(measures: Measures, most: int = 20) -> list[dict[str, Any]]:
    """Return the errors of requests without a complete response, most frequent first."""
    counts = Counter(
        (str(outcome), record.status, record.reason[:TEXT], record.error[:TEXT])
        for record, outcome in zip(measures.records, measures.outcomes, strict=True)
        if outcome not in COMPLETE
    )
    return [
        {"outcome": outcome, "status": status, "reason": reason, "error": error, "count": count}
        for (outcome, status, reason, error), count in counts.most_common(most)
    ]


def handoffs(measures: Measures) -> dict[str, Any] | None:
    """Return statistics of requests handed off between workers, or None if there were none."""
    seen = [one for one in measures.stages if one.is_handed_off]
    if not seen:
        return None
    moved, early = _sum(seen, "kv_bytes"), _sum(seen, "early_bytes")
    seconds = _sum(seen, "transfer_s")
    return {
        "requests": len(seen),
        "cost_ms": _spread([one.handoff_s for one in seen]),
        "exposed_ms": _spread([one.exposed_s for one in seen]),
        "admission_ms": _spread([one.admission_s for one in seen]),
        "transfer_ms": _spread([one.transfer_s for one in seen]),
        "kv_bytes": int(moved),
        "early_share": early / moved if moved else None,
        "bytes_per_s": moved / seconds if seconds else None,
        "transports": dict(Counter(one.transport for one in seen if one.transport)),
    }


def predictions(measures: Measures, metric: str) -> dict[str, Any] | None:
    """Return predicted / measured for a metric, from the placement on; None without predictions.

    Only requests with a single attempt are included.
    """
    pairs = [(getattr(one, f"predicted_{metric}_s"), getattr(one, f"placed_{metric}_s")) for one in measures.stages]
    ratios = [predicted / actual for predicted, actual in pairs if predicted is not None and actual]
    if not ratios:
        return None
    p10, p50, p90 = percentiles(ratios, (10, 50, 90))
    return {"requests": len(ratios), "p10": p10, "p50": p50, "p90": p90}


def _group(run: RunView, part: Measures) -> dict[str, Any]:
    shares = attainments(part)
    offered, all_offered = len(part), run.summary.offered
    rate = run.summary.offered_rps
    return {
        "offered": offered,
        "outcomes": {str(outcome): count for outcome in RequestOutcome if (count := part.outcomes.count(outcome))},
        "attainment": {name: share.to_json() for name, share in shares.items()},
        "goodput_rps": None if rate is None else int(part.good.sum()) * rate / all_offered,
        **{f"{metric}_ms": _spread(part.of_complete(metric).tolist()) for metric in ("ttft", "tpot", "e2e")},
    }


def _worker(run: RunView, role: str, worker: str, part: Measures) -> dict[str, Any]:
    found = {"worker": worker, "role": role, **_group(run, part)}
    if role == "prefill":
        busy = _sum(part.stages, "prefill_s")
        found |= {
            "queue_ms": _spread([one.queue_s for one in part.stages]),
            "prefill_ms": _spread([one.prefill_s for one in part.stages]),
            "busy_share": busy / run.result.run.duration_s if run.result.run.duration_s > 0 else None,
        }
    else:
        found |= {
            "handoff_ms": _spread([one.handoff_s for one in part.stages]),
            "kv_bytes": int(_sum(part.stages, "kv_bytes")),
            "output_tokens": int(np.nansum(part.columns["output_tokens"])),
        }
    return found


def _by_role(item: tuple[tuple[str, str], list[int]]) -> tuple[bool, str]:
    (role, worker), _ = item
    return role != "prefill", worker


def _spread(seconds: Sequence[float | None]) -> dict[str, Any] | None:
    """Return {"count", "mean", "p50", "p99"} in milliseconds, or None without values."""
    known = np.array([value for value in seconds if value is not None], dtype=np.float64)
    if known.size == 0:
        return None
    p50, p99 = percentiles(known * 1e3, (50, 99))
    return {"count": int(known.size), "mean": float(known.mean()) * 1e3, "p50": p50, "p99": p99}


def _sum(stages: Sequence[Stages], name: str) -> float:
    return float(sum(getattr(one, name) or 0 for one in stages))
