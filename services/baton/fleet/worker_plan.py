"""Plans the workers of a configuration: their names, roles, cores, GPUs and KV memory. Pure functions."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise

from baton.core.cluster.worker_report import WorkerRole
from baton.core.errors import ConfigError
from baton.runtime.config.byte_sizes import format_size
from baton.runtime.config.fleet_settings import FleetSettings
from baton.runtime.config.settings import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker that should exist.

    cores: CPU cores that it is pinned to; empty: not pinned.
    gpu: CUDA name of the only GPU that it sees; empty: all GPUs that its node or Ray exposes.
    """

    worker_id: str
    role: WorkerRole
    cores: tuple[int, ...] = ()
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredWorkers:
    """The detached workers that should run on an existing Ray cluster.

    minimum: number of workers of each role.
    scale_with_nodes: run one worker for each place that nodes offer, if that is more than the minimum.
    config_of: returns the settings of a worker.
    """

    minimum: Mapping[WorkerRole, int]
    scale_with_nodes: bool
    config_of: Callable[[WorkerSpec], WorkerConfig]


def workers_by_role(settings: FleetSettings) -> dict[WorkerRole, int]:
    """Return the number of workers of each role in a configuration."""
    return {
        WorkerRole.PREFILL: settings.prefill,
        WorkerRole.DECODE: settings.decode,
        WorkerRole.HYBRID: settings.hybrid,
    }


def plan_changes(
    role: WorkerRole, number: int, is_waiting: Mapping[str, bool], left_behind: Collection[str]
) -> tuple[list[WorkerSpec], list[str]]:
    """Return the workers of a role to add, and the ids of those to remove, to reach `number` workers.

    is_waiting: the current workers of this role, and whether each waits for a node. Only waiting workers are
        removed, highest index first.
    left_behind: ids of workers that an earlier fleet left running. They are added first, so that a running
        worker is not replaced by a new one.
    """
    missing = number - len(is_waiting)
    if missing <= 0:
        waiting = sorted((worker_id for worker_id, waits in is_waiting.items() if waits), key=_index, reverse=True)
        return [], waiting[:-missing] if missing else []
    adoptable = [
        worker_id
        for worker_id in left_behind
        if worker_id.rpartition("-")[0] == role.value and worker_id.rpartition("-")[2].isdecimal()
    ]
    adopted = sorted(set(adoptable) - is_waiting.keys(), key=_index)
    taken = is_waiting.keys() | set(adopted)
    fresh = (name for name in (f"{role.value}-{i}" for i in count()) if name not in taken)
    return [WorkerSpec(worker_id=name, role=role) for name in islice(chain(adopted, fresh), missing)], []


def _index(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])


def plan_workers(settings: FleetSettings, cores: Sequence[int], gpus: Sequence[str] = ()) -> list[WorkerSpec]:
    """Return the workers of a configuration: prefill first, then decode, then hybrid.

    `cores` are divided between them (empty: do not pin). `gpus` are assigned round-robin. On a private Ray
    the workers are named `w0`, `w1`, .... On an existing Ray cluster they may outlive their driver and are
    named `prefill-0`, `decode-0`, ..., so that a name does not depend on the number of workers of other
    roles.
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
    assigned_gpus = [gpus[i % len(gpus)] if gpus else "" for i in range(len(roles))]
    return [
        WorkerSpec(worker_id=name, role=role, cores=share, gpu=gpu)
        for name, role, share, gpu in zip(names, roles, shares, assigned_gpus, strict=True)
    ]


def max_workers_per_gpu(specs: Sequence[WorkerSpec]) -> int:
    """Return the largest number of these workers of one machine that share one GPU."""
    return max(Counter(spec.gpu for spec in specs).values(), default=1)


def check_kv_memory(sizes: Mapping[str, int], num_workers: int, free: int) -> None:
    """Raise ConfigError if `free` bytes of host memory cannot hold `sizes` for each worker: bytes by option.

    A check in each worker is not enough: when they start together, no worker has touched its pages yet. All
        checks would pass, and the machine would run out of memory while they serve.
    """
    kv_memory = sum(sizes.values())
    if kv_memory * num_workers > free:
        given = " and ".join(f"{option} {format_size(size)}" for option, size in sizes.items())
        subject = "set it" if len(sizes) == 1 else "keep their sum"
        raise ConfigError(
            f"{given} for each of {num_workers} workers is "
            f"{kv_memory * num_workers >> 20} MiB, but only {free >> 20} MiB are free: {subject} well below "
            f"{free // num_workers >> 20}MiB, because the models need memory too, or start fewer workers"
        )


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Divide the cores into consecutive ranges, one per worker, whose sizes differ by at most one.

    With more workers than cores, each worker gets one core, assigned round-robin.
    """
    if not cores:
        return [()] * num_workers
    if num_workers > len(cores):
        return [(cores[i % len(cores)],) for i in range(num_workers)]
    bounds = [i * len(cores) // num_workers for i in range(num_workers + 1)]
    return [tuple(cores[low:high]) for low, high in pairwise(bounds)]
