"""Runs one scheduler over in-process streams."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random

from prometheus_client import CollectorRegistry

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import StoreUnavailable
from baton.core.interfaces import DecisionStore, Duplex, KvEventFeed
from baton.runtime.network.in_process_network import InProcessNetwork
from baton.runtime.observability.metrics import SchedulerMetrics
from baton.runtime.process.byte_budget import Account
from baton.scheduler.admission.slo_admission import AdmissionMode
from baton.scheduler.scheduler_budget import scheduler_budget
from baton.scheduler.scheduler_service import Scheduler, SchedulerRules
from baton.scheduler.state.worker_streams import SchedulerTimes
from baton.store.memory.memory_stores import MemoryKvEventFeed
from tests.builders import with_limits

ADDRESS = "scheduler:1"


class BrokenStore(DecisionStore):
    async def put(self, record: DecisionRecord, ttl_s: float) -> None:
        raise StoreUnavailable("redis is away")

    async def get(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        raise StoreUnavailable("redis is away")


@asynccontextmanager
async def a_scheduler(
    policy: str = "least_loaded",
    max_waiting_seqs: int = 4,
    store: DecisionStore | None = None,
    max_queued_requests: int = 0,
    admission: AdmissionMode = AdmissionMode.OFF,
    silence_s: float = 30.0,
    registry: CollectorRegistry | None = None,
    feed: KvEventFeed | None = None,
    memory_limits: Mapping[Account, int] | None = None,
) -> AsyncIterator[tuple[Scheduler, InProcessNetwork]]:
    scheduler = Scheduler(
        scheduler_id="s0",
        rules=SchedulerRules(
            policy=policy,
            admission=admission,
            max_waiting_seqs=max_waiting_seqs,
            max_worker_queue_s=0.5,
            max_queued_requests=max_queued_requests,
        ),
        times=SchedulerTimes(silence_s=silence_s, settle_s=0.05, reservation_s=5.0, watch_interval_s=0.0),
        store=store or BrokenStore(),
        feed=feed or MemoryKvEventFeed(),
        metrics=SchedulerMetrics(registry or CollectorRegistry()),
        rng=Random(0),
        budget=with_limits(scheduler_budget(2**30), memory_limits),
    )
    network = InProcessNetwork()
    network.add_scheduler(ADDRESS, scheduler)
    try:
        yield scheduler, network
    finally:
        await network.aclose()
        await scheduler.aclose()


async def next_command(stream: Duplex[WorkerReport, WorkerCommand]) -> WorkerCommand:
    """Return the next command except SNAPSHOT, which these workers do not implement."""
    while (command := await stream.receive()).kind is CommandKind.SNAPSHOT:
        pass
    return command


async def join(network: InProcessNetwork, report: WorkerReport) -> Duplex[WorkerReport, WorkerCommand]:
    stream = await network.open_report(ADDRESS)
    stream.send(report)
    await settle()
    return stream


def tpot_slo_of_only_worker(scheduler: Scheduler) -> float | None:
    """Return the TPOT SLO at the only worker, as the next decision would see it."""
    (worker,) = scheduler._state.snapshot(asyncio.get_running_loop().time()).workers
    return worker.tpot_slo_s


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
