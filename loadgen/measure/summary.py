"""Summary of a set of requests: outcomes, attainment, goodput, latencies, throughput, prefix hits.

Values are in seconds; `to_json` has milliseconds. Latency distributions cover complete responses (good and
late). A server that sheds load can make those look good, so each also has percentiles over all offered
requests, where a request without a complete response counts as infinitely slow (`of_offered`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.measure import request_metrics
from loadgen.measure.measures import SLOS, Flags, Measures
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import RequestOutcome, SendingStats
from loadgen.measure.stats import (
    Floats,
    Interval,
    mean_interval,
    percentile_interval,
    percentiles,
    ratio_interval,
    share_interval,
)

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "ttft_sent", "tpot", "itl", "tbt", "e2e", "e2e_sent", "normalised", "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """`kept` of `of` requests, with Wilson's interval for their effective number."""

    kept: int
    of: int
    interval: Interval

    @property
    def value(self) -> float:
        """The share, or NaN without requests."""
        return self.kept / self.of if self.of else math.nan

    def to_json(self) -> dict[str, Any]:
        return {
            "kept": self.kept,
            "of": self.of,
            "share": _finite(self.value),
            "low": self.interval.low,
            "high": self.interval.high,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its confidence interval."""

    value: float
    interval: Interval | None = None

    def to_json(self, scale: float = 1.0) -> dict[str, float | None]:
        low, high = (self.interval.low, self.interval.high) if self.interval else (None, None)
        return {
            key: None if number is None else _finite(number * scale)
            for key, number in (("value", self.value), ("low", low), ("high", high))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """Distribution of one metric over complete responses that have it; for `itl`, over their gaps.

    `of_offered[q]` is the q-th percentile of all offered requests, infinite if it falls on one without a
    complete response. It is empty if some complete responses lack the metric.
    """

    count: int
    mean: Estimate
    minimum: float
    maximum: float
    percentiles: Mapping[int, Estimate]
    of_offered: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "mean_ms": self.mean.to_json(1e3),
            "min_ms": self.minimum * 1e3,
            "max_ms": self.maximum * 1e3,
            **{f"p{q}_ms": estimate.to_json(1e3) for q, estimate in self.percentiles.items()},
            "of_offered": {f"p{q}_ms": _finite(value * 1e3) for q, value in self.of_offered.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Throughput per second in the steady window and in total.

    The steady window lasts from the first arrival plus a ramp of min(p90 of e2e, a quarter of the arrivals'
    time) to the last arrival. Neither the ramp nor the tail after the last arrival shows the server's
    throughput. `raw` covers everything from the first intended time to the last end. Requests are complete
    responses, counted at their last token. Output tokens are all that arrived. Prompt tokens are counted at
    the first token.
    """

    start_s: float
    end_s: float
    steady: Mapping[str, float]
    raw_s: float
    raw: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "steady": {
                "from_s": self.start_s,
                "to_s": self.end_s,
                **{key: _finite(value) for key, value in self.steady.items()},
            },
            "raw": {"seconds": self.raw_s, **{key: _finite(value) for key, value in self.raw.items()}},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHits:
    """Cached prompt tokens, over requests whose server reports them. `by_tier` counts them by where the KV
    was stored."""

    cached_tokens: int
    prompt_tokens: int
    requests: int
    by_tier: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """Cached tokens as a share of prompt tokens, or NaN."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCount:
    """Prompt tokens as planned and as counted by the server, over requests where both are known.

    They differ if prompts are sent as text, and by tokens that the server adds (a start token, a chat
    template).
    """

    planned_tokens: int
    counted_tokens: int
    requests: int

    @property
    def deviation(self) -> float:
        """Relative excess of the server's count over the plan's, or NaN."""
        return self.counted_tokens / self.planned_tokens - 1 if self.planned_tokens else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of one run or of a part of it. `outcomes` has every outcome and sums to `offered`."""

    offered: int
    outcomes: Mapping[RequestOutcome, int]
    attainment: Mapping[str, Share]
    offered_rps: float | None
    goodput_rps: Estimate | None
    sending: SendingStats
    latency: Mapping[str, MetricSummary]
    throughput: Throughput | None
    prefix: PrefixHits
    prompts: PromptCount
    tokens_per_message: float | None

    @property
    def joint(self) -> Share:
        """Share of requests that meet all bounds of their SLO."""
        return self.attainment["joint"]


def summarise(measures: Measures, *, confidence: float = 0.95, seed: int = 0) -> Summary:
    """Compute the summary with confidence intervals."""
    counts = Counter(measures.outcomes)
    attainment = attainments(measures, confidence)
    sent = request_metrics.sending(measures.records)
    offered_rps = rate(measures.columns["intended"])
    joint = attainment["joint"]
    goodput = None
    if offered_rps is not None:
        bounds = Interval(low=joint.interval.low * offered_rps, high=(joint.interval.high or 0.0) * offered_rps)
        goodput = Estimate(value=joint.value * offered_rps, interval=bounds)
    distributions = {name: distribution(measures, name, confidence=confidence, seed=seed) for name in LATENCIES}
    messages, tokens = measures.columns["messages"], measures.token_times.size
    return Summary(
        offered=len(measures),
        outcomes={outcome: counts[outcome] for outcome in RequestOutcome},
        attainment=attainment,
        offered_rps=offered_rps,
        goodput_rps=goodput,
        sending=sent,
        latency={name: one for name, one in distributions.items() if one is not None},
        throughput=throughput(measures),
        prefix=prefix_hits(measures),
        prompts=prompt_count(measures.records),
        tokens_per_message=tokens / float(np.nansum(messages)) if tokens else None,
    )


def attainments(measures: Measures, confidence: float = 0.95) -> dict[str, Share]:
    """Return the share `joint`, then that of each SLO bound that some class has.

    The denominators are all offered requests, and all offered requests with that bound.
    """
    shares = {"joint": _share(measures.good, confidence)}
    for slo in SLOS:
        if measures.has_slo[slo].any():
            shares[slo] = _share(measures.met[slo][measures.has_slo[slo]], confidence)
    return shares


def distribution(measures: Measures, metric: str, *, confidence: float = 0.95, seed: int = 0) -> MetricSummary | None:
    """Return the distribution of a metric, or None if no complete response has it."""
    if metric == "itl":
        return _gaps(measures, confidence, seed)
    values = measures.of_complete(metric)
    if values.size == 0:
        return None
    found = percentiles(values, PERCENTILES)
    return MetricSummary(
        count=values.size,
        mean=Estimate(value=float(values.mean()), interval=mean_interval(values, confidence=confidence, seed=seed)),
        minimum=float(values.min()),
        maximum=float(values.max()),
        percentiles={
            q: Estimate(value=value, interval=percentile_interval(values, q, confidence=confidence, seed=seed))
            for q, value in zip(PERCENTILES, found, strict=True)
        },
        of_offered=_of_offered(values, len(measures)) if values.size == measures.complete.sum() else {},
    )


def _gaps(measures: Measures, confidence: float, seed: int) -> MetricSummary | None:
    gaps, rows = measures.gaps, measures.gap_rows
    if gaps.size == 0:
        return None
    found = percentiles(gaps, PERCENTILES)
    sums, counts = np.bincount(rows, gaps, len(measures)), np.bincount(rows, minlength=len(measures)).astype(np.float64)
    return MetricSummary(
        count=gaps.size,
        mean=Estimate(
            value=float(gaps.mean()), interval=ratio_interval(sums, counts, confidence=confidence, seed=seed)
        ),
        minimum=float(gaps.min()),
        maximum=float(gaps.max()),
        percentiles={
            q: Estimate(
                value=value,
                interval=percentile_interval(
                    gaps, q, owners=rows, num_owners=len(measures), confidence=confidence, seed=seed
                ),
            )
            for q, value in zip(PERCENTILES, found, strict=True)
        },
        of_offered={},
    )


def _of_offered(values: Floats, offered: int) -> dict[int, float]:
    """Return percentiles over all offered requests.

    A percentile is infinite if its rank falls on a request without a complete response.
    """
    ordered = np.sort(values)
    result: dict[int, float] = {}
    for q in PERCENTILES:
        rank = q / 100 * (offered - 1)
        low, high = math.floor(rank), math.ceil(rank)
        result[q] = (
            math.inf if high >= ordered.size else float(ordered[low] + (rank - low) * (ordered[high] - ordered[low]))
        )
    return result


def rate(times: Floats) -> float | None:
    """Return (n - 1) / (last - first), or None for fewer than two times or no duration.

    It is exact for a constant rate. For a Poisson process it is too high by one part in n - 2.
    """
    if times.size < 2:
        return None
    span = float(times.max() - times.min())
    return (times.size - 1) / span if span > 0 else None


def steady_window(measures: Measures) -> tuple[float, float] | None:
    """Return the steady window, which `Throughput` defines, as (start, end) in due times of requests.

    Returns None with fewer than two requests, or if all were due at one time.
    """
    due, e2e = measures.columns["intended"], measures.of_complete("e2e")
    if due.size < 2 or due.max() <= due.min():
        return None
    first, last = float(due.min()), float(due.max())
    return first + ramp_s(e2e, last - first), last


def ramp_s(e2e: Floats, span_s: float) -> float:
    """Return the length of the ramp before the steady window.

    `e2e` are those of complete responses; the arrivals take `span_s`.
    """
    return min(float(np.percentile(e2e, 90)), span_s / 4) if e2e.size else 0.0


def throughput(measures: Measures) -> Throughput | None:
    """Return the throughput in the steady window and in total, or None without a steady window."""
    window = steady_window(measures)
    if window is None:
        return None
    columns = measures.columns
    last_token = columns["intended"] + columns["e2e"]
    first_token = columns["intended"] + columns["ttft"]
    prompts = np.nan_to_num(columns["prompt_tokens"])
    start, end = float(columns["intended"].min()), float(columns["ended"].max())

    def per_second(low: float, high: float) -> dict[str, float]:
        def inside(times: Floats) -> Flags:
            flags: Flags = (times >= low) & (times <= high)
            return flags

        seconds = max(high - low, 1e-9)
        ended = inside(last_token)
        return {
            "requests_per_s": float((ended & measures.complete).sum()) / seconds,
            "good_requests_per_s": float((ended & measures.good).sum()) / seconds,
            "output_tokens_per_s": float(inside(measures.token_times).sum()) / seconds,
            "prompt_tokens_per_s": float(prompts[inside(first_token)].sum()) / seconds,
        }

    return Throughput(
        start_s=window[0], end_s=window[1], steady=per_second(*window), raw_s=end - start, raw=per_second(start, end)
    )


def prefix_hits(measures: Measures) -> PrefixHits:
    """Return cached and total prompt tokens of the requests whose server reports both."""
    cached, prompt = measures.columns["cached_tokens"], measures.columns["prompt_tokens"]
    known = ~np.isnan(cached) & ~np.isnan(prompt)
    by_tier = Counter[str]()
    for stages in measures.stages:
        by_tier.update(stages.cached_by_tier)
    return PrefixHits(
        cached_tokens=int(cached[known].sum()),
        prompt_tokens=int(prompt[known].sum()),
        requests=int(known.sum()),
        by_tier=by_tier,
    )


def prompt_count(records: Iterable[Record]) -> PromptCount:
    """Return planned and counted prompt tokens of the requests where both are known."""
    pairs = [(record.planned_prompt_tokens, record.num_prompt_tokens) for record in records]
    known = [(planned, counted) for planned, counted in pairs if planned is not None and counted is not None]
    return PromptCount(
        planned_tokens=sum(planned for planned, _ in known),
        counted_tokens=sum(counted for _, counted in known),
        requests=len(known),
    )


def in_flight_when_due(measures: Measures) -> Floats:
    """Return for each request how many others were in flight when it was due."""
    due, ended = measures.columns["intended"], np.sort(measures.columns["ended"])
    return np.maximum(0.0, np.arange(due.size) - np.searchsorted(ended, due, side="right")).astype(np.float64)


def _share(kept: Flags, confidence: float) -> Share:
    return Share(kept=int(kept.sum()), of=int(kept.size), interval=share_interval(kept, confidence))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
