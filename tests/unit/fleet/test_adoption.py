"""Workers of an earlier fleet: which ones are adopted, and when the others are drained."""

from dataclasses import replace
from pathlib import Path

from baton.fleet.ray import ray_nodes
from baton.fleet.ray.fleet_worker import WorkerStage
from tests.contract.networks import eventually
from tests.unit.fleet.fake_ray import FakeRay
from tests.unit.fleet.fleet_rig import NOT_ANSWERED_S, D, P, desired, left_behind, many_refreshes, reconciling


async def test_running_workers_are_adopted_and_unmanaged_ones_drained(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 3})
    actors = [left_behind(ray, f"decode-{i}", resources={"baton_decode": 1}) for i in (1, 2, 3)]
    other = left_behind(ray, "hybrid-0")
    async with reconciling(ray, tmp_path, desired(decode=2)) as fleet:
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 2})
        assert [len(actor.starts) for actor in actors] == [2, 2, 1], "running workers are adopted, whatever their index"
        await eventually(lambda: actors[2].ended.done() and other.ended.done())
        assert not actors[0].ended.done()


async def test_running_worker_is_adopted_before_a_waiting_one(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    running = left_behind(ray, "decode-1", resources={"baton_decode": 1})
    left_behind(ray, "decode-0", resources={"baton_decode": 1})
    # decode-0 does not answer, so this takes the whole timeout.
    async with reconciling(ray, tmp_path, desired(), left_behind_timeout_s=1.0) as fleet:
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})
        await many_refreshes()
        assert (len(running.starts), running.ended.done()) == (2, False)


async def test_unmanaged_actor_that_is_gone_before_its_drain_is_no_error(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    other = left_behind(ray, "hybrid-1")
    names = ray.util.list_named_actors
    ray.util.list_named_actors = lambda: ["worker-hybrid-0", *names(), "worker-hybrid-2"]  # names without an actor
    async with reconciling(ray, tmp_path, desired()):
        await eventually(other.ended.done)
        await many_refreshes()
        await eventually(lambda: (ray.where.get("prefill-0"), ray.where.get("decode-0")) == ("p", "d"))


async def test_unmanaged_workers_are_drained_only_after_all_managed_ones_have_settled(tmp_path: Path) -> None:
    ray = FakeRay(d={"baton_decode": 1, "baton_hybrid": 1})
    other = left_behind(ray, "hybrid-0", resources={"baton_hybrid": 1})
    notes: list[str] = []
    notes_before: list[str] = []
    other.ended.add_done_callback(lambda _: notes_before.extend(notes))
    async with reconciling(ray, tmp_path, desired(), report_after_s=0.2, notify=notes.append):
        await eventually(other.ended.done)
        await eventually(lambda: ray.where.get("decode-0") == "d")
    assert [note for note in notes_before if note.startswith("prefill-0 waits")], "prefill-0 could still come up"


async def test_adopted_actor_that_waits_for_a_node_is_created_again(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1})
    stale = left_behind(ray, "decode-0", resources={"baton_decode": 1}, label_selector={ray_nodes.NODE_LABEL: "!in(d)"})
    unanswered = {"adopt_timeout_s": NOT_ANSWERED_S, "left_behind_timeout_s": NOT_ANSWERED_S}
    async with reconciling(ray, tmp_path, desired(), **unanswered) as fleet:
        await eventually(lambda: stale.is_dead)
        ray.add("d", baton_decode=1)
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})
        assert ray.where["decode-0"] == "d"


async def test_next_fleet_adopts_workers_above_the_minimum(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 3})
    actors = [left_behind(ray, f"decode-{i}", resources={"baton_decode": 1}) for i in (0, 2, 7)]
    async with reconciling(ray, tmp_path, replace(desired(), scale_with_nodes=True)) as fleet:
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 3})
        await many_refreshes()
        assert [(len(actor.starts), actor.ended.done()) for actor in actors] == [(2, False)] * 3
