"""Checks that work ends on the workers soon after it was cancelled, in whatever way.

A worker's sample is *unwanted* if no living gateway waits for it: its client has cancelled, a stop string or
the deadline has ended it, another attempt has replaced it, or its gateway has died.
"""

import asyncio
from dataclasses import dataclass

from baton.core.ids import Incarnation, JobId
from baton.gateway.cluster.worker_session import WorkerSession
from baton.sim.chaos.report import ChaosReport
from baton.sim.sim_cluster import SimCluster
from baton.sim.virtual_time import running_loop
from baton.worker.jobs.job_table import OpenSamples

INTERVAL_S = 0.1
CONNECTED_LIMIT_S = 1.0
"""Longest time that an unwanted sample may run while the session of its job is connected."""
MARGIN_S = 0.6
"""Allowance beyond keepalive and `session_grace_s`, after which a worker ends the jobs of a lost session."""

_Key = tuple[Incarnation, JobId, int]


@dataclass(slots=True)
class _Unwanted:
    """Time for which a worker has run an unwanted sample, without its pauses, and the connected part."""

    running_s: float = 0.0
    connected_s: float = 0.0


class CancelAudit:
    """Watches all workers of a cluster for unwanted samples."""

    def __init__(self, cluster: SimCluster, report: ChaosReport) -> None:
        self._cluster = cluster
        self._report = report
        self._unwanted: dict[_Key, _Unwanted] = {}
        self._limit_s = cluster.network.keepalive_s + cluster.config.session_grace_s + MARGIN_S

    async def run(self) -> None:
        """Check until cancelled. Raises AssertionError naming a sample that ran too long."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._check()

    def _check(self) -> None:
        found: dict[_Key, _Unwanted] = {}
        for name, worker in self._cluster.workers.items():
            is_paused = running_loop().is_paused(name)
            for opened in worker.jobs.open_samples():
                for sample in opened.sample_indices - self._wanted(name, opened):
                    key = (worker.worker.incarnation, opened.job, sample)
                    found[key] = unwanted = self._unwanted.get(key, _Unwanted())
                    if not is_paused:
                        unwanted.running_s += INTERVAL_S
                        unwanted.connected_s += INTERVAL_S * self._is_connected(name, opened)
                    self._check_limits(name, opened, sample, unwanted)
        self._unwanted = found

    def _check_limits(self, name: str, opened: OpenSamples, sample: int, unwanted: _Unwanted) -> None:
        if unwanted.connected_s > CONNECTED_LIMIT_S or unwanted.running_s > self._limit_s:
            raise AssertionError(
                f"{name} has run sample {sample} of {opened.job} for {unwanted.running_s:.1f} s "
                f"({unwanted.connected_s:.1f} s of it connected) although {opened.gateway_id} does not want it"
            )

    def _wanted(self, name: str, opened: OpenSamples) -> frozenset[int]:
        session = self._session(name, opened.gateway_id)
        return session.wanted_samples(opened.job) if session is not None else frozenset()

    def _is_connected(self, name: str, opened: OpenSamples) -> bool:
        session = self._session(name, opened.gateway_id)
        return (
            session is not None
            and session.is_connected
            and session.session_id == opened.session_id
            and not running_loop().is_paused(opened.gateway_id)
            and not self._cluster.network.is_partitioned(frozenset((name, opened.gateway_id)))
        )

    def _session(self, worker: str, gateway: str) -> WorkerSession | None:
        """Return the session of a living gateway with a worker, both given by name."""
        living = self._cluster.gateways.get(gateway)
        return None if living is None else living.workers.find(self._cluster.workers[worker].worker)
