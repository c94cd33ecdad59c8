"""Every Ray call has a timeout. Fleets with real workers are in tests/integration/fleet."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.fleet.ray.ray_calls import RayFailed
from baton.fleet.ray.ray_connection import JoinedCluster
from baton.fleet.ray.ray_fleet import RayFleet
from tests.unit.fleet.fake_ray import FakeConnection


def joining(tmp_path: Path, connect: Callable[[], object], connect_timeout_s: float = 60.0) -> RayFleet:
    """A fleet whose `connect` calls this function on the Ray thread."""
    return RayFleet(
        ray_dir=tmp_path,
        log_dir=None,
        joined=JoinedCluster(address="h:1", cluster="default"),
        connection=FakeConnection(connect=connect),
        connect_timeout_s=connect_timeout_s,
    )


async def test_close_without_connect_does_not_raise(tmp_path: Path) -> None:
    await joining(tmp_path, lambda: None).close(grace_s=1.0)


async def test_ray_that_does_not_answer_is_a_failure_after_the_timeout(tmp_path: Path) -> None:
    never = threading.Event()
    fleet = joining(tmp_path, never.wait, connect_timeout_s=0.05)
    async with asyncio.timeout(60):
        with pytest.raises(RayFailed, match=r"could not be joined at h:1: no answer within 0.05 s"):
            await fleet.connect()
        with pytest.raises(RayFailed, match="could not go on: no answer"):
            await fleet._call("go on", lambda: None, 0.05)
    never.set()


async def test_error_of_ray_is_part_of_the_message(tmp_path: Path) -> None:
    def refuse() -> str:
        raise ConnectionError("no such cluster")

    fleet = joining(tmp_path, refuse)
    with pytest.raises(
        RayFailed, match=r"joined at h:1: no such cluster; this machine .* `ray start --address h:1 --num-cpus 0`"
    ):
        await fleet.connect()


async def test_all_calls_run_in_order_on_one_thread(tmp_path: Path) -> None:
    connection = FakeConnection(connect=lambda: threading.current_thread().name)
    fleet = RayFleet(ray_dir=tmp_path, log_dir=None, connection=connection)
    assert await fleet.connect() == "ray"
    order: list[int] = []
    await asyncio.gather(*(fleet._call("count", lambda i=i: order.append(i)) for i in range(5)))  # type: ignore[misc]
    assert order == [0, 1, 2, 3, 4]
