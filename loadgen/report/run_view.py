"""One run with everything that its report needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.measure.measures import Measures
from loadgen.measure.prefix_hits import CacheVerdict
from loadgen.measure.records_file import Result
from loadgen.measure.request_metrics import OutcomeRules, why_invalid
from loadgen.measure.summary import Summary, summarise
from loadgen.slo_target import SloTarget

SERIES_COLORS = 8
SHADES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run prepared for a report.

    - `name`: unique among the report's runs
    - `color`: CSS classes of its curves
    - `best_hits`: best possible prefix hit ratios by cache name
    - `cache`: whether the prefix cache was warm when the run began
    - `offered_text`: how the number of requests follows from the plan's rate; may be empty
    - `invalid`: the run's own reasons, or those that its records give under these SLOs
    """

    name: str
    number: int
    color: str
    result: Result
    rules: OutcomeRules
    measures: Measures
    summary: Summary
    invalid: tuple[str, ...] = ()
    best_hits: Mapping[str, float] = field(default_factory=dict)
    cache: CacheVerdict = field(default_factory=CacheVerdict)
    offered_text: str = ""
    notes: tuple[str, ...] = ()
    workers: int | None = None

    @property
    def verdict(self) -> str:
        """`invalid`, `warm` (a warm cache makes the numbers too good) or `valid`."""
        return "invalid" if self.invalid else "warm" if self.cache.is_warm else "valid"

    @property
    def label(self) -> str:
        """The system's name. Runs with one label are points of one line."""
        return label_of(self.result)


def view(
    result: Result,
    *,
    number: int = 0,
    color: str = "c0",
    name: str = "",
    slos: Mapping[str, SloTarget] | None = None,
    best_hits: Mapping[str, float] | None = None,
    cache: CacheVerdict | None = None,
    offered_text: str = "",
    workers: int | None = None,
) -> RunView:
    """Prepare a run for a report. `slos` and `workers` replace the run's own."""
    run = result.run
    rules = OutcomeRules(slos=slos if slos is not None else run.slos, ignore_eos=run.ignore_eos)
    measures = Measures.of(result.records, rules)
    return RunView(
        name=name or result.name,
        number=number,
        color=color,
        result=result,
        rules=rules,
        measures=measures,
        summary=summarise(measures),
        invalid=why_invalid(run, result.records, rules),
        best_hits=best_hits or {},
        cache=cache or CacheVerdict(),
        offered_text=offered_text,
        notes=result.notes,
        workers=workers or _workers(result, measures),
    )


def _workers(result: Result, measures: Measures) -> int | None:
    """Return the number of workers as recorded in the run, or as counted in the timelines."""
    known: Any = result.run.server.get("gpus") or result.run.server.get("workers")
    if isinstance(known, int | list):
        return (known if isinstance(known, int) else len(known)) or None
    return (
        len(
            {worker for stages in measures.stages for worker in (stages.prefill_worker, stages.decode_worker) if worker}
        )
        or None
    )


def label_of(result: Result) -> str:
    """Return the system's name: the run's label, or model and address."""
    run = result.run
    return str(run.flags.get("label") or "") or f"{run.model} at {run.url}"


def colors(results: Sequence[Result]) -> list[str]:
    """Return CSS classes for each run.

    Each run has its own colour. With too many runs, or several labels at several rates, each label has a
    colour and each run a shade of it.
    """
    labels = [label_of(result) for result in results]
    kinds = list(dict.fromkeys(labels))
    if len(results) <= SERIES_COLORS and len(kinds) in (1, len(results)):
        return [f"c{number}" for number in range(len(results))]
    found = []
    for number, label in enumerate(labels):
        members = [other for other, name in enumerate(labels) if name == label]
        shade = SHADES - 1 - (len(members) - 1 - members.index(number)) * (SHADES - 1) // max(len(members) - 1, 1)
        found.append(f"c{kinds.index(label) % SERIES_COLORS} k{shade}")
    return found


def unique_names(results: Sequence[Result]) -> list[str]:
    """Return a unique name for each run.

    It is the label or directory, both if labels repeat, and a number if even that repeats.
    """
    plain = Counter(result.name for result in results)
    seen: Counter[str] = Counter()
    found: list[str] = []
    for result in results:
        directory = result.path.resolve().name
        name = result.name if plain[result.name] == 1 or result.name == directory else f"{result.name} · {directory}"
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
