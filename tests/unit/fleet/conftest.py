"""A Ray that does what the test says, and a fleet that looks at it again soon."""

from collections.abc import Callable

import pytest

from baton.fleet.ray import actor_placement, ray_actors, ray_fleet, ray_nodes
from baton.fleet.ray.ray_fleet import RayFleet
from tests.unit.fleet.fake_ray import FakeRay


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOOK_S": 0.005, "SAY_WAITING_S": 0.02, "SAY_AGAIN_S": 0.05, "ADOPT_LIMIT_S": 0.05}.items():
        monkeypatch.setattr(actor_placement, name, seconds)
    for name, seconds in {"LOOK_S": 0.005, "LEFT_BEHIND_LIMIT_S": 0.05}.items():
        monkeypatch.setattr(ray_fleet, name, seconds)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeRay], FakeRay]:
    def use(ray: FakeRay) -> FakeRay:
        for module in (ray_actors, ray_fleet, ray_nodes):
            monkeypatch.setattr(module, "the_ray", lambda: ray)
        monkeypatch.setattr(RayFleet, "_join_ray", lambda self: "10.0.0.1")
        return ray

    return use
