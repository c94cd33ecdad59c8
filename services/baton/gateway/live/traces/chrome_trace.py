"""Writes recent requests in Chrome's trace-event format, which opens in Perfetto.

Each worker and the gateway is a process; concurrent requests are its lanes. Workers report durations of their
own clocks. They are placed on the gateway's clock: a prefill begins with its placement, and a decode ends
with its last token. Source: "Trace Event Format" (Chromium project), event types X, i and M.
"""

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from baton.core.request import LegTimeline
from baton.gateway.live.traces.leg_phases import leg_phases
from baton.gateway.live.traces.request_trace import AttemptTrace, RequestTrace

GATEWAY = "gateway"
MAX_REQUESTS = 2_048
"""Requests of one trace. With a few legs each, it has at most some megabytes."""

Slice = tuple[float, float, str, dict[str, Any]]
"""(begin, end, name, arguments), in seconds of the event loop's clock."""


def recent_traces(traces: Iterable[RequestTrace], now_s: float, since_s: float) -> list[RequestTrace]:
    """Return the requests that were open after `since_s` (event loop time). Open ones are copied.

    Ended ones no longer change, so another thread may read the result.
    """
    recent = [trace for trace in traces if (trace.ended_s or now_s) >= since_s][-MAX_REQUESTS:]
    return [trace if trace.ended_s is not None else _copy(trace) for trace in recent]


def _copy(trace: RequestTrace) -> RequestTrace:
    return replace(trace, attempts=[replace(attempt) for attempt in trace.attempts])


def trace_pieces(recent: Sequence[RequestTrace], now_s: float, unix_offset_s: float) -> Iterator[bytes]:
    """Yield the trace of these requests as JSON, in pieces of one event.

    The JSON encoder does not release the GIL, so encoding all events at once would stop the event loop.
    """
    lanes = _Lanes(unix_offset_s)
    for trace in recent:
        _add_gateway_slices(lanes, trace, now_s if trace.ended_s is None else trace.ended_s)
        for attempt in trace.attempts:
            for number, leg in trace.legs:
                if number == attempt.number and attempt.placed_s is not None:
                    lanes.add(leg.worker_id, _leg_slices(leg, attempt, trace))
    yield b'{"displayTimeUnit":"ms","otherData":{"requests":%d},"traceEvents":[' % len(recent)
    comma = b""
    for event in lanes.events():
        yield comma + json.dumps(event, separators=(",", ":")).encode()
        comma = b","
    yield b"]}"


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
        what = {"attempt": attempt.number + 1, "rejected": attempt.rejected}
        return [(attempt.started_s, until_s, "placement", what)]
    slices: list[Slice] = [(attempt.started_s, attempt.placed_s, "placement", {"attempt": attempt.number + 1})]
    if attempt.lost_s is not None:
        why = {"attempt": attempt.number + 1, "reason": attempt.lost_reason, "problem": attempt.lost_problem}
        return [*slices, (attempt.placed_s, attempt.lost_s, "lost attempt", why)]
    first_s = min(max(end_s if trace.first_s is None else trace.first_s, attempt.placed_s), end_s)
    return [
        *slices,
        (attempt.placed_s, first_s, "prefill", {"attempt": attempt.number + 1}),
        (first_s, end_s, "decode", {"attempt": attempt.number + 1}),
    ]


def _leg_slices(leg: LegTimeline, attempt: AttemptTrace, trace: RequestTrace) -> list[Slice]:
    """Return the phases of a leg. `reported_ms` is the duration that its worker reported."""
    assert attempt.placed_s is not None
    arguments = {
        "request_id": trace.request_id,
        "attempt": attempt.number + 1,
        "computed_tokens": leg.num_computed_tokens,
        "cached_tokens": leg.num_cached_tokens,
        "kv_bytes": leg.kv_bytes,
        "transport": leg.transport,
    }
    return [
        (phase.begin_s, phase.end_s, phase.name, arguments | {"reported_ms": round(1000 * phase.reported_s, 3)})
        for phase in leg_phases(leg, attempt.placed_s, trace.last_s if attempt.lost_s is None else None)
    ]


class _Lanes:
    """Assigns groups of slices to lanes (thread ids), so that groups in one lane do not overlap."""

    def __init__(self, unix_offset_s: float) -> None:
        self._offset_s = unix_offset_s
        self._groups: dict[str, list[list[Slice]]] = {}

    def add(self, process: str, slices: list[Slice]) -> None:
        """Add slices that share a lane of a process."""
        if slices:
            self._groups.setdefault(process, []).append(slices)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all events, those that name the processes first."""
        processes = sorted(self._groups, key=lambda process: (process != GATEWAY, process))
        for pid, process in enumerate(processes, 1):
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
        for pid, process in enumerate(processes, 1):
            for lane, slices in _in_lanes(self._groups[process]):
                for each in slices:
                    yield self._event(pid, lane, each)

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
