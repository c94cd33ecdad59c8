"""Plans the workers of this machine and divides its cores, GPUs and memory between them."""

import asyncio
from dataclasses import dataclass

from baton.engine.kv_cache.sizing import free_host_bytes
from baton.fleet.local.local_gpus import DRIVER, computes_on_cpu, local_gpus
from baton.fleet.worker_plan import WorkerSpec, check_kv_memory, plan_workers
from baton.runtime.config.settings import ClusterConfig, FleetConfig
from baton.runtime.process.cores import core_quota, pinnable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHost:
    """Resources of this machine that workers can use.

    cores: cores to which a process can be pinned; empty if the system does not support that.
    quota: CPU quota of the container in cores; None if there is none.
    free_bytes: free host memory.
    gpus: CUDA names of the GPUs.
    has_gpu_driver: True if an NVIDIA driver is loaded.
    """

    cores: tuple[int, ...]
    quota: float | None
    free_bytes: int
    gpus: tuple[str, ...]
    has_gpu_driver: bool


async def plan_local_workers(config: ClusterConfig | FleetConfig) -> list[WorkerSpec]:
    """Return the workers of a configuration for this machine. Raises ConfigError as `plan_workers_on`."""
    gpus = await asyncio.to_thread(local_gpus, config.device)
    host = LocalHost(
        cores=tuple(pinnable_cores()),
        quota=core_quota(),
        free_bytes=free_host_bytes(),
        gpus=tuple(gpus),
        has_gpu_driver=DRIVER.exists(),
    )
    return plan_workers_on(host, config)


def plan_workers_on(host: LocalHost, config: ClusterConfig | FleetConfig) -> list[WorkerSpec]:
    """Return the workers of a configuration for a machine with these resources.

    Workers are pinned only if no CPU quota is below the number of cores: otherwise all containers of a
    machine would pin to its first cores. Raises ConfigError if CPU workers would get more KV memory than is
    free.
    """
    is_limited = host.quota is not None and host.quota < len(host.cores)
    specs = plan_workers(config, () if is_limited else host.cores, host.gpus)
    on_cpu = computes_on_cpu(config.device, host.gpus, host.has_gpu_driver)
    sizes = {"--host-kv-memory": config.host_kv_memory or 0, "--kv-memory": (config.kv_memory or 0) if on_cpu else 0}
    given = {option: size for option, size in sizes.items() if size}
    if given:
        check_kv_memory(given, len(specs), host.free_bytes)
    return specs
