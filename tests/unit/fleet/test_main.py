"""`baton fleet` as a process: what it says of itself while it has, or waits for, its workers."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from baton.core.cluster.worker_report import WorkerRole
from baton.core.errors import ConfigError
from baton.fleet import fleet_main
from baton.fleet.ray import actor_placement, ray_actors, ray_fleet, ray_nodes
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.worker_plan import WorkerSpec
from baton.runtime.config.settings import FleetConfig
from baton.runtime.network.addresses import choose_port
from baton.runtime.process.process import Stop
from tests.unit.fleet.fake_ray import FakeRay


@asynccontextmanager
async def serving(config: FleetConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A fleet, and who asks at its admin port; it must end well when it is told to."""
    stop = Stop()
    task = asyncio.create_task(fleet_main.serve(config, stop, lambda address: None))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.admin_port}", trust_env=False) as client:
        try:
            yield client
        finally:
            stop.request()
            await asyncio.wait_for(task, 5)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def until_answered(client: httpx.AsyncClient, path: str, *words: str) -> httpx.Response:
    async with asyncio.timeout(5):
        while True:
            try:
                answer = await client.get(path)
            except httpx.ConnectError:
                pass
            else:
                if all(word in answer.text for word in words):
                    return answer
            await asyncio.sleep(0.01)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    found = FakeRay(d={"baton_decode": 1})
    for module in (ray_actors, ray_fleet, ray_nodes):
        monkeypatch.setattr(module, "the_ray", lambda: found)
    for module in (actor_placement, ray_fleet):
        monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(fleet_main, "RunDir", lambda: SimpleNamespace(path=tmp_path, close=lambda: None))
    return found


async def test_it_lives_at_once_is_ready_once_it_has_joined_and_counts_its_workers(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = threading.Event()
    monkeypatch.setattr(RayFleet, "_join_ray", lambda self: joined.wait(5) and "10.0.0.1")
    port = choose_port("127.0.0.1", 0, flag="")
    async with serving(
        FleetConfig(ray_address="h:1", ray_placement="role", scale_with_nodes=True, admin_port=port)
    ) as client:
        await until_answered(client, "/health", "ok")
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reasons"]) == (503, ["ray: starting"])
        joined.set()
        await until_answered(client, "/ready", '"ready"')
        answer = await until_answered(client, "/metrics", 'baton_fleet_workers{role="decode",state="serving"} 1.0')
        assert 'baton_fleet_workers{role="prefill",state="waiting"} 1.0' in answer.text
        assert 'baton_fleet_workers{role="prefill",state="serving"} 0.0' in answer.text
        ray.add("p", baton_prefill=2)
        answer = await until_answered(client, "/metrics", 'baton_fleet_workers{role="prefill",state="serving"} 2.0')
        assert 'baton_fleet_workers{role="prefill",state="waiting"} 0.0' in answer.text


async def test_without_an_admin_port_there_is_none(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayFleet, "_join_ray", lambda self: "10.0.0.1")
    monkeypatch.setattr(fleet_main, "AdminServer", None)
    stop, ready = Stop(), asyncio.Event()
    task = asyncio.create_task(fleet_main.serve(FleetConfig(ray_address="h:1"), stop, lambda address: ready.set()))
    await asyncio.wait_for(ready.wait(), 5)
    stop.request()
    await asyncio.wait_for(task, 5)


def test_where_the_fleet_listens_is_no_setting_of_its_workers() -> None:
    config = FleetConfig(ray_address="h:1", host="0.0.0.0", admin_port=9000, model="demo")
    worker = fleet_main.worker_config(config, WorkerSpec(worker_id="decode-0", role=WorkerRole.DECODE), 1, "demo")
    assert (worker.host, worker.admin_port) == ("127.0.0.1", None)


@pytest.mark.parametrize("ray_address", [None, "h:1"])
async def test_how_long_a_worker_may_take_is_a_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ray_address: str | None
) -> None:
    made: dict[str, Any] = {}

    class Fleet:
        def __init__(self, **options: Any) -> None:
            made.update(options)
            raise ConfigError("enough")

    monkeypatch.setattr(fleet_main, "RayFleet", Fleet)
    monkeypatch.setattr(fleet_main, "RunDir", lambda: SimpleNamespace(path=tmp_path, close=lambda: None))
    with pytest.raises(ConfigError, match="enough"):
        await fleet_main.serve(FleetConfig(ray_address=ray_address, worker_start_s=1800.0), Stop(), lambda _: None)
    assert made["start_limit_s"] == 1800.0


@pytest.mark.parametrize("settings", [{}, {"ray_address": "h:1", "ray_placement": "spread"}])
def test_places_to_follow_are_those_that_nodes_offer_by_role(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scale_with_nodes"):
        FleetConfig(scale_with_nodes=True, **settings)
    assert FleetConfig(scale_with_nodes=True, ray_address="h:1").scale_with_nodes
