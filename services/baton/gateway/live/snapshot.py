"""Assembles what the live view shows, as plain JSON values. Pure functions of the gateway's state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from baton.core.client_api import ClusterStatus, WorkerStatus
from baton.core.cluster.decision_record import Candidate, DecisionRecord
from baton.core.cluster.decision_terms import PREDICTIONS, TERMS, in_display_order, label_of
from baton.core.cluster.placement import Placement
from baton.core.cluster.worker_report import LinkReport
from baton.core.kv.kv_events import Tier
from baton.core.plain_json import to_plain
from baton.core.request import LegTimeline, Slo
from baton.gateway.live.activity import Activity, AnsweredAttempt, newest
from baton.gateway.live.traces.leg_phases import leg_phases
from baton.gateway.live.traces.request_trace import AttemptTrace, RequestTrace
from baton.gateway.live.window import INTERVAL_S, WindowInterval, total

RATE_S = 10.0
"""Time over which current rates are averaged."""
MAX_OPEN, MAX_ENDED, MAX_WAITING, MAX_DECISIONS, MAX_EVENTS = 30, 20, 20, 20, 60
MAX_WORKERS, MAX_LINKS, MAX_REASONS = 256, 1024, 12

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The event loop time now, and what must be added to such times to get Unix times."""

    now_s: float
    unix_offset_s: float

    def unix(self, at_s: float | None) -> float | None:
        """Return a Unix time to the millisecond."""
        return None if at_s is None else round(at_s + self.unix_offset_s, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCounts:
    """Cumulative handoffs and moved bytes by (owner, reader), for the difference between two snapshots."""

    handoffs: Mapping[Pair, int]
    moved_bytes: Mapping[Pair, int]

    @classmethod
    def of(cls, activity: Activity) -> "PairCounts":
        return cls(handoffs=dict(activity.handoffs), moved_bytes=dict(activity.moved_bytes))


def snapshot(
    status: ClusterStatus, problem: str, slo: Slo, activity: Activity, before: PairCounts, clocks: Clocks
) -> dict[str, Any]:
    """Return one snapshot.

    problem: why no request can be served; empty if one can.
    before: counts of the snapshot before, from which `flows` are computed.
    """
    requests = list(activity.open_traces())
    return {
        "now": clocks.unix(clocks.now_s),
        "version": status.version,
        "model": status.model,
        "problem": problem,
        "open_requests": status.open_requests,
        "gateway": to_plain(status.gateway),
        "scheduler": to_plain(status.scheduler),
        "slo": {"ttft": slo.ttft_s, "tpot": slo.tpot_s},
        "workers": [_worker(worker) for worker in status.workers[:MAX_WORKERS]],
        "links": list(islice((_link(w, link) for w in status.workers for link in w.links), MAX_LINKS)),
        "flows": _flows(requests, activity, before),
        "figures": _figures(activity, clocks),
        "points": _last_points(activity, clocks),
        "queue": _queue(requests, clocks),
        "open": [_request(trace, clocks) for trace in requests[-MAX_OPEN:][::-1]],
        "ended": [_request(trace, clocks) for trace in newest(activity.ended, MAX_ENDED)],
        "decisions": [_decision(each, clocks) for each in islice(reversed(activity.decisions), MAX_DECISIONS)],
        "refusals": _refusals(activity, clocks),
        "events": [
            {"number": e.number, "at": clocks.unix(e.at_s), "severity": e.severity, "text": e.text}
            for e in islice(reversed(activity.events), MAX_EVENTS)
        ],
    }


def history(activity: Activity, clocks: Clocks) -> list[dict[str, Any]]:
    """Return the points of the charts of the last ten minutes, oldest first."""
    return [point(interval, clocks) for interval in activity.window.recent(clocks.now_s)]


def _last_points(activity: Activity, clocks: Clocks) -> list[dict[str, Any]]:
    """Return the points of this interval and the one before, whose last events follow its last snapshot."""
    activity.window.at(clocks.now_s)
    return [point(interval, clocks) for interval in activity.window.recent(clocks.now_s, 2 * INTERVAL_S)]


def point(interval: WindowInterval, clocks: Clocks) -> dict[str, Any]:
    """Return one point of the charts: the figures of an interval, which may still run."""
    seconds = min(INTERVAL_S, max(1.0, clocks.now_s - interval.begin_s))
    return {"t": clocks.unix(interval.begin_s), **interval.figures(seconds)}


def request_details(trace: RequestTrace, clocks: Clocks) -> dict[str, Any]:
    """Return everything that is known about one request, with the data of its waterfall.

    All times are seconds since its receipt.
    """
    end_s = clocks.now_s if trace.ended_s is None else trace.ended_s
    return {
        **_request(trace, clocks),
        "ttft_slo": trace.slo.ttft_s,
        "tpot_slo": trace.slo.tpot_s,
        "total": round(end_s - trace.received_s, 6),
        "first": _since(trace, trace.first_s),
        "last": _since(trace, trace.last_s),
        "message": trace.message,
        "attempts": [_attempt(trace, attempt) for attempt in trace.attempts],
    }


def decision_details(records: Sequence[DecisionRecord]) -> list[dict[str, Any]]:
    """Return decision records for people: the answer, and the candidates with their terms."""
    return [
        {
            "attempt": record.attempt + 1,
            "scheduler": record.scheduler_id,
            "policy": record.policy,
            "placement": _placement(record.placement),
            "predicted": _predicted(record.placement),
            "rejection": to_plain(record.rejection),
            "waited": record.query.waited_s,
            "excluded": dict(record.num_excluded),
            "columns": _columns(record.candidates),
            "candidates": [
                {
                    "worker": candidate.worker.worker_id,
                    "side": candidate.side,
                    "excluded": candidate.excluded,
                    "chosen": record.is_chosen(candidate),
                    "terms": to_plain(candidate.terms),
                }
                for candidate in record.candidates
            ],
            "actuals": to_plain({name: record.actuals.get(name) for name in ("outcome", "ttft_s", "tpot_s")}),
        }
        for record in records
    ]


def _predicted(placement: Placement | None) -> list[dict[str, Any]]:
    """Return the predicted parts of the TTFT, with their labels."""
    if placement is None:
        return []
    parts = (
        (label, getattr(placement, name)) for name, label in PREDICTIONS.items() if name not in ("ttft_s", "tpot_s")
    )
    return [{"label": label, "seconds": _rounded(seconds)} for label, seconds in parts if seconds]


def _columns(candidates: Sequence[Candidate]) -> list[dict[str, str]]:
    """Return the terms of candidates in display order: name, label, and meaning if it is defined."""
    return [
        {"name": name, "label": label_of(name), "meaning": TERMS[name].meaning if name in TERMS else ""}
        for name in in_display_order(name for candidate in candidates for name in candidate.terms)
    ]


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    return {
        "id": worker.worker.worker_id,
        "epoch": f"{worker.worker.worker_epoch:016x}"[:8],
        "role": worker.role.value,
        "state": worker.state.value,
        "model": worker.model,
        "pid": worker.pid,
        "host": worker.host,
        "running": worker.running_seqs,
        "waiting": worker.waiting_seqs,
        "prefill_tokens": worker.waiting_prefill_tokens,
        "context_tokens": worker.running_context_tokens,
        "leases": worker.open_leases,
        "tier": Tier.DEVICE.value,
        "blocks": to_plain(worker.blocks),
        "block_tokens": worker.block_size_tokens,
        "block_bytes": worker.block_bytes,
    }


def _link(reader: WorkerStatus, link: LinkReport) -> dict[str, Any]:
    return {
        "owner": link.peer.worker_id,
        "reader": reader.worker.worker_id,
        "transport": link.transport,
        "speed": round(link.bytes_per_s),
        "inflight": link.inflight_bytes,
        "problem": (link.problem or "broken") if link.broken else "",
    }


def _flows(requests: Sequence[RequestTrace], activity: Activity, before: PairCounts) -> list[dict[str, Any]]:
    """Return the movement of KV per pair: requests in prefill now, and what moved since the last snapshot."""
    prefilling: dict[Pair, int] = {}
    for trace in requests:
        placement = trace.placement
        if placement is not None and placement.prefill and placement.decode and trace.phase == "prefill":
            pair = placement.prefill.worker_id, placement.decode.worker_id
            prefilling[pair] = prefilling.get(pair, 0) + 1
    flows = []
    for pair in sorted(prefilling.keys() | activity.handoffs.keys() | activity.moved_bytes.keys()):
        handoffs = activity.handoffs.get(pair, 0) - before.handoffs.get(pair, 0)
        num_bytes = activity.moved_bytes.get(pair, 0) - before.moved_bytes.get(pair, 0)
        if pair in prefilling or handoffs > 0 or num_bytes > 0:
            number = prefilling.get(pair, 0)
            flows.append(
                {"from": pair[0], "to": pair[1], "prefilling": number, "handoffs": handoffs, "bytes": num_bytes}
            )
    return flows[:MAX_LINKS]


def _figures(activity: Activity, clocks: Clocks) -> dict[str, Any]:
    """Return the figures of the last ten minutes, and the rates of the last ten seconds."""
    intervals = activity.window.recent(clocks.now_s)
    figures = total(intervals).figures(1.0)
    counts, seconds = activity.window.rates(clocks.now_s, RATE_S)
    now = counts.figures(seconds)
    count = {name: round(figures[name]) for name in ("ok", "failed", "refused")}
    return {
        **figures,
        **count,
        "rate": round(now["ok"] + now["failed"] + now["refused"], 2),
        "tokens": now["tokens"],
        "decisions": activity.num_decisions,
    }


def _queue(requests: Sequence[RequestTrace], clocks: Clocks) -> dict[str, Any]:
    """Return the requests of this gateway that have no placement yet, longest wait first."""
    waiting = [trace for trace in requests if trace.phase == "waiting"]
    return {
        "waiting": len(waiting),
        "oldest": round(clocks.now_s - waiting[0].received_s, 3) if waiting else None,
        "requests": [_request(trace, clocks) for trace in waiting[:MAX_WAITING]],
    }


def _request(trace: RequestTrace, clocks: Clocks) -> dict[str, Any]:
    placement = trace.placement
    last = placement or next((a.placement for a in reversed(trace.attempts) if a.placement), None)
    return {
        "id": trace.request_id,
        "tenant": trace.tenant,
        "phase": trace.phase,
        "at": clocks.unix(trace.received_s),
        "age": round((trace.ended_s or clocks.now_s) - trace.received_s, 4),
        "prompt": trace.num_prompt_tokens,
        "output": trace.num_output_tokens,
        "max_tokens": trace.max_tokens,
        "cached": trace.num_cached_tokens,
        "priority": trace.priority,
        "num_attempts": len(trace.attempts),
        "prefill": _id(last.prefill) if last else None,
        "decode": _id(last.decode) if last else None,
        "ttft": _rounded(trace.ttft_s),
        "tpot": _rounded(trace.tpot_s),
        "met": trace.meets_slo if trace.outcome else None,
        "why": trace.message or next((a.rejected for a in reversed(trace.attempts) if a.rejected), ""),
    }


def _attempt(trace: RequestTrace, attempt: AttemptTrace) -> dict[str, Any]:
    return {
        "number": attempt.number + 1,
        "started": _since(trace, attempt.started_s),
        "placed": _since(trace, attempt.placed_s),
        "placement": _placement(attempt.placement),
        "rejected": attempt.rejected,
        "lost": _since(trace, attempt.lost_s),
        "lost_reason": attempt.lost_reason,
        "lost_problem": attempt.lost_problem,
        "legs": [_leg(trace, attempt, leg) for number, leg in trace.legs if number == attempt.number],
    }


def _leg(trace: RequestTrace, attempt: AttemptTrace, leg: LegTimeline) -> dict[str, Any]:
    phases = []
    if attempt.placed_s is not None:
        phases = leg_phases(leg, attempt.placed_s, trace.last_s if attempt.lost_s is None else None)
    return {
        "worker": leg.worker_id,
        "phases": [
            {
                "name": phase.name,
                "begin": _since(trace, phase.begin_s),
                "end": _since(trace, phase.end_s),
                "reported": _rounded(phase.reported_s),
            }
            for phase in phases
        ],
    }


def _decision(decision: AnsweredAttempt, clocks: Clocks) -> dict[str, Any]:
    rejection = decision.rejection
    return {
        "at": clocks.unix(decision.at_s),
        "id": decision.request_id,
        "attempt": decision.attempt + 1,
        "placement": _placement(decision.placement),
        "reason": rejection.reason.value if rejection else "",
        "message": rejection.message if rejection else "",
    }


def _placement(placement: Placement | None) -> dict[str, Any] | None:
    if placement is None:
        return None
    return {
        "policy": placement.policy,
        "prefill": _id(placement.prefill),
        "decode": _id(placement.decode),
        "source": placement.prefix_source.worker.worker_id if placement.prefix_source else None,
        "ttft": placement.ttft_s,
        "tpot": placement.tpot_s,
        "waiting": placement.waiting_s,
        "overlap": placement.prefill_overlap_blocks,
    }


def _refusals(activity: Activity, clocks: Clocks) -> list[dict[str, Any]]:
    recent = sorted(activity.refusals.items(), key=lambda item: -item[1].last_s)[:MAX_REASONS]
    return [
        {"reason": reason, "count": each.count, "at": clocks.unix(each.last_s), "message": each.message}
        for reason, each in recent
    ]


def _id(worker: Any) -> str | None:
    return None if worker is None else worker.worker_id


def _since(trace: RequestTrace, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - trace.received_s, 6)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
