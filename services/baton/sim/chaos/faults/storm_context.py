"""State that all faults share: the cluster, the end of the storm, and which processes may fail together."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from baton.sim.chaos.profile import ChaosProfile
from baton.sim.chaos.report import ChaosReport
from baton.sim.sim_cluster import SimCluster
from baton.sim.sim_stores import StoreFault
from baton.sim.virtual_time import running_loop

RECOVERY_S = 1.5
"""Time after a fault of a process until another one of its role may fail."""


@dataclass(slots=True, kw_only=True)
class StormContext:
    """The state that the faults of one storm share.

    end_s: virtual time after which no fault begins.
    """

    cluster: SimCluster
    profile: ChaosProfile
    report: ChaosReport
    end_s: float
    _failing: dict[str, str] = field(default_factory=dict)  # role → the process of it that fails now

    async def next_fault(self, rng: Random, rate_per_s: float) -> bool:
        """Wait for a random time. Returns False once the storm has ended."""
        if rate_per_s <= 0.0:
            return False
        left_s = self.end_s - running_loop().now_s
        wait_s = rng.expovariate(rate_per_s)
        await asyncio.sleep(max(0.0, min(wait_s, left_s)))
        return wait_s < left_s

    def processes(self) -> list[str]:
        """Return the names of all running processes, sorted."""
        cluster = self.cluster
        return sorted([*cluster.workers, *cluster.gateways, *cluster.schedulers])

    def role_of(self, process: str) -> str:
        """Return `gateway`, `scheduler`, or the role of a worker."""
        return process.partition("-")[0]

    def may_fail(self, *processes: str) -> bool:
        """True if every role of these processes keeps one that works."""
        roles = [self.role_of(process) for process in processes]
        return len(set(roles)) == len(roles) and not any(role in self._failing for role in roles)

    @contextmanager
    def failing(self, *processes: str) -> Iterator[None]:
        """Count these processes as failing. They recover a while after the scope."""
        roles = {self.role_of(process): process for process in processes}
        self._failing |= roles
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(RECOVERY_S, self._recover, tuple(roles))

    def _recover(self, roles: tuple[str, ...]) -> None:
        if self.cluster.stores.fault is not StoreFault.NONE:  # a new process cannot join, and is not found
            asyncio.get_running_loop().call_later(RECOVERY_S, self._recover, roles)
            return
        for role in roles:
            self._failing.pop(role, None)
