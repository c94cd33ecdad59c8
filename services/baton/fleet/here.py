"""The workers of this machine, with what it has to share out between them."""

import asyncio
import os

from baton.fleet.gpus import local_gpus
from baton.fleet.plan import WorkerSpec, plan_workers
from baton.runtime.settings import FleetSettings


async def plan_here(settings: FleetSettings, device: str) -> list[WorkerSpec]:
    """All cores that this process may use, where the system can pin to them, and all GPUs, if workers compute on such a `device`."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return plan_workers(settings, cores, await asyncio.to_thread(local_gpus, device))
