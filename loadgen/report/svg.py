"""Draws figures (`figure`) as inline SVG.

The drawing states its frame (`data-frame`, four numbers) and the values at its edges (`data-x`, `data-y`), so
that a test can convert each coordinate back into a number. Colours are CSS classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from loadgen.report.scales import Scale, format_value

LEFT, RIGHT, TOP, BOTTOM = 52.0, 16.0, 10.0, 40.0
ABOVE = 16.0
"""Additional space above the frame if the y axis has a name."""
ROW = 22.0


def draw(figure: Mapping[str, Any]) -> str:
    """Return a figure's SVG."""
    return _spans(figure) if figure["kind"] == "spans" else _lines(figure)


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


def _lines(figure: Mapping[str, Any]) -> str:
    width, height = (1140.0 if figure["is_wide"] else 560.0), float(figure["height"])
    x_axis, y_axis = figure["x"], figure["y"]
    frame = (LEFT, TOP + (ABOVE if y_axis["label"] else 0.0), width - RIGHT, height - BOTTOM)
    x = Scale(low=x_axis["min"], high=x_axis["max"], start=frame[0], end=frame[2], is_log=x_axis["is_log"])
    y = Scale(low=y_axis["min"], high=y_axis["max"], start=frame[3], end=frame[1], is_log=y_axis["is_log"])
    parts = [_grid(x, y, frame, x_axis, y_axis)]
    parts.extend(_mark(mark, x, y, frame) for mark in figure["marks"])
    parts.extend(_series(number, series, x, y) for number, series in enumerate(figure["series"]))
    return _svg(figure, width, height, frame, x, y, parts)


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
            tip = f' data-tip="{escape(names[place])}"' if place < len(names) else ""
            kind = series.get("classes", ())
            dot = escape(kind[place]) if place < len(kind) else ""
            drawn.append(
                f'<circle class="dot {dot}" cx="{px:.2f}" cy="{py:.2f}" r="{3.2 if style == "dots" else 4.2}"{tip}/>'
            )
    return f'<g class="series {color} {escape(style)}" data-series="{series["key"]}">{"".join(drawn)}</g>'


def _spans(figure: Mapping[str, Any]) -> str:
    width = 1140.0 if figure["is_wide"] else 560.0
    rows: Sequence[Mapping[str, Any]] = figure["rows"]
    left = min(LEFT + 190, 24 + 6.6 * max((len(row["name"]) for row in rows), default=0))
    max_chars = int((left - 12) / 6.2)  # characters that fit left of the frame
    thick = float(figure.get("row_height", ROW))
    height = TOP + thick * len(rows) + BOTTOM
    frame = (left, TOP, width - RIGHT, height - BOTTOM)
    axis = figure["x"]
    x = Scale(low=axis["min"], high=axis["max"], start=frame[0], end=frame[2])
    parts = [_ticks_below(x, frame, axis)]
    order = {name: number for number, name in enumerate(name for name in figure["legend"] if _is_used(name, rows))}
    for number, row in enumerate(rows):
        top = frame[1] + number * thick
        drawn = []
        for span in row["spans"]:
            start, end = x(span["from"]), x(span["to"])
            tip = (
                span.get("tip")
                or f"{row['name']} · {span['name']} {format_value(span['to'] - span['from'], axis['unit'])}"
            )
            drawn.append(
                f'<rect class="{escape(span["color"])}" data-series="{order[span["name"]]}" x="{start:.2f}" '
                f'y="{top + 3:.2f}" '
                f'width="{max(end - start, 0):.2f}" height="{thick - 6:.2f}" data-tip="{escape(tip)}"/>'
            )
        for mark in row.get("marks", ()):
            line = f"M{x(mark['at']):.2f} {top + 1:.2f}v{thick - 2:.2f}"
            drawn += [f'<path class="tick {escape(mark["color"])}" data-tip="{escape(mark["name"])}" d="{line}"/>']
        if row.get("note"):
            ends = [*(span["to"] for span in row["spans"]), *(mark["at"] for mark in row.get("marks", ()))]
            end = max(map(x, ends), default=frame[0])
            is_inside = end + 6.4 * len(row["note"]) + 8 > frame[2]
            side = f'x="{frame[2] - 2:.1f}" text-anchor="end"' if is_inside else f'x="{end + 6:.1f}"'
            drawn.append(f'<text class="note" {side} y="{top + thick / 2 + 4:.1f}">{escape(row["note"])}</text>')
        place = f'x="{left - 8:.1f}" y="{top + thick / 2 + 4:.1f}" text-anchor="end" data-tip="{escape(row["name"])}"'
        shown = row["name"] if len(row["name"]) <= max_chars else f"{row['name'][: max_chars - 1]}…"
        name = f'<text class="row {escape(row.get("color", ""))}" {place}>{escape(shown)}</text>'
        parts.append(f'<g class="line-row" data-row="{number}">{name}{"".join(drawn)}</g>')
    return _svg(figure, width, height, frame, x, None, parts)


def _is_used(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(span["name"] == name for row in rows for span in row["spans"])


def _svg(
    figure: Mapping[str, Any],
    width: float,
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
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(figure["title"])}" '
        f'data-frame="{" ".join(f"{edge:g}" for edge in frame)}" {edges}>{"".join(parts)}</svg>'
    )


def _grid(x: Scale, y: Scale, frame: tuple[float, ...], x_axis: Mapping[str, Any], y_axis: Mapping[str, Any]) -> str:
    parts = [_ticks_below(x, frame, x_axis)]
    for value in y.ticks(5):
        at = y(value)
        parts.append(f'<path class="grid" d="M{frame[0]:.1f} {at:.1f}H{frame[2]:.1f}"/>')
        parts.append(
            f'<text x="{frame[0] - 7:.1f}" y="{at + 4:.1f}" '
            f'text-anchor="end">{escape(format_value(value, y_axis["unit"]))}</text>'
        )
    if y_axis["label"]:
        parts.append(
            f'<text class="label" x="{frame[0] - 44:.1f}" y="{frame[1] - 11:.1f}">{escape(y_axis["label"])}</text>'
        )
    return "".join(parts)


def _ticks_below(x: Scale, frame: tuple[float, ...], axis: Mapping[str, Any]) -> str:
    about = 9 if frame[2] - frame[0] > 700 else 6
    parts = [f'<path class="axis" d="M{frame[0]:.1f} {frame[3]:.1f}H{frame[2]:.1f}"/>']
    for value in x.ticks(about):
        at = x(value)
        parts.append(f'<path class="grid" d="M{at:.1f} {frame[1]:.1f}V{frame[3]:.1f}"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{frame[3] + 16:.1f}" '
            f'text-anchor="middle">{escape(format_value(value, axis["unit"]))}</text>'
        )
    middle = (frame[0] + frame[2]) / 2
    parts.append(
        f'<text class="label" x="{middle:.1f}" y="{frame[3] + 33:.1f}" '
        f'text-anchor="middle">{escape(axis["label"])}</text>'
    )
    return "".join(parts)


def _mark(mark: Mapping[str, Any], x: Scale, y: Scale, frame: tuple[float, ...]) -> str:
    """Return a labelled line at a value of one axis; empty if it is outside of the frame."""
    if mark["axis"] == "x":
        if not x.low <= mark["at"] <= x.high:
            return ""
        at = x(mark["at"])
        is_right = at > frame[2] - 90
        side = f'x="{at - 5:.1f}" text-anchor="end"' if is_right else f'x="{at + 5:.1f}"'
        line, text = (
            f"M{at:.1f} {frame[1]:.1f}V{frame[3]:.1f}",
            f'{side} y="{frame[3] - 8 - 14 * mark.get("level", 0):.1f}"',
        )
    else:
        if not y.low <= mark["at"] <= y.high:
            return ""
        at = y(mark["at"])
        line, text = f"M{frame[0]:.1f} {at:.1f}H{frame[2]:.1f}", f'x="{frame[0] + 6:.1f}" y="{at - 5:.1f}"'
    return f'<path class="mark" d="{line}"/><text class="mark" {text}>{escape(mark["name"])}</text>'


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px:.2f} {py:.2f}" for px, py in places) if places else ""
