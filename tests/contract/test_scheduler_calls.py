"""Contract of the scheduler calls of a `Network`: placements, watches and reports."""

import asyncio
from typing import Any

import pytest

from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.placement import Placement, Rejection, StillWaiting
from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.errors import Reason, Refused, StoreUnavailable, StreamBroken
from baton.core.ids import DecisionId
from baton.core.interfaces import Duplex
from baton.core.request import RequestActuals
from tests import builders
from tests.contract.networks import (
    NetworkHarness,
    StubScheduler,
    UpdateQueue,
    eventually,
)
from tests.times import LONG_LIMIT_S

pytestmark = pytest.mark.contract


PLACEMENT = Placement(
    decision_id=DecisionId("d1"),
    scheduler_id="s1",
    policy="round_robin",
    prefill=builders.worker_ref("p0"),
    decode=builders.worker_ref("d0"),
    ttft_s=0.25,
    waiting_s=0.5,
)
REJECTION = Rejection(reason=Reason.NO_WORKERS, message="no prefill worker", retry_after_s=1.5, term="workers")


@pytest.mark.parametrize("answer", [PLACEMENT, REJECTION, StillWaiting(num_waiting=7)])
async def test_place_returns_the_answer_of_the_scheduler(
    harness: NetworkHarness, answer: Placement | Rejection | StillWaiting
) -> None:
    service = StubScheduler(answer)
    scheduler = harness.network.scheduler(await harness.add_scheduler(service))
    query = builders.query(waited_s=0.25, answer_within_s=1.5)
    assert await scheduler.place(query) == answer
    assert service.asked == [query]


async def test_finished_explain_and_drain_pass_their_arguments(harness: NetworkHarness) -> None:
    service = StubScheduler()
    scheduler = harness.network.scheduler(await harness.add_scheduler(service))
    actuals = [
        RequestActuals(
            decision_id=DecisionId(f"d{n}"), outcome="finished", ttft_s=0.5, cached_tokens_by_tier={"host": n}
        )
        for n in range(3)
    ]
    await scheduler.finished(*actuals)
    service.answer = ()
    assert await scheduler.explain(None) == ()
    assert await scheduler.explain(b"r") == ()
    service.answer = True
    assert await scheduler.drain("w0")
    assert await scheduler.drain("w0", node_shutting_down=True)
    service.answer = ("w0", "w1")
    assert await scheduler.clear_tenant(b"salt") == ("w0", "w1")
    service.answer = CacheStats(
        since_s=2.5,
        total=TokenReuse(num_requests=2, num_prompt_tokens=64, cached_tokens={"host": 32}),
        workers=(TokenReuse(worker_id="w0", num_requests=1, num_prompt_tokens=32),),
        ceiling_tokens=40.5,
        sampled_share=0.25,
    )
    assert await scheduler.cache_stats() == service.answer
    assert service.asked == [*actuals, None, b"r", ("w0", False), ("w0", True), b"salt", "cache_stats"]


async def test_refusal_and_lost_scheduler_raise_typed_errors(harness: NetworkHarness) -> None:
    failure = builders.failure(Reason.DRAINING, retry_after_s=2.0, retriable=True)
    service = StubScheduler(Refused(failure))
    address = await harness.add_scheduler(service)
    scheduler = harness.network.scheduler(address)
    with pytest.raises(Refused) as refused:
        await scheduler.place(builders.query())
    assert refused.value.failure == failure
    await harness.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(scheduler.place(builders.query()), LONG_LIMIT_S)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(scheduler.watch(), LONG_LIMIT_S)


async def test_removed_scheduler_breaks_its_open_call(harness: NetworkHarness) -> None:
    has_started = asyncio.Event()

    class SlowScheduler(StubScheduler):
        async def place(self, query: Any) -> Placement | Rejection:
            has_started.set()
            await asyncio.Event().wait()
            return PLACEMENT

    address = await harness.add_scheduler(SlowScheduler())
    placing = asyncio.create_task(harness.network.scheduler(address).place(builders.query()))
    await has_started.wait()
    await harness.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(placing, LONG_LIMIT_S)


async def test_cancelled_call_is_cancelled_at_the_scheduler(harness: NetworkHarness) -> None:
    has_started, has_ended = asyncio.Event(), asyncio.Event()

    class SlowScheduler(StubScheduler):
        async def place(self, query: Any) -> Placement | Rejection:
            has_started.set()
            try:
                await asyncio.Event().wait()
            finally:
                has_ended.set()
            return PLACEMENT

    placing = asyncio.create_task(
        harness.network.scheduler(await harness.add_scheduler(SlowScheduler())).place(builders.query())
    )
    await has_started.wait()
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    await asyncio.wait_for(has_ended.wait(), LONG_LIMIT_S)


async def test_forgotten_scheduler_finishes_running_calls_and_can_be_called_again(harness: NetworkHarness) -> None:
    may_answer, updates = asyncio.Event(), UpdateQueue()

    class SlowScheduler(StubScheduler):
        async def place(self, query: Any) -> Placement | Rejection:
            await may_answer.wait()
            return PLACEMENT

    address = await harness.add_scheduler(SlowScheduler(updates=updates))
    watch = await harness.network.scheduler(address).watch()
    placing = asyncio.create_task(harness.network.scheduler(address).place(builders.query()))
    await asyncio.sleep(0.05)
    harness.network.forget_scheduler(address)
    harness.network.forget_scheduler("127.0.0.1:9")
    may_answer.set()
    assert await placing == PLACEMENT
    updates.put(ClusterUpdate(scheduler_id="s1", reports=()))
    assert (await watch.receive()).scheduler_id == "s1"
    await watch.aclose()
    assert await harness.network.scheduler(address).place(builders.query()) == PLACEMENT


async def test_watch_delivers_all_updates_until_either_side_closes_it(harness: NetworkHarness) -> None:
    def update(i: int) -> ClusterUpdate:
        return ClusterUpdate(scheduler_id="s1", reports=(builders.worker_report(report_seq=i),))

    updates = UpdateQueue()
    address = await harness.add_scheduler(StubScheduler(updates=updates))
    watch = await harness.network.scheduler(address).watch()
    for i in range(30):
        updates.put(update(i))
        assert await watch.receive() == update(i)
    await watch.aclose()
    await eventually(lambda: updates.is_closed)
    with pytest.raises(StreamBroken):
        await watch.receive()

    second_updates = UpdateQueue()
    address = await harness.add_scheduler(StubScheduler(updates=second_updates))
    watch = await harness.network.scheduler(address).watch()
    second_updates.put(update(1))
    assert await watch.receive() == update(1)
    await harness.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(watch.receive(), LONG_LIMIT_S)
    await eventually(lambda: second_updates.is_closed)
    await watch.aclose()


async def test_report_stream_carries_reports_and_commands(harness: NetworkHarness) -> None:
    command = WorkerCommand(kind=CommandKind.CONNECT, peer=builders.worker_ref("d0"))
    reports = []

    async def answer_reports(stream: Duplex[Any, Any]) -> None:
        while True:
            reports.append(await stream.receive())
            stream.send(command)

    stream = await harness.network.open_report(await harness.add_scheduler(StubScheduler(report=answer_reports)))
    for seq in range(3):
        stream.send(builders.worker_report(report_seq=seq))
        assert await stream.receive() == command
    assert reports == [builders.worker_report(report_seq=seq) for seq in range(3)]
    await stream.aclose()


async def test_store_error_in_the_scheduler_reaches_the_caller(harness: NetworkHarness) -> None:
    scheduler = harness.network.scheduler(
        await harness.add_scheduler(StubScheduler(StoreUnavailable("Redis is unreachable")))
    )
    with pytest.raises((StoreUnavailable, Refused), match="Redis is unreachable"):
        await scheduler.explain(None)
