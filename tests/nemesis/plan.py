"""Computes a schedule of faults from a seed.

Targets are the names of processes in a `ProcessCluster`. A fault holds its targets from its begin to its end;
no other fault has one of them in that time, so that each fault can be undone on its own. At most `MAX_OPEN`
faults are open at a time. Some faults are far enough from all others that goodput with one worker less can be
measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

WORKERS = ("p0", "p1", "d0", "d1", "h0")
PREFILL, DECODE, HYBRID = ("p0", "p1"), ("d0", "d1"), ("h0",)
ROLES = {"prefill": PREFILL, "decode": DECODE, "hybrid": HYBRID}
SCHEDULERS = ("scheduler", "scheduler1")
GATEWAYS = ("gateway", "gateway1")
SERVICES = (*WORKERS, *SCHEDULERS, *GATEWAYS)
REDIS = "redis"

MAX_OPEN = 2
APART_SHARE = 0.4
"""Share of the faults that are open alone."""
MEASURED = "kill"
"""Kind of fault during which goodput is measured, for one role after the other."""
MEASURED_S = (6.0, 10.0)
"""Duration of such a fault that is open alone. Long, so that half an hour gives enough time for each role."""
GAP_S = (1.0, 4.0)
BEFORE_APART_S = 4.0
"""Time without faults before a fault that is open alone."""
RESTART_S = 6.0
"""Allowance for the restart of a killed process."""
LONGEST_S = 20.0
"""Longest duration of a fault. Runs with shorter faults have shorter gaps, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule.

    kind: a key of `KINDS`.
    targets: names of the processes that it affects.
    begin_s, duration_s: seconds since the start of the faults, and until it is undone.
    restart_s: allowance for the restart of its targets after its end, 0 if they keep running.
    """

    kind: str
    targets: tuple[str, ...]
    begin_s: float
    duration_s: float
    restart_s: float = 0.0

    @property
    def end_s(self) -> float:
        """Time at which the fault is undone. Restarts then begin."""
        return self.begin_s + self.duration_s

    @property
    def released_s(self) -> float:
        """Time from which the targets serve again."""
        return self.end_s + self.restart_s

    def __str__(self) -> str:
        return f"{self.begin_s:7.1f} s  {self.kind:<13} {' '.join(self.targets):<22} for {self.duration_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault: how its targets are drawn, and the limits of its duration in seconds.

    restarts: True if its targets are started again at its end.
    weight: how often it occurs among the others.
    """

    targets: Callable[[Random], tuple[str, ...]]
    duration_s: tuple[float, float]
    restarts: bool = False
    weight: int = 1


def _one_of(names: Sequence[str]) -> Callable[[Random], tuple[str, ...]]:
    return lambda rng: (rng.choice(names),)


def _control_pair(rng: Random) -> tuple[str, ...]:
    """A worker and a gateway or scheduler."""
    return rng.choice(WORKERS), rng.choice((*SCHEDULERS, *GATEWAYS))


def _data_pair(rng: Random) -> tuple[str, ...]:
    """A prefill worker and a decode worker."""
    return rng.choice(PREFILL), rng.choice(DECODE)


KINDS: Mapping[str, Kind] = {
    "kill": Kind(targets=_one_of(WORKERS), duration_s=(2.0, 10.0), restarts=True, weight=5),
    "kill_service": Kind(targets=_one_of((*SCHEDULERS, *GATEWAYS)), duration_s=(1.0, 6.0), restarts=True, weight=2),
    "lost_node": Kind(targets=_data_pair, duration_s=(2.0, 12.0), restarts=True),
    "pause": Kind(targets=_one_of(SERVICES), duration_s=(3.0, 20.0), weight=3),
    "cut_control": Kind(targets=_control_pair, duration_s=(3.0, 20.0), weight=2),
    "cut_data": Kind(targets=_data_pair, duration_s=(3.0, 20.0), weight=2),
    "redis_stop": Kind(targets=_one_of((REDIS,)), duration_s=(3.0, 20.0)),
    "redis_full": Kind(targets=_one_of((REDIS,)), duration_s=(3.0, 20.0)),
    "redis_flush": Kind(targets=_one_of((REDIS,)), duration_s=(0.1, 0.2)),
    "redis_restart": Kind(targets=_one_of((REDIS,)), duration_s=(0.5, 8.0), restarts=True),
    "clock": Kind(targets=_one_of(SERVICES), duration_s=(3.0, 20.0)),
    "log_disk": Kind(targets=_one_of(SERVICES), duration_s=(3.0, 20.0)),
    "disk_full": Kind(targets=_one_of(WORKERS), duration_s=(3.0, 20.0)),
    "disk_slow": Kind(targets=_one_of(WORKERS), duration_s=(3.0, 20.0)),
    "disk_damaged": Kind(targets=_one_of(WORKERS), duration_s=(1.0, 6.0), restarts=True),
    "disk_killed": Kind(targets=_one_of(WORKERS), duration_s=(1.0, 6.0), restarts=True, weight=2),
}
DISK_KINDS = frozenset(("disk_full", "disk_slow", "disk_damaged", "disk_killed"))
"""Kinds that need workers with a disk tier."""


def make_plan(
    seed: int,
    seconds: float,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    longest_s: float = LONGEST_S,
    apart_share: float = APART_SHARE,
) -> tuple[Fault, ...]:
    """Return the faults of one run, by begin. All end before `seconds`, without restarts.

    kinds: the kinds to draw from. Each occurs once before one occurs again as often as its weight allows.
    longest_s: longest duration of a fault.
    apart_share: share of the faults that are open alone. If it is not 0, at least half of the kills of a
        worker are, because goodput is measured in them. They hit one role after the other.
    Raises ValueError for an unknown kind.
    """
    if unknown := [name for name in kinds if name not in KINDS]:
        raise ValueError(f"unknown kinds {', '.join(unknown)}; there are {', '.join(KINDS)}")
    rng, scale = Random(seed), longest_s / LONGEST_S
    faults: list[Fault] = []
    deck: list[str] = []
    now_s, num_kills = 0.0, 0
    roles: list[str] = []
    while True:
        deck = deck or _shuffled(rng, kinds)
        kind, is_apart = KINDS[deck[-1]], rng.random() < apart_share
        if deck[-1] == MEASURED and apart_share:
            num_kills += 1
            is_apart = is_apart or num_kills % 2 == 1
        now_s = _next_begin(faults, now_s + rng.uniform(*GAP_S) * min(1.0, scale + 0.25), is_apart, scale)
        targets, durations_s = kind.targets(rng), kind.duration_s
        if is_apart and deck[-1] == MEASURED:
            roles = roles or rng.sample(list(ROLES), len(ROLES))
            targets, durations_s = (rng.choice(ROLES[roles.pop()]),), MEASURED_S
        now_s = max([now_s, *(fault.released_s for fault in faults if set(fault.targets) & set(targets))])
        fault = Fault(
            kind=deck.pop(),
            targets=targets,
            begin_s=now_s,
            duration_s=rng.uniform(*(min(limit_s, longest_s) for limit_s in durations_s)),
            restart_s=RESTART_S * scale if kind.restarts else 0.0,
        )
        if fault.end_s > seconds:
            return tuple(sorted(faults, key=lambda each: each.begin_s))
        faults.append(fault)
        if is_apart:
            now_s = fault.released_s


def open_faults(faults: Sequence[Fault], at_s: float) -> list[Fault]:
    """Return the faults that are open at a time, restarts included."""
    return [fault for fault in faults if fault.begin_s <= at_s < fault.released_s]


def conflicts(faults: Sequence[Fault]) -> list[tuple[Fault, Fault]]:
    """Return pairs of faults that hold the same process at the same time. A schedule has none."""
    return [
        (a, b)
        for a, b in combinations(faults, 2)
        if set(a.targets) & set(b.targets) and a.begin_s < b.released_s and b.begin_s < a.released_s
    ]


def _shuffled(rng: Random, kinds: Sequence[str]) -> list[str]:
    """Return each kind as often as its weight. They are drawn from the end: first each kind once."""
    first, more = list(kinds), [name for name in kinds for _ in range(KINDS[name].weight - 1)]
    rng.shuffle(first)
    rng.shuffle(more)
    return more + first


def _next_begin(faults: Sequence[Fault], earliest_s: float, is_apart: bool, scale: float) -> float:
    """Return the first time from `earliest_s` on at which one more fault may begin."""
    if is_apart:
        return max([earliest_s, *(fault.released_s + BEFORE_APART_S * scale for fault in faults)])
    ends_s = sorted((fault.released_s for fault in faults if fault.released_s > earliest_s), reverse=True)
    return max([earliest_s, *ends_s[MAX_OPEN - 1 : MAX_OPEN]])
