"""Says which option to change after an invalid run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from loadgen.measure import request_metrics
from loadgen.measure.records import Record, RunInfo
from loadgen.measure.request_metrics import MAX_LAG_OF_TTFT, MAX_RATE_ERROR, NOT_SENT, OutcomeRules, SendingStats

BUSY = 0.6
"""A sending process that used more of a core than this is too busy to send in time."""
MAX_SLO_S = 5.0
"""Longest TTFT SLO that is proposed because it allows the measured lag."""
MOST = 3


def remedies(run: RunInfo, records: Sequence[Record], rules: OutcomeRules) -> tuple[str, ...]:
    """Return what to change so that the next run is valid, the most promising first, at most `MOST`.

    Each begins with the option. Empty for a valid run.
    """
    return tuple([*_missing(run, records), *_connections(records), *_sending(run, records, rules)][:MOST])


def _missing(run: RunInfo, records: Sequence[Record]) -> Iterator[str]:
    if run.num_offered > len(records):
        yield "run it again until it ends: without its main process the last requests have no record"


def _connections(records: Sequence[Record]) -> Iterator[str]:
    if any(record.error.startswith(NOT_SENT) and not record.left_early for record in records):
        yield "ulimit -n, a higher one, or more --processes: each may open that many connections"


def _sending(run: RunInfo, records: Sequence[Record], rules: OutcomeRules) -> Iterator[str]:
    """Yield what lets requests be sent in time."""
    sent = request_metrics.sending(records)
    is_late = sent.lag_p99_s is not None and sent.lag_p99_s > request_metrics.lag_limit_s(rules)
    is_off = bool(sent.due_rps and sent.achieved_rps) and (
        abs((sent.achieved_rps or 0.0) / (sent.due_rps or 1.0) - 1) > MAX_RATE_ERROR
    )
    if is_late or is_off:
        yield from (*_processes(run), *_priority(run), *_slo(sent, rules), *_rate(run, sent))


def _processes(run: RunInfo) -> Iterator[str]:
    cores, cpu_s = run.machine.get("cores"), run.machine.get("loadgen_cpu_s")
    if not isinstance(cores, int):
        return
    if run.processes > cores:
        yield f"--processes {cores}: {run.processes} share {cores} core{'' if cores == 1 else 's'}"
        return
    if not isinstance(cpu_s, int | float) or run.duration_s <= 0:
        return
    busy = cpu_s / run.duration_s / max(run.processes, 1)
    if busy <= BUSY:
        return
    wanted = min(cores, math.ceil(run.processes * busy / (BUSY / 2)))
    if wanted > run.processes:
        yield f"--processes {wanted}: each sending process used {busy:.0%} of a core"


def _priority(run: RunInfo) -> Iterator[str]:
    granted = str(run.machine.get("priority") or "normal")
    if granted.startswith("realtime"):
        return
    if run.flags.get("priority") == "realtime":
        yield f"run as root or with CAP_SYS_NICE: --priority realtime was not permitted ({granted})"
    else:
        yield f"--priority realtime, as root or with CAP_SYS_NICE: this run had {granted}"


def _slo(sent: SendingStats, rules: OutcomeRules) -> Iterator[str]:
    has_ttft = any(slo.ttft_s is not None for slo in rules.slos.values())
    needed_s = (sent.lag_p99_s or 0.0) / MAX_LAG_OF_TTFT
    if not has_ttft and 0 < needed_s <= MAX_SLO_S:
        bound_ms = math.ceil(needed_s * 10 * 1.2) * 100  # rounded up to 100 ms, with a fifth to spare
        yield (f"--slo ttft={bound_ms}ms, if that is your SLO: the lag limit is then 1 % of it instead of 2 ms")


def _rate(run: RunInfo, sent: SendingStats) -> Iterator[str]:
    where = "or send from another machine"
    if run.flags.get("plan"):
        yield f"PLAN: one with a lower rate, {where}"
    elif sent.due_rps:
        yield f"--rate {sent.due_rps / 2:.2g}, {where}"
