"""What an earlier fleet left: which workers are adopted, and when the rest is drained."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.fleet.ray import actor_placement, ray_fleet, ray_nodes
from baton.fleet.ray.ray_fleet import Stage
from tests.contract.networks import eventually
from tests.unit.fleet.fake_ray import FakeRay
from tests.unit.fleet.keeping import D, P, Use, for_a_while, keeping, left_behind, wanted

pytestmark = pytest.mark.usefixtures("soon")


async def test_what_an_earlier_fleet_left_is_adopted_and_the_rest_drained(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 3}))
    there = [left_behind(ray, f"decode-{i}", resources={"baton_decode": 1}) for i in (1, 2, 3)]
    other = left_behind(ray, "hybrid-0")
    async with keeping(tmp_path, wanted(decode=2)) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 2})
        assert [len(actor.starts) for actor in there] == [2, 2, 1], "those that run are taken, whatever their number"
        await eventually(lambda: there[2].ended.done() and other.ended.done())
        assert not there[0].ended.done()


async def test_what_runs_is_adopted_before_what_waits_for_a_node(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_placement, "ADOPT_LIMIT_S", 0.5)
    monkeypatch.setattr(ray_fleet, "LEFT_BEHIND_LIMIT_S", 0.5)
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    runs = left_behind(ray, "decode-1", resources={"baton_decode": 1})
    left_behind(ray, "decode-0", resources={"baton_decode": 1})
    async with keeping(tmp_path, wanted()) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
        await for_a_while()
        assert (len(runs.starts), runs.ended.done()) == (2, False)


async def test_one_that_ends_before_it_is_told_to_is_nobodys_failure(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    other = left_behind(ray, "hybrid-1")
    names = ray.util.list_named_actors
    ray.util.list_named_actors = lambda: ["worker-hybrid-0", *names(), "worker-hybrid-2"]  # which it no longer finds
    async with keeping(tmp_path, wanted()):
        await eventually(other.ended.done)
        await for_a_while()


async def test_the_rest_is_not_drained_before_ours_serve_or_are_known_to_wait(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_placement, "SAY_WAITING_S", 0.2)
    ray = use(FakeRay(d={"baton_decode": 1, "baton_hybrid": 1}))
    other = left_behind(ray, "hybrid-0", resources={"baton_hybrid": 1})
    async with keeping(tmp_path, wanted()):
        await eventually(lambda: ray.where.get("decode-0"))
        await for_a_while()
        assert not other.ended.done(), "prefill-0 may still come up"
        await eventually(other.ended.done)


async def test_an_actor_that_still_waits_for_a_node_is_asked_for_anew(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}))
    stale = left_behind(ray, "decode-0", resources={"baton_decode": 1}, label_selector={ray_nodes.NODE_LABEL: "!in(d)"})
    async with keeping(tmp_path, wanted()) as fleet:
        await eventually(lambda: stale.is_dead)
        ray.add("d", baton_decode=1)
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
        assert ray.where["decode-0"] == "d"


async def test_the_next_fleet_adopts_those_above_the_least(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 3}))
    there = [left_behind(ray, f"decode-{i}", resources={"baton_decode": 1}) for i in (0, 2, 7)]
    async with keeping(tmp_path, replace(wanted(), follows_places=True)) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 3})
        await for_a_while()
        assert [(len(actor.starts), actor.ended.done()) for actor in there] == [(2, False)] * 3
