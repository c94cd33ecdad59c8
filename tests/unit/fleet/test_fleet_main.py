"""`baton fleet` as a process: its health, readiness and metrics while workers serve or wait for nodes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from baton.core.cluster.worker_report import WorkerRole
from baton.core.errors import ConfigError
from baton.fleet import fleet_main
from baton.fleet.ray.actor_placement import PlacementTimes
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.worker_plan import WorkerSpec
from baton.runtime.config.settings import FleetConfig
from baton.runtime.process.process import Stop
from tests.free_port import free_port
from tests.unit.fleet.fake_ray import FakeConnection, FakeRay

SOON = PlacementTimes(refresh_interval_s=0.01)


def fake_parts(ray: FakeRay, tmp_path: Path, connect: Callable[[], object] = lambda: "10.0.0.1") -> dict[str, Any]:
    """Arguments of `serve` with which it runs on a fake Ray."""
    return {
        "make_run_dir": lambda: SimpleNamespace(path=tmp_path, close=lambda: None),
        "make_fleet": partial(RayFleet, connection=FakeConnection(ray, connect=connect), placement_times=SOON),
    }


@asynccontextmanager
async def serving(config: FleetConfig, **parts: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A running fleet and a client of its admin port. The fleet must end cleanly at the end of the block."""
    stop = Stop()
    task = asyncio.create_task(fleet_main.serve(config, stop, lambda address: None, **parts))
    client_of = partial(
        httpx.AsyncClient, base_url=f"http://127.0.0.1:{config.admin_port}", timeout=60, trust_env=False
    )
    async with client_of() as client:
        try:
            yield client
        finally:
            stop.request()
            await asyncio.wait_for(task, 60)
    async with client_of() as client:  # without the connection of before, whose end may be noticed later
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def until_answered(client: httpx.AsyncClient, path: str, *words: str) -> httpx.Response:
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await client.get(path)
            except httpx.ConnectError:
                pass
            else:
                if all(word in answer.text for word in words):
                    return answer
            await asyncio.sleep(0.01)


async def test_fleet_is_healthy_before_it_joins_then_ready_and_counts_its_workers(tmp_path: Path) -> None:
    ray, joined = FakeRay(d={"baton_decode": 1}), threading.Event()
    parts = fake_parts(ray, tmp_path, connect=lambda: joined.wait(60) and "10.0.0.1")
    port = free_port("127.0.0.1")
    async with serving(
        FleetConfig(ray_address="h:1", ray_placement="role", scale_with_nodes=True, admin_port=port), **parts
    ) as client:
        await until_answered(client, "/health", "ok")
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reasons"]) == (503, ["ray: starting"])
        joined.set()
        await until_answered(client, "/ready", '"ready"')
        answer = await until_answered(
            client,
            "/metrics",
            'baton_fleet_workers{role="decode",state="serving"} 1.0',
            'baton_fleet_workers{role="prefill",state="waiting"} 1.0',
        )
        assert 'baton_fleet_workers{role="prefill",state="serving"} 0.0' in answer.text
        assert "baton_event_loop_stall_seconds_count" in answer.text
        ray.add("p", baton_prefill=2)
        answer = await until_answered(client, "/metrics", 'baton_fleet_workers{role="prefill",state="serving"} 2.0')
        assert 'baton_fleet_workers{role="prefill",state="waiting"} 0.0' in answer.text


def listening_ports() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


async def test_no_admin_server_runs_without_an_admin_port(tmp_path: Path) -> None:
    before = listening_ports()
    stop, ready = Stop(), asyncio.Event()
    parts = fake_parts(FakeRay(d={"baton_decode": 1}), tmp_path)
    config = FleetConfig(ray_address="h:1")
    task = asyncio.create_task(fleet_main.serve(config, stop, lambda address: ready.set(), **parts))
    await asyncio.wait_for(ready.wait(), 60)
    assert listening_ports() <= before
    stop.request()
    await asyncio.wait_for(task, 60)


def test_listening_address_of_the_fleet_does_not_apply_to_workers() -> None:
    config = FleetConfig(ray_address="h:1", host="0.0.0.0", admin_port=9000, model="demo")
    worker = fleet_main.worker_config(config, WorkerSpec(worker_id="decode-0", role=WorkerRole.DECODE), 1, "demo")
    assert (worker.host, worker.admin_port) == ("127.0.0.1", None)


@pytest.mark.parametrize("ray_address", [None, "h:1"])
async def test_start_timeout_of_workers_is_a_setting(tmp_path: Path, ray_address: str | None) -> None:
    used: dict[str, Any] = {}

    def make_fleet(**options: Any) -> RayFleet:
        used.update(options)
        raise ConfigError("enough")

    config = FleetConfig(ray_address=ray_address, worker_start_s=1800.0)
    parts = fake_parts(FakeRay(), tmp_path) | {"make_fleet": make_fleet}
    with pytest.raises(ConfigError, match="enough"):
        await fleet_main.serve(config, Stop(), lambda _: None, **parts)
    assert used["start_timeout_s"] == 1800.0


@pytest.mark.parametrize("settings", [{}, {"ray_address": "h:1", "ray_placement": "spread"}])
def test_scale_with_nodes_requires_placement_by_role(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scale_with_nodes"):
        FleetConfig(scale_with_nodes=True, **settings)
    assert FleetConfig(scale_with_nodes=True, ray_address="h:1").scale_with_nodes
