"""Compares goodput while one worker of a role is down with goodput without a fault."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.nemesis.history import End, Interval, Record
from tests.nemesis.plan import MEASURED, ROLES, WORKERS, Fault

LEAST_SHARE = 0.6
LEAST_SECONDS = 20.0
"""Seconds with one worker of a role down below which a share says nothing."""

LEAST_PART_S = 5.0
"""A shorter time with one worker down does not count: most of it passes before that is noticed."""
SETTLE_S = 3.0
"""Time after a fault in which the answers that it delayed arrive. It counts as neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A fault as it was injected. end_s: its end, with the restart of its targets."""

    fault: Fault
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGoodput:
    """Complete answers per second without a fault, and while one worker of `role` was down.

    without_s: seconds without a fault, before the first one and between faults.
    during_s: seconds with one worker of the role down and no other fault.
    """

    role: str
    without: float
    without_s: float
    during: float
    during_s: float

    @property
    def share(self) -> float:
        """Goodput with one worker down, as a share of that without a fault."""
        return self.during / self.without if self.without else 0.0

    @property
    def is_measured(self) -> bool:
        """True if there were enough seconds with one worker down, and answers without a fault."""
        return self.during_s >= LEAST_SECONDS and self.without > 0

    @property
    def is_enough(self) -> bool:
        """True if the share is measured, and at least `LEAST_SHARE`."""
        return self.is_measured and self.share >= LEAST_SHARE

    def __str__(self) -> str:
        return ("" if self.is_measured else "not measured: ") + (
            f"{self.role}: {self.during:.2f} answers/s while one worker was down ({self.during_s:.0f} s), "
            f"{self.without:.2f} answers/s without a fault ({self.without_s:.0f} s): {100 * self.share:.0f} %"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Goodput while one worker was down: of each role, and of any role."""

    roles: tuple[RoleGoodput, ...]
    any_role: RoleGoodput

    def problems(self, *, needs_all: bool) -> list[str]:
        """Return each role whose share is below `LEAST_SHARE`, or not measured although `needs_all` is set.

        Without `needs_all`, roles that are not measured are left out. If that leaves none, their times are
        judged together.
        """
        judged = [each for each in self.roles if each.is_measured or needs_all] or [self.any_role]
        return [str(each) for each in judged if not each.is_enough]

    def __str__(self) -> str:
        """One line per role."""
        return "\n".join(map(str, self.roles))


def measure(records: Iterable[Record], calm: Interval, observed: Sequence[Observed]) -> Goodput:
    """Return the goodput without a fault, and by role in all times in which exactly one worker was down.

    Such a time ends when the worker serves again, or when the next fault begins. It does not count if another
    fault was open at its begin.

    calm: the time before the first fault that counts.
    """
    ends_s = [record.end_s for record in records if record.ends == [End.COMPLETE] and record.end_s is not None]
    undisturbed = [calm, *_between(observed)]
    without_s = sum(i.end_s - i.begin_s for i in undisturbed)
    without = _count(ends_s, undisturbed) / without_s if without_s else 0.0
    alone = [interval for each in observed if (interval := _alone(each, observed)) is not None]

    def of(role: str, workers: Sequence[str]) -> RoleGoodput:
        times = [interval for interval in alone if interval.name in workers]
        during_s = sum(i.end_s - i.begin_s for i in times)
        during = _count(ends_s, times) / during_s if during_s else 0.0
        return RoleGoodput(role=role, without=without, without_s=without_s, during=during, during_s=during_s)

    return Goodput(roles=tuple(of(role, workers) for role, workers in ROLES.items()), any_role=of("any", WORKERS))


def _between(observed: Iterable[Observed]) -> list[Interval]:
    """Return the times between faults in which none was open, without the first `SETTLE_S` of each."""
    times: list[Interval] = []
    open_until_s: float | None = None
    for each in sorted(observed, key=lambda one: one.begin_s):
        if open_until_s is not None and each.begin_s - open_until_s > SETTLE_S:
            times.append(Interval(name="quiet", begin_s=open_until_s + SETTLE_S, end_s=each.begin_s))
        open_until_s = max(each.end_s, open_until_s or 0.0)
    return times


def _alone(kill: Observed, observed: Iterable[Observed]) -> Interval | None:
    """Return the time of a kill of one worker without another fault, or None if it does not count."""
    if kill.fault.kind != MEASURED:
        return None
    others = [each for each in observed if each is not kill and each.end_s > kill.begin_s]
    end_s = min([kill.end_s, *(each.begin_s for each in others)])
    if end_s - kill.begin_s < LEAST_PART_S:
        return None
    return Interval(name=kill.fault.targets[0], begin_s=kill.begin_s, end_s=end_s)


def _count(ends_s: Iterable[float], intervals: Sequence[Interval]) -> int:
    return sum(1 for end_s in ends_s if any(i.begin_s <= end_s < i.end_s for i in intervals))
