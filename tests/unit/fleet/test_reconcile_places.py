"""A fleet with `scale_with_nodes`: workers are added and removed with the places that nodes offer."""

from concurrent.futures import Future
from pathlib import Path

from baton.fleet.ray.fleet_worker import WorkerStage
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.ray.release_check import release_probe
from baton.fleet.ray.worker_actor import NODE_SHUTTING_DOWN
from tests.contract.networks import eventually
from tests.unit.fleet.fake_ray import FakeActor, FakeRay
from tests.unit.fleet.fleet_rig import NOT_ANSWERED_S, D, P, desired, left_behind, many_refreshes, reconciling


async def test_one_worker_runs_for_each_offered_place(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1})
    async with reconciling(ray, tmp_path, desired(scale_with_nodes=True)) as fleet:
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.WAITING): 1})
        for node in ("d", "e", "f"):
            ray.add(node, baton_decode=1)
        ray.add("p2", baton_prefill=2)
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 3, (D, WorkerStage.SERVING): 3})
        assert sorted(ray.where.values()) == ["d", "e", "f", "p", "p2", "p2"]
        assert ray.serving("prefill-2").starts[-1]["workers_on_host"] == 2, "two workers share the memory of this node"


async def test_workers_are_removed_with_their_places_down_to_the_minimum(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}, e={"baton_decode": 1}, f={"baton_decode": 1})
    async with reconciling(ray, tmp_path, desired(scale_with_nodes=True)) as fleet:
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 3})
        ray.lose("f")
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 2})
        drained = next(worker_id for worker_id, node in ray.where.items() if node == "e")
        ray.serving(drained).end(NODE_SHUTTING_DOWN)
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})
        await eventually(lambda: len(ray.living) == 2)  # no actor waits for a place that no node offers
        ray.lose("e")
        ray.lose("d")
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.WAITING): 1})
        await many_refreshes()
        assert fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.WAITING): 1}
        ray.add("g", baton_decode=1)
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})


async def test_adopted_worker_that_may_serve_is_not_removed_for_lack_of_places(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1})
    actors = []
    for worker_id, node in {"decode-0": "f", "decode-1": "d", "decode-2": "e"}.items():
        ray.add(node, baton_decode=1)
        actors.append(left_behind(ray, worker_id, resources={"baton_decode": 1}))
        actors[-1].placed = Future()  # it does not answer yet
    workers = desired(scale_with_nodes=True)
    async with reconciling(ray, tmp_path, workers, left_behind_timeout_s=NOT_ANSWERED_S) as fleet:
        await eventually(lambda: sum(fleet.stages.values()) == 4)
        ray.lose("f")
        await eventually(lambda: sum(fleet.stages.values()) == 3)
        await many_refreshes()
        assert [actor.is_dead for actor in actors] == [True, False, False]
        actors[1].placed.set_result("d")
        actors[2].placed.set_result("e")
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 2})
        assert ray.where == {"prefill-0": "p", "decode-1": "d", "decode-2": "e"}


async def test_worker_that_gets_a_place_while_another_is_removed_stays(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}, e={"baton_decode": 2})
    ray.releases["e"] = {**release_probe()(), "Baton": "0.0.9"}
    removals: list[str] = []
    on_g: list[FakeActor] = []

    class SlowFleet(RayFleet):
        """Offers a new place between two removals."""

        async def _remove_waiting(self, worker_id: str) -> None:
            await super()._remove_waiting(worker_id)
            removals.append(worker_id)
            if not on_g:
                ray.add("g", baton_decode=1)
                await eventually(lambda: "g" in ray.where.values())
                on_g.extend(actor for actor in ray.living if actor.node == "g")

    async with reconciling(ray, tmp_path, desired(scale_with_nodes=True), fleet_class=SlowFleet) as fleet:
        await eventually(
            lambda: (
                fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1, (D, WorkerStage.WAITING): 2}
            )
        )
        ray.lose("e")
        await eventually(lambda: len(removals) == 2)
        await many_refreshes()
        assert fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 2}
        assert [actor.is_dead for actor in on_g] == [False]


async def test_places_are_not_filled_without_follows_places(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 4}, d={"baton_decode": 4})
    async with reconciling(ray, tmp_path, desired()) as fleet:
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})
        await many_refreshes()
        assert len(ray.where) == 2
