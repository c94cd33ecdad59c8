"""The live view's snapshots: what happened on a gateway with stub workers, as its page shows it."""

import asyncio
from contextlib import AsyncExitStack
from statistics import median
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from baton.core.cluster.placement import Rejection
from baton.core.cluster.worker_report import WorkerState
from baton.core.errors import Reason, Refused
from baton.core.request import Slo
from baton.gateway.live.activity import Activity
from baton.gateway.live.cluster_changes import ClusterFacts, changes
from baton.gateway.live.live_feed import MAX_VIEWERS, LiveFeed, TooManyViewers
from baton.gateway.live.live_source import MAX_EXPLAINING
from baton.gateway.live.seen_prefixes import SeenPrefixes
from baton.gateway.live.snapshot import Clocks, PairCounts, snapshot
from baton.gateway.live.window import INTERVAL_S, Window, quantile, total
from baton.gateway.request.open_request import OpenRequest
from baton.gateway.text.stop_strings import StopPatterns
from tests import builders
from tests.cpu_time import CpuTime
from tests.unit.gateway.fakes import OutputCollector, kill_at, until
from tests.unit.gateway.live_rig import live_rig

PAIR = (("p0", "prefill"), ("d0", "decode"))


async def test_snapshot_shows_a_finished_request_and_its_figures() -> None:
    async with live_rig(*PAIR, default_slo=Slo(ttft_s=60.0, tpot_s=1e-9)) as rig:
        await rig.cluster.complete("hello", max_tokens=6)
        rig.cluster.gateway.count_result("completions", None)
        found = await rig.snapshot()
        (request,) = found["ended"]
        assert (request["phase"], request["prefill"], request["decode"]) == ("finished", "p0", "d0")
        assert (request["prompt"], request["output"], request["met"]) == (5, 6, False)
        figures = found["figures"]
        assert (figures["ok"], figures["failed"], figures["refused"]) == (1, 0, 0)
        assert figures["attainment"] == 0.0  # the TPOT SLO cannot be met
        assert figures["ttft_p50"] == pytest.approx(request["ttft"], rel=0.05)
        assert found["decisions"][0]["placement"]["decode"] == "d0"
        assert found["slo"] == {"ttft": 60.0, "tpot": 1e-9}
        details = await rig.view.request(request["id"])
        assert details is not None
        assert details["attempts"][0]["placement"]["prefill"] == "p0"
        assert 0 <= details["attempts"][0]["placed"] <= details["first"] <= details["last"] <= details["total"]


async def test_workers_and_links_are_those_of_status() -> None:
    async with live_rig(*PAIR) as rig:
        found = await rig.snapshot()
        reports = {report.worker.worker_id: report for report in rig.cluster.gateway.view.reports}
        assert [worker["id"] for worker in found["workers"]] == list(reports)
        for worker in found["workers"]:
            report = reports[worker["id"]]
            assert (worker["role"], worker["state"], worker["pid"]) == (report.role.value, "ready", report.pid)
            assert worker["blocks"]["total"] == report.blocks.total
        assert [(link["owner"], link["reader"], link["problem"]) for link in found["links"]] == [("p0", "d0", "")]


async def test_lost_attempt_is_an_event_and_its_answer_moves() -> None:
    async with live_rig(*PAIR, ("d1", "decode")) as rig:
        first = next(worker for worker in rig.cluster.scheduler.workers if worker.ref.worker_id == "d0")
        first.before_token = kill_at(2)
        await rig.cluster.complete("hello", max_tokens=6)
        found = await rig.snapshot()
        (request,) = found["ended"]
        assert (request["num_attempts"], request["decode"], request["output"]) == (2, "d1", 6)
        assert any("lost attempt 1 after" in event["text"] for event in found["events"])
        details = await rig.view.request(request["id"])
        assert details is not None
        assert [attempt["lost"] is not None for attempt in details["attempts"]] == [True, False]


async def test_refusal_says_why() -> None:
    async with live_rig(*PAIR) as rig:
        rejection = Rejection(
            reason=Reason.TTFT_SLO,
            message="predicted TTFT 2 s",
            retry_after_s=1.0,
            term="ttft",
            predicted_s=2.0,
            limit_s=0.5,
        )
        rig.cluster.scheduler.answer = lambda _: rejection
        with pytest.raises(Refused) as refused:
            await rig.cluster.complete("hello")
        rig.cluster.gateway.count_result("completions", refused.value.failure)
        found = await rig.snapshot()
        assert (found["decisions"][0]["reason"], found["decisions"][0]["placement"]) == ("ttft_slo", None)
        assert found["figures"]["refused"] == 1
        assert found["refusals"] == [
            {**found["refusals"][0], "reason": "ttft_slo", "count": 1, "message": rejection.message}
        ]
        assert found["ended"][0]["why"] == "predicted TTFT 2 s"


async def test_open_request_waits_then_runs() -> None:
    async with live_rig(*PAIR) as rig:
        rig.cluster.scheduler.hangs = True
        call = asyncio.create_task(rig.cluster.complete("hello"))
        await until(lambda: rig.cluster.scheduler.queries)
        found = await rig.snapshot()
        assert (found["queue"]["waiting"], found["open"][0]["phase"]) == (1, "waiting")
        call.cancel()
        await asyncio.wait((call,))
        found = await rig.snapshot()
        assert (found["queue"]["waiting"], found["open"], found["ended"][0]["phase"]) == (0, [], "cancelled")


async def test_tokens_count_while_a_request_runs_and_once() -> None:
    async with live_rig(("h0", "hybrid")) as rig:
        call = await rig.cluster.call("hello")
        request = OpenRequest(
            call.requests[0], call, StopPatterns(()), rig.cluster.gateway.tokenizer, OutputCollector(), 0
        )
        rig.activity.opened(request, call.identity)
        for num_tokens in (3, 7):
            request.output = SimpleNamespace(num_tokens=num_tokens)  # type: ignore[assignment]
            await rig.snapshot()
            assert rig.activity.window.total(asyncio.get_running_loop().time()).output_tokens == num_tokens
        request.output = SimpleNamespace(num_tokens=8)  # type: ignore[assignment]
        rig.activity.closed(request, None)
        assert rig.activity.window.total(asyncio.get_running_loop().time()).output_tokens == 8


async def test_transfers_before_the_first_viewer_are_not_in_progress() -> None:
    async with live_rig(*PAIR) as rig:
        rig.activity.handoffs["p0", "d0"] += 5
        rig.activity.moved_bytes["p0", "d0"] += 2**30
        assert (await rig.snapshot())["flows"] == []
        rig.activity.moved_bytes["p0", "d0"] += 2**20
        assert [flow["bytes"] for flow in (await rig.snapshot())["flows"]] == [2**20]


async def test_repeated_prompt_raises_the_ceiling() -> None:
    async with live_rig(("h0", "hybrid")) as rig:
        for _ in range(2):
            await rig.cluster.complete("x" * 64, max_tokens=1)
        first, second = rig.activity.ended
        assert (first.seen_tokens, second.seen_tokens) == (0, 63)  # all but the last token, which is computed always


async def test_details_of_the_last_decision_are_fetched_once() -> None:
    async with live_rig(*PAIR) as rig:
        rig.cluster.scheduler.records = (builders.decision_record(),)
        await rig.cluster.complete("hello")
        await rig.view._explain_last()
        why = (await rig.snapshot())["why"]
        assert why["id"] == rig.activity.decisions[-1].request_id
        assert why["decisions"][0]["policy"] == "least_loaded"
        rig.cluster.scheduler.records = ()
        await rig.view._explain_last()
        assert (await rig.snapshot())["why"] == why


async def test_last_decision_is_explained_again_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_rig(*PAIR) as rig:
        rig.cluster.scheduler.records = (builders.decision_record(),)
        await rig.cluster.complete("hello")
        schedulers = rig.cluster.gateway.schedulers
        with monkeypatch.context() as patched:
            patched.setattr(schedulers, "explain", AsyncMock(side_effect=TimeoutError))
            await rig.view._explain_last()
        assert (await rig.snapshot())["why"] is None
        await rig.view._explain_last()
        why = (await rig.snapshot())["why"]
        assert (why["number"], len(why["decisions"])) == (1, 1)


async def test_last_decision_is_explained_while_viewers_wait_for_theirs() -> None:
    async with live_rig(*PAIR) as rig:
        rig.cluster.scheduler.records = (builders.decision_record(),)
        await rig.cluster.complete("hello")
        async with AsyncExitStack() as taken:
            for _ in range(MAX_EXPLAINING):
                await taken.enter_async_context(rig.view._viewers_limit)
            await rig.view._explain_last()
        assert (await rig.snapshot())["why"] is not None


async def test_snapshot_has_the_point_of_the_interval_before() -> None:
    async with live_rig(*PAIR) as rig:
        activity = Activity(lambda: 0.0)
        for at_s in (1.0, 6.0, 11.0):
            activity.window.at(at_s).ok += 10
        clocks = Clocks(now_s=12.5, unix_offset_s=100.0)
        found = snapshot(rig.view._status(), "", Slo(), activity, PairCounts.of(activity), clocks)
        assert [(each["t"], each["ok"]) for each in found["points"]] == [(105.0, 2.0), (110.0, 4.0)]


def test_changes_of_the_cluster_are_events() -> None:
    def facts(*reports: object, scheduler: str = "s") -> ClusterFacts:
        return ClusterFacts.of(scheduler, reports)  # type: ignore[arg-type]

    ready = builders.worker_report("d0", "decode", links=(builders.link("p0"),))
    prefill = builders.worker_report("p0", "prefill")
    before = facts(ready, prefill)
    draining = builders.worker_report("d0", "decode", state=WorkerState.DRAINING)
    again = builders.worker_report("d0", "decode", epoch=2)
    broken = builders.worker_report("d0", "decode", links=(builders.link("p0", broken=True),))
    assert list(changes(before, before)) == []
    assert list(changes(before, facts(prefill))) == [("error", "d0 is lost")]
    assert list(changes(before, facts(draining, prefill))) == [("warning", "d0 is draining")]
    assert list(changes(facts(draining), facts())) == [("info", "d0 has drained and left")]
    assert list(changes(before, facts(again, prefill))) == [("warning", "d0 was restarted, ready")]
    assert list(changes(before, facts(broken, prefill))) == [("error", "d0 no longer reads from p0: a read failed")]
    assert list(changes(facts(broken, prefill), before)) == [("info", "d0 reads from p0 again")]
    earlier = builders.link("p0", epoch=9, broken=True)
    restarted = builders.worker_report("d0", "decode", links=(builders.link("p0"), earlier))
    assert list(changes(facts(broken, prefill), facts(restarted, prefill))) == [("info", "d0 reads from p0 again")]
    assert next(changes(before, facts(ready, prefill, scheduler="")))[0] == "error"


async def test_nothing_is_computed_without_viewers_and_once_for_all() -> None:
    computed = []
    feed = LiveFeed(lambda: computed.append(1) or len(computed), list, interval_s=0.01)
    await asyncio.sleep(0.05)
    assert computed == []
    viewers = [feed.watch() for _ in range(20)]
    assert {await anext(viewer) for viewer in viewers} == {b"event: history\ndata: []\n\nevent: snapshot\ndata: 1\n\n"}
    assert {await anext(viewer) for viewer in viewers} == {b"event: snapshot\ndata: 2\n\n"}
    for viewer in viewers:
        await viewer.aclose()
    number = len(computed)
    await asyncio.sleep(0.05)
    assert len(computed) == number


async def test_viewers_are_limited_and_end_with_the_feed() -> None:
    feed = LiveFeed(dict, list, interval_s=60)
    viewers = [feed.watch() for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        await anext(viewer)
    with pytest.raises(TooManyViewers):
        await anext(feed.watch())
    waiting = [asyncio.ensure_future(anext(viewer, b"")) for viewer in viewers[:3]]
    await asyncio.sleep(0)
    await feed.aclose()
    assert await asyncio.gather(*waiting) == [b""] * 3
    for viewer in viewers:
        await viewer.aclose()


async def test_viewer_of_a_failed_first_snapshot_is_not_counted() -> None:
    feed = LiveFeed(lambda: 1 / 0, dict)
    with pytest.raises(ZeroDivisionError):
        await anext(feed.watch())
    assert feed.num_viewers == 0


async def test_error_in_one_snapshot_does_not_end_the_feed() -> None:
    numbers = iter(range(100))

    def snapshot() -> int:
        number = next(numbers)
        if number == 1:
            raise ValueError("once")
        return number

    feed = LiveFeed(snapshot, list, interval_s=0.01)
    viewer = feed.watch()
    await anext(viewer)
    assert await anext(viewer) == b"event: snapshot\ndata: 2\n\n"
    await viewer.aclose()


def test_window_forgets_and_its_quantiles_are_exact_to_two_percent() -> None:
    window = Window()
    for second in range(1_200):
        interval = window.at(float(second))
        interval.ok += 1
        interval.observe_latency(0.001 * (second % 100 + 1), None)
    found = window.total(1_199.0)
    assert 595 <= found.ok <= 605
    assert quantile(found.ttft, 0.5) == pytest.approx(0.05, rel=0.03)
    assert quantile(found.ttft, 0.95) == pytest.approx(0.095, rel=0.03)
    assert quantile(found.tpot, 0.5) is None
    assert total([]).figures(1.0)["hit"] is None


@pytest.mark.parametrize("phase_s", [0.0, 0.1, 2.5, 4.9])
def test_rate_of_a_constant_load_is_the_same_at_any_time(phase_s: float) -> None:
    window, now_s = Window(), 100.0 + phase_s
    for tenth in range(int(now_s * 10)):
        window.at(tenth / 10).ok += 1
    counts, seconds = window.rates(now_s, 10.0)
    assert 10.0 <= seconds < 10.0 + INTERVAL_S
    assert counts.ok / seconds == pytest.approx(10.0, rel=0.03)


def test_seen_prefixes_cost_the_same_when_full() -> None:
    def cost_s(seen: SeenPrefixes, first_id: int) -> float:
        hashes = builders.hashes_of(range(first_id, first_id + 4 * 2_048))
        with CpuTime() as cpu:
            assert seen.add(hashes) == 0
        return cpu.spent_s

    full, empty = SeenPrefixes(max_blocks=2_048), SeenPrefixes()
    costs = [(cost_s(full, begin), cost_s(empty, begin)) for begin in range(0, 80_000, 10_000)]
    assert min(cost for cost, _ in costs[1:]) < 5 * min(cost for _, cost in costs)


def test_seen_prefixes_are_bounded_and_forget_the_oldest() -> None:
    seen = SeenPrefixes(max_blocks=8)
    first, second = builders.hashes_of(range(16)), builders.hashes_of(range(100, 132))
    assert (seen.add(first), seen.add(first)) == (0, 4)
    assert (seen.add(second), seen.add(first)) == (0, 0)


async def test_a_request_costs_the_hooks_microseconds() -> None:
    async with live_rig(("h0", "hybrid")) as rig:
        call = await rig.cluster.call("hello")
        gateway = rig.cluster.gateway
        requests = [
            OpenRequest(call.requests[0], call, StopPatterns(()), gateway.tokenizer, OutputCollector(), 0)
            for _ in range(300)
        ]
        costs_s: list[float] = []
        for request in requests:
            with CpuTime() as cpu:
                rig.activity.opened(request, call.identity)
                rig.activity.placed(request.request.request_id, 0, builders.placement())
                rig.activity.closed(request, None)
                rig.activity.counted("completions", None)
            costs_s.append(cpu.spent_s)
        assert median(costs_s) < 0.5e-3
        assert len(rig.activity.ended) <= 512
