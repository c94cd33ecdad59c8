"""The workers of this machine, with what it has to share out between them."""

import asyncio
import os

from baton.engine.kv_memory import free_host_bytes
from baton.fleet.gpus import computes_on_cpu, local_gpus
from baton.fleet.plan import WorkerSpec, check_kv_memory, plan_workers
from baton.runtime.settings import ClusterConfig, FleetConfig


async def plan_here(config: ClusterConfig | FleetConfig) -> list[WorkerSpec]:
    """All cores that this process may use, where the system can pin to them, and all GPUs, if workers compute on such. Raises ConfigError
    if workers on the CPU are to have more KV memory than is free."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gpus = await asyncio.to_thread(local_gpus, config.device)
    specs = plan_workers(config, cores, gpus)
    if config.kv_memory is not None and computes_on_cpu(config.device, gpus):
        check_kv_memory(config.kv_memory, len(specs), free_host_bytes())
    return specs
