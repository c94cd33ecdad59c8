"""Calls to schedulers: placement queries, reported outcomes, and behaviour without a scheduler."""

import asyncio
from collections import Counter
from unittest.mock import AsyncMock

import pytest

from baton.core.cluster.placement import PlacementQuery, Rejection, StillWaiting
from baton.core.errors import Code, Failure, Reason, Refused, StreamBroken
from baton.core.ids import DecisionId
from baton.core.interfaces import Member, MemberKind
from baton.core.request import RequestActuals
from baton.gateway.cluster.scheduler_pool import MAX_OUTCOMES_PER_CALL
from baton.store.memory.memory_stores import MemoryMembership
from tests.times import TEST_TIMES
from tests.unit.gateway.fakes import PROMPT, Cluster, StubScheduler, answer_to, cluster, kill_at, until
from tests.unit.gateway.virtual import virtual


@virtual
async def test_placement_of_a_queued_request_is_repeated_with_its_waiting_time() -> None:
    async with cluster(("h0", "hybrid")) as c:
        loop = asyncio.get_running_loop()
        begin_s, until_s = loop.time(), loop.time() + 3 * TEST_TIMES["scheduler_wait_s"]
        c.scheduler.answer = lambda _: StillWaiting(num_waiting=1) if loop.time() < until_s else None
        await c.complete(PROMPT, max_tokens=3)
        waited_s = [asked.waited_s for asked in c.scheduler.queries]
        assert waited_s == pytest.approx([i * 0.1 * TEST_TIMES["detection_s"] for i in range(len(waited_s))], abs=0.05)
        assert loop.time() - begin_s > 3 * TEST_TIMES["scheduler_wait_s"], (
            "it would have been lost, had nobody answered"
        )
        assert {asked.request_id for asked in c.scheduler.queries} == {c.scheduler.queries[0].request_id}


@virtual
async def test_next_scheduler_is_asked_if_one_does_not_answer() -> None:
    async with cluster(("h0", "hybrid")) as c:
        other = StubScheduler(c.network, "scheduler:2")
        other.workers = c.scheduler.workers
        c.gateway.schedulers._set_addresses(["scheduler:1", "scheduler:2"])
        c.scheduler.die()
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(other.queries) == 1
        await asyncio.sleep(0.5)
        assert c.gateway.health.is_ready


NO_WORKERS = Rejection(reason=Reason.NO_WORKERS, message="no worker has reported", retry_after_s=1.0)


@virtual
async def test_next_scheduler_is_asked_if_one_knows_no_worker() -> None:
    """A scheduler that has just started may not know the workers yet."""
    async with cluster(("h0", "hybrid")) as c:
        other = StubScheduler(c.network, "scheduler:2")
        other.workers = c.scheduler.workers
        c.gateway.schedulers._set_addresses(["scheduler:1", "scheduler:2"])
        c.scheduler.answer = lambda _: NO_WORKERS
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert (len(c.scheduler.queries), len(other.queries)) == (1, 1)
        await until(lambda: bool(other.actuals))  # the outcome goes to the scheduler that decided


@virtual
async def test_each_scheduler_is_asked_once_if_none_knows_a_worker() -> None:
    async with cluster(("h0", "hybrid")) as c:
        others = [StubScheduler(c.network, f"scheduler:{number}") for number in (2, 3)]
        c.gateway.schedulers._set_addresses(["scheduler:1", "scheduler:2", "scheduler:3"])
        for scheduler in (c.scheduler, *others):
            scheduler.answer = lambda _: NO_WORKERS
        others[1].die()
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason) == (Code.UNAVAILABLE, Reason.NO_WORKERS)
        assert (len(c.scheduler.queries), len(others[0].queries)) == (1, 1)


@virtual
async def test_new_request_waits_for_a_scheduler_and_then_fails() -> None:
    async with cluster(("h0", "hybrid")) as c:
        loop = asyncio.get_running_loop()
        c.scheduler.die()
        begin_s = loop.time()
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason) == (Code.UNAVAILABLE, Reason.SCHEDULER_LOST)
        assert 1.9 < loop.time() - begin_s < 2.3
        response = asyncio.create_task(c.complete(PROMPT))
        await asyncio.sleep(1)
        c.network.add_scheduler(c.scheduler.address, c.scheduler)
        assert (await response).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_streams_continue_without_a_scheduler() -> None:
    async with cluster(("h0", "hybrid")) as c:
        c.scheduler.workers[0].step_s = 1.0
        response = asyncio.create_task(c.complete(PROMPT))
        await asyncio.sleep(1.5)
        c.scheduler.die()
        assert (await response).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_outcome_of_each_decision_is_reported() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        c.scheduler.workers[0].before_token = kill_at(3)
        await c.complete(PROMPT)
        await asyncio.sleep(0.1)
        assert [(a.decision_id, a.outcome) for a in c.scheduler.actuals] == [
            ("decision-1", "worker_lost"),
            ("decision-2", "finished"),
        ]
        assert [a.ttft_s is not None for a in c.scheduler.actuals] == [True, False]
        assert c.gateway.schedulers._by_decision == {}


@virtual
async def test_outcomes_are_reported_in_batches() -> None:
    async with cluster(("h0", "hybrid")) as c:
        calls: list[int] = []

        async def finished(*actuals: RequestActuals) -> None:
            calls.append(len(actuals))

        c.scheduler.finished = finished  # type: ignore[method-assign]
        c.scheduler.workers[0].step_s = 0.001
        await asyncio.gather(*(c.complete(PROMPT, max_tokens=2 + number) for number in range(6)))
        await until(lambda: bool(calls))
        await c.complete(PROMPT)
        await until(lambda: len(calls) == 2)
        assert calls == [6, 1]


@virtual
async def test_outcomes_are_reported_to_the_deciding_scheduler_in_bounded_calls() -> None:
    num_outcomes = 2 * MAX_OUTCOMES_PER_CALL + 2
    async with cluster(("h0", "hybrid")) as c:
        other = StubScheduler(c.network, "scheduler:2")
        c.gateway.schedulers._set_addresses(["scheduler:1", "scheduler:2"])
        for number in range(num_outcomes):
            decision = DecisionId(f"d{number}")
            c.gateway.schedulers._by_decision[decision] = f"scheduler:{1 + number % 2}"
            c.gateway.schedulers.finished(RequestActuals(decision_id=decision, outcome="finished"))
        await until(lambda: len(c.scheduler.actuals) + len(other.actuals) == num_outcomes)
        assert [a.decision_id for a in c.scheduler.actuals] == [f"d{n}" for n in range(0, num_outcomes, 2)]
        assert [a.decision_id for a in other.actuals] == [f"d{n}" for n in range(1, num_outcomes, 2)]
        assert max(c.scheduler.num_outcomes_per_call) <= MAX_OUTCOMES_PER_CALL
        assert len(c.scheduler.num_outcomes_per_call) > 1


@virtual
async def test_query_contains_prompt_and_delivered_tokens() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        c.scheduler.workers[0].before_token = kill_at(3)
        await c.complete(PROMPT)
        first, second = c.scheduler.queries
        assert (first.num_prompt_tokens, first.num_output_tokens, first.max_tokens, first.attempt) == (5, 0, 8, 0)
        assert (second.num_prompt_tokens, second.num_output_tokens, second.max_tokens, second.attempt) == (8, 3, 8, 1)
        assert len(first.block_hashes) == 1
        assert len(second.block_hashes) == 2
        assert second.block_hashes[0] == first.block_hashes[0]


@virtual
async def test_scheduler_that_still_answers_is_kept_although_membership_lists_none() -> None:
    """The store was emptied, or is too full for announcements."""
    async with cluster(("h0", "hybrid")) as c:
        pool, membership = c.gateway.schedulers, MemoryMembership()
        discovering = asyncio.create_task(pool._discover(membership))
        await asyncio.sleep(2)
        assert pool.addresses == (c.scheduler.address,)
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        c.scheduler.die()
        await until(lambda: not pool.addresses)
        discovering.cancel()
        await asyncio.wait((discovering,))


@virtual
async def test_scheduler_that_failed_before_membership_listed_none_is_asked_once_more() -> None:
    """Its connection was cut while the other one was asked, and then the store was emptied."""
    async with cluster(("h0", "hybrid")) as c:
        other = StubScheduler(c.network, "scheduler:2")
        other.workers = c.scheduler.workers
        pool, membership = c.gateway.schedulers, MemoryMembership()
        pool._set_addresses(["scheduler:1", "scheduler:2"])
        pool._mark_failed("scheduler:2", StreamBroken("cut"))
        discovering = asyncio.create_task(pool._discover(membership))
        await asyncio.sleep(2 * TEST_TIMES["heartbeat_s"])
        c.scheduler.die()
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(other.queries) == 1
        await until(lambda: pool.addresses == ("scheduler:2",))
        other.die()
        await until(lambda: not pool.addresses)
        discovering.cancel()
        await asyncio.wait((discovering,))


@virtual
async def test_scheduler_that_fails_once_is_kept_although_membership_lists_only_a_dead_one() -> None:
    """The store is too full for announcements, and the gateway was paused, which broke its connections."""
    async with cluster(("h0", "hybrid")) as c:
        pool, membership = c.gateway.schedulers, MemoryMembership()
        dead = Member(kind=MemberKind.SCHEDULER, member_id="s2", epoch=1, address="scheduler:2")
        await membership.announce(dead, ttl_s=1000.0)
        discovering = asyncio.create_task(pool._discover(membership))
        await until(lambda: len(pool.addresses) == 2)
        await asyncio.sleep(2 * TEST_TIMES["heartbeat_s"])
        pool._mark_failed(c.scheduler.address, StreamBroken("no answer to keepalive"))
        pool._set_addresses([dead.address, *pool._unlisted([dead.address])])
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        c.scheduler.die()
        await until(lambda: pool.addresses == (dead.address,))
        discovering.cancel()
        await asyncio.wait((discovering,))


@virtual
async def test_new_request_reaches_the_scheduler_that_works_behind_several_that_hang() -> None:
    """The first is paused, and the hosts of two others are gone. The last one failed after they did, when its
    connection was cut."""
    async with cluster(("h0", "hybrid")) as c:
        pool = c.gateway.schedulers
        hanging = [c.scheduler, *(StubScheduler(c.network, f"gone:{number}") for number in (1, 2))]
        working = StubScheduler(c.network, "scheduler:2")
        working.workers = c.scheduler.workers
        pool._set_addresses([each.address for each in (*hanging, working)])
        for scheduler in hanging:
            scheduler.hangs = True
        for scheduler in (*hanging[1:], working):
            pool._mark_failed(scheduler.address, StreamBroken("cut"))
            await asyncio.sleep(0.001)
        assert pool._by_preference() == [each.address for each in (*hanging, working)]
        assert 3 * TEST_TIMES["detection_s"] > TEST_TIMES["scheduler_wait_s"]
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert 0 < working.queries[0].answer_within_s < TEST_TIMES["detection_s"]


def add_two_that_hang(c: Cluster) -> None:
    """Let the gateway know two more schedulers, which accept calls and never answer."""
    hanging = [StubScheduler(c.network, f"gone:{number}") for number in (1, 2)]
    for scheduler in hanging:
        scheduler.hangs = True
    c.gateway.schedulers._set_addresses([each.address for each in (c.scheduler, *hanging)])


@virtual
async def test_new_request_reaches_a_scheduler_whose_connection_broke_before_two_that_hang() -> None:
    """So it is after a stall of the gateway. Neither of the two has failed before."""
    async with cluster(("h0", "hybrid")) as c:
        add_two_that_hang(c)
        await asyncio.sleep(2 * TEST_TIMES["heartbeat_s"])  # the watch is at the first
        c.gateway.schedulers._mark_failed(c.scheduler.address, StreamBroken("no answer to keepalive"))
        assert 2 * TEST_TIMES["detection_s"] >= TEST_TIMES["scheduler_wait_s"]
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_new_request_asks_a_scheduler_again_whose_connection_breaks() -> None:
    async with cluster(("h0", "hybrid")) as c:
        add_two_that_hang(c)
        breaks = iter([StreamBroken("no answer to keepalive")])

        def answer(_: PlacementQuery) -> None:
            for error in breaks:
                raise error

        c.scheduler.answer = answer
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_connections_to_schedulers_that_are_gone_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that restarts many times has a new port each time."""
    async with cluster(("h0", "hybrid")) as c:
        pool, open_ = c.gateway.schedulers, Counter({c.scheduler.address: 1})
        find = c.network.scheduler
        monkeypatch.setattr(c.network, "scheduler", lambda address: (open_.update([address]), find(address))[1])
        monkeypatch.setattr(c.network, "forget_scheduler", lambda address: open_.subtract([address]))
        for port in range(10):
            pool._set_addresses([c.scheduler.address, f"restarted:{port}"])
            assert {address for address, number in open_.items() if number} == set(pool.addresses)
        assert len(pool.addresses) == 2
        assert max(open_.values()) == 1


@virtual
async def test_time_in_which_the_gateway_was_stalled_does_not_count_as_waiting() -> None:
    """A gateway that was paused for long asks again before it reports its schedulers as lost."""
    async with cluster(("h0", "hybrid")) as c:
        loop, pool = asyncio.get_running_loop(), c.gateway.schedulers
        await c.complete(PROMPT)
        c.scheduler.hangs = True
        begin_s, stalled_s = loop.time(), 10 * TEST_TIMES["scheduler_wait_s"]
        pool._clock = lambda: max(begin_s, loop.time() - stalled_s)
        with pytest.raises(Refused) as refused:
            await pool.place(lambda *_: c.scheduler.queries[0], is_first=True, deadline_s=begin_s + 1000.0)
        assert refused.value.failure.reason is Reason.SCHEDULER_LOST
        waited_s = loop.time() - begin_s - stalled_s
        assert TEST_TIMES["scheduler_wait_s"] <= waited_s < TEST_TIMES["scheduler_wait_s"] + 1.0


@virtual
async def test_deadline_of_a_request_says_nothing_about_the_scheduler_that_it_waits_for() -> None:
    """Membership lists no scheduler, so one that counts as failed is dropped."""
    async with cluster(("h0", "hybrid")) as c:
        loop, pool = asyncio.get_running_loop(), c.gateway.schedulers
        await c.complete(PROMPT)
        discovering = asyncio.create_task(pool._discover(MemoryMembership()))
        c.scheduler.hangs = True
        deadline_s = loop.time() + TEST_TIMES["detection_s"] / 2
        with pytest.raises(Refused) as refused:
            await pool.place(lambda *_: c.scheduler.queries[0], is_first=False, deadline_s=deadline_s)
        assert refused.value.failure.reason is Reason.DEADLINE
        assert refused.value.failure.message == "the deadline passed before a scheduler answered; allow more time"
        await asyncio.sleep(2 * TEST_TIMES["heartbeat_s"])
        assert pool.addresses == (c.scheduler.address,)
        discovering.cancel()
        await asyncio.wait((discovering,))


@virtual
async def test_drain_reaches_the_schedulers_after_one_that_is_shutting_down() -> None:
    refusal = Failure(code=Code.UNAVAILABLE, reason=Reason.DRAINING, message="this scheduler is shutting down")
    async with cluster(("h0", "hybrid")) as c:
        other = StubScheduler(c.network, "scheduler:2")
        other.workers = c.scheduler.workers
        pool = c.gateway.schedulers
        pool._set_addresses(["scheduler:1", "scheduler:2"])
        for ending in (c.scheduler, other):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ending, "drain", AsyncMock(side_effect=Refused(refusal)))
                assert await pool.drain("h0")
        assert (c.scheduler.drained, other.drained) == ([("h0", False)], [("h0", False)])
