"""What is asked of Ray has a limit, whatever Ray does. The workers themselves: tests/integration/fleet."""

import asyncio
import threading
from pathlib import Path

import pytest

from baton.fleet.ray import ray_fleet
from baton.fleet.ray.ray_calls import RayFailed
from baton.fleet.ray.ray_fleet import Joined, RayFleet


@pytest.fixture
def fleet(tmp_path: Path) -> RayFleet:
    return RayFleet(ray_dir=tmp_path, log_dir=None, joined=Joined(address="h:1", cluster="default"))


async def test_closing_what_was_never_connected_is_nothing(fleet: RayFleet) -> None:
    await fleet.close(grace_s=1.0)


async def test_a_ray_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, fleet: RayFleet) -> None:
    never = threading.Event()
    monkeypatch.setattr(fleet, "_join_ray", never.wait)
    monkeypatch.setattr(ray_fleet, "CONNECT_LIMIT_S", 0.05)
    async with asyncio.timeout(5):
        with pytest.raises(RayFailed, match=r"could not be joined at h:1: no answer within 0.05 s"):
            await fleet.connect()
        with pytest.raises(RayFailed, match="could not go on: no answer"):
            await fleet._call("go on", lambda: None, 0.05)
    never.set()


async def test_what_ray_raises_is_said(monkeypatch: pytest.MonkeyPatch, fleet: RayFleet) -> None:
    def refuse() -> str:
        raise ConnectionError("no such cluster")

    monkeypatch.setattr(fleet, "_join_ray", refuse)
    with pytest.raises(
        RayFailed, match=r"joined at h:1: no such cluster; this machine .* `ray start --address h:1 --num-cpus 0`"
    ):
        await fleet.connect()


async def test_calls_come_one_after_the_other_from_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fleet = RayFleet(ray_dir=tmp_path, log_dir=None)
    monkeypatch.setattr(fleet, "_start_ray", lambda: threading.current_thread().name)
    assert await fleet.connect() == "ray"
    order: list[int] = []
    await asyncio.gather(*(fleet._call("count", lambda i=i: order.append(i)) for i in range(5)))  # type: ignore[misc]
    assert order == [0, 1, 2, 3, 4]
