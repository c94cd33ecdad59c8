"""What every number means, defined once. A record has only what was seen; all that is derived from one
request is derived here.

Times are seconds by the generator's one clock. `intended` is when a request was due, `sent` when its last
byte was handed to the kernel. t_1 … t_n are the times at which its n output tokens arrived; tokens that came
in one message arrived together, at the message's time.

    ttft        t_1 - intended            judges the SLO: a generator or server that holds requests back cannot hide it
    ttft_sent   t_1 - sent                beside it, for comparison with tools that count from the actual send
    tpot        (t_n - t_1) / (n - 1)     the first token excluded; none if n = 1, and then a TPOT SLO counts as kept
    itl         t_(i+1) - t_i             n - 1 gaps of each request; 0 between tokens of one message, so a request's mean gap is its tpot
    tbt         mean of the longest ceil(10 %) of a request's gaps (Mooncake, FAST'25)
    e2e         t_n - intended            to the last token, not to the end of the stream; e2e_sent from the actual send
    normalised  e2e / n                   seconds per output token, the first one's wait included (Orca, OSDI'22)
    queue       what Baton's timeline gives as the wait for the worker that computed the prompt, at the scheduler and at the worker; absent
                for other servers
    send_lag    sent - intended           the generator's own error

n is the server's usage where it gave one, else the tokens seen. A text message without token ids counts as
one token; where that makes fewer than n, gaps are those between messages and their mean is above tpot.

Every offered request is in exactly one class (`RequestOutcome`). Shares have all offered requests as their
denominator: a request that was refused, lost or cut short keeps no promise.

    attainment  good / offered                      joint; of one SLO: whole answers that kept it / offered requests that were promised it
    offered_rps (offered - 1) / (last - first intended time)
    goodput_rps attainment * offered_rps            so a stuck request at the end does not thin it out, as dividing by the duration would
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

REFUSALS = (429, 503)
MAX_LAG_S = 0.002
MAX_LAG_OF_TTFT = 0.01
MAX_RATE_ERROR = 0.01


class RequestOutcome(StrEnum):
    """What became of an offered request; exactly one. A *whole* answer is complete and as long as planned."""

    GOOD = "good"
    """Whole, and its class's SLO kept by times from the intended send."""
    LATE = "late"
    """Whole, SLO broken."""
    REJECTED_EARLY = "rejected_early"
    """Refused before any token, in less than the TTFT SLO (in any time if none is promised): the client may
    still go elsewhere."""
    REJECTED_LATE = "rejected_late"
    """Refused so, but later than the first token was promised."""
    TIMED_OUT = "timed_out"
    """The client's own limit, or 504."""
    CANCELLED = "cancelled"
    """Given up by the client: the plan's cancel, an earlier turn that was not whole, the user's Ctrl-C."""
    FAILED = "failed"
    """Any other error: unreachable, 4xx, 5xx, garbage, a broken stream, an end without a token."""
    TRUNCATED = "truncated"
    """The stream ended without an error, but with fewer tokens than planned or without its proper end."""


WHOLE = (RequestOutcome.GOOD, RequestOutcome.LATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What answers are held against. `ignore_eos`: the server was told to go on to the planned length, so a
    shorter answer is truncated."""

    slos: Mapping[str, SloTarget] = field(default_factory=dict)
    ignore_eos: bool = True

    def slo_of(self, record: Record) -> SloTarget:
        """Its class's; else that of `default`; else nothing is promised."""
        return self.slos.get(record.slo_class) or self.slos.get("default") or SloTarget()


def classify(record: Record, terms: Terms) -> RequestOutcome:
    """The first that applies. A 429 is a refusal in itself; a 503 only with a reason or a time to come back,
    since a proxy whose server is gone answers a bare 503, too."""
    if record.left_early:
        return RequestOutcome.CANCELLED
    if record.timed_out or record.status == 504:
        return RequestOutcome.TIMED_OUT
    slo = terms.slo_of(record)
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
    if not is_whole(record, terms):
        return RequestOutcome.TRUNCATED
    return RequestOutcome.GOOD if all(kept_slos(record, slo).values()) else RequestOutcome.LATE


def _is_refusal(record: Record) -> bool:
    return record.status == 429 or (record.status == 503 and (bool(record.reason) or record.retry_after_s is not None))


def is_whole(record: Record, terms: Terms) -> bool:
    """Complete, without an error, with at least one token, and (under `ignore_eos`) with all that were
    planned. Where the server counts for itself neither by usage nor by token ids, its finish reason `length`
    is believed."""
    if not record.is_complete or record.error or not _tokens_seen(record):
        return False
    if not terms.ignore_eos or num_output_tokens(record) >= record.planned_output_tokens:
        return True
    return record.num_output_tokens is None and not record.token_ids and record.finish_reason == "length"


def kept_slos(record: Record, slo: SloTarget) -> dict[str, bool]:
    """For each SLO that is promised, whether the times of this answer keep it; whether it is whole is not
    asked here."""
    kept: dict[str, bool] = {}
    if slo.ttft_s is not None:
        kept["ttft"] = _at_most(ttft_s(record), slo.ttft_s)
    if slo.tpot_s is not None:
        tpot = tpot_s(record)
        kept["tpot"] = bool(_tokens_seen(record)) and (tpot is None or _at_most(tpot, slo.tpot_s))
    if slo.e2e_s is not None:
        kept["e2e"] = _at_most(e2e_s(record), slo.e2e_s)
    return kept


def num_output_tokens(record: Record) -> int:
    """n: the server's usage, else its token ids, else the tokens seen."""
    if record.num_output_tokens is not None:
        return record.num_output_tokens
    return len(record.token_ids) or _tokens_seen(record)


def ttft_s(record: Record, from_intended: bool = True) -> float | None:
    """t_1 - intended, or t_1 - sent. None without a token, or if it was never sent."""
    return _since(record, _first(record), from_intended)


def tpot_s(record: Record) -> float | None:
    """(t_n - t_1) / (n - 1). None for fewer than two tokens."""
    first, last, count = _first(record), _last(record), num_output_tokens(record)
    if first is None or last is None or count < 2:
        return None
    return (last.at_s - first.at_s) / (count - 1)


def itl_s(record: Record) -> Floats:
    """The gaps t_(i+1) - t_i in order, [tokens seen - 1]: a message of k tokens after a pause of g gives g
    and then k - 1 zeros."""
    times = np.repeat(
        np.fromiter((arrival.at_s for arrival in record.arrivals), np.float64),
        np.fromiter((arrival.num_tokens for arrival in record.arrivals), np.intp),
    )
    return np.diff(times)


def tbt_s(record: Record) -> float | None:
    """Mean of the longest ceil(10 %) of the gaps. None without a gap."""
    return longest_tenth(itl_s(record))


def longest_tenth(gaps: Floats) -> float | None:
    if gaps.size == 0:
        return None
    count = -(-gaps.size // 10)
    return float(np.mean(np.partition(gaps, gaps.size - count)[gaps.size - count :]))


def e2e_s(record: Record, from_intended: bool = True) -> float | None:
    """t_n - intended, or t_n - sent. None without a token, or if it was never sent."""
    return _since(record, _last(record), from_intended)


def normalised_s(record: Record) -> float | None:
    """e2e / n. None without a token."""
    e2e, count = e2e_s(record), num_output_tokens(record)
    return e2e / count if e2e is not None and count else None


def queue_s(record: Record) -> float | None:
    """The wait for the worker that computed the prompt, at the scheduler and there. None without a timeline
    that says it."""
    return Stages.of(record.timeline).wait_s if record.timeline else None


def send_lag_s(record: Record) -> float | None:
    """sent - intended. None if it was never sent."""
    return None if record.sent_s is None else record.sent_s - record.intended_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How well the generator kept to its plan. Requests given up before they were sent were not its to send,
    and are left out.

    `due_rps`: (due - 1) / (last - first intended time). `achieved_rps`: that, times the share of due requests
    that went out, divided by how much longer than planned it took from the first to the last. Both None for
    one request or a plan without length. Lags: None if none was sent.
    """

    num_due: int
    num_sent: int
    due_rps: float | None
    achieved_rps: float | None
    lag_p50_s: float | None
    lag_p99_s: float | None
    lag_max_s: float | None


def sending(records: Iterable[Record]) -> Sending:
    """A request that could not be sent for an error (no connection) counts as sent: the generator tried, in
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
    return Sending(
        num_due=len(due),
        num_sent=len(out),
        due_rps=due_rps,
        achieved_rps=achieved,
        lag_p50_s=p50,
        lag_p99_s=p99,
        lag_max_s=max(lags, default=None),
    )


def lag_limit_s(terms: Terms) -> float:
    """max(2 ms, 1 % of the strictest TTFT SLO): above it the p99 send lag says more of the generator than of
    the server."""
    promised = [slo.ttft_s for slo in terms.slos.values() if slo.ttft_s is not None]
    return max(MAX_LAG_S, MAX_LAG_OF_TTFT * min(promised)) if promised else MAX_LAG_S


def invalid_reasons(records: Sequence[Record], terms: Terms, num_offered: int | None = None) -> tuple[str, ...]:
    """Why a run must not be trusted; empty if it may. `num_offered`: how many requests came due, where that
    is known otherwise."""
    if not records:
        return ("nothing was offered",)
    sent, limit_s, reasons = sending(records), lag_limit_s(terms), list[str]()
    if sent.lag_p99_s is not None and sent.lag_p99_s > limit_s:
        reasons.append(
            f"the generator was late: p99 send lag {sent.lag_p99_s * 1e3:.2f} ms, allowed {limit_s * 1e3:g} ms (the larger of 2 ms and "
            "1 % of the TTFT SLO); give it more --processes or a core of its own, or lower the rate"
        )
    if sent.due_rps is not None and sent.achieved_rps is not None:
        error = sent.achieved_rps / sent.due_rps - 1
        if abs(error) > MAX_RATE_ERROR:
            reasons.append(
                f"the offered rate was missed by {error:+.1%}: {sent.achieved_rps:.3f} instead of {sent.due_rps:.3f} requests/s "
                "(allowed 1 %)"
            )
    missing = 0 if num_offered is None else num_offered - len(records)
    if missing > 0:
        reasons.append(f"{missing} of {num_offered} offered requests left no record; was the run killed?")
    return tuple(reasons)


def why_invalid(run: RunInfo, records: Sequence[Record], terms: Terms) -> tuple[str, ...]:
    """Its own reasons; if it has none, those that its records give for promises that it was not run under."""
    return run.invalid or invalid_reasons(records, terms, run.num_offered)


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
    """To the nanosecond: 1.6 - 1.0 keeps 0.6."""
    return value is not None and value <= bound + 1e-9
