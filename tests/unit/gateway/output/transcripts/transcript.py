"""The form of golden transcripts, and arguments that many of them have."""

import json
from dataclasses import dataclass
from typing import Any

from baton.core.request import FinishReason


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A text of a model, and its message. The arguments of calls are values, or text if they are no JSON."""

    family: str
    case: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    prompt: str = ""
    special: tuple[str, ...] = ()
    reason: FinishReason = FinishReason.STOP

    def __str__(self) -> str:
        return f"{self.family}-{self.case}"


HARD = {"city": 'Zürich "HB" \\ 北京 😀\n', "where": {"at": [1, {"x": None}], "b": True}}
"""Arguments with quotes, escapes, Unicode and nesting."""
HARD_JSON = json.dumps(HARD, ensure_ascii=False)
CITY = {"city": "Oslo"}


def family(name: str, *cases: dict[str, Any], **common: Any) -> list[Transcript]:
    """Return the transcripts of a family."""
    return [Transcript(family=name, **{**common, **case}) for case in cases]
