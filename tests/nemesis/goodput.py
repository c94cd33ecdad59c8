"""Compares goodput while one worker is down with goodput before the first fault."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.nemesis.history import End, Interval, Record
from tests.nemesis.plan import WORKERS, Fault

LEAST_SHARE = 0.6
LEAST_SECONDS = 20.0
"""Seconds with one worker down below which a share says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A fault as it was injected. end_s: its end, with the restart of its targets."""

    fault: Fault
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Complete answers per second before the faults and while one worker was down, with the seconds of
    each."""

    before: float
    before_s: float
    during: float
    during_s: float

    @property
    def share(self) -> float:
        """Goodput with one worker down, as a share of that before."""
        return self.during / self.before if self.before else 0.0

    @property
    def is_measured(self) -> bool:
        """True if there were enough seconds with one worker down, and answers before."""
        return self.during_s >= LEAST_SECONDS and self.before > 0

    @property
    def is_enough(self) -> bool:
        """True if the share is measured, and at least `LEAST_SHARE`."""
        return self.is_measured and self.share >= LEAST_SHARE

    def __str__(self) -> str:
        return ("" if self.is_measured else "not measured: ") + (
            f"{self.before:.2f} answers/s before the faults ({self.before_s:.0f} s), {self.during:.2f} answers/s while "
            f"one worker was down ({self.during_s:.0f} s): {100 * self.share:.0f} %"
        )


def measure(records: Iterable[Record], calm: Interval, observed: Sequence[Observed]) -> Goodput:
    """Return the goodput in `calm` and in all times in which exactly one worker and nothing else was down."""
    ends_s = [record.end_s for record in records if record.ends == [End.COMPLETE] and record.end_s is not None]
    alone = [
        Interval(name=each.fault.targets[0], begin_s=each.begin_s, end_s=each.end_s)
        for each in observed
        if each.fault.kind == "kill" and each.fault.targets[0] in WORKERS and not _overlapping(each, observed)
    ]
    before_s, during_s = calm.end_s - calm.begin_s, sum(i.end_s - i.begin_s for i in alone)
    return Goodput(
        before=_count(ends_s, [calm]) / before_s if before_s else 0.0,
        before_s=before_s,
        during=_count(ends_s, alone) / during_s if during_s else 0.0,
        during_s=during_s,
    )


def _overlapping(one: Observed, observed: Sequence[Observed]) -> bool:
    return any(each is not one and each.begin_s < one.end_s and one.begin_s < each.end_s for each in observed)


def _count(ends_s: Iterable[float], intervals: Sequence[Interval]) -> int:
    return sum(1 for end_s in ends_s if any(i.begin_s <= end_s < i.end_s for i in intervals))
