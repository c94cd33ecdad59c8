"""What a set of requests came to: classes, attainment, goodput, distributions, throughput, prefix hits.
Seconds; `to_json`: milliseconds.

Distributions are of whole answers (good and late), with the number of them beside: a server that sheds load
can make those look fine, so each also says what the offered requests would say if one without a whole answer
had waited for ever (`of_offered`).
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
from loadgen.measure.request_metrics import RequestOutcome, Sending
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
    """`kept` of `of` requests, with Wilson's interval on their effective number. NaN of none."""

    kept: int
    of: int
    interval: Interval

    @property
    def value(self) -> float:
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
    """A number and how sure it is."""

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
    """One metric over the whole answers that have it; `itl` over their gaps. `of_offered[q]`: the q-th
    percentile of all offered requests, one without a whole answer counting as infinitely slow, inf where that
    is what it says; absent where some whole answers lack the metric."""

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
    """Per second. `steady` counts what happened from `start_s` to `end_s`: the arrivals' own time less its
    beginning, in which the first requests were still being worked on: min(p90 of e2e, a quarter). Neither
    that ramp nor the tail after the last arrival is the server's throughput. `raw` is everything over
    everything: from the first intended time to the last end. Requests: whole answers, by their last token;
    output tokens: all that arrived, of any request; prompt tokens: by the first token."""

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
    """Of the requests whose server told both numbers: the prompt tokens it had cached. `by_tier`: where their
    KV lay, of those whose server told that, too."""

    cached_tokens: int
    prompt_tokens: int
    requests: int
    by_tier: Mapping[str, int]

    @property
    def ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCount:
    """Of the requests whose server counted the prompt and whose plan knows it: what each says. They differ
    where prompts are sent as text, and by what a server adds itself (a start token, a chat template)."""

    planned_tokens: int
    counted_tokens: int
    requests: int

    @property
    def deviation(self) -> float:
        """How many more tokens the server counts than were planned, as a share of those; NaN of none."""
        return self.counted_tokens / self.planned_tokens - 1 if self.planned_tokens else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of one run, or of a part of it. `outcomes` has every class and sums to `offered`."""

    offered: int
    outcomes: Mapping[RequestOutcome, int]
    attainment: Mapping[str, Share]
    offered_rps: float | None
    goodput_rps: Estimate | None
    sending: Sending
    latency: Mapping[str, MetricSummary]
    throughput: Throughput | None
    prefix: PrefixHits
    prompts: PromptCount
    tokens_per_message: float | None

    @property
    def joint(self) -> Share:
        return self.attainment["joint"]


def summarise(measures: Measures, *, confidence: float = 0.95, seed: int = 0) -> Summary:
    """Everything, with intervals."""
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
    """`joint`, then each SLO that some class promises. Denominator: all offered requests, or those that were
    promised it."""
    shares = {"joint": _share(measures.good, confidence)}
    for slo in SLOS:
        if measures.promised[slo].any():
            shares[slo] = _share(measures.kept[slo][measures.promised[slo]], confidence)
    return shares


def distribution(measures: Measures, metric: str, *, confidence: float = 0.95, seed: int = 0) -> MetricSummary | None:
    """None if no whole answer has that metric."""
    if metric == "itl":
        return _gaps(measures, confidence, seed)
    values = measures.of_whole(metric)
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
        of_offered=_of_offered(values, len(measures)) if values.size == measures.whole.sum() else {},
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
    """Linear interpolation as always; inf as soon as one of the two ranks is a request without a whole
    answer."""
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
    """(n - 1) / (last - first): exact for a constant rate, too high by one part in n - 2 for a Poisson
    process. None for fewer than two or no length."""
    if times.size < 2:
        return None
    span = float(times.max() - times.min())
    return (times.size - 1) / span if span > 0 else None


def steady_window(measures: Measures) -> tuple[float, float] | None:
    """As `Throughput` says. None if all came at once."""
    due, e2e = measures.columns["intended"], measures.of_whole("e2e")
    if due.size < 2 or due.max() <= due.min():
        return None
    first, last = float(due.min()), float(due.max())
    return first + ramp_s(e2e, last - first), last


def ramp_s(e2e: Floats, span_s: float) -> float:
    """How long the steady window's beginning is after the first of arrivals that take `span_s`, by the e2e of
    whole answers."""
    return min(float(np.percentile(e2e, 90)), span_s / 4) if e2e.size else 0.0


def throughput(measures: Measures) -> Throughput | None:
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
            "requests_per_s": float((ended & measures.whole).sum()) / seconds,
            "good_requests_per_s": float((ended & measures.good).sum()) / seconds,
            "output_tokens_per_s": float(inside(measures.token_times).sum()) / seconds,
            "prompt_tokens_per_s": float(prompts[inside(first_token)].sum()) / seconds,
        }

    return Throughput(
        start_s=window[0], end_s=window[1], steady=per_second(*window), raw_s=end - start, raw=per_second(start, end)
    )


def prefix_hits(measures: Measures) -> PrefixHits:
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
    pairs = [(record.planned_prompt_tokens, record.num_prompt_tokens) for record in records]
    known = [(planned, counted) for planned, counted in pairs if planned is not None and counted is not None]
    return PromptCount(
        planned_tokens=sum(planned for planned, _ in known),
        counted_tokens=sum(counted for _, counted in known),
        requests=len(known),
    )


def in_flight_when_due(measures: Measures) -> Floats:
    """For each request, how many others had come due and not ended when it came due."""
    due, ended = measures.columns["intended"], np.sort(measures.columns["ended"])
    return np.maximum(0.0, np.arange(due.size) - np.searchsorted(ended, due, side="right")).astype(np.float64)


def _share(kept: Flags, confidence: float) -> Share:
    return Share(kept=int(kept.sum()), of=int(kept.size), interval=share_interval(kept, confidence))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
