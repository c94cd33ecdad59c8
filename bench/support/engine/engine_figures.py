"""Keeps the figures of the benchmark `engine` and compares them: medians, and ratios of the same repeat."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.support.engine.engine_cells import CELLS_BY_NAME, EngineCell

Key = tuple[str, str, int]
"""Cell name, contestant's name, and number of the repeat."""
CLOSE_S = 1800.0
"""Figures that were taken further apart are not compared: machines drift."""


@dataclass(frozen=True, slots=True)
class EngineFigure:
    """One measurement: seconds or requests per second, and when it was taken."""

    value: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Times that one contestant is as fast as another, over all repeats that both have."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


class EngineFigures:
    """Figures of one model and format, with failures and the hardware limits of the same repeats."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        """`saved`: what `plain` returned, or an empty mapping."""
        self._figures = {
            (cell, name, int(number)): EngineFigure(*figure)
            for cell, names in saved.get("figures", {}).items()
            for name, by_number in names.items()
            for number, figure in by_number.items()
        }
        self.failures: dict[str, str] = dict(saved.get("failures", {}))
        self.limits: list[Mapping[str, float]] = list(saved.get("limits", []))

    def plain(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        figures: dict[str, Any] = {}
        for (cell, name, number), figure in self._figures.items():
            figures.setdefault(cell, {}).setdefault(name, {})[str(number)] = [figure.value, figure.at_s]
        return {"figures": figures, "failures": self.failures, "limits": self.limits}

    def add(self, key: Key, figure: EngineFigure) -> None:
        """Keep a figure. An earlier failure of the same cell no longer counts."""
        self._figures[key] = figure
        self.failures.pop(failure_key(key[1], key[0]), None)

    def start(self, name: str) -> None:
        """Note that a contestant has started. That it once did not no longer counts."""
        self.failures.pop(failure_key(name, ""), None)

    def fail(self, name: str, cell: str, reason: str) -> None:
        """Keep why a contestant has no figure. `cell` is empty if it did not start."""
        self.failures[failure_key(name, cell)] = reason

    def missing(self, wanted: Sequence[tuple[str, str]], repeats: int) -> list[Key]:
        """Return what is to be measured, repeat by repeat. `wanted`: cells and names of contestants."""
        keys = [(cell, name, number) for number in range(repeats) for cell, name in wanted]
        return [key for key in keys if key not in self._figures]

    @property
    def num_repeats(self) -> int:
        """Number of repeats that have a figure."""
        return len({number for _, _, number in self._figures})

    def values(self, cell: str, name: str) -> list[float]:
        """Return the figures of a cell."""
        return [figure.value for _, figure in self._of(cell, name)]

    def median(self, cell: str, name: str) -> float | None:
        """Return the median of a cell; None if it was not measured."""
        values = self.values(cell, name)
        return statistics.median(values) if values else None

    def ratio(self, cell: str, name: str, other: str) -> Ratio | None:
        """Return how many times as fast `name` is as `other`, over the repeats that both have."""
        others = dict(self._of(cell, other))
        ratios = [
            times_as_fast(CELLS_BY_NAME[cell], figure.value, others[number].value)
            for number, figure in self._of(cell, name)
            if number in others and abs(figure.at_s - others[number].at_s) <= CLOSE_S
        ]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None

    def limit(self, name: str) -> float | None:
        """Return the median of a measured hardware limit, `flops` or `bytes` a second."""
        return statistics.median(each[name] for each in self.limits) if self.limits else None

    def _of(self, cell: str, name: str) -> Iterator[tuple[int, EngineFigure]]:
        for (own_cell, own_name, number), figure in self._figures.items():
            if (own_cell, own_name) == (cell, name):
                yield number, figure


def failure_key(name: str, cell: str) -> str:
    """Return the key of a failure."""
    return f"{name}: {cell}" if cell else name


def times_as_fast(cell: EngineCell, own: float, other: float) -> float:
    """Return how many times as fast `own` is. More throughput is faster, and fewer seconds are."""
    return own / other if cell.what == "throughput" else other / own
