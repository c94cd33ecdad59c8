"""Which workers a fleet has, where, and what becomes of them, on a Ray that does what the test says."""

import asyncio
import logging
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.fleet.ray import actor_placement
from baton.fleet.ray.ray_fleet import RayFleet, Stage, WorkerFailed
from baton.fleet.ray.ray_nodes import NodesRefused
from baton.fleet.ray.release_check import release_probe
from baton.fleet.ray.worker_actor import NODE_SHUTTING_DOWN
from baton.fleet.worker_plan import WorkerSpec
from tests.contract.networks import eventually
from tests.unit.fleet.fake_ray import FakeRay
from tests.unit.fleet.keeping import QUICK, D, P, Use, connected, for_a_while, keeping, wanted, worker_config

pytestmark = pytest.mark.usefixtures("soon")

NEEDS_REPLACEMENT = "WorkerNeedsReplacement: too many blocks were quarantined"


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    messages: list[Any] = [record.msg for record in caplog.records]
    return [message for message in messages if isinstance(message, dict) and message["event"] == event]


async def test_a_worker_without_a_node_keeps_nobody_from_being_looked_after(
    use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_placement, "PLACE_LIMIT_S", 0.01)
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


async def test_who_was_held_up_does_not_say_it_more_often_afterwards(
    use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


async def test_one_that_ends_with_its_driver_is_given_up_without_a_node(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_placement, "PLACE_LIMIT_S", 0.05)
    use(FakeRay(d={"baton_decode": 1}))
    fleet = await connected(tmp_path, is_detached=False)
    spec = WorkerSpec(worker_id="prefill-0", role=P)
    with pytest.raises(
        WorkerFailed,
        match=r"not placed within 0\.05 s: it asks for baton_prefill: 1; of the nodes, d \(at-d\) has baton_dec",
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


async def test_one_that_takes_long_to_fail_keeps_dying_too(
    use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    of_it = [
        message["event"] for message in messages if isinstance(message, dict) and message.get("worker") == "prefill-0"
    ]
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
    monkeypatch.setattr(actor_placement, "NAME_FREE_S", 0.02)
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


@pytest.mark.parametrize("why", ["", NEEDS_REPLACEMENT])
async def test_one_that_leaves_by_itself_or_by_name_is_replaced_where_it_was(
    use: Use, tmp_path: Path, why: str
) -> None:
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
        ray.serving("decode-0").end(NODE_SHUTTING_DOWN)
        await eventually(lambda: fleet.stages == {(P, Stage.SERVING): 1, (D, Stage.WAITING): 1})
        await for_a_while()
        assert ray.where == {"prefill-0": "p"}
        ray.add("e", baton_decode=1)
        await eventually(lambda: ray.where == {"prefill-0": "p", "decode-0": "e"})


async def test_on_one_machine_who_was_drained_stays_away(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for why in ("", NODE_SHUTTING_DOWN):
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
