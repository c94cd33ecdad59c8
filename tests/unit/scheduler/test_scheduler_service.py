"""One scheduler over in-process streams: membership, reservations, commands and decision records."""

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from baton.core.cluster.decision_record import MissingReason
from baton.core.cluster.placement import Placement, Rejection
from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import WorkerState
from baton.core.errors import Reason, StreamBroken
from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import KvSnapshot, Tier
from baton.core.request import RequestActuals, Slo
from baton.scheduler.decisions.recent_decisions import MAX_DECISIONS
from baton.store.memory.memory_stores import MemoryDecisionStore, MemoryKvEventFeed
from tests.builders import blocks, decision_record, hashes_of, layout, query, worker_report
from tests.unit.scheduler.measured_workers import measured
from tests.unit.scheduler.running_scheduler import a_scheduler, join, next_command, settle, tpot_slo_of_only_worker
from tests.unit.worker.virtual_loop import virtual


@virtual
async def test_worker_gets_requests_from_its_first_report_to_the_end_of_its_stream() -> None:
    async with a_scheduler() as (scheduler, network):
        rejected = await scheduler.place(query())
        assert isinstance(rejected, Rejection)
        assert rejected.reason is Reason.NO_WORKERS
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


@virtual
async def test_request_waits_for_workers_that_may_not_have_reported_yet() -> None:
    async with a_scheduler() as (scheduler, network):
        asked = asyncio.create_task(scheduler.place(query()))
        await settle()
        assert not asked.done(), "a scheduler that has just started knows no workers yet"
        await join(network, worker_report("w0"))
        assert isinstance(await asked, Placement)


@virtual
async def test_request_waits_for_workers_that_find_the_scheduler_when_the_store_is_back() -> None:
    async with a_scheduler() as (scheduler, network):
        assert isinstance(await scheduler.place(query()), Rejection)
        scheduler.listed()
        asked = asyncio.create_task(scheduler.place(query()))
        await settle()
        assert not asked.done()
        await join(network, worker_report("w0"))
        assert isinstance(await asked, Placement)


@virtual
async def test_burst_between_two_reports_is_spread() -> None:
    async with a_scheduler() as (scheduler, network):
        for worker_id in ("w0", "w1"):
            await join(network, worker_report(worker_id, "hybrid"))
        placements = [await scheduler.place(query()) for _ in range(8)]
        chosen = [p.decode.worker_id for p in placements if isinstance(p, Placement) and p.decode is not None]
        assert sorted(chosen) == ["w0"] * 4 + ["w1"] * 4


async def test_decision_sees_the_effects_of_the_one_before() -> None:
    prompt = tuple(bytes([i]) * 16 for i in range(4))
    async with a_scheduler("prefix_aware") as (scheduler, network):
        await join(network, measured("w0", "hybrid"))
        placed = [
            await scheduler.place(query(request_id=name, num_prompt_tokens=64, block_hashes=prompt))
            for name in (b"a", b"b")
        ]
        seen = [p.decode_overlap_blocks for p in placed if isinstance(p, Placement)]
        assert seen == [0, 3], "without any wait in between; the last token is always computed"
        assert [len(await scheduler.explain(name)) for name in (b"a", b"b")] == [1, 1]


@virtual
async def test_full_queues_reject_new_requests_but_not_retries() -> None:
    async with a_scheduler(max_waiting_seqs=2) as (scheduler, network):
        await join(network, worker_report("w0", "hybrid"))
        answers = [await scheduler.place(query()) for _ in range(3)]
        refused = answers[-1]
        assert isinstance(refused, Rejection)
        assert refused.reason is Reason.QUEUE_FULL
        assert refused.retry_after_s > 0
        assert isinstance(await scheduler.place(query(attempt=1)), Placement)


@virtual
async def test_decode_worker_gets_one_connect_command_per_prefill_worker() -> None:
    async with a_scheduler() as (_, network):
        prefill = await join(network, worker_report("p", "prefill"))
        decode = await join(network, worker_report("d", "decode"))
        command = await next_command(decode)
        assert command.kind is CommandKind.CONNECT
        assert command.peer == worker_report("p").worker
        decode.send(worker_report("d", "decode", report_seq=2))
        await settle()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(next_command(decode), 0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(next_command(prefill), 0.01)


@virtual
async def test_watch_stream_gets_only_the_newest_state() -> None:
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


@virtual
async def test_silent_worker_is_removed_from_watch_streams() -> None:
    async with a_scheduler(silence_s=0.5) as (scheduler, network):
        await join(network, worker_report("w0"))
        watch = await scheduler.watch()
        await watch.receive()
        async with asyncio.timeout(5):
            assert (await watch.receive()).reports == ()


@virtual
async def test_workers_that_need_replacement_are_replaced_one_per_role_at_a_time() -> None:
    async with a_scheduler(silence_s=0.5) as (_, network):
        streams = [await join(network, worker_report(name, "decode", needs_replacement=True)) for name in ("d0", "d1")]
        began_s = asyncio.get_running_loop().time()
        command = asyncio.create_task(next_command(streams[0]))
        report_seq = 1
        while not command.done():
            report_seq += 1
            for name, stream in zip(("d0", "d1"), streams, strict=True):
                stream.send(worker_report(name, "decode", report_seq=report_seq, needs_replacement=True))
            await asyncio.sleep(0.05)
        assert command.result() == WorkerCommand(kind=CommandKind.REPLACE)
        assert asyncio.get_running_loop().time() - began_s >= 0.5  # every scheduler has received both requests
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(next_command(streams[1]), 0.01)


async def test_drain_reaches_the_worker_and_is_false_for_unknown_workers() -> None:
    async with a_scheduler() as (scheduler, network):
        stream = await join(network, worker_report("w0", state=WorkerState.READY))
        assert await scheduler.drain("w0")
        assert await scheduler.drain("w0", node_shutting_down=True)
        assert await next_command(stream) == WorkerCommand(kind=CommandKind.DRAIN)
        assert await next_command(stream) == WorkerCommand(kind=CommandKind.DRAIN, node_shutting_down=True)
        assert not await scheduler.drain("w9")


async def test_all_workers_get_the_command_to_clear_a_tenant() -> None:
    async with a_scheduler() as (scheduler, network):
        streams = [await join(network, worker_report(name, state=WorkerState.READY)) for name in ("w1", "w0")]
        assert await scheduler.clear_tenant(b"salt") == ("w0", "w1")
        for stream in streams:
            assert await next_command(stream) == WorkerCommand(kind=CommandKind.CLEAR, tenant_salt=b"salt")


async def test_cache_use_of_completed_requests_is_compared_with_the_ceiling() -> None:
    async with a_scheduler() as (scheduler, network):
        await join(network, worker_report("w0", layout=layout(block_size_tokens=16)))
        asked = query(num_prompt_tokens=40, block_hashes=(b"a" * 16, b"b" * 16))
        for number in range(3):
            placed = await scheduler.place(replace(asked, request_id=bytes([number])))
            assert isinstance(placed, Placement)
            actuals = RequestActuals(
                decision_id=placed.decision_id, outcome="finished", cached_tokens_by_tier={"host": 16 * (number == 2)}
            )
            await scheduler.finished(actuals)
        stats = await scheduler.cache_stats()
        (use,) = stats.workers
        assert (use.worker_id, use.num_requests, use.num_prompt_tokens, use.num_cached_tokens) == ("w0", 3, 120, 16)
        assert stats.ceiling_tokens == 2 * 32


async def test_decisions_are_explained_with_outcomes_without_the_store() -> None:
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


async def test_attempts_decided_by_another_scheduler_are_explained() -> None:
    store = MemoryDecisionStore()
    await store.put(decision_record(0, request_id=b"r", scheduler_id="other"), 60.0)
    async with a_scheduler(store=store) as (scheduler, network):
        await join(network, worker_report("w0"))
        await scheduler.place(query(request_id=b"r", attempt=1))
        assert [(r.attempt, r.scheduler_id) for r in await scheduler.explain(b"r")] == [(0, "other"), (1, "s0")]


async def test_close_writes_the_last_record_and_ends_streams() -> None:
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


@virtual
async def test_finished_request_releases_its_reservation() -> None:
    async with a_scheduler(max_waiting_seqs=1) as (scheduler, network):
        await join(network, worker_report("w0"))
        placed = await scheduler.place(query())
        assert isinstance(placed, Placement)
        assert isinstance(await scheduler.place(query()), Rejection)
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        assert isinstance(await scheduler.place(query()), Placement)
        with suppress(StreamBroken):
            await network.aclose()


@virtual
async def test_placement_counts_until_it_has_ended_despite_many_rejections() -> None:
    async with a_scheduler(max_waiting_seqs=1) as (scheduler, network):
        stream = await join(network, worker_report("w0"))
        placed = await scheduler.place(query(request_id=b"a", slo=Slo(tpot_s=0.01)))
        assert isinstance(placed, Placement)
        for number in range(MAX_DECISIONS + 1):
            assert isinstance(await scheduler.place(query(request_id=b"%d" % number)), Rejection)
        stream.send(worker_report("w0", report_seq=2, running_seqs=1, counted_decision_ids=(placed.decision_id,)))
        await settle()
        assert tpot_slo_of_only_worker(scheduler) == 0.01
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        assert tpot_slo_of_only_worker(scheduler) is None


class BrokenFeed(MemoryKvEventFeed):
    async def snapshot(self, worker: WorkerRef) -> KvSnapshot | None:
        raise ZeroDivisionError


@virtual
async def test_failed_task_is_reported_as_the_schedulers_failure() -> None:
    async with a_scheduler(feed=BrokenFeed()) as (scheduler, network):
        await join(network, worker_report("w0"))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(scheduler.failed, 5)


@virtual
async def test_schedulers_with_equal_reports_answer_equally() -> None:
    roomy = {"blocks": blocks(total=10_000), "max_num_seqs": 100}
    loads = (("p0", "prefill", 0), ("p1", "prefill", 1), ("d0", "decode", 3), ("d1", "decode", 2))
    answers = []
    for _ in range(2):
        async with a_scheduler(policy="kv_centric", max_waiting_seqs=64) as (scheduler, network):
            for name, role, seqs in loads:
                await join(network, worker_report(name, role, running_seqs=seqs, **roomy))
            placed = [
                await scheduler.place(query(request_id=b"%d" % number, num_prompt_tokens=50 * number + 1))
                for number in range(20)
            ]
            answers.append([(p.prefill, p.decode) for p in placed if isinstance(p, Placement)])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 20


KINDS = ("asked", "predicted", "actual")


async def test_predicted_and_actual_prefix_hits_are_counted() -> None:
    registry = CollectorRegistry()
    async with a_scheduler("kv_centric", registry=registry) as (scheduler, network):
        await join(network, measured("h0", "hybrid"))
        tokens = list(range(100))
        hashes = hashes_of(tokens, 16)
        found = {}
        for number in range(2):
            asked = query(request_id=b"r%d" % number, num_prompt_tokens=100, block_hashes=hashes)
            placed = await scheduler.place(asked)
            assert isinstance(placed, Placement)
            actuals = RequestActuals(
                decision_id=placed.decision_id, outcome="finished", ttft_s=0.5, num_cached_tokens=48 * number
            )
            await scheduler.finished(actuals)
            lost = await scheduler.place(query(request_id=b"lost%d" % number, num_prompt_tokens=100))
            assert isinstance(lost, Placement)
            await scheduler.finished(RequestActuals(decision_id=lost.decision_id, outcome="worker_lost"))
            found = {kind: registry.get_sample_value("baton_prefix_hit_tokens_total", {"kind": kind}) for kind in KINDS}
        assert found == {
            "asked": 200,
            "predicted": 96,
            "actual": 48,
        }  # the second finds what the first has computed


@virtual
async def test_decision_record_says_why_a_prefix_was_missing() -> None:
    async with a_scheduler("kv_centric") as (scheduler, network):
        await join(network, measured("h0", "hybrid"))
        reasons = []
        for number, tenant in enumerate(("a", "a", "b")):
            hashes = hashes_of([*range(100), 0, 0] if tenant == "a" else [1, *range(101)], 16)
            asked = query(
                request_id=bytes([number]), num_prompt_tokens=102, block_hashes=hashes, tenant=tenant, prefix_key=b"k"
            )
            await scheduler.place(asked)
            (record,) = await scheduler.explain(asked.request_id)
            reasons.append(record.missing and (record.missing.num_blocks, record.missing.reason))
        assert reasons == [(6, MissingReason.NEVER_SEEN), None, (6, MissingReason.OTHER_TENANT)]


@virtual
async def test_decision_records_have_the_turn_of_the_session() -> None:
    async with a_scheduler("kv_centric") as (scheduler, network):
        await join(network, measured("h0", "hybrid"))
        turns = []
        for number in range(3):
            asked = query(request_id=bytes([number]), num_prompt_tokens=50, session_key="s")
            placed = await scheduler.place(asked)
            assert isinstance(placed, Placement)
            await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="finished"))
            (record,) = await scheduler.explain(asked.request_id)
            turns.append((record.query.session_key, record.session and (record.session.turn, record.session.gap_s)))
            await asyncio.sleep(2.0 + number)
        assert turns == [("s", (1, None)), ("s", (2, pytest.approx(2.0))), ("s", (3, pytest.approx(3.0)))]


@virtual
async def test_index_knows_of_how_many_blocks_a_worker_announces_one() -> None:
    feed, chain = MemoryKvEventFeed(), hashes_of(range(160), 16)
    async with a_scheduler("kv_centric", feed=feed) as (scheduler, network):
        report = measured("h0", "hybrid", announce_every=4)
        held = {Tier.DEVICE: (chain[3], chain[7], chain[8])}
        await feed.reset(KvSnapshot(worker=report.worker, event_seq=1, block_size_tokens=16, hashes=held), 60.0)
        await join(network, report)
        await asyncio.sleep(1.0)
        assert scheduler.index.overlaps(chain, 0.0)["h0"].num_held_blocks == 9


@virtual
async def test_metrics_of_a_removed_worker_are_removed() -> None:
    registry = CollectorRegistry()
    async with a_scheduler("kv_centric", registry=registry, silence_s=0.2) as (scheduler, network):
        stream = await join(network, measured("h0", "hybrid"))
        placed = await scheduler.place(query())
        later = await scheduler.place(query(request_id=b"later"))
        assert isinstance(placed, Placement)
        assert isinstance(later, Placement)
        labels = {"term": "ttft", "worker": "h0"}

        def count() -> float | None:
            return registry.get_sample_value("baton_predicted_over_actual_ratio_count", labels)

        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="finished", ttft_s=0.5))
        await asyncio.sleep(0.1)  # one maintenance round
        assert count() == 1
        await stream.aclose()
        await asyncio.sleep(0.2)
        assert count() is None
        await scheduler.finished(RequestActuals(decision_id=later.decision_id, outcome="finished", ttft_s=0.5))
        assert count() is None
