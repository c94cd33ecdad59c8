"""Tests of a worker as a process and as a thread, with real gRPC on the loopback and a simulated device."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from baton.core.errors import BatonError, ConfigError, ModelError, StreamBroken
from baton.core.ids import WorkerRef
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.engine import EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.step import DeviceFault
from baton.rpc.grpc_network import GrpcNetwork
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.process.process import Stop
from baton.sim.sim_executor import SimExecutor, SimStepCost
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_transfer_backend import LinkModel, SimFabric, SimTransferBackend
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.device.gpu_start import Say
from baton.worker.device.real_device import default_threads
from baton.worker.device.worker_device import Device
from baton.worker.worker_lifecycle import WorkerLifecycle
from baton.worker.worker_main import UNHEALTHY_EXIT_CODE, StartupGate, run_worker, serve
from baton.worker.worker_service import Worker
from baton.worker.worker_thread import WorkerThread
from tests import builders
from tests.unit.worker.harness import BLOCK, GatedExecutor, worker_times
from tests.unit.worker.job_builders import VOCAB_SIZE, decode_job
from tests.unit.worker.scripted_gateway import Gateway

NUM_BLOCKS = 64


class Opened:
    """Opens a simulated device, and keeps what the worker under test uses."""

    def __init__(self) -> None:
        self.executor: GatedExecutor
        self.worker: WorkerRef
        self.closed = threading.Event()

    def open(self, config: WorkerConfig, worker: WorkerRef, say: Say) -> Device:
        layout = builders.layout(block_size_tokens=BLOCK)
        memory, generations = (
            SimMemory(NUM_BLOCKS, BLOCK),
            MemoryGenerationTable(bytearray(NUM_BLOCKS * ENTRY_BYTES), worker.worker_epoch),
        )
        pool = BlockPool(NUM_BLOCKS, BLOCK, generations)
        engine_config = EngineConfig(
            max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256, block_size_tokens=BLOCK
        )
        self.worker = worker
        self.executor = GatedExecutor(
            SimExecutor(layout=layout, memory=memory, vocab_size=VOCAB_SIZE, cost=SimStepCost())
        )
        return Device(
            executor=self.executor,
            engine_config=engine_config,
            pool=pool,
            backend=SimTransferBackend(
                fabric=SimFabric(Random(0), LinkModel()),
                worker=worker,
                layout=layout,
                memory=memory,
                generations=generations,
            ),
            constraints=TokenConstraints(vocab_size=VOCAB_SIZE, in_threads=False),
            summary="simulated",
            close_memory=self.closed.set,
        )


@pytest.fixture
def opened() -> Opened:
    return Opened()


def config(**changes: Any) -> WorkerConfig:
    known = {**worker_times(), "step_limit_s": 60.0, "worker_id": "w", "schedulers": ("127.0.0.1:9",)}
    return WorkerConfig(**{**known, **changes})


@asynccontextmanager
async def serving(opened: Opened, **changes: Any) -> AsyncIterator[tuple[asyncio.Task[None], Stop, Gateway, list[int]]]:
    """Run a worker. Yields its task, its stop, a session with it, and the exit codes of its process."""
    stop, ready, codes = Stop(), asyncio.get_running_loop().create_future(), []
    # The heartbeat is also the keepalive: a busy machine must not end the session.
    changes = {"heartbeat_s": 5.0, "detection_s": 30.0, **changes}
    task = asyncio.create_task(serve(config(**changes), stop, ready.set_result, codes.append, opened.open))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    network = GrpcNetwork(heartbeat_s=10.0, dial_s=30.0)
    gateway = Gateway(network, opened.worker)
    try:
        assert await ready == opened.worker.address
        await gateway.connect()
        yield task, stop, gateway, codes
    finally:
        await network.aclose()
        task.cancel()
        await asyncio.wait((task,))


async def test_worker_serves_until_drained_and_closes_everything(opened: Opened) -> None:
    async with serving(opened) as (task, stop, gateway, codes):
        job = decode_job(20)
        gateway.send(job)
        await gateway.ended(job.job)
        stop.request()
        await asyncio.wait_for(task, 30.0)
        assert codes == [0]
        assert opened.closed.is_set()


async def test_unhealthy_worker_refuses_connections_and_ends_the_process(opened: Opened) -> None:
    async with serving(opened) as (task, _, gateway, codes):
        opened.executor.error = DeviceFault("device lost")
        gateway.send(decode_job(20))
        await gateway.until(lambda: gateway.is_broken)
        with pytest.raises(StreamBroken):
            await gateway.connect()
        await asyncio.wait_for(task, 30.0)
        assert codes == [UNHEALTHY_EXIT_CODE]
        assert not opened.closed.is_set()


async def test_worker_without_schedulers_or_redis_does_not_start() -> None:
    with pytest.raises(ConfigError, match="--schedulers"):
        await run_worker(config(schedulers=()), Stop(), lambda ready: None)


async def test_streams_are_closed_until_the_worker_is_built() -> None:
    from baton.runtime.network.in_process_network import duplex_pair

    ours: Any
    ours, theirs = duplex_pair()
    await StartupGate().session(theirs)
    with pytest.raises(StreamBroken):
        await ours.receive()


def test_worker_thread_starts_drains_and_ends_without_error(opened: Opened) -> None:
    thread = WorkerThread(config(), open_device=opened.open)
    ready = thread.start()
    assert ready.worker == opened.worker
    assert ready.summary.startswith("simulated, targets without SLO TTFT 10x, TPOT 4x of unknown costs")
    assert ready.start_s >= 0
    thread.drain()
    assert thread.wait() == ""
    assert opened.closed.is_set()


def test_worker_thread_reports_needs_replacement_and_the_process_keeps_running(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(
        WorkerLifecycle, "is_to_be_replaced", property(lambda self: True, lambda self, value: None), raising=False
    )
    thread = WorkerThread(config(), codes.append, opened.open)
    thread.start()
    thread.drain()
    assert str(thread.wait()).startswith("WorkerNeedsReplacement: too many blocks were quarantined")
    assert codes == []


def test_worker_thread_reports_that_its_node_shuts_down(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Worker.drain
    for node_shutting_down in (False, True):
        monkeypatch.setattr(
            Worker,
            "drain",
            lambda self, node_shutting_down=node_shutting_down: drain(self, node_shutting_down=node_shutting_down),
        )
        thread = WorkerThread(config(), open_device=opened.open)
        thread.start()
        thread.drain()
        assert (thread.wait(), thread.node_shutting_down) == ("", node_shutting_down)


def test_repeated_start_returns_the_same_worker_until_it_has_ended(opened: Opened) -> None:
    thread = WorkerThread(config(), open_device=opened.open)
    assert thread.start() is thread.start()
    assert thread.wait(limit_s=0.0) is None, "it runs"
    thread.stop()
    assert thread.wait(limit_s=30.0) == ""
    with pytest.raises(BatonError, match="has ended"):
        thread.start()


def test_worker_thread_can_be_stopped_immediately(opened: Opened) -> None:
    thread = WorkerThread(config(), open_device=opened.open)
    thread.start()
    thread.stop()
    assert thread.wait(limit_s=30.0) == ""


def test_start_error_is_raised_by_every_call_of_start() -> None:
    def fail(config: WorkerConfig, worker: WorkerRef, say: Say) -> Device:
        raise ModelError("no such model")

    thread = WorkerThread(config(), open_device=fail)
    for _ in range(2):
        with pytest.raises(ModelError, match="no such model"):
            thread.start()
    assert "no such model" in (thread.wait() or "")


def test_default_threads_are_the_allowed_cores_or_an_even_share_of_all() -> None:
    assert default_threads(4, num_cores=8, num_usable_cores=2, quota=None) == 2
    assert [default_threads(n, num_cores=8, num_usable_cores=8, quota=None) for n in (1, 3, 16)] == [8, 2, 1]


@pytest.mark.parametrize(("quota", "threads"), [(6.5, [6, 3, 1]), (0.5, [1, 1, 1]), (64.0, [8, 4, 1])])
def test_default_threads_respect_the_container_quota(quota: float, threads: list[int]) -> None:
    assert [default_threads(n, num_cores=8, num_usable_cores=8, quota=quota) for n in (1, 2, 7)] == threads
