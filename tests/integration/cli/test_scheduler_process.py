"""`baton scheduler` as a process with a real Redis: calls, loss of Redis, SIGTERM and SIGKILL."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from baton.core.cluster.placement import Placement, Rejection
from baton.core.cluster.worker_command import CommandKind
from baton.core.errors import Reason, StreamBroken
from baton.core.interfaces import Member, MemberKind, Source
from baton.core.request import RequestActuals
from baton.rpc.grpc_network import GrpcNetwork
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_decision_store import RedisDecisionStore
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_membership import RedisMembership
from tests.builders import query, worker_report
from tests.free_port import free_port
from tests.redis_server import RunningRedis, running_redis
from tests.times import TEST_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
LIMIT_S = 60.0
LONG_LIMITS = ("--heartbeat-s", "5", "--detection-s", "60")
"""For tests whose worker reports once: on a busy machine neither it nor a connection is taken for lost."""
SHORT_LIMITS = ("--heartbeat-s", "0.5", "--detection-s", "2")
"""For tests without a worker: a new scheduler waits for reports for this long before it rejects."""
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def redis() -> Iterator[RunningRedis]:
    with running_redis() as server:
        yield server


class SchedulerProcess:
    def __init__(self, log_dir: Path, redis_url: str, *args: str) -> None:
        times = [
            text
            for name in ("heartbeat_s", "detection_s", "drain_s")
            for text in (f"--{name.replace('_', '-')}", str(TEST_TIMES[name]))
        ]
        self.log = log_dir / "scheduler.log"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-X",
                "faulthandler",
                "-m",
                "baton.cli",
                "scheduler",
                "--redis-url",
                redis_url,
                "--log-dir",
                str(log_dir),
                *times,
                *args,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        self.address = self.first_line.removeprefix("ready ").strip()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Signal the process and return its exit code. If it does not end, fail with its stacks."""
        self.process.send_signal(signum)
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            _, stacks = self.process.communicate(LIMIT_S)
            raise AssertionError(f"the process did not end: {stacks}\n{self.log.read_text()}") from None

    def events(self, **fields: str) -> list[str]:
        """Return the names of the logged events that have these fields."""
        lines = self.log.read_text().splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry["event"] for entry in entries if fields.items() <= entry.items()]


@contextmanager
def scheduler(log_dir: Path, redis_url: str, *args: str) -> Iterator[SchedulerProcess]:
    started = SchedulerProcess(log_dir, redis_url, *args)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


@asynccontextmanager
async def network() -> AsyncIterator[GrpcNetwork]:
    network = GrpcNetwork(heartbeat_s=10.0, dial_s=LIMIT_S, call_s=LIMIT_S)  # for a busy machine
    try:
        yield network
    finally:
        await network.aclose()


@asynccontextmanager
async def connected(redis: RunningRedis) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis.url, timeout_s=LIMIT_S)
    try:
        yield connection
    finally:
        await connection.aclose()


async def poll_interval() -> None:
    """Wait between two checks of another process."""
    await asyncio.sleep(0.05)


async def until_broken(source: Source[object]) -> None:
    while True:
        await source.receive()


async def listed_schedulers(connection: RedisConnection) -> tuple[Member, ...]:
    return await RedisMembership(connection, Keys()).members(MemberKind.SCHEDULER)


async def test_process_serves_calls_and_leaves_redis_after_sigterm(tmp_path: Path, redis: RunningRedis) -> None:
    with scheduler(tmp_path, redis.url, "--policy", "round_robin", *LONG_LIMITS) as process:
        async with network() as grpc_network, connected(redis) as connection, asyncio.timeout(LIMIT_S):
            (member,) = await listed_schedulers(connection)
            assert (member.address, dict(member.info)["pid"]) == (process.address, str(process.process.pid))
            api = grpc_network.scheduler(member.address)
            watch = await api.watch()
            reports = await grpc_network.open_report(member.address)
            reports.send(worker_report("w0"))
            while not (await watch.receive()).reports:
                pass
            placed = await api.place(query(request_id=b"r"))
            assert isinstance(placed, Placement)
            assert (placed.policy, placed.scheduler_id) == ("round_robin", member.member_id)
            await api.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop", ttft_s=0.5))
            (record,) = await api.explain(None)
            assert record.placement == placed
            assert await api.drain("w0")
            while (command := await reports.receive()).kind is CommandKind.SNAPSHOT:
                pass  # this worker sends no snapshot
            assert command.kind is CommandKind.DRAIN

            assert process.stop() == 0
            assert await listed_schedulers(connection) == ()
            (kept,) = await RedisDecisionStore(connection, Keys()).get(b"r")
            assert kept.actuals["ttft_s"] == 0.5
            with pytest.raises(StreamBroken):
                await until_broken(watch)
            with pytest.raises(StreamBroken):
                await until_broken(reports)
    assert "scheduler_drain_started" in process.events()
    assert "worker_lost" not in process.events(), "a scheduler that shuts down must not report lost workers"


async def test_process_places_with_a_policy_of_another_module(
    tmp_path: Path, redis: RunningRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"), prepend=os.pathsep)
    with scheduler(tmp_path, redis.url, "--policy", "most_free:most_free", *LONG_LIMITS) as process:
        async with network() as grpc_network, asyncio.timeout(LIMIT_S):
            reports = await grpc_network.open_report(process.address)
            reports.send(worker_report("w0"))
            api = grpc_network.scheduler(process.address)
            watch = await api.watch()
            while not (await watch.receive()).reports:
                pass
            assert isinstance(await api.place(query(request_id=b"r")), Placement)
            (record,) = await api.explain(None)
            assert record.policy == "most_free:most_free"
            assert record.candidates[0].terms == {"free_blocks": 100}
    with scheduler(tmp_path, redis.url, "--policy", "most_free:most_fre") as process:
        assert process.process.wait(LIMIT_S) == 1
        assert process.process.stderr is not None
        assert "did you mean 'most_free'?" in process.process.stderr.read()


async def test_placement_continues_without_redis_and_the_entry_returns_with_it(tmp_path: Path) -> None:
    with running_redis() as redis, scheduler(tmp_path, redis.url, *LONG_LIMITS, "--heartbeat-s", "1") as process:
        async with network() as grpc_network, asyncio.timeout(LIMIT_S):
            redis.kill()
            reports = await grpc_network.open_report(process.address)
            reports.send(worker_report("w0"))
            watch = await grpc_network.scheduler(process.address).watch()
            while not (await watch.receive()).reports:
                pass
            assert isinstance(await grpc_network.scheduler(process.address).place(query()), Placement)
            while "store_became_unavailable" not in process.events(use="membership"):
                await poll_interval()
            await asyncio.sleep(2.5)  # two heartbeats more
            redis.start()
            async with connected(redis) as connection:
                while not await listed_schedulers(connection):
                    await poll_interval()
        assert process.stop() == 0
    membership = process.events(use="membership")
    # More would follow if Redis stood still after its return.
    assert membership[:2] == ["store_became_unavailable", "store_recovered"]


async def test_process_starts_without_redis_and_logs_it(tmp_path: Path) -> None:
    with scheduler(tmp_path, f"redis://127.0.0.1:{free_port('127.0.0.1')}/0", *SHORT_LIMITS) as process:
        assert process.first_line.startswith("ready 127.0.0.1:")
        async with network() as grpc_network, asyncio.timeout(LIMIT_S):
            rejection = await grpc_network.scheduler(process.address).place(query())
            assert isinstance(rejection, Rejection)
            assert rejection.reason is Reason.NO_WORKERS
        assert process.stop() == 0
    assert "store_became_unavailable" in process.events()


async def test_entry_of_a_killed_process_expires(tmp_path: Path, redis: RunningRedis) -> None:
    with scheduler(tmp_path, redis.url) as process:
        process.stop(signal.SIGKILL)
        async with connected(redis) as connection, asyncio.timeout(LIMIT_S):
            while process.address in [member.address for member in await listed_schedulers(connection)]:
                await poll_interval()


async def test_admin_port_serves_metrics_and_readiness(tmp_path: Path, redis: RunningRedis) -> None:
    with scheduler(tmp_path, redis.url, "--admin-port", "0", *SHORT_LIMITS) as process:
        admin = next(
            json.loads(line)["address"] for line in process.log.read_text().splitlines() if '"admin_started"' in line
        )
        async with httpx.AsyncClient(base_url=f"http://{admin}", timeout=LIMIT_S) as client, network() as grpc_network:
            await grpc_network.scheduler(process.address).place(query())
            assert (await client.get("/ready")).json() == {"status": "ready", "reasons": []}
            metrics = (await client.get("/metrics")).text
        assert 'baton_rejections_total{reason="no_workers"} 1.0' in metrics
        assert "baton_event_loop_lag_seconds" in metrics
        assert process.stop() == 0


def test_port_in_use_is_reported_in_one_line(tmp_path: Path, redis: RunningRedis) -> None:
    with scheduler(tmp_path, redis.url) as process:
        port = process.address.rpartition(":")[2]
        second = SchedulerProcess(tmp_path, redis.url, "--rpc-port", port)
        _, errors = second.process.communicate(timeout=LIMIT_S)
    assert second.first_line == ""
    assert second.process.returncode == 1
    assert (
        errors.splitlines()[-1]
        == f"baton: port {port} on 127.0.0.1 is in use; choose another with --rpc-port, or 0 for a free one"
    )


def test_invalid_redis_url_is_reported_in_one_line(tmp_path: Path) -> None:
    process = SchedulerProcess(tmp_path, "http://h:1")
    _, errors = process.process.communicate(timeout=LIMIT_S)
    assert process.process.returncode == 1
    assert "redis://" in errors.splitlines()[-1]
