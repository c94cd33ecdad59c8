"""How a fleet places, starts and restarts its workers, over a fake Ray."""

import asyncio
import logging
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.fleet.ray.actor_placement import WorkerFailed
from baton.fleet.ray.fleet_worker import WorkerStage
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.ray.ray_nodes import NodesRefused
from baton.fleet.ray.release_check import release_probe
from baton.fleet.ray.worker_actor import NODE_SHUTTING_DOWN
from baton.fleet.worker_plan import WorkerSpec
from tests.contract.networks import eventually
from tests.unit.fleet.fake_ray import FakeConnection, FakeRay
from tests.unit.fleet.fleet_rig import QUICK_LIMIT, D, P, connected, desired, many_refreshes, reconciling, worker_config

NEEDS_REPLACEMENT = "WorkerNeedsReplacement: too many blocks were quarantined"


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    messages: list[Any] = [record.msg for record in caplog.records]
    return [message for message in messages if isinstance(message, dict) and message["event"] == event]


async def test_worker_waiting_for_a_node_does_not_block_other_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = FakeRay(d={"baton_decode": 1})
    with caplog.at_level(logging.INFO):
        async with reconciling(ray, tmp_path, desired(), timeout_s=0.01) as fleet:
            await eventually(lambda: ray.where == {"decode-0": "d"})
            first = ray.serving("decode-0")
            first.die()
            await eventually(lambda: ray.where == {"decode-0": "d"} and ray.serving("decode-0") is not first)
            await eventually(lambda: len(events(caplog, "worker_waiting_for_node")) >= 3)
            await eventually(lambda: fleet.stages == {(P, WorkerStage.WAITING): 1, (D, WorkerStage.SERVING): 1})
            ray.add("p", baton_prefill=1)
            await eventually(lambda: ray.where == {"decode-0": "d", "prefill-0": "p"})
            await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})
    reports = events(caplog, "worker_waiting_for_node")
    assert {event["worker"] for event in reports} == {"prefill-0"}
    assert (reports[0]["demand"], reports[0]["nodes"]) == ("baton_prefill: 1", "d (at-d) has baton_decode: 1")
    reported_at_s = [record.created for record in caplog.records if record.msg in reports]
    assert reported_at_s[2] - reported_at_s[0] > 0.08, "once per report interval, not at each refresh"


async def test_reports_do_not_catch_up_after_a_blocked_event_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reports() -> list[dict[str, Any]]:
        return [event for event in events(caplog, "worker_waiting_for_node") if event["worker"] == "prefill-0"]

    ray = FakeRay(d={"baton_decode": 1})
    with caplog.at_level(logging.INFO):
        async with reconciling(ray, tmp_path, desired()):
            await eventually(lambda: reports())
            time.sleep(0.3)  # noqa: ASYNC251 - blocks the event loop, as a busy machine does
            await eventually(lambda: len(reports()) >= 3)
    reported_at_s = [record.created for record in caplog.records if record.msg in reports()]
    assert all(later_s - earlier_s > 0.04 for earlier_s, later_s in pairwise(reported_at_s))


async def test_worker_that_is_not_detached_fails_after_waiting_too_long_for_a_node(tmp_path: Path) -> None:
    ray = FakeRay(d={"baton_decode": 1})
    fleet = await connected(ray, tmp_path, is_detached=False, timeout_s=0.05)
    spec = WorkerSpec(worker_id="prefill-0", role=P)
    with pytest.raises(
        WorkerFailed,
        match=r"not placed within 0\.05 s: it requests baton_prefill: 1; available nodes: d \(at-d\) has baton_dec",
    ):
        await fleet.start(spec, worker_config(spec))
    await fleet.close(1.0)


async def test_crash_looping_worker_is_retried_later_and_does_not_block_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    ray.start_errors["prefill-0"] = [RuntimeError("no such model")]
    with caplog.at_level(logging.INFO):
        async with reconciling(ray, tmp_path, desired()) as fleet:
            await eventually(lambda: events(caplog, "worker_crash_looping"))
            await eventually(lambda: fleet.stages == {(P, WorkerStage.FAILING): 1, (D, WorkerStage.SERVING): 1})
            first = ray.serving("decode-0")
            first.die()
            await eventually(lambda: ray.where == {"decode-0": "d"} and ray.serving("decode-0") is not first)
            ray.start_errors.clear()
            await eventually(lambda: ray.where == {"decode-0": "d", "prefill-0": "p"})
    assert "no such model" in events(caplog, "worker_crash_looping")[0]["reason"]


async def test_slow_failures_also_count_as_a_crash_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    ray.start_errors["prefill-0"], ray.start_s["prefill-0"] = [RuntimeError("no such model")], 0.05
    seen: set[WorkerStage] = set()

    def has_logged(fleet: RayFleet, event: str) -> bool:
        if events(caplog, "worker_died"):
            seen.update(stage for role, stage in fleet.stages if role is P)
        return bool(events(caplog, event))

    with caplog.at_level(logging.INFO):
        async with reconciling(ray, tmp_path, desired(), limit=replace(QUICK_LIMIT, window_s=0.02)) as fleet:
            await eventually(lambda: has_logged(fleet, "worker_crash_looping") and WorkerStage.FAILING in seen)
            assert WorkerStage.STARTING not in seen, "a retry after a failure stays FAILING"
            ray.start_errors.clear()
            await eventually(lambda: ray.where == {"decode-0": "d", "prefill-0": "p"})
            await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})
            num_logged = len(events(caplog, "worker_crash_looping"))
            first = ray.serving("prefill-0")
            first.die()
            await eventually(lambda: "prefill-0" in ray.where and ray.serving("prefill-0") is not first)
            assert len(events(caplog, "worker_crash_looping")) == num_logged, "it has served in between"
    messages: list[Any] = [record.msg for record in caplog.records]
    of_it = [
        message["event"] for message in messages if isinstance(message, dict) and message.get("worker") == "prefill-0"
    ]
    failures = [event for event in of_it if event in ("worker_died", "worker_crash_looping")]
    assert failures[:4] == ["worker_died"] * 3 + ["worker_crash_looping"], "after more deaths than the limit"


async def test_actor_name_that_ray_does_not_free_does_not_block_other_workers(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    ray.start_errors["prefill-0"] = [RuntimeError("no memory")]
    ray.kept_names.add("worker-prefill-0")
    async with reconciling(ray, tmp_path, desired()):
        await eventually(lambda: "decode-0" in ray.where and any(actor.is_dead for actor in ray.actors))
        first = ray.serving("decode-0")
        first.die()
        await eventually(lambda: ray.where == {"decode-0": "d"} and ray.serving("decode-0") is not first)
        ray.start_errors.clear()
        ray.kept_names.clear()
        await eventually(lambda: ray.where == {"decode-0": "d", "prefill-0": "p"})
        assert ray.serving("decode-0") is not first


async def test_actor_name_that_ray_does_not_free_is_a_failure_of_that_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    with caplog.at_level(logging.INFO):
        async with reconciling(ray, tmp_path, desired(), name_timeout_s=0.02) as fleet:
            await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})
            ray.kept_names.add("worker-decode-0")
            ray.serving("decode-0").end("")
            await eventually(lambda: events(caplog, "worker_died"))
            ray.kept_names.clear()
            await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.SERVING): 1})
    assert "Ray did not free the name of worker decode-0 within 0.02 s" in events(caplog, "worker_died")[0]["reason"]


async def test_fleet_goes_on_while_a_worker_that_can_decode_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    notes: list[str] = []
    fleet = await connected(ray, tmp_path, is_detached=False, notify=notes.append)
    for spec in (WorkerSpec(worker_id="prefill-0", role=P), WorkerSpec(worker_id="decode-0", role=D)):
        await fleet.start(spec, worker_config(spec))
    ray.start_errors["prefill-0"] = [RuntimeError("no memory")]
    supervision = asyncio.create_task(fleet.supervise())
    with caplog.at_level(logging.INFO):
        ray.serving("prefill-0").die()
        await eventually(lambda: events(caplog, "worker_crash_looping"))
    assert not supervision.done()
    assert fleet.stages == {(P, WorkerStage.FAILING): 1, (D, WorkerStage.SERVING): 1}
    assert any("prefill-0 keeps dying" in note and "the others go on" in note for note in notes)
    ray.start_errors["decode-0"] = [RuntimeError("no memory")]
    ray.serving("decode-0").die()
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(supervision, 60)
    assert "worker decode-0 keeps dying" in str(failed.value.exceptions[0])
    await fleet.close(1.0)


async def test_crash_looping_worker_that_is_not_detached_ends_the_fleet(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1})
    fleet = await connected(ray, tmp_path, is_detached=False)
    spec = WorkerSpec(worker_id="prefill-0", role=P)
    await fleet.start(spec, worker_config(spec))
    ray.start_errors["prefill-0"] = [RuntimeError("no memory")]
    supervision = asyncio.create_task(fleet.supervise())
    ray.serving("prefill-0").die()
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(supervision, 60)
    (error,) = failed.value.exceptions
    assert isinstance(error, WorkerFailed)
    assert "keeps dying: worker prefill-0 did not start: no memory" in str(error)
    await fleet.close(1.0)


@pytest.mark.parametrize("why", ["", NEEDS_REPLACEMENT])
async def test_worker_that_ends_by_itself_or_is_drained_is_replaced_on_its_node(tmp_path: Path, why: str) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    async with reconciling(ray, tmp_path, desired()):
        await eventually(lambda: len(ray.where) == 2)
        first = ray.serving("decode-0")
        first.end(why)
        await eventually(lambda: first.is_dead and ray.where.get("decode-0") == "d")
        assert ray.serving("decode-0") is not first


async def test_draining_node_gets_no_worker_until_it_is_gone(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    async with reconciling(ray, tmp_path, desired()) as fleet:
        await eventually(lambda: len(ray.where) == 2)
        ray.serving("decode-0").end(NODE_SHUTTING_DOWN)
        await eventually(lambda: fleet.stages == {(P, WorkerStage.SERVING): 1, (D, WorkerStage.WAITING): 1})
        await many_refreshes()
        assert ray.where == {"prefill-0": "p"}
        ray.add("e", baton_decode=1)
        await eventually(lambda: ray.where == {"prefill-0": "p", "decode-0": "e"})


async def test_drained_worker_is_not_restarted_on_a_private_ray(tmp_path: Path) -> None:
    for why in ("", NODE_SHUTTING_DOWN):
        ray = FakeRay(here={})
        fleet = RayFleet(ray_dir=tmp_path, log_dir=None, limit=QUICK_LIMIT, connection=FakeConnection(ray))
        await fleet.connect()
        spec = WorkerSpec(worker_id="w0", role=P)
        await fleet.start(spec, worker_config(spec))
        (actor,) = ray.actors
        actor.end(why)
        await asyncio.wait_for(fleet.supervise(), 60)
        assert ray.actors == [actor]
        await fleet.close(1.0)


async def test_demand_of_a_waiting_worker_follows_the_nodes(tmp_path: Path) -> None:
    ray = FakeRay(p={"baton_prefill": 1})
    async with reconciling(ray, tmp_path, desired(), placement="auto"):
        await eventually(lambda: [actor.demand for actor in ray.living if not actor.node] == [{"CPU": 1}])
        ray.add("d", baton_decode=1)
        await eventually(lambda: ray.where == {"prefill-0": "p", "decode-0": "d"})
        assert all(actor.node for actor in ray.living), "an actor still waits for a node"


async def test_fleet_waits_for_new_nodes_if_all_have_another_release(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = FakeRay(p={"baton_prefill": 1}, d={"baton_decode": 1})
    ray.releases["d"] = {**release_probe()(), "Baton": "0.0.9"}
    with caplog.at_level(logging.INFO):
        async with reconciling(ray, tmp_path, desired()):
            await eventually(lambda: events(caplog, "worker_waiting_for_node"))
            ray.lose("d")
            ray.add("e", baton_decode=1)
            await eventually(lambda: ray.where == {"prefill-0": "p", "decode-0": "e"})
    assert "has Baton 0.0.9" in events(caplog, "worker_waiting_for_node")[0]["refused"][0]
    fleet = await connected(ray, tmp_path, is_detached=False)
    ray.releases["e"] = ray.releases["d"]
    fleet._nodes._accepted.clear()
    spec = WorkerSpec(worker_id="decode-1", role=D)
    with pytest.raises(NodesRefused):
        await fleet.start(spec, worker_config(spec))
    await fleet.close(1.0)
