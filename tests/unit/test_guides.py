"""The guides name what the code offers."""

import re
from pathlib import Path

from baton.gateway.output.builtin_formats import REASONING_FORMATS, TOOL_FORMATS

TOOLS_GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "tools-and-reasoning.md"


def test_guide_names_every_parser() -> None:
    rows = [line.split(" | ")[0] for line in TOOLS_GUIDE.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    names = {*TOOL_FORMATS, *REASONING_FORMATS} - {"none"}
    assert not names - named
