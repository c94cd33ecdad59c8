"""Builds figures as plain data, used both in `report.json` and for the drawing in `svg`.

A figure is {"id", "title", "caption", "kind", "is_wide", …}:

    "lines"   x and y axes, `series` of {name, color, style, points [[x, y], …]}, `marks` of {axis, at, name}
    "spans"   an x axis, `rows` of {name, spans of {name, color, from, to}}: stacked bars

`key` is the number of the legend entry of a series; series without their own entry share another's. A style
is line, dashed, area, marked (a line with dots) or dots. A color is a CSS class of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.measure.stats import Floats
from loadgen.report.scales import extent

Figure = dict[str, Any]
POINTS = 240


def axis(
    label: str, unit: str, values: Sequence[float], *, is_log: bool = False, from_zero: bool = False, **fixed: float
) -> dict[str, Any]:
    """Return an axis that contains all `values`; `min` and `max` may be given."""
    low, high = extent(values, is_log=is_log, from_zero=from_zero)
    return {"label": label, "unit": unit, "is_log": is_log, "min": fixed.get("min", low), "max": fixed.get("max", high)}


def cdf(values: Floats, total: int, *, low: float = 0.0, high: float = math.inf) -> list[list[float]]:
    """Return [[x, share of `total` at or below x], …] at a few hundred of the values.

    Points are limited to low < x <= high; `low` is above 0 for a log axis.
    """
    ordered = np.sort(values[np.isfinite(values)])
    if ordered.size == 0 or total == 0:
        return []
    ranks = np.unique(
        np.concatenate(
            (np.linspace(0, ordered.size - 1, POINTS).astype(int), np.arange(max(0, ordered.size - 40), ordered.size))
        )
    )
    points = [[float(ordered[rank]), (int(rank) + 1) / total] for rank in ranks]
    return [point for point in points if low < point[0] <= high]


def used(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the series that have points."""
    return [one for one in series if one["points"]]


def series_of(name: str, color: str, style: str, points: list[list[float]], **more: Any) -> dict[str, Any]:
    """Return a series. `more` may have `key`, `bars` [[low, high], …], and `names` and `classes` of each
    point."""
    return {"name": name, "color": color, "style": style, "points": points, **more}


def lines(
    figure_id: str,
    title: str,
    caption: str,
    x: dict[str, Any],
    y: dict[str, Any],
    series: list[dict[str, Any]],
    *,
    marks: list[dict[str, Any]] | None = None,
    is_wide: bool = False,
    height: int = 300,
) -> Figure:
    """Return a figure of lines. Series without points are left out."""
    shown = used(series)
    for number, one in enumerate(shown):
        one.setdefault("key", number)
    return {
        "id": figure_id,
        "title": title,
        "caption": caption,
        "kind": "lines",
        "is_wide": is_wide,
        "height": height,
        "x": x,
        "y": y,
        "series": shown,
        "marks": marks or [],
    }


def spans(
    figure_id: str,
    title: str,
    caption: str,
    x: dict[str, Any],
    rows: list[dict[str, Any]],
    legend: list[str],
    *,
    row_height: int = 26,
    is_wide: bool = False,
) -> Figure:
    """Return a figure of stacked bars."""
    return {
        "id": figure_id,
        "title": title,
        "caption": caption,
        "kind": "spans",
        "is_wide": is_wide,
        "row_height": row_height,
        "x": x,
        "rows": rows,
        "legend": legend,
    }
