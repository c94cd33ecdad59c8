"""Which workers a fleet has, where, and what becomes of them, on a Ray that does what the test says."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.core.cluster import WorkerRole
from baton.fleet import actors, placing, ray_fleet, ray_nodes
from baton.fleet.plan import Wanted, WorkerSpec
from baton.fleet.ray_fleet import Joined, RayFleet, Stage, WorkerFailed
from baton.fleet.ray_nodes import NodesRefused
from baton.fleet.releases import release_probe
from baton.fleet.supervisor import RestartLimit
from baton.fleet.worker_actor import NODE_LEAVES
from baton.runtime.settings import RayPlacement, WorkerConfig
from tests.contract.networks import eventually
from tests.unit.fleet.fake_ray import FakeActor, FakeRay

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
QUICK = RestartLimit(deaths=2, window_s=0.2, first_wait_s=0.001, max_wait_s=0.001)
WORN_OUT = "WorkerWornOut: too many blocks were quarantined"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOOK_S": 0.005, "SAY_WAITING_S": 0.02, "SAY_AGAIN_S": 0.05, "ADOPT_LIMIT_S": 0.05}.items():
        monkeypatch.setattr(placing, name, seconds)
    for name, seconds in {"LOOK_S": 0.005, "LEFT_BEHIND_LIMIT_S": 0.05}.items():
        monkeypatch.setattr(ray_fleet, name, seconds)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeRay], FakeRay]:
    def use(ray: FakeRay) -> FakeRay:
        for module in (actors, ray_fleet, ray_nodes):
            monkeypatch.setattr(module, "the_ray", lambda: ray)
        monkeypatch.setattr(RayFleet, "_join_ray", lambda self: "10.0.0.1")
        return ray

    return use


Use = Callable[[FakeRay], FakeRay]


async def connected(tmp_path: Path, *, is_detached: bool = True, placement: RayPlacement = "role", limit: RestartLimit = QUICK) -> RayFleet:
    joined = Joined(address="h:1", cluster="test", placement=placement, is_detached=is_detached)
    fleet = RayFleet(ray_dir=tmp_path, log_dir=None, joined=joined, limit=limit)
    await fleet.connect()
    return fleet


def wanted(*, follows_places: bool = False, prefill: int = 1, decode: int = 1) -> Wanted:
    return Wanted(least={P: prefill, D: decode}, follows_places=follows_places, config_of=worker_config)


def worker_config(spec: WorkerSpec) -> WorkerConfig:
    return WorkerConfig(worker_id=spec.worker_id, role=spec.role.value)


@asynccontextmanager
async def keeping(tmp_path: Path, wanted: Wanted, placement: RayPlacement = "role", limit: RestartLimit = QUICK) -> AsyncIterator[RayFleet]:
    """A fleet that looks after these; it must still do so when the test ends."""
    fleet = await connected(tmp_path, placement=placement, limit=limit)
    task = asyncio.create_task(fleet.keep(wanted))
    try:
        yield fleet
        assert not task.done()
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        await fleet.close(1.0)
        if not isinstance(ended, asyncio.CancelledError):
            raise ended


async def for_a_while() -> None:
    """Many looks long."""
    await asyncio.sleep(0.1)


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    messages: list[Any] = [record.msg for record in caplog.records]
    return [message for message in messages if isinstance(message, dict) and message["event"] == event]


async def test_a_worker_without_a_node_keeps_nobody_from_being_looked_after(
    use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "PLACE_LIMIT_S", 0.01)
    ray = use(FakeRay(d={"baton_decode": 1}))
    with caplog.at_level(logging.INFO):
        async with keeping(tmp_path, wanted()) as fleet:
            await eventually(lambda: ray.where == {"decode-0": "d"})
            first = ray.serving("decode-0")
            first.die()
            await eventually(lambda: ray.where == {"decode-0": "d"} and ray.serving("decode-0") is not first)
            await eventually(lambda: len(events(caplog, "worker_waits_for_a_node")) >= 3)
            assert fleet.stages == {(P, Stage.WAITING): 1, (D, Stage.SERVING): 1}
            ray.add("p", baton_prefill=1)
            await eventually(lambda: ray.where == {"decode-0": "d", "prefill-0": "p"})
            await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
    said = events(caplog, "worker_waits_for_a_node")
    assert {event["worker"] for event in said} == {"prefill-0"}
    assert (said[0]["asks_for"], said[0]["nodes"]) == ("baton_prefill: 1", "d (at-d) has baton_decode: 1")
    said_at_s = [record.created for record in caplog.records if record.msg in said]
    assert said_at_s[2] - said_at_s[0] > 0.08, "now and then, not at each look"


async def test_who_was_held_up_does_not_say_it_more_often_afterwards(use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[dict[str, Any]]:
        return [event for event in events(caplog, "worker_waits_for_a_node") if event["worker"] == "prefill-0"]

    use(FakeRay(d={"baton_decode": 1}))
    with caplog.at_level(logging.INFO):
        async with keeping(tmp_path, wanted()):
            await eventually(lambda: told())
            time.sleep(0.3)  # noqa: ASYNC251 - as a busy machine does
            await eventually(lambda: len(told()) >= 3)
    said_at_s = [record.created for record in caplog.records if record.msg in told()]
    assert all(later_s - earlier_s > 0.04 for earlier_s, later_s in pairwise(said_at_s))


async def test_one_that_ends_with_its_driver_is_given_up_without_a_node(use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "PLACE_LIMIT_S", 0.05)
    use(FakeRay(d={"baton_decode": 1}))
    fleet = await connected(tmp_path, is_detached=False)
    spec = WorkerSpec(worker_id="prefill-0", role=P)
    with pytest.raises(
        WorkerFailed, match=r"not placed within 0\.05 s: it asks for baton_prefill: 1; of the nodes, d \(at-d\) has baton_dec"
    ):
        await fleet.start(spec, worker_config(spec))
    await fleet.close(1.0)


async def test_one_that_keeps_dying_is_tried_again_later_and_the_others_are_looked_after(
    use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    ray.start_errors["prefill-0"] = [RuntimeError("no such model")]
    with caplog.at_level(logging.INFO):
        async with keeping(tmp_path, wanted()) as fleet:
            await eventually(lambda: events(caplog, "worker_keeps_dying"))
            assert fleet.stages == {(P, Stage.FAILING): 1, (D, Stage.SERVING): 1}
            first = ray.serving("decode-0")
            first.die()
            await eventually(lambda: ray.where == {"decode-0": "d"} and ray.serving("decode-0") is not first)
            ray.start_errors.clear()
            await eventually(lambda: ray.where == {"decode-0": "d", "prefill-0": "p"})
    assert "no such model" in events(caplog, "worker_keeps_dying")[0]["why"]


async def test_one_that_takes_long_to_fail_keeps_dying_too(use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    ray.start_errors["prefill-0"], ray.start_s["prefill-0"] = [RuntimeError("no such model")], 0.05
    seen: set[Stage] = set()

    def told_of(fleet: RayFleet, event: str) -> bool:
        if events(caplog, "worker_died"):
            seen.update(stage for role, stage in fleet.stages if role is P)
        return bool(events(caplog, event))

    with caplog.at_level(logging.INFO):
        async with keeping(tmp_path, wanted(), limit=replace(QUICK, window_s=0.02)) as fleet:
            await eventually(lambda: told_of(fleet, "worker_keeps_dying"))
            assert Stage.FAILING in seen
            assert Stage.STARTING not in seen, "it has failed, and is tried again"
            ray.start_errors.clear()
            await eventually(lambda: ray.where == {"decode-0": "d", "prefill-0": "p"})
            await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
            num_told = len(events(caplog, "worker_keeps_dying"))
            first = ray.serving("prefill-0")
            first.die()
            await eventually(lambda: "prefill-0" in ray.where and ray.serving("prefill-0") is not first)
            assert len(events(caplog, "worker_keeps_dying")) == num_told, "it has served between"
    messages: list[Any] = [record.msg for record in caplog.records]
    of_it = [message["event"] for message in messages if isinstance(message, dict) and message.get("worker") == "prefill-0"]
    told = [event for event in of_it if event in ("worker_died", "worker_keeps_dying")]
    assert told[:4] == ["worker_died"] * 3 + ["worker_keeps_dying"], "once there were more than it may have"


async def test_while_ray_keeps_the_name_of_one_the_others_are_looked_after(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    ray.start_errors["prefill-0"] = [RuntimeError("no memory")]
    ray.kept_names.add("worker-prefill-0")
    async with keeping(tmp_path, wanted()):
        await eventually(lambda: "decode-0" in ray.where and any(actor.is_dead for actor in ray.actors))
        first = ray.serving("decode-0")
        first.die()
        await eventually(lambda: ray.where == {"decode-0": "d"} and ray.serving("decode-0") is not first)
        ray.start_errors.clear()
        ray.kept_names.clear()
        await eventually(lambda: ray.where == {"decode-0": "d", "prefill-0": "p"})


async def test_a_name_that_ray_keeps_is_a_failure_of_that_worker_alone(
    use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "NAME_FREE_S", 0.02)
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    with caplog.at_level(logging.INFO):
        async with keeping(tmp_path, wanted()) as fleet:
            await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
            ray.kept_names.add("worker-decode-0")
            ray.serving("decode-0").end("")
            await eventually(lambda: events(caplog, "worker_died"))
            ray.kept_names.clear()
            await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
    assert "Ray has not let go of the name of worker decode-0 within 0.02 s" in events(caplog, "worker_died")[0]["why"]


async def test_one_of_a_driver_that_keeps_dying_ends_it(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}))
    fleet = await connected(tmp_path, is_detached=False)
    spec = WorkerSpec(worker_id="prefill-0", role=P)
    await fleet.start(spec, worker_config(spec))
    ray.start_errors["prefill-0"] = [RuntimeError("no memory")]
    supervision = asyncio.create_task(fleet.supervise())
    ray.serving("prefill-0").die()
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(supervision, 5)
    (error,) = failed.value.exceptions
    assert isinstance(error, WorkerFailed)
    assert "keeps dying: worker prefill-0 did not start: no memory" in str(error)
    await fleet.close(1.0)


@pytest.mark.parametrize("why", ["", WORN_OUT])
async def test_one_that_leaves_by_itself_or_by_name_is_replaced_where_it_was(use: Use, tmp_path: Path, why: str) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    async with keeping(tmp_path, wanted()):
        await eventually(lambda: len(ray.where) == 2)
        first = ray.serving("decode-0")
        first.end(why)
        await eventually(lambda: first.is_dead and ray.where.get("decode-0") == "d")


async def test_a_node_that_is_drained_gets_no_worker_while_it_lives(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    async with keeping(tmp_path, wanted()) as fleet:
        await eventually(lambda: len(ray.where) == 2)
        ray.serving("decode-0").end(NODE_LEAVES)
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.WAITING): 1})
        await for_a_while()
        assert ray.where == {"prefill-0": "p"}
        ray.add("e", baton_decode=1)
        await eventually(lambda: ray.where == {"prefill-0": "p", "decode-0": "e"})


async def test_on_one_machine_who_was_drained_stays_away(use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for why in ("", NODE_LEAVES):
        ray = use(FakeRay(here={}))
        monkeypatch.setattr(RayFleet, "_start_ray", lambda self: "local")
        fleet = RayFleet(ray_dir=tmp_path, log_dir=None, limit=QUICK)
        await fleet.connect()
        spec = WorkerSpec(worker_id="w0", role=P)
        await fleet.start(spec, worker_config(spec))
        (actor,) = ray.actors
        actor.end(why)
        await asyncio.wait_for(fleet.supervise(), 5)
        assert ray.actors == [actor]
        await fleet.close(1.0)


def left_behind(ray: FakeRay, worker_id: str, **options: Any) -> FakeActor:
    """An actor that an earlier driver made."""
    actor: FakeActor = ray.remote(FakeActor).options(name=f"worker-{worker_id}", **options).remote()
    if actor.node:
        actor.starts.append({"worker_id": worker_id})
    return actor


async def test_what_an_earlier_fleet_left_is_adopted_and_the_rest_drained(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 3}))
    there = [left_behind(ray, f"decode-{i}", resources={"baton_decode": 1}) for i in (1, 2, 3)]
    other = left_behind(ray, "hybrid-0")
    async with keeping(tmp_path, wanted(decode=2)) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 2})
        assert [len(actor.starts) for actor in there] == [2, 2, 1], "those that run are taken, whatever their number"
        await eventually(lambda: there[2].ended.done() and other.ended.done())
        assert not there[0].ended.done()


async def test_what_runs_is_adopted_before_what_waits_for_a_node(use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "ADOPT_LIMIT_S", 0.5)
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
    monkeypatch.setattr(placing, "SAY_WAITING_S", 0.2)
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


async def test_what_a_waiting_worker_asks_for_follows_the_nodes(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}))
    async with keeping(tmp_path, wanted(), placement="auto"):
        await eventually(lambda: [actor.demand for actor in ray.living if not actor.node] == [{"CPU": 1}])
        ray.add("d", baton_decode=1)
        await eventually(lambda: ray.where == {"prefill-0": "p", "decode-0": "d"})


async def test_where_all_nodes_have_another_baton_a_fleet_waits_for_others(
    use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1}))
    ray.releases["d"] = {**release_probe()(), "Baton": "0.0.9"}
    with caplog.at_level(logging.INFO):
        async with keeping(tmp_path, wanted()):
            await eventually(lambda: events(caplog, "worker_waits_for_a_node"))
            ray.lose("d")
            ray.add("e", baton_decode=1)
            await eventually(lambda: ray.where == {"prefill-0": "p", "decode-0": "e"})
    assert "has Baton 0.0.9" in events(caplog, "worker_waits_for_a_node")[0]["refused"][0]
    fleet = await connected(tmp_path, is_detached=False)
    ray.releases["e"] = ray.releases["d"]
    fleet._nodes._accepted.clear()
    spec = WorkerSpec(worker_id="decode-1", role=D)
    with pytest.raises(NodesRefused):
        await fleet.start(spec, worker_config(spec))
    await fleet.close(1.0)


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
        ray.serving(drained).end(NODE_LEAVES)
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})
        await eventually(lambda: len(ray.living) == 2)  # nobody asks for what nobody offers
        ray.lose("e")
        ray.lose("d")
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.WAITING): 1})
        await for_a_while()
        assert fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.WAITING): 1}
        ray.add("g", baton_decode=1)
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 1})


async def test_one_that_may_serve_is_not_ended_for_want_of_places(use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "ADOPT_LIMIT_S", 5.0)
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


async def test_one_that_gets_a_place_while_another_is_dropped_stays(use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_the_next_fleet_adopts_those_above_the_least(use: Use, tmp_path: Path) -> None:
    ray = use(FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 3}))
    there = [left_behind(ray, f"decode-{i}", resources={"baton_decode": 1}) for i in (0, 2, 7)]
    async with keeping(tmp_path, replace(wanted(), follows_places=True)) as fleet:
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.SERVING): 3})
        await for_a_while()
        assert [(len(actor.starts), actor.ended.done()) for actor in there] == [(2, False)] * 3
