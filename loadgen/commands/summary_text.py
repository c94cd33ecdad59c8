"""Terminal summary of `loadgen run`. The last line lists the outcomes, which sum to the offered requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from loadgen.measure import request_metrics
from loadgen.measure.records import Record
from loadgen.measure.remedies import remedies
from loadgen.measure.request_metrics import OutcomeRules, RequestOutcome, SendingStats
from loadgen.measure.stats import percentiles
from loadgen.measure.summary import prompt_count, rate
from loadgen.plan.drawn_rate import offered_text
from loadgen.plan.plan import Plan
from loadgen.send.run.run_plan import FinishedRun, outcome_line


def summary_lines(finished: FinishedRun, plan: Plan, out: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary as (text, colour or "")."""
    run, records, rules = finished.run, finished.records, finished.rules
    yield _plan_line(finished, plan), ""
    sent = request_metrics.sending(records)
    lag_limit_s = request_metrics.lag_limit_s(rules)
    if sent.lag_p99_s is not None:
        yield _sending_line(sent, lag_limit_s), ""
        yield f"priority    {run.machine.get('priority') or 'normal'}", ""
    for line in _latency_lines(records, rules):
        yield line, ""
    if records:
        yield _attainment_line(finished), ""
    deviation = prompt_count(records).deviation
    if deviation and not math.isnan(deviation):
        than = "more" if deviation > 0 else "fewer"
        yield (
            f"prompts     the server counted {abs(deviation):.1%} {than} tokens than planned",
            "yellow" if abs(deviation) > 0.02 else "",
        )
    for error, count in _errors(records):
        yield f"error       {count} × {error}", "yellow"
    if finished.cache.text:
        yield f"cache       {finished.cache.text}", "yellow" if finished.cache.is_warm else ""
    for note in finished.notes:
        yield f"note        {note}", "yellow"
    yield f"result      {out}    loadgen report {out}", ""
    if run.interrupted:
        yield f"INTERRUPTED after {run.duration_s:.1f} s: {run.num_offered} of the plan's requests were due", "red"
    for reason in run.invalid:
        yield f"INVALID     {reason}", "red"
    for remedy in remedies(run, records, rules):
        yield f"change      {remedy}", "yellow"
    yield (
        outcome_line(finished.outcomes, run.num_offered, is_valid=not run.invalid),
        "red" if run.invalid else "",
    )


def _plan_line(finished: FinishedRun, plan: Plan) -> str:
    offered = offered_text(plan, "planned" if finished.run.interrupted else "offered")
    repeats = "" if finished.run.flags.get("plan") else f"; the same options with --seed {plan.seed} repeat it"
    return f"plan        {plan.name}: {offered or f'{len(plan.requests):,} requests'}{repeats}"


def _sending_line(sent: SendingStats, lag_limit_s: float) -> str:
    rates = ""
    if sent.due_rps is not None and sent.achieved_rps is not None:
        rates = f"due {sent.due_rps:.2f} requests/s, achieved {sent.achieved_rps:.2f}; "
    lags = f"p50 {_ms(sent.lag_p50_s)}, p99 {_ms(sent.lag_p99_s)}, max {_ms(sent.lag_max_s)}"
    return f"sending     {rates}send lag {lags} (p99 limit {lag_limit_s * 1e3:g} ms)"


def _latency_lines(records: Sequence[Record], rules: OutcomeRules) -> Iterator[str]:
    complete = [record for record in records if request_metrics.is_complete_response(record, rules)]
    for name, metric in (
        ("ttft", request_metrics.ttft_s),
        ("tpot", request_metrics.tpot_s),
        ("e2e", request_metrics.e2e_s),
    ):
        values = [value for record in complete if (value := metric(record)) is not None]
        if values:
            p50, p90, p99 = percentiles(values, (50, 90, 99))
            yield (
                f"{name:<10}  p50 {_ms(p50)}  p90 {_ms(p90)}  p99 {_ms(p99)}  of {len(values)} complete "
                "responses, from the intended send time"
            )


def _attainment_line(finished: FinishedRun) -> str:
    rules, num_offered = finished.rules, finished.run.num_offered
    good = finished.outcomes[RequestOutcome.GOOD]
    slo_text = "; ".join(
        f"{name} {slo}" if len(rules.slos) > 1 else str(slo) for name, slo in rules.slos.items() if str(slo)
    )
    offered_rps = rate(np.array([record.intended_s for record in finished.records]))
    goodput = f", goodput {offered_rps * good / num_offered:.2f} requests/s" if offered_rps and num_offered else ""
    return (
        f"attainment  {good / max(1, num_offered):.1%}{goodput} "
        f"({slo_text or 'no SLO: every complete response counts'})"
    )


def _errors(records: Sequence[Record]) -> list[tuple[str, int]]:
    errors = Counter(record.error for record in records if record.error and not record.left_early)
    return errors.most_common(3)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
