"""The workers of this machine, with what it has to share out between them."""

import asyncio

from baton.engine.kv_cache.sizing import free_host_bytes
from baton.fleet.local.local_gpus import computes_on_cpu, local_gpus
from baton.fleet.worker_plan import WorkerSpec, check_kv_memory, plan_workers
from baton.runtime.config.settings import ClusterConfig, FleetConfig
from baton.runtime.process.cores import core_quota, pinnable_cores


async def plan_here(config: ClusterConfig | FleetConfig) -> list[WorkerSpec]:
    """All GPUs, if workers compute on such, and all cores that this process may use: where the system can pin
    to them, and where a container's limit leaves them whole. Else all containers of a machine would crowd on
    its first cores. Raises ConfigError if workers on the CPU are to have more KV memory than is free."""
    cores, quota = pinnable_cores(), core_quota()
    if quota is not None and quota < len(cores):
        cores = ()
    gpus = await asyncio.to_thread(local_gpus, config.device)
    specs = plan_workers(config, cores, gpus)
    if config.kv_memory is not None and computes_on_cpu(config.device, gpus):
        check_kv_memory(config.kv_memory, len(specs), free_host_bytes())
    return specs
