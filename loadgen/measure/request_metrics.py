"""Definitions of all metrics of one request.

Times are seconds by the client's clock. `intended` is when a request was due, `sent` when its last byte was
passed to the kernel. t_1 … t_n are the arrival times of its n output tokens; tokens of one message arrive
together.

    ttft        t_1 - intended            evaluates the SLO, so delays before sending are counted
    ttft_sent   t_1 - sent                for comparison with tools that measure from the actual send
    tpot        (t_n - t_1) / (n - 1)     without the first token; undefined for n = 1, which meets any SLO
    itl         t_(i+1) - t_i             n - 1 gaps per request; 0 within a message, so their mean is tpot
    tbt         mean of the longest ceil(10 %) of a request's gaps (Mooncake, FAST'25)
    e2e         t_n - intended            to the last token, not the end of the stream
    e2e_sent    t_n - sent
    normalised  e2e / n                   seconds per output token including the first (Orca, OSDI'22)
    queue       wait for the prefill worker, at the scheduler and the worker, from Baton's timeline
    send_lag    sent - intended           the load generator's own error

n is the server's reported usage, else the tokens seen. A text message without token ids counts as one token;
if that is less than n, gaps are those between messages and their mean exceeds the tpot.

Every offered request has exactly one outcome (`RequestOutcome`). Shares are of all offered requests, so a
request that was rejected, lost or cut short misses its SLO.

    attainment  good / offered            joint; for one SLO bound: complete responses that met it / offered
                                          requests with that bound
    offered_rps (offered - 1) / (last - first intended time)
    goodput_rps attainment * offered_rps  not divided by the duration, which one slow request would extend
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from loadgen.measure.records import Arrival, Record, RunInfo
from loadgen.measure.stats import Floats, percentiles
from loadgen.measure.timeline import Stages
from loadgen.slo_target import SloTarget

NOT_SENT = "not sent: "
"""Prefix of the error of a request that this machine could not send."""
MAX_LAG_S = 0.002
MAX_LAG_OF_TTFT = 0.01
MAX_RATE_ERROR = 0.01


class RequestOutcome(StrEnum):
    """Outcome of an offered request. Each has exactly one. A *complete* response has ended properly at full
    length."""

    GOOD = "good"
    """Complete, and all bounds of its SLO met, measured from the intended send time."""
    LATE = "late"
    """Complete, but the SLO was missed."""
    REJECTED_EARLY = "rejected_early"
    """Rejected without a token within the TTFT SLO, or at any time without one. The client can still retry
    elsewhere."""
    REJECTED_LATE = "rejected_late"
    """Rejected without a token, later than the TTFT SLO."""
    TIMED_OUT = "timed_out"
    """Client timeout, or status 504."""
    CANCELLED = "cancelled"
    """Cancelled by the client: by the plan, because an earlier turn failed, or by Ctrl-C."""
    FAILED = "failed"
    """Any other error: unreachable, 4xx, 5xx, invalid data, a broken stream, an end without a token."""
    TRUNCATED = "truncated"
    """The stream ended without an error, but with fewer tokens than planned or without a proper end."""


COMPLETE = (RequestOutcome.GOOD, RequestOutcome.LATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRules:
    """Rules for evaluating responses: the SLO of each class, and whether short responses are truncated.

    With `ignore_eos` the server was told to generate the planned length, so a shorter response is truncated.
    """

    slos: Mapping[str, SloTarget] = field(default_factory=dict)
    ignore_eos: bool = True

    def slo_of(self, record: Record) -> SloTarget:
        """Return the SLO of the record's class, else that of `default`, else one without bounds."""
        return self.slos.get(record.slo_class) or self.slos.get("default") or SloTarget()


def classify(record: Record, rules: OutcomeRules) -> RequestOutcome:
    """Return a request's outcome: the first rule that applies.

    Status 429 is a rejection by itself. 503 is one only with a reason or a retry time, because a proxy
    without a server also returns a bare 503.
    """
    if record.left_early:
        return RequestOutcome.CANCELLED
    if record.timed_out or record.status == 504:
        return RequestOutcome.TIMED_OUT
    slo = rules.slo_of(record)
    tokens_seen = _tokens_seen(record)
    if not tokens_seen and _is_refusal(record):
        bound_s = math.inf if slo.ttft_s is None else slo.ttft_s
        return (
            RequestOutcome.REJECTED_EARLY
            if _at_most(record.ended_s - record.intended_s, bound_s)
            else RequestOutcome.REJECTED_LATE
        )
    if record.error or (record.status is not None and record.status >= 400):
        return RequestOutcome.FAILED
    if record.sent_s is None and record.status is None and not tokens_seen:
        return RequestOutcome.CANCELLED
    if not tokens_seen and not record.is_complete:
        return RequestOutcome.FAILED
    if not is_complete_response(record, rules):
        return RequestOutcome.TRUNCATED
    return RequestOutcome.GOOD if all(met_slos(record, slo).values()) else RequestOutcome.LATE


def _is_refusal(record: Record) -> bool:
    return record.status == 429 or (record.status == 503 and (bool(record.reason) or record.retry_after_s is not None))


def is_complete_response(record: Record, rules: OutcomeRules) -> bool:
    """True if the response ended properly, without an error, and has all planned tokens.

    It has at least one token, and with `ignore_eos` the planned number. If the server reports neither usage
    nor token ids, its finish reason `length` counts as the planned number.
    """
    if not record.is_complete or record.error or not _tokens_seen(record):
        return False
    if not rules.ignore_eos or num_output_tokens(record) >= record.planned_output_tokens:
        return True
    return record.num_output_tokens is None and not record.token_ids and record.finish_reason == "length"


def met_slos(record: Record, slo: SloTarget) -> dict[str, bool]:
    """Return whether the response's times meet each bound of the SLO. Completeness is not checked."""
    met: dict[str, bool] = {}
    if slo.ttft_s is not None:
        met["ttft"] = _at_most(ttft_s(record), slo.ttft_s)
    if slo.tpot_s is not None:
        tpot = tpot_s(record)
        met["tpot"] = bool(_tokens_seen(record)) and (tpot is None or _at_most(tpot, slo.tpot_s))
    if slo.e2e_s is not None:
        met["e2e"] = _at_most(e2e_s(record), slo.e2e_s)
    return met


def num_output_tokens(record: Record) -> int:
    """Return n: the server's reported usage, else the number of token ids, else the tokens seen."""
    if record.num_output_tokens is not None:
        return record.num_output_tokens
    return len(record.token_ids) or _tokens_seen(record)


def ttft_s(record: Record, from_intended: bool = True) -> float | None:
    """Return t_1 - intended, or t_1 - sent. None without a token, or if it was never sent."""
    return _since(record, _first(record), from_intended)


def tpot_s(record: Record) -> float | None:
    """Return (t_n - t_1) / (n - 1). None for fewer than two tokens."""
    first, last, count = _first(record), _last(record), num_output_tokens(record)
    if first is None or last is None or count < 2:
        return None
    return (last.at_s - first.at_s) / (count - 1)


def itl_s(record: Record) -> Floats:
    """Return the gaps t_(i+1) - t_i in order, [tokens seen - 1].

    A message of k tokens after a pause g gives g and then k - 1 zeros.
    """
    times = np.repeat(
        np.fromiter((arrival.at_s for arrival in record.arrivals), np.float64),
        np.fromiter((arrival.num_tokens for arrival in record.arrivals), np.intp),
    )
    return np.diff(times)


def longest_tenth(gaps: Floats) -> float | None:
    """Return the mean of the longest ceil(10 %) of the values. None without values."""
    if gaps.size == 0:
        return None
    count = -(-gaps.size // 10)
    return float(np.mean(np.partition(gaps, gaps.size - count)[gaps.size - count :]))


def e2e_s(record: Record, from_intended: bool = True) -> float | None:
    """Return t_n - intended, or t_n - sent. None without a token, or if it was never sent."""
    return _since(record, _last(record), from_intended)


def normalised_s(record: Record) -> float | None:
    """Return e2e / n. None without a token."""
    e2e, count = e2e_s(record), num_output_tokens(record)
    return e2e / count if e2e is not None and count else None


def queue_s(record: Record) -> float | None:
    """Return the wait for the prefill worker, at the scheduler and at the worker. None without a timeline."""
    return Stages.of(record.timeline).wait_s if record.timeline else None


def send_lag_s(record: Record) -> float | None:
    """Return sent - intended. None if it was never sent."""
    return None if record.sent_s is None else record.sent_s - record.intended_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingStats:
    """Sending statistics of a run. Requests cancelled before they were sent are left out.

    - `due_rps`: (due - 1) / (last - first intended time)
    - `achieved_rps`: `due_rps` times the share of due requests that were sent, corrected for the stretch of
      the sending time
    - `lag_*`: percentiles of the send lag; None if nothing was sent

    Both rates are None for a single request or a plan without duration.
    """

    num_due: int
    num_sent: int
    due_rps: float | None
    achieved_rps: float | None
    lag_p50_s: float | None
    lag_p99_s: float | None
    lag_max_s: float | None


def sending(records: Iterable[Record]) -> SendingStats:
    """Compute the sending statistics. A request that failed to connect counts as sent: the generator tried in
    time."""
    due = [record for record in records if not (record.left_early and record.sent_s is None)]
    out = [record for record in due if record.sent_s is not None]
    tried = sum(1 for record in due if record.sent_s is not None or record.error or record.timed_out)
    planned_s = _span([record.intended_s for record in due])
    due_rps = (len(due) - 1) / planned_s if planned_s else None
    achieved = None
    if due_rps is not None and len(out) > 1:
        stretch = _span([record.sent_s or 0.0 for record in out]) - _span([record.intended_s for record in out])
        achieved = due_rps * tried / len(due) * planned_s / max(planned_s + stretch, 1e-9)
    lags = [lag for record in out if (lag := send_lag_s(record)) is not None]
    p50, p99 = percentiles(lags, (50, 99)) if lags else (None, None)
    return SendingStats(
        num_due=len(due),
        num_sent=len(out),
        due_rps=due_rps,
        achieved_rps=achieved,
        lag_p50_s=p50,
        lag_p99_s=p99,
        lag_max_s=max(lags, default=None),
    )


def lag_limit_s(rules: OutcomeRules) -> float:
    """Return the largest valid p99 send lag: max(2 ms, 1 % of the strictest TTFT SLO)."""
    ttft_bounds = [slo.ttft_s for slo in rules.slos.values() if slo.ttft_s is not None]
    return max(MAX_LAG_S, MAX_LAG_OF_TTFT * min(ttft_bounds)) if ttft_bounds else MAX_LAG_S


def invalid_reasons(records: Sequence[Record], rules: OutcomeRules, num_offered: int | None = None) -> tuple[str, ...]:
    """Return why a run is invalid; empty if it is valid. `num_offered` is the number of due requests, if
    known."""
    if not records:
        return ("no request was offered",)
    sent, limit_s, reasons = sending(records), lag_limit_s(rules), list[str]()
    if sent.lag_p99_s is not None and sent.lag_p99_s > limit_s:
        reasons.append(
            f"the generator sent late: p99 send lag {sent.lag_p99_s * 1e3:.2f} ms, limit {limit_s * 1e3:g} ms "
            "(the larger of 2 ms and 1 % of the TTFT SLO)"
        )
    if sent.due_rps is not None and sent.achieved_rps is not None:
        error = sent.achieved_rps / sent.due_rps - 1
        if abs(error) > MAX_RATE_ERROR:
            reasons.append(
                f"the achieved rate is off by {error:+.1%}: {sent.achieved_rps:.3f} instead of {sent.due_rps:.3f} "
                "requests/s "
                "(limit 1 %)"
            )
    missing = 0 if num_offered is None else num_offered - len(records)
    if missing > 0:
        reasons.append(f"{missing} of {num_offered} offered requests have no record; the run was probably killed")
    return tuple(reasons)


def why_invalid(run: RunInfo, records: Sequence[Record], rules: OutcomeRules) -> tuple[str, ...]:
    """Return the run's own reasons, or those that its records give under `rules`."""
    return run.invalid or invalid_reasons(records, rules, run.num_offered)


def _span(times: Sequence[float]) -> float:
    return max(times) - min(times) if times else 0.0


def _tokens_seen(record: Record) -> int:
    return sum(arrival.num_tokens for arrival in record.arrivals)


def _first(record: Record) -> Arrival | None:
    return next((arrival for arrival in record.arrivals if arrival.num_tokens), None)


def _last(record: Record) -> Arrival | None:
    return next((arrival for arrival in reversed(record.arrivals) if arrival.num_tokens), None)


def _since(record: Record, arrival: Arrival | None, from_intended: bool) -> float | None:
    start_s = record.intended_s if from_intended else record.sent_s
    return None if arrival is None or start_s is None else arrival.at_s - start_s


def _at_most(value: float | None, bound: float) -> bool:
    """True if value <= bound with a tolerance of 1 ns, so that 1.6 - 1.0 meets 0.6."""
    return value is not None and value <= bound + 1e-9
