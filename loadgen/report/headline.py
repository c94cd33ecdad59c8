"""Writes the sentence that opens a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.report.scales import format_percent

Run = Mapping[str, Any]

PREFIXES = {"invalid": "Invalid run: ", "warm": "Warm cache: ", "valid": ""}
LEAST = 0.005
"""Smallest share of requests that the sentence mentions."""
PLACES = {
    "send lag": "in the load generator",
    "queue": "in the queue",
    "other, to the first token": "outside the workers",
    "exposed transfer": "in the exposed transfer",
    "first decode step": "in the first decode step",
    "waiting at the scheduler": "waiting at the scheduler",
}
"""Phrases for the stages of the critical path; others are `in STAGE`."""
ENDS = {
    "rejected_early": "rejected",
    "rejected_late": "rejected",
    "timed_out": "timed out",
    "cancelled": "were cancelled",
    "failed": "failed",
    "truncated": "were cut short",
}


def headline(runs: Sequence[Run]) -> str:
    """Return the sentence for one run or several."""
    return _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)


def _of_one(run: Run) -> str:
    num_offered, parts = run["offered"], list[str]()
    for miss in run["misses"]:
        if miss["share"] >= LEAST:
            where = f", mostly {place(miss['stage'])}" if miss["stage"] else ""
            parts.append(f"{_percent(miss['share'])} missed {miss['slo'].upper()}{where}")
    ended: dict[str, int] = {}
    for outcome, count in run["outcomes"].items():
        if outcome in ENDS:
            ended[ENDS[outcome]] = ended.get(ENDS[outcome], 0) + count
    for words, count in sorted(ended.items(), key=lambda item: -item[1]):
        if count >= LEAST * num_offered and count:
            were = "were " if words == "rejected" else ""
            parts.append(f"{_percent(count / num_offered)} {were}{words}")
    share = run["attainment"]["joint"]["share"]
    met = "met the SLO" if has_slo(run) else "completed; no SLO was set"
    sentence = "; ".join(
        [f"{_percent(share)} of {num_offered:,} request{'' if num_offered == 1 else 's'} {met}", *parts]
    )
    prefix = PREFIXES[run["verdict"]]
    return f"{prefix}{sentence}."


def _of_several(runs: Sequence[Run]) -> str:
    shares = sorted(runs, key=lambda run: run["attainment"]["joint"]["share"] or 0.0)
    low, high = shares[0], shares[-1]
    what = "SLO attainment" if all(map(has_slo, runs)) else "The share of good responses"
    first, last = (_percent(run["attainment"]["joint"]["share"]) for run in (low, high))
    if first == last:
        sentence = f"{what} is {first} in all {len(runs)} runs"
    else:
        sentence = f"{what} is between {first} ({low['name']}) and {last} ({high['name']}) in {len(runs)} runs"
    counts = [
        (sum(run["verdict"] == verdict for run in runs), words)
        for verdict, words in (("invalid", "invalid"), ("warm", "measured with a warm cache"))
    ]
    doubts = [f"{count} {'is' if count == 1 else 'are'} {words}" for count, words in counts if count]
    return "; ".join([sentence, *doubts]) + "."


def place(stage: str) -> str:
    """Return where a stage is, as a phrase."""
    return PLACES.get(stage, f"in {stage}")


def has_slo(run: Run) -> bool:
    """True if some class of the run has an SLO bound."""
    return any(run["slos"].values())


def _percent(share: float | None) -> str:
    """Return a percentage with a decimal near 0 and 100 %, and without one in between."""
    digits = 1 if share is not None and (share < 0.1 or share > 0.9) else 0
    return format_percent(share, digits).replace(".0 %", " %")
