"""Which workers a configuration asks for, and which cores each of them gets: pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.core.cluster import WorkerRole
from baton.runtime.settings import FleetSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker that should exist. `cores`: the processors it is pinned to; empty: it is not pinned."""

    worker_id: str
    role: WorkerRole
    cores: tuple[int, ...] = ()


def plan_workers(settings: FleetSettings, cores: Sequence[int]) -> list[WorkerSpec]:
    """Prefill workers, then decode, then hybrid. `cores` (empty: do not pin) are split between them.

    On a Ray of our own they are `w0`, `w1`, …; on a cluster of others, where they may outlive who asked for them, `prefill-0`, `decode-0`,
    …, so that a name means the same worker when there are more or fewer of another role.
    """
    roles = [WorkerRole.PREFILL] * settings.prefill + [WorkerRole.DECODE] * settings.decode + [WorkerRole.HYBRID] * settings.hybrid
    shares = share_cores(cores, len(roles))
    if settings.ray_address is None:
        names = [f"w{i}" for i in range(len(roles))]
    else:
        names = [f"{role.value}-{roles[:i].count(role)}" for i, role in enumerate(roles)]
    return [WorkerSpec(worker_id=name, role=role, cores=share) for name, role, share in zip(names, roles, shares, strict=True)]


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Consecutive cores for each worker, sizes equal within one; with more workers than cores, workers take turns on single cores."""
    if not cores:
        return [()] * num_workers
    if num_workers > len(cores):
        return [(cores[i % len(cores)],) for i in range(num_workers)]
    bounds = [i * len(cores) // num_workers for i in range(num_workers + 1)]
    return [tuple(cores[low:high]) for low, high in pairwise(bounds)]
