"""Requests that wait at one scheduler: order, interim answers and removal."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.errors import Code, Reason, Refused
from baton.core.request import RequestActuals, Slo
from baton.scheduler.admission.admission_queue import MAX_DECISIONS_PER_ROUND, AdmissionQueue, Blocked
from baton.scheduler.admission.slo_admission import AdmissionMode
from baton.scheduler.scheduler_budget import scheduler_budget
from tests.builders import blocks, query, worker_report
from tests.unit.scheduler.running_scheduler import a_scheduler, join, settle, tpot_slo_of_only_worker
from tests.unit.worker.virtual_loop import virtual


@virtual
async def test_request_waits_until_a_report_counts_the_placement_before_it() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
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


@virtual
async def test_waiting_request_gets_still_waiting_and_keeps_its_position_when_asked_again() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a"))
        assert isinstance(placed, Placement)
        waiting_query = query(request_id=b"b", answer_within_s=0.05)
        assert await scheduler.place(waiting_query) == StillWaiting(num_waiting=1)
        later = asyncio.create_task(scheduler.place(query(request_id=b"c", answer_within_s=60.0)))
        assert await scheduler.place(waiting_query) == StillWaiting(num_waiting=2)
        again = asyncio.create_task(scheduler.place(replace(waiting_query, answer_within_s=60.0)))
        await settle()
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        assert isinstance(await asyncio.wait_for(again, 5), Placement)
        assert not later.done(), "it arrived later"
        later.cancel()


@virtual
async def test_request_that_is_not_asked_for_again_is_removed() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
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


@virtual
async def test_later_attempt_does_not_wait_and_new_request_does_not_overtake() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        assert isinstance(await scheduler.place(query(request_id=b"b", answer_within_s=0.02)), StillWaiting)
        assert isinstance(await scheduler.place(query(request_id=b"c", attempt=1)), Placement)
        assert await scheduler.place(query(request_id=b"d", answer_within_s=0.02)) == StillWaiting(num_waiting=2)


@virtual
async def test_full_queue_displaces_one_request_and_overdue_request_is_rejected_with_reason() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=2, admission=AdmissionMode.PREDICTIVE) as (
        scheduler,
        network,
    ):
        await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        hasty = asyncio.create_task(scheduler.place(query(request_id=b"b", slo=Slo(ttft_s=0.3), answer_within_s=60.0)))
        waiting_query = asyncio.create_task(scheduler.place(query(request_id=b"c", answer_within_s=60.0)))
        await settle()
        refused = await scheduler.place(query(request_id=b"d", deadline_s=900.0))
        assert isinstance(refused, Rejection)
        assert (refused.reason, refused.term) == (Reason.QUEUE_FULL, "scheduler_queue")
        late = await asyncio.wait_for(hasty, 5)
        assert isinstance(late, Rejection)
        assert (late.reason, late.term, late.limit_s) == (Reason.TTFT_SLO, "waiting_s", 0.3)
        assert not waiting_query.done()
        for request_id in (b"b", b"d"):
            (record,) = await scheduler.explain(request_id)
            assert record.rejection is not None
        waiting_query.cancel()


@virtual
async def test_draining_scheduler_refuses_waiting_requests() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        waiting = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=60.0)))
        await settle()
        await scheduler.aclose()
        for asked in (waiting, scheduler.place(query(request_id=b"b")), scheduler.place(query(request_id=b"new"))):
            with pytest.raises(Refused) as refused:
                await asked
            assert refused.value.failure.code is Code.UNAVAILABLE
        assert await scheduler.explain(b"b") == ()


@virtual
async def test_waiting_requests_survive_a_short_worker_absence() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        waiting = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=60.0)))
        await settle()
        await stream.aclose()
        await asyncio.sleep(0.02)
        await join(network, worker_report("w0", epoch=2))
        assert isinstance(await asyncio.wait_for(waiting, 5), Placement)


@virtual
async def test_waiting_requests_are_rejected_when_workers_stay_absent() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        assert isinstance(await scheduler.place(query(request_id=b"a")), Placement)
        waiting = asyncio.create_task(scheduler.place(query(request_id=b"b", answer_within_s=60.0)))
        await settle()
        await stream.aclose()
        refused = await asyncio.wait_for(waiting, 5)
        assert isinstance(refused, Rejection)
        assert refused.reason is Reason.NO_WORKERS


@virtual
async def test_error_in_a_decision_fails_one_request_and_not_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
        await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a"))
        assert isinstance(placed, Placement)
        first, second = (
            asyncio.create_task(scheduler.place(query(request_id=name, answer_within_s=60.0))) for name in (b"b", b"c")
        )
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
        monkeypatch.undo()
        await scheduler.finished(RequestActuals(decision_id=second.result().decision_id, outcome="stop"))
        assert isinstance(await scheduler.place(query(request_id=b"b")), Placement), "it can be placed again"


@virtual
async def test_answer_that_is_not_fetched_is_released() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a"))
        assert isinstance(placed, Placement)
        gone = query(request_id=b"b", slo=Slo(tpot_s=0.01), answer_within_s=0.2)
        assert isinstance(await scheduler.place(gone), StillWaiting)
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        await asyncio.sleep(0.05)
        assert tpot_slo_of_only_worker(scheduler) == 0.01, "the answer waits for the next call"
        await asyncio.sleep(0.2)
        stream.send(worker_report("w0", report_seq=2))
        await asyncio.sleep(0.4)
        assert tpot_slo_of_only_worker(scheduler) is None


@virtual
async def test_smaller_requests_overtake_one_that_fits_on_no_worker() -> None:
    roomy = {"blocks": blocks(total=100, free=10), "max_num_seqs": 100}
    async with a_scheduler(max_waiting_seqs=100, max_queued_requests=100) as (scheduler, network):
        await join(network, worker_report("w0", **roomy))
        large = asyncio.create_task(
            scheduler.place(query(request_id=b"large", num_prompt_tokens=300, answer_within_s=60.0))
        )
        await settle()
        assert not large.done()
        small = query(request_id=b"small", num_prompt_tokens=8, answer_within_s=60.0)
        assert isinstance(await asyncio.wait_for(scheduler.place(small), 5), Placement)
        large.cancel()


@pytest.mark.parametrize("can_answer", [False, True])
@virtual
async def test_one_round_makes_a_bounded_number_of_decisions(can_answer: bool) -> None:
    """The next round follows while requests can be answered."""
    decided_s: list[float] = []
    loop = asyncio.get_running_loop()

    def decide(asking: PlacementQuery, waited_s: float) -> Rejection | Blocked:
        decided_s.append(loop.time())
        if not can_answer or asking.request_id == b"0":
            return Blocked.THIS_REQUEST
        return Rejection(reason=Reason.TTFT_SLO, message="", retry_after_s=1.0)

    queue = AdmissionQueue(
        max_queued_requests=100,
        slos_set_due=True,
        decide=decide,
        refuse=lambda *_: None,
        abandon=lambda _: None,
        on_size=lambda _: None,
        budget=scheduler_budget(2**30),
    )
    running = asyncio.create_task(queue.run())
    for number in range(30):
        asking = query(request_id=b"%d" % number, answer_within_s=60.0)
        queue.add(asking, 0.0)
    await asyncio.sleep(0.2)
    rounds = Counter(decided_s)
    assert max(rounds.values()) <= MAX_DECISIONS_PER_ROUND
    assert len(queue) == (1 if can_answer else 30)
    assert len(rounds) == (6 if can_answer else 1)
    running.cancel()
