"""What a check of `baton doctor` answers with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class CheckStatus(Enum):
    """WARN: Baton runs, but slower or with less than it could. FAIL: `baton up` cannot run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`found`: the fact, for people. `advice`: what to do about it; empty where there is nothing to do."""

    name: str
    verdict: CheckStatus
    found: str
    advice: str = ""


Examine = Callable[[], Iterable[Finding]]
"""Looks at one thing. Bounded in time; changes nothing; none where the question does not arise on this
system."""


def ok(name: str, found: str) -> Finding:
    return Finding(name=name, verdict=CheckStatus.OK, found=found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, verdict=CheckStatus.WARN, found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, verdict=CheckStatus.FAIL, found=found, advice=advice)
