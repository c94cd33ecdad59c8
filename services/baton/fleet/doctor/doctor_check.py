"""The result type of `baton doctor` checks, and its constructors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class CheckStatus(Enum):
    """Severity of a finding.

    OK: nothing to do.
    WARN: Baton runs, but more slowly or with fewer features.
    FAIL: `baton up` cannot run on this machine.
    """

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check.

    name: what was checked, for example "shared memory".
    verdict: its severity.
    found: the observed fact, in words.
    advice: what the user can do about it. Empty if nothing needs to be done.
    """

    name: str
    verdict: CheckStatus
    found: str
    advice: str = ""


Check = Callable[[], Iterable[Finding]]
"""Examines one property of the machine. A check takes bounded time and changes nothing. It returns no finding
if the property does not exist on this operating system."""


def ok(name: str, found: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(name=name, verdict=CheckStatus.OK, found=found)


def warn(name: str, found: str, advice: str) -> Finding:
    """Return a finding with which Baton runs, but worse than it could."""
    return Finding(name=name, verdict=CheckStatus.WARN, found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Finding:
    """Return a finding with which `baton up` cannot run."""
    return Finding(name=name, verdict=CheckStatus.FAIL, found=found, advice=advice)
