"""Draws grouped bars as one self-contained SVG. A bar shows the median, a dot each round."""

import statistics
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, BAR, GAP, HEAD, FOOT = 860, 150, 70, 16, 30, 20, 34
COLORS = ("#2f6fdf", "#6ea0f2", "#a9c6f7", "#c2551f", "#e9a47e", "#8a3a12")
STYLE = "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600}.a{fill:#666}circle{fill:#111;opacity:.6}"


def picture(groups: Mapping[str, Sequence[tuple[str, Sequence[float]]]]) -> str:
    """Return the SVG.

    `groups`: by title, the bars as (name, rate of each round). Every group has its own scale, starting at
    zero.
    """
    parts: list[str] = []
    y = 8
    for title, bars in groups.items():
        most = max((max(rates) for _, rates in bars if rates), default=0.0) or 1.0
        y += HEAD
        parts.append(f'<text class="t" x="8" y="{y}">{escape(title)}: requests per second at 90 % attainment</text>')
        y += 8
        for (name, rates), color in zip(bars, COLORS, strict=False):
            parts += _bar(name, rates, color, most, y)
            y += BAR + 4
        y += GAP - HEAD
    height = y + FOOT - 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join(
        (
            head,
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>",
            "",
        )
    )


def _bar(name: str, rates: Sequence[float], color: str, most: float, y: int) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / most
    parts = [f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>']
    if not rates:
        return [*parts, f'<text class="a" x="{LEFT + 4}" y="{y + 12}">no figure</text>']
    middle = statistics.median(rates)
    parts.append(f'<rect x="{LEFT}" y="{y}" width="{middle * scale:.1f}" height="{BAR}" fill="{color}"/>')
    parts += [f'<circle cx="{LEFT + rate * scale:.1f}" cy="{y + BAR / 2}" r="2.5"/>' for rate in rates]
    parts.append(
        f'<text x="{LEFT + max(rates) * scale + 6:.1f}" y="{y + 12}">{f"{middle:.3g}" if middle else "none"}</text>'
    )
    return parts
