"""The promise that a request is held against: `ttft=500ms,tpot=50ms`, written the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadgen.loadgen_errors import LoadgenError

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TERM = re.compile(r"(ttft|tpot|e2e)\s*=\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)")


class BadSlo(LoadgenError):
    """An SLO that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """Upper bounds in seconds; None: nothing is promised. An empty one is kept by every answer that is
    whole."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> SloTarget:
        """`"ttft=500ms,tpot=50ms"`. Raises BadSlo."""
        values: dict[str, float] = {}
        for term in filter(None, (part.strip() for part in text.split(","))):
            match = _TERM.fullmatch(term)
            if match is None:
                raise BadSlo(f"`{term}` is no SLO: write ttft=500ms, tpot=50ms or e2e=10s, separated by commas")
            name, value, unit = match[1] + "_s", float(match[2]), match[3]
            if name in values:
                raise BadSlo(f"{match[1]} is given twice in `{text}`")
            if value <= 0:
                raise BadSlo(f"`{term}` can never be kept: give more than zero")
            values[name] = value * _UNITS[unit]
        return cls(**values)

    def __str__(self) -> str:
        terms = (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s))
        return ",".join(f"{name}={value * 1e3:g}ms" for name, value in terms if value is not None)

    def to_json(self) -> dict[str, float]:
        """Without what is not promised; `_s` keys."""
        return {key: value for key in ("ttft_s", "tpot_s", "e2e_s") if (value := getattr(self, key)) is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, float]) -> SloTarget:
        """Raises BadSlo for an unknown key."""
        unknown = sorted(set(data) - {"ttft_s", "tpot_s", "e2e_s"})
        if unknown:
            raise BadSlo(f"an SLO has no `{unknown[0]}`")
        return cls(**{key: float(value) for key, value in data.items()})

    def scaled(self, factor: float) -> SloTarget:
        """Each bound times `factor`."""
        return SloTarget(**{key: value * factor for key, value in self.to_json().items()})


def promised(slos: Mapping[str, SloTarget], given: Sequence[tuple[str | None, SloTarget]]) -> dict[str, SloTarget]:
    """By class, what `--slo` makes of what was promised before: one without a class is for all of them, one
    of a class for that one alone. Raises BadSlo for a class that there is not."""
    found = dict(slos) or {"default": SloTarget()}
    for name, slo in sorted(given, key=lambda entry: entry[0] is not None):
        if name is None:
            found = dict.fromkeys(found, slo)
        elif name in found:
            found[name] = slo
        else:
            raise BadSlo(f"--slo {name}:…: the plan has no class of that name; it has {', '.join(found)}")
    return found
