"""A worker writes KV events for schedulers and step costs for later workers to Redis."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import KvEvent, Tier
from baton.rpc.grpc_network import GrpcNetwork
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.process.process import Stop
from baton.sim.sim_executor import SimStepCost
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_cost_store import RedisCostStore
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_kv_event_feed import RedisKvEventFeed
from baton.worker.device.gpu_start import Say
from baton.worker.device.worker_device import Device
from baton.worker.worker_main import WorkerReady, run_worker
from tests.redis_server import RunningRedis, running_redis
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.scripted_gateway import Gateway
from tests.unit.worker.test_worker_main import Opened, config

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def redis() -> Iterator[RunningRedis]:
    with running_redis() as server:
        yield server


async def test_worker_writes_block_events_and_step_costs_to_redis(
    redis: RunningRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RedisConnection.__init__.__kwdefaults__, "timeout_s", 30.0)  # for a busy machine
    device = Opened()

    def open_with_costs(settings: WorkerConfig, worker: WorkerRef, say: Say) -> Device:
        return replace(device.open(settings, worker, say), costs=SimStepCost().model, costs_key="kind")

    stop, ready = Stop(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(run_worker(config(redis_url=redis.url), stop, ready.set_result, open_with_costs))
    started: WorkerReady = await asyncio.wait_for(ready, 60.0)
    connection, keys = RedisConnection(redis.url), Keys()
    network = GrpcNetwork(heartbeat_s=10.0, dial_s=30.0)
    try:
        feed, costs = RedisKvEventFeed(connection, keys), RedisCostStore(connection, keys)
        async with asyncio.timeout(30.0):
            while (snapshot := await feed.snapshot(started.worker)) is None:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        assert snapshot.hashes[Tier.DEVICE] == ()
        gateway = Gateway(network, started.worker)
        await gateway.connect()
        job = decode_job(20)
        gateway.send(job)
        await gateway.ended(job.job)
        stored: set[bytes] = set()
        async with asyncio.timeout(30.0):
            while len(stored) < 6:
                events = await feed.read({started.worker: 1}, max_events=10, wait_s=0.2)
                held = [event for event in events.get(started.worker, ()) if isinstance(event, KvEvent)]
                stored = {block_hash for event in held for block_hash in event.hashes}
        stop.request()
        await asyncio.wait_for(serving, 60.0)
        stored_costs = await costs.get("kind")
        assert stored_costs is not None
        assert stored_costs.coefficients == SimStepCost().model.coefficients
        assert stored_costs.decode_factor != 1.0, "corrected by measured steps"
    finally:
        serving.cancel()
        await asyncio.wait((serving,))
        await network.aclose()
        await connection.aclose()
