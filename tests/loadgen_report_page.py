"""Parses a report page: its references, its embedded data, and the numbers that its figures were drawn
from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

Attributes = dict[str, str]
REFERENCE_ATTRIBUTES = (
    "src",
    "href",
    "action",
    "data",
    "poster",
    "srcset",
    "background",
    "cite",
    "formaction",
    "xlink:href",
)


@dataclass
class Drawing:
    """An SVG: its attributes and the elements of each series or row."""

    svg: Attributes = field(default_factory=dict)
    groups: list[tuple[Attributes, list[tuple[str, Attributes]]]] = field(default_factory=list)


class Page(HTMLParser):
    """A parsed page. `references` are the targets of all attributes; `data` is the embedded JSON.

    `figures` has the drawings of each figure. A wide figure has two: one for wide and one for narrow screens.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.styles: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.figures: dict[str, list[Drawing]] = {}
        self.alerts = 0
        self.data: Any = None
        self._figure: list[Drawing] | None = None
        self._raw: tuple[str, Attributes] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.references += [found[name] for name in REFERENCE_ATTRIBUTES if name in found]
        self.styles += [found["style"]] if "style" in found else []
        self.scripts += [value for name, value in found.items() if name.startswith("on")]
        self.alerts += found.get("role") == "alert"
        self._raw = (tag, found) if tag in ("script", "style") else None
        if tag == "figure":
            self._figure = self.figures[found["data-figure"]] = []
        elif self._figure is not None:
            self._draw(self._figure, tag, found)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self._raw = None
        self._figure = None if tag == "figure" else self._figure

    def handle_data(self, data: str) -> None:
        if self._raw is None:
            return
        tag, attributes = self._raw
        if tag == "style":
            self.styles.append(data)
        elif attributes.get("type") == "application/json":
            self.data = json.loads(data)
        else:
            self.scripts.append(data)

    def _draw(self, figure: list[Drawing], tag: str, attributes: Attributes) -> None:
        kind = attributes.get("class", "").split()
        if tag == "svg":
            figure.append(Drawing(svg=attributes))
        elif tag == "g" and ("series" in kind or "line-row" in kind):
            figure[-1].groups.append((attributes, []))
        elif tag in ("path", "circle", "rect") and figure and figure[-1].groups:
            figure[-1].groups[-1][1].append((tag, attributes))


def points_of(figure: Drawing, number: int) -> list[tuple[float, float]]:
    """Return the numbers that a series' line or dots represent."""
    to_x, to_y = _axis_value(figure, "data-x", 0, 2), _axis_value(figure, "data-y", 3, 1)
    _, elements = figure.groups[number]
    lines = [attributes["d"] for tag, attributes in elements if tag == "path" and "line" in attributes["class"].split()]
    if lines:
        pairs = re.findall(r"([-\d.]+) ([-\d.]+)", lines[0])
    else:
        pairs = [(attributes["cx"], attributes["cy"]) for tag, attributes in elements if tag == "circle"]
    return [(to_x(float(x)), to_y(float(y))) for x, y in pairs]


def spans_of(figure: Drawing, number: int) -> list[tuple[float, float]]:
    """Return (from, to) of each bar of a row."""
    to_x = _axis_value(figure, "data-x", 0, 2)
    _, elements = figure.groups[number]
    bars = [attributes for tag, attributes in elements if tag == "rect"]
    return [(to_x(float(bar["x"])), to_x(float(bar["x"]) + float(bar["width"]))) for bar in bars]


def _axis_value(figure: Drawing, name: str, start: int, end: int) -> Any:
    """Return the function from a coordinate to the value on the axis."""
    edges = [float(edge) for edge in figure.svg["data-frame"].split()]
    low, high, kind = figure.svg[name].split()
    first, last = float(low), float(high)

    def value(coordinate: float) -> float:
        share = (coordinate - edges[start]) / (edges[end] - edges[start])
        return first * math.pow(last / first, share) if kind == "log" else first + share * (last - first)

    return value


def tolerance(axis: Mapping[str, Any], value: float) -> float:
    """Return the resolution of a coordinate with two decimals: 1/20,000 of the axis.

    On a log axis it is relative to the value.
    """
    span = math.log(axis["max"] / axis["min"]) * abs(value) if axis["is_log"] else axis["max"] - axis["min"]
    return span / 10_000 + 1e-9
