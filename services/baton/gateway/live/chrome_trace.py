"""Writes recent requests in Chrome's trace-event format, which opens in Perfetto.

Each worker and the gateway is a process; concurrent requests are its lanes. Workers report durations of their
own clocks. They are placed on the gateway's clock: a prefill begins with its placement, and a decode ends
with its last token. Source: "Trace Event Format" (Chromium project), event types X, i and M.
"""

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from baton.core.request import LegTimeline
from baton.gateway.live.request_trace import AttemptTrace, RequestTrace

GATEWAY = "gateway"
MAX_REQUESTS = 2_048
"""Requests of one trace. With a few legs each, it has at most some megabytes."""

Slice = tuple[float, float, str, dict[str, Any]]
"""(begin, end, name, arguments), in seconds of the event loop's clock."""


def chrome_trace(traces: Iterable[RequestTrace], now_s: float, since_s: float, unix_offset_s: float) -> dict[str, Any]:
    """Return the trace of the requests that were open after `since_s` (event loop time)."""
    recent = [trace for trace in traces if (trace.ended_s or now_s) >= since_s][-MAX_REQUESTS:]
    lanes = _Lanes(unix_offset_s)
    for trace in recent:
        _add_gateway_slices(lanes, trace, now_s if trace.ended_s is None else trace.ended_s)
        for attempt in trace.attempts:
            for number, leg in trace.legs:
                if number == attempt.number and attempt.placed_s is not None:
                    lanes.add(leg.worker_id, _leg_slices(leg, attempt, trace))
    return {"displayTimeUnit": "ms", "traceEvents": lanes.events(), "otherData": {"requests": len(recent)}}


def _add_gateway_slices(lanes: "_Lanes", trace: RequestTrace, end_s: float) -> None:
    """Add a request and, inside it, its attempts. Concurrent attempts of other samples get own lanes."""
    arguments = {
        "request_id": trace.request_id,
        "tenant": trace.tenant,
        "outcome": trace.outcome or "open",
        "prompt_tokens": trace.num_prompt_tokens,
        "cached_tokens": trace.num_cached_tokens,
        "output_tokens": trace.num_output_tokens,
        "attempts": len(trace.attempts),
    }
    slices: list[Slice] = [(trace.received_s, end_s, f"request {trace.request_id[:8]}", arguments)]
    free_s = trace.received_s
    for attempt in trace.attempts:
        inner = _attempt_slices(attempt, trace, end_s)
        if inner[0][0] >= free_s:
            slices += inner
            free_s = inner[-1][1]
        else:
            lanes.add(GATEWAY, inner)
    lanes.add(GATEWAY, slices)


def _attempt_slices(attempt: AttemptTrace, trace: RequestTrace, end_s: float) -> list[Slice]:
    if attempt.placed_s is None:
        until_s = end_s if attempt.lost_s is None else attempt.lost_s
        what = {"attempt": attempt.number, "rejected": attempt.rejected}
        return [(attempt.started_s, until_s, "placement", what)]
    slices: list[Slice] = [(attempt.started_s, attempt.placed_s, "placement", {"attempt": attempt.number})]
    if attempt.lost_s is not None:
        why = {"attempt": attempt.number, "reason": attempt.lost_reason, "problem": attempt.lost_problem}
        return [*slices, (attempt.placed_s, attempt.lost_s, "lost attempt", why)]
    first_s = min(max(end_s if trace.first_s is None else trace.first_s, attempt.placed_s), end_s)
    return [
        *slices,
        (attempt.placed_s, first_s, "prefill", {"attempt": attempt.number}),
        (first_s, end_s, "decode", {"attempt": attempt.number}),
    ]


def _leg_slices(leg: LegTimeline, attempt: AttemptTrace, trace: RequestTrace) -> list[Slice]:
    """Return the phases that a worker reported, one after another."""
    assert attempt.placed_s is not None
    at_s = attempt.placed_s
    arguments = {
        "request_id": trace.request_id,
        "attempt": attempt.number,
        "computed_tokens": leg.num_computed_tokens,
        "cached_tokens": leg.num_cached_tokens,
        "kv_bytes": leg.kv_bytes,
        "transport": leg.transport,
    }
    slices: list[Slice] = []
    for name, seconds in (
        ("queue", leg.queue_s),
        ("prefill", leg.compute_s),
        ("wait for KV", leg.kv_wait_s),
        ("KV transfer", leg.kv_transfer_s),
        ("KV admission", leg.kv_admission_s),
    ):
        if seconds:
            slices.append((at_s, at_s + seconds, name, arguments))
            at_s += seconds
    if leg.decode_s:
        end_s = trace.last_s if trace.last_s is not None and attempt.lost_s is None else at_s + leg.decode_s
        slices.append((max(at_s, end_s - leg.decode_s), max(at_s, end_s), "decode", arguments))
    return slices


class _Lanes:
    """Assigns groups of slices to lanes (thread ids), so that groups in one lane do not overlap."""

    def __init__(self, unix_offset_s: float) -> None:
        self._offset_s = unix_offset_s
        self._groups: dict[str, list[list[Slice]]] = {}

    def add(self, process: str, slices: list[Slice]) -> None:
        """Add slices that share a lane of a process."""
        if slices:
            self._groups.setdefault(process, []).append(slices)

    def events(self) -> list[dict[str, Any]]:
        """Return all events, those that name the processes first."""
        processes = sorted(self._groups, key=lambda process: (process != GATEWAY, process))
        names = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
            for pid, process in enumerate(processes, 1)
        ]
        return names + [
            self._event(pid, lane, each)
            for pid, process in enumerate(processes, 1)
            for lane, slices in _in_lanes(self._groups[process])
            for each in slices
        ]

    def _event(self, pid: int, lane: int, each: Slice) -> dict[str, Any]:
        begin_s, end_s, name, arguments = each
        return {
            "ph": "X",
            "cat": "baton",
            "name": name,
            "pid": pid,
            "tid": lane,
            "ts": round((begin_s + self._offset_s) * 1e6),
            "dur": max(0, round((end_s - begin_s) * 1e6)),
            "args": arguments,
        }


def _in_lanes(groups: list[list[Slice]]) -> Iterator[tuple[int, list[Slice]]]:
    """Yield (lane, slices) so that groups in one lane do not overlap. Lanes count from 1."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for slices in sorted(groups, key=lambda slices: min(each[0] for each in slices)):
        begin_s, end_s = min(each[0] for each in slices), max(each[1] for each in slices)
        while busy and busy[0][0] <= begin_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy) + 1
        heapq.heappush(busy, (end_s, lane))
        yield lane, slices
