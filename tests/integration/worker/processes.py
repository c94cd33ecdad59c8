"""Starts worker processes over real gRPC and NIXL or shared memory, with a scheduler that records reports."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.core.ids import WorkerRef
from baton.core.interfaces import Network
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.runtime.config.config_base import dump
from baton.runtime.config.settings import WorkerConfig
from tests.times import TEST_TIMES
from tests.unit.worker.harness import ListeningScheduler

TIME_FACTOR = 10
"""Factor of the test times. No timeout is tested here: a busy machine must not end a lease or connection."""
HEARTBEAT_S = TIME_FACTOR * TEST_TIMES["heartbeat_s"]
START_S = 180.0


class WorkerProcess:
    """One `baton worker` process."""

    def __init__(self, worker_id: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.worker_id = worker_id
        self.process = process
        self.log = log
        self.ref: WorkerRef

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def exit_code(self, within_s: float) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()


class WorkerProcesses:
    """Starts workers that report to a stub scheduler, and kills all of them at exit."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.scheduler = ListeningScheduler()
        self.network: Network = GrpcNetwork(heartbeat_s=HEARTBEAT_S)
        self._server = GrpcServer(heartbeat_s=HEARTBEAT_S)
        self._workers: list[WorkerProcess] = []
        self.address = ""

    async def start(self) -> None:
        self._server.add_scheduler(self.scheduler)  # type: ignore[arg-type]
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1', 0)}"

    async def start_workers(self, *workers: tuple[str, dict[str, Any], dict[str, str]]) -> list[WorkerProcess]:
        """Start workers from (worker_id, settings, extra environment), concurrently.

        Returns when all are ready.
        """
        started = [await self.spawn(*worker) for worker in workers]
        for worker in started:
            worker.ref = (await self.report(worker.worker_id, within_s=START_S)).worker
        return started

    async def report(
        self,
        worker_id: str,
        state: WorkerState = WorkerState.READY,
        within_s: float = 60.0,
        *,
        may_have_ended: bool = False,
    ) -> WorkerReport:
        """Wait for the first report with this state.

        may_have_ended: the process may have ended before its report is read here
        """
        async with asyncio.timeout(within_s):
            while True:
                for report in self.scheduler.reports[worker_id]:
                    if report.state is state:
                        return report
                for worker in self._workers:
                    has_ended = worker.process.returncode is not None and not may_have_ended
                    if worker.worker_id == worker_id and has_ended:
                        raise AssertionError(
                            f"{worker_id} ended with {worker.process.returncode}:\n{worker.log.read_text()[-4000:]}"
                        )
                await asyncio.sleep(0.02)

    async def latest_clean(self, worker_id: str, within_s: float = 60.0) -> WorkerReport:
        """Wait for a report of a clean worker: no block is in use except cached ones."""
        async with asyncio.timeout(within_s):
            while True:
                report = self.scheduler.reports[worker_id][-1]
                blocks = report.blocks
                if blocks.free + blocks.cached == blocks.total and not report.open_leases:
                    return report
                await asyncio.sleep(0.05)

    async def aclose(self) -> None:
        for worker in self._workers:
            if worker.process.returncode is None:
                worker.process.kill()
            await worker.process.wait()
        await self.network.aclose()
        await self._server.stop(0.5)

    async def spawn(self, worker_id: str, settings: dict[str, Any], environment: dict[str, str]) -> WorkerProcess:
        """Start one worker and return at once."""
        times = {name: TIME_FACTOR * TEST_TIMES[name] for name in TEST_TIMES if hasattr(WorkerConfig, name)}
        defaults = {"worker_id": worker_id, "schedulers": (self.address,), "threads_per_worker": 1, "dtype": "float32"}
        config = WorkerConfig(**{**times, **defaults, "max_model_len": 2048, "kv_memory": 96 * 2**20, **settings})
        flags = [_flag(name, value) for name, value in dump(config).items() if value is not None]
        log = self._directory / f"{worker_id}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "baton.cli", "worker", *flags),
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        worker = WorkerProcess(worker_id, process, log)
        self._workers.append(worker)
        return worker


def _flag(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}={','.join(value) if isinstance(value, list) else value}"


@asynccontextmanager
async def worker_processes(directory: Path) -> AsyncIterator[WorkerProcesses]:
    processes = WorkerProcesses(directory)
    await processes.start()
    try:
        yield processes
    finally:
        await processes.aclose()
