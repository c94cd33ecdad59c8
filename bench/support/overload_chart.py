"""Draws the utilisation of prefill and decode workers under overload as one SVG, with one panel per mode."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, HIGH, HEAD, FOOT = 860, 54, 16, 130, 30, 26
TOP_SHARE = 1.5
"""Top of the scale. Without admission, decode workers far exceed the batch that their TPOT SLO allows."""
COLORS = {"prefill": "#2f6fdf", "decode": "#c2551f"}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600}.a{fill:#666}.g{stroke:#ddd}"
    ".e{stroke:#888;stroke-dasharray:4 3}"
    "polyline{fill:none;stroke-width:1.8}"
)

Points = Sequence[tuple[float, float]]


def picture(panels: Mapping[str, Mapping[str, Points]], lasts_s: float) -> str:
    """Return the SVG.

    `panels`: by title and worker role, points of (seconds since the start of the load, utilisation). Values
    are cut off at `TOP_SHARE`. `lasts_s` is the length of the load.
    """
    parts: list[str] = []
    y = 4.0
    for title, sides in panels.items():
        parts += _panel(title, sides, lasts_s, y)
        y += HEAD + HIGH + FOOT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" height="{y:.0f}">'
    return "\n".join(
        (head, f"<style>{STYLE}</style>", f'<rect width="{WIDTH}" height="{y:.0f}" fill="#fff"/>', *parts, "</svg>", "")
    )


def _panel(title: str, sides: Mapping[str, Points], lasts_s: float, y: float) -> list[str]:
    bottom = y + HEAD + HIGH

    def place(at_s: float, share: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * at_s / lasts_s
        return f"{x:.1f},{bottom - HIGH * min(share, TOP_SHARE) / TOP_SHARE:.1f}"

    parts = [f'<text class="t" x="8" y="{y + 18:.0f}">{escape(title)}</text>']
    for number, (name, color) in enumerate(COLORS.items()):
        parts.append(
            f'<text x="{WIDTH - RIGHT - 70 * (2 - number)}" y="{y + 18:.0f}" style="fill:{color}">{name}</text>'
        )
    for share in (0.0, 0.5, 1.0, 1.5):
        level = bottom - HIGH * share / TOP_SHARE
        kind = "e" if share == 1.0 else "g"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text class="a" x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for at_s in range(0, int(lasts_s) + 1, 10):
        x = place(at_s, 0).partition(",")[0]
        parts.append(f'<text class="a" x="{x}" y="{bottom + 16:.0f}" text-anchor="middle">{at_s} s</text>')
    for name, points in sides.items():
        joined = " ".join(place(at_s, share) for at_s, share in points)
        parts.append(f'<polyline points="{joined}" stroke="{COLORS[name]}"/>')
    return parts
