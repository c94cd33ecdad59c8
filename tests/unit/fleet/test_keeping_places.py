"""As many workers as nodes have places for: which come with new places, and which go when they are gone."""

from concurrent.futures import Future
from pathlib import Path

import pytest

from baton.fleet.ray import actor_placement
from baton.fleet.ray.ray_fleet import RayFleet, Stage
from baton.fleet.ray.release_check import release_probe
from baton.fleet.ray.worker_actor import NODE_SHUTTING_DOWN
from tests.contract.networks import eventually
from tests.unit.fleet.fake_ray import FakeActor, FakeRay
from tests.unit.fleet.keeping import D, P, Use, for_a_while, keeping, left_behind, wanted

pytestmark = pytest.mark.usefixtures("soon")


async def test_as_many_workers_as_nodes_have_places_for(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}))
    async with keeping(tmp_path, wanted(follows_places=True)) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.WAITING): 1})
        for node in ("d", "e", "f"):
            ray.add(node, baton_decode=1)
        ray.add("p2", baton_prefill=2)
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 3, (D, Stage.SERVING): 3})
        assert sorted(ray.where.values()) == ["d", "e", "f", "p", "p2", "p2"]
        assert ray.serving("prefill-2").starts[-1]["workers_on_host"] == 2, "so much of the node's memory is its own"


async def test_workers_go_with_their_places_but_never_below_the_least(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}, e={"baton_decode": 1}, f={"baton_decode": 1}))
    async with keeping(tmp_path, wanted(follows_places=True)) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 3})
        ray.lose("f")
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 2})
        drained = next(worker_id for worker_id, node in ray.where.items() if node == "e")
        ray.serving(drained).end(NODE_SHUTTING_DOWN)
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
        await eventually(lambda: len(ray.living) == 2)  # nobody asks for what nobody offers
        ray.lose("e")
        ray.lose("d")
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.WAITING): 1})
        await for_a_while()
        assert fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.WAITING): 1}
        ray.add("g", baton_decode=1)
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})


async def test_one_that_may_serve_is_not_ended_for_want_of_places(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_placement, "ADOPT_LIMIT_S", 5.0)
    ray = use(FakeRay(p={"baton_prefill": 1}))
    there = []
    for worker_id, node in {"decode-0": "f", "decode-1": "d", "decode-2": "e"}.items():
        ray.add(node, baton_decode=1)
        there.append(left_behind(ray, worker_id, resources={"baton_decode": 1}))
        there[-1].placed = Future()  # where it is it will say when it has time
    async with keeping(tmp_path, wanted(follows_places=True)) as fleet:
        await eventually(lambda: sum(fleet.stages.values()) == 4)
        ray.lose("f")
        await eventually(lambda: sum(fleet.stages.values()) == 3)
        await for_a_while()
        assert [actor.is_dead for actor in there] == [True, False, False]
        there[1].placed.set_result("d")
        there[2].placed.set_result("e")
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 2})
        assert ray.where == {"prefill-0": "p", "decode-1": "d", "decode-2": "e"}


async def test_one_that_gets_a_place_while_another_is_dropped_stays(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}, e={"baton_decode": 2}))
    ray.releases["e"] = {**release_probe()(), "Baton": "0.0.9"}
    drop = RayFleet._drop
    asked: list[str] = []
    on_g: list[FakeActor] = []

    async def slowly(fleet: RayFleet, worker_id: str) -> None:
        await drop(fleet, worker_id)
        asked.append(worker_id)
        if not on_g:
            ray.add("g", baton_decode=1)
            await eventually(lambda: "g" in ray.where.values())
            on_g.extend(actor for actor in ray.living if actor.node == "g")

    monkeypatch.setattr(RayFleet, "_drop", slowly)
    async with keeping(tmp_path, wanted(follows_places=True)) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1, (D, Stage.WAITING): 2})
        ray.lose("e")
        await eventually(lambda: len(asked) == 2)
        await for_a_while()
        assert fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 2}
        assert [actor.is_dead for actor in on_g] == [False]


async def test_without_being_told_to_places_are_not_filled(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 4}, d={"baton_decode": 4}))
    async with keeping(tmp_path, wanted()) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
        await for_a_while()
        assert len(ray.where) == 2
