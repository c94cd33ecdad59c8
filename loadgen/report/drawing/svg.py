"""Draws figures (`figure`) as inline SVG.

The drawing states its frame (`data-frame`, four numbers) and the values at its edges (`data-x`, `data-y`), so
that a test can convert each coordinate back into a number. Colours are CSS classes. Text stands outside of
the frame, so that it never covers data: names of marks above it or right of it, notes of bars in a margin.

A wide figure is drawn twice, and the style sheet shows the one that fits the screen: shrunk to the width of a
phone, its text would be illegible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from loadgen.report.scales import Scale, format_value

TOP, BOTTOM = 10.0, 40.0
LEFT, RIGHT = 52.0, 16.0
ABOVE = 16.0
"""Additional space above the frame if the y axis has a name."""
LINE = 15.0
"""Height of a line of mark names."""
ROW = 22.0
GAP = 8.0
"""Least space between two texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Width of a drawing, its CSS class, and the widest likely character in its coordinates.

    A narrow drawing has larger text, because screens shrink it.
    """

    width: float
    css: str
    char: float
    max_left: float


FULL = Size(width=1140.0, css="full", char=7.4, max_left=LEFT + 230)
COMPACT = Size(width=560.0, css="compact", char=8.6, max_left=LEFT + 150)
HALF = Size(width=560.0, css="half", char=8.6, max_left=LEFT + 150)


def draw(figure: Mapping[str, Any]) -> str:
    """Return a figure's SVG; that of a wide figure for wide and for narrow screens."""
    one = _spans if figure["kind"] == "spans" else _lines
    return "".join(one(figure, size) for size in ((FULL, COMPACT) if figure["is_wide"] else (HALF,)))


def legend(figure: Mapping[str, Any]) -> str:
    """Return a figure's legend as HTML; empty for fewer than two entries."""
    names = [
        (series["name"], series["color"], series["style"])
        for number, series in enumerate(figure.get("series", ()))
        if series["key"] == number
    ]
    keys = [number for number, series in enumerate(figure.get("series", ())) if series["key"] == number]
    if figure["kind"] == "spans":
        seen = {span["name"]: span["color"] for row in figure["rows"] for span in row["spans"]}
        order = [name for name in figure["legend"] if name in seen]
        names = [(name, seen[name], "box") for name in order]
        keys = list(range(len(names)))
    if len(names) < 2:
        return ""
    items = "".join(
        f'<button type="button" class="key" data-series="{number}"><i class="{escape(color)} '
        f'{escape(style)}"></i>{escape(name)}</button>'
        for number, (name, color, style) in zip(keys, names, strict=True)
    )
    return f'<div class="legend">{items}</div>'


def _lines(figure: Mapping[str, Any], size: Size) -> str:
    x_axis, y_axis = figure["x"], figure["y"]
    on_x, on_y = _marks_of(figure, "x"), _marks_of(figure, "y")
    name_width = max((len(mark["name"]) * size.char + GAP for mark in on_y), default=0.0)
    sides = (LEFT, size.width - max(RIGHT, name_width))
    x = Scale(low=x_axis["min"], high=x_axis["max"], start=sides[0], end=sides[1], is_log=x_axis["is_log"])
    above = _above(on_x, x, size)
    extra = (ABOVE if y_axis["label"] else 0.0) + LINE * (1 + max((line for _, line in above), default=-1))
    frame = (sides[0], TOP + extra, sides[1], float(figure["height"]) + extra - BOTTOM)
    y = Scale(low=y_axis["min"], high=y_axis["max"], start=frame[3], end=frame[1], is_log=y_axis["is_log"])
    parts = [_grid(x, y, frame, x_axis, y_axis, size)]
    parts += [_mark_above(mark, x, place, line, frame) for mark, (place, line) in zip(on_x, above, strict=True)]
    parts.append(_marks_right(on_y, y, frame))
    parts.extend(_series(number, series, x, y) for number, series in enumerate(figure["series"]))
    return _svg(figure, size, frame[3] + BOTTOM, frame, x, y, parts)


def _series(number: int, series: Mapping[str, Any], x: Scale, y: Scale) -> str:
    color, style = escape(series["color"]), series["style"]
    places = [(x(point[0]), y(point[1])) for point in series["points"]]
    drawn: list[str] = []
    for low_high, (place_x, _) in zip(series.get("bars", ()), places, strict=False):
        drawn.append(f'<path class="bar" d="M{place_x:.2f} {y(low_high[0]):.2f}V{y(low_high[1]):.2f}"/>')
    if style != "dots":
        steps = style == "area"
        path = _path(places)
        if steps and places:
            base = y(y.low)
            drawn.append(
                f'<path class="fill" d="M{places[0][0]:.2f} {base:.2f}L{path[1:]}L{places[-1][0]:.2f} {base:.2f}Z"/>'
            )
        drawn.append(f'<path class="line" d="{path}"/>')
    if style in ("dots", "marked"):
        names = series.get("names", ())
        for place, (px, py) in enumerate(places):
            tip = f' data-point="{place}"' if place < len(names) else ""
            kind = series.get("classes", ())
            dot = escape(kind[place]) if place < len(kind) else ""
            drawn.append(
                f'<circle class="dot {dot}" cx="{px:.2f}" cy="{py:.2f}" r="{3.2 if style == "dots" else 4.2}"{tip}/>'
            )
    return f'<g class="series {color} {escape(style)}" data-series="{series["key"]}">{"".join(drawn)}</g>'


def _spans(figure: Mapping[str, Any], size: Size) -> str:
    rows: Sequence[Mapping[str, Any]] = figure["rows"]
    left = min(size.max_left, 24 + size.char * max((len(row["name"]) for row in rows), default=0))
    max_chars = int((left - 12) / size.char)  # characters that fit left of the frame
    notes = max((len(row.get("note", "")) for row in rows), default=0) * size.char
    thick = float(figure.get("row_height", ROW))
    frame = (left, TOP, size.width - max(RIGHT, notes + 2 * GAP if notes else 0.0), TOP + thick * len(rows))
    axis = figure["x"]
    x = Scale(low=axis["min"], high=axis["max"], start=frame[0], end=frame[2])
    parts = [_ticks_below(x, frame, axis, size)]
    order = {name: number for number, name in enumerate(name for name in figure["legend"] if _is_used(name, rows))}
    for number, row in enumerate(rows):
        top = frame[1] + number * thick
        shown = row["name"] if len(row["name"]) <= max_chars else f"{row['name'][: max_chars - 1]}…"
        place = f'x="{left - 8:.1f}" y="{top + thick / 2 + 4:.1f}" text-anchor="end" data-tip="{escape(row["name"])}"'
        name = f'<text class="row" {place}>{escape(shown)}</text>'
        bars = _bars(row, x, top, thick, order, axis["unit"])
        parts.append(f'<g class="line-row" data-row="{number}">{name}{bars}{_note(row, x, frame, top, thick)}</g>')
    return _svg(figure, size, frame[3] + BOTTOM, frame, x, None, parts)


def _bars(row: Mapping[str, Any], x: Scale, top: float, thick: float, order: Mapping[str, int], unit: str) -> str:
    drawn = []
    for span in row["spans"]:
        start, end = x(span["from"]), x(span["to"])
        tip = span.get("tip") or f"{row['name']} · {span['name']} {format_value(span['to'] - span['from'], unit)}"
        drawn.append(
            f'<rect class="{escape(span["color"])}" data-series="{order[span["name"]]}" x="{start:.2f}" '
            f'y="{top + 3:.2f}" width="{max(end - start, 0):.2f}" height="{thick - 6:.2f}" data-tip="{escape(tip)}"/>'
        )
    for mark in row.get("marks", ()):
        line = f"M{x(mark['at']):.2f} {top + 1:.2f}v{thick - 2:.2f}"
        drawn += [f'<path class="tick {escape(mark["color"])}" data-tip="{escape(mark["name"])}" d="{line}"/>']
    return "".join(drawn)


def _note(row: Mapping[str, Any], x: Scale, frame: tuple[float, ...], top: float, thick: float) -> str:
    """Return the row's note, right of its bars."""
    if not row.get("note"):
        return ""
    ends = [*(span["to"] for span in row["spans"]), *(mark["at"] for mark in row.get("marks", ()))]
    end = max(map(x, ends), default=frame[0])
    return f'<text class="note" x="{end + GAP:.1f}" y="{top + thick / 2 + 4:.1f}">{escape(row["note"])}</text>'


def _is_used(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(span["name"] == name for row in rows for span in row["spans"])


def _svg(
    figure: Mapping[str, Any],
    size: Size,
    height: float,
    frame: tuple[float, ...],
    x: Scale,
    y: Scale | None,
    parts: Sequence[str],
) -> str:
    edges = f'data-x="{x.low!r} {x.high!r} {"log" if x.is_log else "linear"}"'
    if y is not None:
        edges += f' data-y="{y.low!r} {y.high!r} {"log" if y.is_log else "linear"}"'
    return (
        f'<svg class="{size.css}" viewBox="0 0 {size.width:g} {height:g}" role="img" '
        f'aria-label="{escape(figure["title"])}" data-frame="{" ".join(f"{edge:g}" for edge in frame)}" {edges}>'
        f"{''.join(parts)}</svg>"
    )


def _grid(
    x: Scale,
    y: Scale,
    frame: tuple[float, ...],
    x_axis: Mapping[str, Any],
    y_axis: Mapping[str, Any],
    size: Size,
) -> str:
    parts = [_ticks_below(x, frame, x_axis, size)]
    for value in y.ticks(5):
        at = y(value)
        parts.append(f'<path class="grid" d="M{frame[0]:.1f} {at:.1f}H{frame[2]:.1f}"/>')
        parts.append(
            f'<text x="{frame[0] - 7:.1f}" y="{at + 4:.1f}" '
            f'text-anchor="end">{escape(format_value(value, y_axis["unit"]))}</text>'
        )
    if y_axis["label"]:
        parts.append(f'<text class="label" x="{frame[0] - 44:.1f}" y="{TOP + 5:.1f}">{escape(y_axis["label"])}</text>')
    return "".join(parts)


def _ticks_below(x: Scale, frame: tuple[float, ...], axis: Mapping[str, Any], size: Size) -> str:
    about = 9 if frame[2] - frame[0] > 700 else 6
    parts = [f'<path class="axis" d="M{frame[0]:.1f} {frame[3]:.1f}H{frame[2]:.1f}"/>']
    taken = -GAP
    for value in x.ticks(about):
        at, text = x(value), format_value(value, axis["unit"])
        parts.append(f'<path class="grid" d="M{at:.1f} {frame[1]:.1f}V{frame[3]:.1f}"/>')
        half = len(text) * size.char / 2
        if at - half >= taken + GAP:
            taken = at + half
            parts.append(f'<text x="{at:.1f}" y="{frame[3] + 16:.1f}" text-anchor="middle">{escape(text)}</text>')
    middle = (frame[0] + frame[2]) / 2
    parts.append(
        f'<text class="label" x="{middle:.1f}" y="{frame[3] + 34:.1f}" '
        f'text-anchor="middle">{escape(axis["label"])}</text>'
    )
    return "".join(parts)


def _marks_of(figure: Mapping[str, Any], on: str) -> list[Mapping[str, Any]]:
    """Return the marks of one axis that are inside of the frame, in order."""
    low, high = figure[on]["min"], figure[on]["max"]
    inside = [mark for mark in figure["marks"] if mark["axis"] == on and low <= mark["at"] <= high]
    return sorted(inside, key=lambda mark: float(mark["at"]))


def _above(marks: Sequence[Mapping[str, Any]], x: Scale, size: Size) -> list[tuple[float, int]]:
    """Return (middle of the name, line above the frame) of each mark, so that no names overlap."""
    ends: list[float] = []  # of each line, where its last name ends
    found = []
    for mark in marks:
        half = len(mark["name"]) * size.char / 2
        middle = max(half, min(x(mark["at"]), size.width - half))
        line = next((line for line, end in enumerate(ends) if middle - half >= end + GAP), len(ends))
        ends[line : line + 1] = [middle + half]
        found.append((middle, line))
    return found


def _mark_above(mark: Mapping[str, Any], x: Scale, middle: float, line: int, frame: tuple[float, ...]) -> str:
    return (
        f'<path class="mark" d="M{x(mark["at"]):.1f} {frame[1]:.1f}V{frame[3]:.1f}"/><text class="mark" '
        f'x="{middle:.1f}" y="{frame[1] - 4 - LINE * line:.1f}" text-anchor="middle">{escape(mark["name"])}</text>'
    )


def _marks_right(marks: Sequence[Mapping[str, Any]], y: Scale, frame: tuple[float, ...]) -> str:
    """Return lines at values of the y axis, with names right of the frame that do not overlap."""
    parts, free = list[str](), frame[3] + LINE
    for mark in marks:
        at = y(mark["at"])
        free = min(at + 4, free - LINE)
        parts.append(
            f'<path class="mark" d="M{frame[0]:.1f} {at:.1f}H{frame[2]:.1f}"/>'
            f'<text class="mark" x="{frame[2] + GAP / 2:.1f}" y="{free:.1f}">{escape(mark["name"])}</text>'
        )
    return "".join(parts)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px:.2f} {py:.2f}" for px, py in places) if places else ""
