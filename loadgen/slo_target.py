"""Service level objectives (SLOs) of requests. The text form is `ttft=500ms,tpot=50ms` everywhere."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadgen.loadgen_errors import LoadgenError

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TERM = re.compile(r"(ttft|tpot|e2e)\s*=\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)")


class BadSlo(LoadgenError):
    """An SLO's text or JSON form is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """Upper bounds on a request's latencies, in seconds. None means no bound.

    Every complete response meets an SLO without bounds.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> SloTarget:
        """Return the SLO for a text such as `"ttft=500ms,tpot=50ms"`. Raises BadSlo."""
        values: dict[str, float] = {}
        for term in filter(None, (part.strip() for part in text.split(","))):
            match = _TERM.fullmatch(term)
            if match is None:
                raise BadSlo(f"`{term}` is not an SLO; write ttft=500ms, tpot=50ms or e2e=10s, separated by commas")
            name, value, unit = match[1] + "_s", float(match[2]), match[3]
            if name in values:
                raise BadSlo(f"`{text}` contains {match[1]} twice; give it once")
            if value <= 0:
                raise BadSlo(f"`{term}` can never be met; the bound must be above zero")
            values[name] = value * _UNITS[unit]
        return cls(**values)

    def __str__(self) -> str:
        terms = (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s))
        return ",".join(f"{name}={value * 1e3:g}ms" for name, value in terms if value is not None)

    def to_json(self) -> dict[str, float]:
        """Return the bounds that are set, under the keys `ttft_s`, `tpot_s` and `e2e_s`."""
        return {key: value for key in ("ttft_s", "tpot_s", "e2e_s") if (value := getattr(self, key)) is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, float]) -> SloTarget:
        """Return the SLO for `to_json`'s form. Raises BadSlo for an unknown key."""
        unknown = sorted(set(data) - {"ttft_s", "tpot_s", "e2e_s"})
        if unknown:
            raise BadSlo(f"`{unknown[0]}` is not a field of an SLO; known are ttft_s, tpot_s and e2e_s")
        return cls(**{key: float(value) for key, value in data.items()})


@dataclass(frozen=True, slots=True)
class SloScale:
    """Factors by which the bounds of an SLO are multiplied.

    The text form is `2` for all bounds, or `3:6` for TTFT and TPOT.
    """

    ttft: float = 1.0
    tpot: float = 1.0

    @classmethod
    def parse(cls, text: str) -> SloScale:
        """Return the scale for a text such as `"2"` or `"3:6"`. Raises BadSlo."""
        try:
            factors = [float(part) for part in text.split(":")]
        except ValueError:
            factors = []
        if len(factors) not in (1, 2) or not all(0 < factor < math.inf for factor in factors):
            raise BadSlo(f"`{text}` is not a scale; write a factor above zero, or TTFT:TPOT such as 3:6")
        return cls(factors[0], factors[-1])

    @classmethod
    def strictest(cls, scales: Sequence[SloScale]) -> SloScale:
        """Return the scale with the smallest factor for each bound."""
        return cls(min(scale.ttft for scale in scales), min(scale.tpot for scale in scales))

    def __str__(self) -> str:
        return f"{self.ttft:g}:{self.tpot:g}" if self.uniform is None else f"{self.uniform:g}"

    @property
    def uniform(self) -> float | None:
        """The factor of all bounds; None if those of TTFT and TPOT differ."""
        return self.ttft if self.ttft == self.tpot else None

    def of(self, slo: SloTarget) -> SloTarget:
        """Return `slo` with its bounds multiplied.

        Raises BadSlo if the factors differ and `slo` has other bounds than TTFT and TPOT.
        """
        if self.uniform is None and slo.to_json().keys() != {"ttft_s", "tpot_s"}:
            raise BadSlo(
                f"the scale {self} needs an SLO with the bounds ttft and tpot, and no other; "
                f"the SLO is `{slo}`: change it, or give one factor"
            )
        factors = {"ttft_s": self.ttft, "tpot_s": self.tpot, "e2e_s": self.ttft}
        return SloTarget(**{key: value * factors[key] for key, value in slo.to_json().items()})


UNSCALED = SloScale()


def override_slos(slos: Mapping[str, SloTarget], given: Sequence[tuple[str | None, SloTarget]]) -> dict[str, SloTarget]:
    """Return the SLO of each class after applying `--slo` values to `slos`.

    A value without a class replaces the SLO of all classes. A value with a class replaces that class only and
    wins over the former. Raises BadSlo for an unknown class.
    """
    found = dict(slos) or {"default": SloTarget()}
    for name, slo in sorted(given, key=lambda entry: entry[0] is not None):
        if name is None:
            found = dict.fromkeys(found, slo)
        elif name in found:
            found[name] = slo
        else:
            raise BadSlo(f"--slo {name}:…: the plan has no class `{name}`; its classes are {', '.join(found)}")
    return found
