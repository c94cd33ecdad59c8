"""Describes the choice of a transfer backend for operators, in `baton status` and in the log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_REASON_CHARS = 100
"""Longest reason why one backend was left out. The text is part of each worker report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One backend as it was measured. problem: why it cannot be used; empty if it can."""

    transfer: str
    bytes_per_s: float
    problem: str


def choice_text(candidates: Sequence[Candidate], left_out: Mapping[str, str]) -> str:
    """Return the speed of each measured backend, then the backends that were left out and why.

    candidates: those that were measured. left_out: reasons by name of the backend
    """
    measured = [f"{each.transfer} {each.problem or f'{each.bytes_per_s / 1e9:.3g} GB/s'}" for each in candidates]
    return ", ".join([*measured, *(f"{name} left out ({_shorten(reason)})" for name, reason in left_out.items())])


def _shorten(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: MAX_REASON_CHARS - 1]}…"
