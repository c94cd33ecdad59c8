"""Which workers a configuration asks for, which cores and which GPU each of them gets, whether their KV fits:
pure functions."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise

from baton.core.cluster.worker_report import WorkerRole
from baton.core.errors import ConfigError
from baton.runtime.config.byte_sizes import format_size
from baton.runtime.config.settings import FleetSettings, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker that should exist. `cores`: the processors it is pinned to; empty: it is not pinned. `gpu`:
    the one that it is shown, by CUDA's name; empty: all that its node, or Ray, shows it."""

    worker_id: str
    role: WorkerRole
    cores: tuple[int, ...] = ()
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The workers that a fleet on a cluster of others should have: `least` of each role, and with
    `follows_places` one for each place that nodes offer, where those are more. `config_of`: the settings of
    each."""

    least: Mapping[WorkerRole, int]
    follows_places: bool
    config_of: Callable[[WorkerSpec], WorkerConfig]


def least_workers(settings: FleetSettings) -> dict[WorkerRole, int]:
    """How many of each role a configuration asks for."""
    return {
        WorkerRole.PREFILL: settings.prefill,
        WorkerRole.DECODE: settings.decode,
        WorkerRole.HYBRID: settings.hybrid,
    }


def changes(
    role: WorkerRole, number: int, waits: Mapping[str, bool], left_behind: Collection[str]
) -> tuple[list[WorkerSpec], list[str]]:
    """The workers of a role to add, and the ids of those to drop, so that there are `number`.

    `waits`: those there are, and whether each waits for a node. Only such are dropped, the highest number
    first: one that has a node has a place. `left_behind`: ids that an earlier fleet left on a node; of those
    that are added they come first, so that nothing that runs is replaced by something that does not.
    """
    missing = number - len(waits)
    if missing <= 0:
        idle = sorted((worker_id for worker_id, does_wait in waits.items() if does_wait), key=_index, reverse=True)
        return [], idle[:-missing] if missing else []
    known = [
        worker_id
        for worker_id in left_behind
        if worker_id.rpartition("-")[0] == role.value and worker_id.rpartition("-")[2].isdecimal()
    ]
    there = sorted(set(known) - waits.keys(), key=_index)
    fresh = (name for name in (f"{role.value}-{i}" for i in count()) if name not in waits and name not in there)
    return [WorkerSpec(worker_id=name, role=role) for name in islice(chain(there, fresh), missing)], []


def _index(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])


def plan_workers(settings: FleetSettings, cores: Sequence[int], gpus: Sequence[str] = ()) -> list[WorkerSpec]:
    """Prefill workers, then decode, then hybrid. `cores` (empty: do not pin) are split between them, and
    `gpus` are given out in turns.

    On a Ray of our own they are `w0`, `w1`, …; on a cluster of others, where they may outlive who asked for
    them, `prefill-0`, `decode-0`, …, so that a name means the same worker when there are more or fewer of
    another role.
    """
    roles = (
        [WorkerRole.PREFILL] * settings.prefill
        + [WorkerRole.DECODE] * settings.decode
        + [WorkerRole.HYBRID] * settings.hybrid
    )
    shares = share_cores(cores, len(roles))
    if settings.ray_address is None:
        names = [f"w{i}" for i in range(len(roles))]
    else:
        names = [f"{role.value}-{roles[:i].count(role)}" for i, role in enumerate(roles)]
    turns = [gpus[i % len(gpus)] if gpus else "" for i in range(len(roles))]
    return [
        WorkerSpec(worker_id=name, role=role, cores=share, gpu=gpu)
        for name, role, share, gpu in zip(names, roles, shares, turns, strict=True)
    ]


def most_on_a_gpu(specs: Sequence[WorkerSpec]) -> int:
    """How many of these workers, all of one machine, may come to share one GPU."""
    return max(Counter(spec.gpu for spec in specs).values(), default=1)


def check_kv_memory(kv_memory: int, num_workers: int, free: int) -> None:
    """That `free` bytes of host memory hold `kv_memory` bytes for each worker of a machine. Each asks for its
    own when it starts, when the others' pages are not real yet: all would pass, and the machine be out of
    memory while they serve. Raises ConfigError."""
    if kv_memory * num_workers > free:
        raise ConfigError(
            f"--kv-memory {format_size(kv_memory)} for each of {num_workers} workers is {kv_memory * num_workers >> 20} MiB, more than the "
            f"{free >> 20} MiB that are free here: give less than {free // num_workers >> 20}MiB, since models need some, or start fewer"
        )


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Consecutive cores for each worker, sizes equal within one; with more workers than cores, workers take
    turns on single cores."""
    if not cores:
        return [()] * num_workers
    if num_workers > len(cores):
        return [(cores[i % len(cores)],) for i in range(num_workers)]
    bounds = [i * len(cores) // num_workers for i in range(num_workers + 1)]
    return [tuple(cores[low:high]) for low, high in pairwise(bounds)]
