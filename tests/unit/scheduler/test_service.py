"""One scheduler over in-process streams: it joins, loses and warms workers, counts what it places, and remembers why."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from baton.core.apis import DecisionStore, Duplex
from baton.core.cluster import (
    Command,
    CommandKind,
    DecisionRecord,
    Placement,
    PlacementQuery,
    Rejection,
    StillWaiting,
    WorkerReport,
    WorkerState,
)
from baton.core.errors import Code, Reason, Refused, StoreUnavailable, StreamBroken
from baton.core.request import RequestActuals, Slo
from baton.runtime.in_process import InProcessNetwork
from baton.runtime.metrics import SchedulerMetrics
from baton.scheduler.admission import Admission
from baton.scheduler.explain import MAX_RECORDS
from baton.scheduler.service import Scheduler, SchedulerRules
from baton.scheduler.workers import SchedulerTimes
from baton.store.memory import MemoryDecisionStore, MemoryKvEventFeed
from tests.builders import blocks, decision_record, query, worker_report

ADDRESS = "scheduler:1"


class BrokenStore(DecisionStore):
    async def put(self, record: DecisionRecord, ttl_s: float) -> None:
        raise StoreUnavailable("redis is away")

    async def get(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        raise StoreUnavailable("redis is away")


@asynccontextmanager
async def a_scheduler(
    policy: str = "least_loaded",
    max_waiting_seqs: int = 4,
    store: DecisionStore | None = None,
    max_waiting: int = 0,
    admission: Admission = Admission.OFF,
) -> AsyncIterator[tuple[Scheduler, InProcessNetwork]]:
    scheduler = Scheduler(
        scheduler_id="s0",
        rules=SchedulerRules(
            policy=policy,
            admission=admission,
            max_waiting_seqs=max_waiting_seqs,
            max_worker_queue_s=0.5,
            max_waiting=max_waiting,
        ),
        times=SchedulerTimes(silence_s=0.5, settle_s=0.05, reservation_s=5.0, watch_interval_s=0.0),
        store=store or BrokenStore(),
        feed=MemoryKvEventFeed(),
        metrics=SchedulerMetrics(CollectorRegistry()),
        rng=Random(0),
    )
    network = InProcessNetwork()
    network.add_scheduler(ADDRESS, scheduler)
    try:
        yield scheduler, network
    finally:
        await network.aclose()
        await scheduler.aclose()


async def told(stream: Duplex[WorkerReport, Command]) -> Command:
    """The next command, less those for a snapshot, which these workers never write."""
    while (command := await stream.receive()).kind is CommandKind.SNAPSHOT:
        pass
    return command


async def join(network: InProcessNetwork, report: WorkerReport) -> Duplex[WorkerReport, Command]:
    stream = await network.open_report(ADDRESS)
    stream.send(report)
    await settle()
    return stream


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_workers_are_placed_on_from_their_first_report_to_the_end_of_their_stream() -> None:
    async with a_scheduler() as (scheduler, network):
        nobody = await scheduler.place(query())
        assert isinstance(nobody, Rejection)
        assert nobody.reason is Reason.NO_WORKERS
        await join(network, worker_report("p", "prefill"))
        decode = await join(network, worker_report("d", "decode"))
        placed = await scheduler.place(query())
        assert isinstance(placed, Placement)
        assert placed.prefill is not None
        assert placed.decode is not None
        assert (placed.prefill.worker_id, placed.decode.worker_id) == ("p", "d")
        await decode.aclose()
        await settle()
        assert isinstance(await scheduler.place(query()), Rejection)


async def test_a_request_waits_for_workers_that_may_only_not_have_reported_yet() -> None:
    async with a_scheduler() as (scheduler, network):
        asked = asyncio.create_task(scheduler.place(query()))
        await settle()
        assert not asked.done(), "a scheduler that has just started knows nobody yet"
        await join(network, worker_report("w0"))
        assert isinstance(await asked, Placement)


async def test_a_burst_between_two_reports_does_not_pile_up() -> None:
    async with a_scheduler() as (scheduler, network):
        for worker_id in ("w0", "w1"):
            await join(network, worker_report(worker_id, "hybrid"))
        placements = [await scheduler.place(query()) for _ in range(8)]
        chosen = [p.decode.worker_id for p in placements if isinstance(p, Placement) and p.decode is not None]
        assert sorted(chosen) == ["w0"] * 4 + ["w1"] * 4


async def test_full_queues_refuse_new_requests_but_not_ones_that_lost_a_worker() -> None:
    async with a_scheduler(max_waiting_seqs=2) as (scheduler, network):
        await join(network, worker_report("w0", "hybrid"))
        answers = [await scheduler.place(query()) for _ in range(3)]
        refused = answers[-1]
        assert isinstance(refused, Rejection)
        assert refused.reason is Reason.QUEUE_FULL
        assert refused.retry_after_s > 0
        assert isinstance(await scheduler.place(query(attempt=1)), Placement)


async def test_decode_workers_are_told_to_warm_their_pairs_once() -> None:
    async with a_scheduler() as (_, network):
        prefill = await join(network, worker_report("p", "prefill"))
        decode = await join(network, worker_report("d", "decode"))
        command = await told(decode)
        assert command.kind is CommandKind.CONNECT
        assert command.peer == worker_report("p").worker
        decode.send(worker_report("d", "decode", report_seq=2))
        await settle()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(told(decode), 0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(told(prefill), 0.01)


async def test_watchers_see_each_change_and_only_the_newest_state() -> None:
    async with a_scheduler() as (scheduler, network):
        watch = await scheduler.watch()
        first = await watch.receive()
        assert (first.scheduler_id, first.reports) == ("s0", ())
        assert (first.pid, first.host) == (os.getpid(), socket.gethostname())
        stream = await join(network, worker_report("w0"))
        stream.send(worker_report("w0", report_seq=2, running_seqs=3))
        await settle()
        assert [r.running_seqs for r in (await watch.receive()).reports] == [3]
        await watch.aclose()
        with pytest.raises(StreamBroken):
            await watch.receive()


async def test_a_worker_that_says_nothing_any_more_is_dropped() -> None:
    async with a_scheduler() as (scheduler, network):
        await join(network, worker_report("w0"))
        watch = await scheduler.watch()
        await watch.receive()
        async with asyncio.timeout(5):
            assert (await watch.receive()).reports == ()


async def test_worn_out_workers_are_let_go_one_a_role_at_a_time() -> None:
    async with a_scheduler() as (_, network):
        streams = [await join(network, worker_report(name, "decode", worn_out=True)) for name in ("d0", "d1")]
        began_s = asyncio.get_running_loop().time()
        heard = asyncio.create_task(told(streams[0]))
        report_seq = 1
        while not heard.done():
            report_seq += 1
            for name, stream in zip(("d0", "d1"), streams, strict=True):
                stream.send(worker_report(name, "decode", report_seq=report_seq, worn_out=True))
            await asyncio.sleep(0.05)
        assert heard.result() == Command(kind=CommandKind.LEAVE)
        assert asyncio.get_running_loop().time() - began_s >= 0.5  # any scheduler would have heard of both
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(told(streams[1]), 0.01)


async def test_draining_reaches_the_worker_and_unknown_workers_are_said_so() -> None:
    async with a_scheduler() as (scheduler, network):
        stream = await join(network, worker_report("w0", state=WorkerState.READY))
        assert await scheduler.drain("w0")
        assert (await told(stream)).kind is CommandKind.DRAIN
        assert not await scheduler.drain("w9")


async def test_decisions_are_explained_with_what_came_of_them_though_the_store_is_away() -> None:
    async with a_scheduler() as (scheduler, network):
        await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"r", block_hashes=(b"h" * 16,)))
        assert isinstance(placed, Placement)
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop", ttft_s=0.5))
        (record,) = await scheduler.explain(b"r")
        assert record.placement == placed
        assert record.actuals["ttft_s"] == 0.5
        assert record.query.block_hashes == (), "records stay small"
        assert await scheduler.explain(None) == (record,)
        assert await scheduler.explain(b"unknown") == ()


async def test_attempts_that_another_scheduler_decided_are_explained_too() -> None:
    store = MemoryDecisionStore()
    await store.put(decision_record(0, request_id=b"r", scheduler_id="other"), 60.0)
    async with a_scheduler(store=store) as (scheduler, network):
        await join(network, worker_report("w0"))
        await scheduler.place(query(request_id=b"r", attempt=1))
        assert [(r.attempt, r.scheduler_id) for r in await scheduler.explain(b"r")] == [(0, "other"), (1, "s0")]


async def test_what_is_decided_last_is_written_before_the_end_and_streams_end() -> None:
    store = MemoryDecisionStore()
    async with a_scheduler(store=store) as (scheduler, network):
        reports = await join(network, worker_report("w0"))
        await scheduler.place(query(request_id=b"r"))
        watch = await scheduler.watch()
        await scheduler.aclose()
        assert len(await store.get(b"r")) == 1
        with pytest.raises(StreamBroken):
            await reports.receive()
        with pytest.raises(StreamBroken):
            await watch.receive()


async def test_a_finished_request_no_longer_counts() -> None:
    async with a_scheduler(max_waiting_seqs=1) as (scheduler, network):
        await join(network, worker_report("w0"))
        placed = await scheduler.place(query())
        assert isinstance(placed, Placement)
        assert isinstance(await scheduler.place(query()), Rejection)
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        assert isinstance(await scheduler.place(query()), Placement)
        with suppress(StreamBroken):
            await network.aclose()


# -- waiting at the scheduler ------------------------------------------------------------------------------------------------------------


async def test_a_request_waits_here_until_a_worker_has_taken_what_it_has() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        first = await scheduler.place(query(request_id=b"a"))
        assert isinstance(first, Placement)
        waiting = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=60.0)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        stream.send(worker_report("w0", report_seq=2, running_seqs=1, counted_decision_ids=(first.decision_id,)))
        second = await asyncio.wait_for(waiting, 5)
        assert isinstance(second, Placement)
        assert second.waiting_s > 0.04
        (record,) = await scheduler.explain(b"b")
        assert record.placement == second


async def test_who_waits_is_told_so_and_keeps_its_place_if_it_asks_again() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a"))
        assert isinstance(placed, Placement)
        patient = query(request_id=b"b", answer_within_s=0.05)
        assert await scheduler.place(patient) == StillWaiting(num_waiting=1)
        later = asyncio.create_task(scheduler.place(query(request_id=b"c", answer_within_s=60.0)))
        assert await scheduler.place(patient) == StillWaiting(num_waiting=2)
        again = asyncio.create_task(scheduler.place(replace(patient, answer_within_s=60.0)))
        await settle()
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        assert isinstance(await asyncio.wait_for(again, 5), Placement)
        assert not later.done(), "it came later"
        later.cancel()


async def test_who_does_not_ask_again_has_left() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a"))
        assert isinstance(placed, Placement)
        assert isinstance(await scheduler.place(query(request_id=b"gone", answer_within_s=0.02)), StillWaiting)
        cancelled = asyncio.create_task(scheduler.place(query(request_id=b"cancelled", answer_within_s=60.0)))
        await settle()
        cancelled.cancel()
        await asyncio.sleep(0.4)
        last = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=0.1)))
        assert await last == StillWaiting(num_waiting=1)


async def test_a_later_attempt_does_not_wait_and_a_new_request_does_not_overtake() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        assert isinstance(await scheduler.place(query(request_id=b"b", answer_within_s=0.02)), StillWaiting)
        assert isinstance(await scheduler.place(query(request_id=b"c", attempt=1)), Placement)
        assert await scheduler.place(query(request_id=b"d", answer_within_s=0.02)) == StillWaiting(num_waiting=2)


async def test_a_full_room_sends_one_away_and_an_overdue_request_is_refused_with_its_reason() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=2, admission=Admission.PREDICTIVE) as (scheduler, network):
        await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        hasty = asyncio.create_task(scheduler.place(query(request_id=b"b", slo=Slo(ttft_s=0.3), answer_within_s=60.0)))
        patient = asyncio.create_task(scheduler.place(query(request_id=b"c", answer_within_s=60.0)))
        await settle()
        refused = await scheduler.place(query(request_id=b"d", deadline_s=900.0))
        assert isinstance(refused, Rejection)
        assert (refused.reason, refused.term) == (Reason.QUEUE_FULL, "scheduler_queue")
        late = await asyncio.wait_for(hasty, 5)
        assert isinstance(late, Rejection)
        assert (late.reason, late.term, late.limit_s) == (Reason.TTFT_SLO, "waiting_s", 0.3)
        assert not patient.done()
        for request_id in (b"b", b"d"):
            (record,) = await scheduler.explain(request_id)
            assert record.rejection is not None
        patient.cancel()


async def test_a_scheduler_that_leaves_sends_those_who_wait_to_another() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        waiting = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=60.0)))
        await settle()
        await scheduler.aclose()
        with pytest.raises(Refused) as refused:
            await waiting
        assert refused.value.failure.code is Code.UNAVAILABLE


async def test_a_worker_that_is_back_in_a_moment_costs_nobody_their_place() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        waiting = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=60.0)))
        await settle()
        await stream.aclose()
        await asyncio.sleep(0.02)
        await join(network, worker_report("w0", epoch=2))
        assert isinstance(await asyncio.wait_for(waiting, 5), Placement)


async def test_without_any_worker_for_long_those_who_wait_are_told_so() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        waiting = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=60.0)))
        await settle()
        await stream.aclose()
        refused = await asyncio.wait_for(waiting, 5)
        assert isinstance(refused, Rejection)
        assert refused.reason is Reason.NO_WORKERS


async def test_a_bug_of_ours_costs_one_request_and_not_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a"))
        assert isinstance(placed, Placement)
        first, second = (asyncio.create_task(scheduler.place(query(request_id=name, answer_within_s=60.0))) for name in (b"b", b"c"))
        await asyncio.sleep(0.05)
        decide = scheduler._decide

        def broken(asking: PlacementQuery, **how: bool) -> object:
            if asking.request_id == b"b":
                raise ZeroDivisionError
            return decide(asking, **how)

        monkeypatch.setattr(scheduler, "_decide", broken)
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        with pytest.raises(Refused) as refused:
            await asyncio.wait_for(first, 5)
        assert refused.value.failure.code is Code.INTERNAL
        assert isinstance(await asyncio.wait_for(second, 5), Placement)


async def test_a_placement_counts_until_it_has_ended_however_many_are_refused_meanwhile() -> None:
    async with a_scheduler(max_waiting_seqs=1) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a", slo=Slo(tpot_s=0.01)))
        assert isinstance(placed, Placement)
        for number in range(MAX_RECORDS + 1):
            assert isinstance(await scheduler.place(query(request_id=b"%d" % number)), Rejection)
        stream.send(worker_report("w0", report_seq=2, running_seqs=1, counted_decision_ids=(placed.decision_id,)))
        await settle()
        (promised,) = scheduler.cluster().workers
        assert promised.tpot_slo_s == 0.01
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        (free,) = scheduler.cluster().workers
        assert free.tpot_slo_s is None


async def test_an_answer_that_nobody_fetches_counts_no_more() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a"))
        assert isinstance(placed, Placement)
        gone = query(request_id=b"b", slo=Slo(tpot_s=0.01), answer_within_s=0.2)
        assert isinstance(await scheduler.place(gone), StillWaiting)
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        await asyncio.sleep(0.05)
        assert scheduler.cluster().workers[0].tpot_slo_s == 0.01, "it is kept for who asks again"
        await asyncio.sleep(0.2)
        stream.send(worker_report("w0", report_seq=2))
        await asyncio.sleep(0.4)
        assert scheduler.cluster().workers[0].tpot_slo_s is None


async def test_one_for_which_there_is_no_room_lets_smaller_ones_pass_for_a_while() -> None:
    roomy = {"blocks": blocks(total=100, free=10), "max_num_seqs": 100}
    async with a_scheduler(max_waiting_seqs=100, max_waiting=100) as (scheduler, network):
        await join(network, worker_report("w0", **roomy))
        large = asyncio.create_task(scheduler.place(query(request_id=b"large", num_prompt_tokens=300, answer_within_s=60.0)))
        await settle()
        assert not large.done()
        small = query(request_id=b"small", num_prompt_tokens=8, answer_within_s=60.0)
        assert isinstance(await asyncio.wait_for(scheduler.place(small), 5), Placement)
        large.cancel()


async def test_after_it_has_left_nobody_is_let_in() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_waiting=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        waiting = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=60.0)))
        await settle()
        await scheduler.aclose()
        with pytest.raises(Refused):
            await waiting
        assert await scheduler.explain(b"b") == ()


async def test_a_scheduler_whose_own_work_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("baton.scheduler.following.KvEventFollowing.run", broken)
    async with a_scheduler() as (scheduler, _):
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(scheduler.failed, 5)


async def test_replicas_that_have_heard_the_same_answer_alike() -> None:
    roomy = {"blocks": blocks(total=10_000), "max_num_seqs": 100}
    loads = (("p0", "prefill", 0), ("p1", "prefill", 1), ("d0", "decode", 3), ("d1", "decode", 2))
    answers = []
    for _ in range(2):
        async with a_scheduler(policy="kv_centric", max_waiting_seqs=64) as (scheduler, network):
            for name, role, seqs in loads:
                await join(network, worker_report(name, role, running_seqs=seqs, **roomy))
            placed = [await scheduler.place(query(request_id=b"%d" % number, num_prompt_tokens=50 * number + 1)) for number in range(20)]
            answers.append([(p.prefill, p.decode) for p in placed if isinstance(p, Placement)])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 20
