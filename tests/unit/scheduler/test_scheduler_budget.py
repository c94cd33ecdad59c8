"""The memory budget of a scheduler: what reserves, what is refused, and what is released."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from baton.core.cluster.placement import Placement, StillWaiting
from baton.core.errors import Code, Reason, Refused
from baton.core.request import RequestActuals
from baton.runtime.process.byte_budget import Account
from baton.scheduler.scheduler_budget import PLACEMENT_BYTES, query_bytes
from tests.builders import query, worker_report
from tests.unit.scheduler.running_scheduler import a_scheduler, join, settle
from tests.unit.worker.virtual_loop import virtual

LONG = (b"h" * 16,) * 1000


@virtual
async def test_query_over_the_budget_is_refused_with_the_arithmetic_and_counted() -> None:
    registry, needed = CollectorRegistry(), query_bytes(query(block_hashes=LONG))
    limits = {Account.QUERIES: needed - 1}
    async with a_scheduler(registry=registry, memory_limits=limits) as (scheduler, network):
        await join(network, worker_report())
        message = f"the placement query needs {needed:,} bytes; .* raise --memory-budget of the scheduler"
        with pytest.raises(Refused, match=message) as refused:
            await scheduler.place(query(block_hashes=LONG))
        assert refused.value.failure.reason is Reason.MEMORY_BUDGET
        assert registry.get_sample_value("baton_rejections_total", {"reason": "memory_budget"}) == 1
        assert isinstance(await scheduler.place(query()), Placement)
        assert scheduler.budget.used(Account.QUERIES) == 0


@virtual
async def test_queued_requests_reserve_memory_until_their_answer_is_fetched() -> None:
    needed = query_bytes(query(block_hashes=LONG))
    limits = {Account.WAITING: needed + 1}
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10, memory_limits=limits) as (scheduler, network):
        await join(network, worker_report())
        placed = await scheduler.place(query(request_id=b"a"))
        assert isinstance(placed, Placement)
        queued = query(request_id=b"b", block_hashes=LONG, answer_within_s=0.2)
        assert isinstance(await scheduler.place(queued), StillWaiting)
        assert scheduler.budget.used(Account.WAITING) == needed
        with pytest.raises(Refused, match=r"the queued request needs .* for waiting are free; retry later") as refused:
            await scheduler.place(query(request_id=b"c", block_hashes=LONG, answer_within_s=0.2))
        failure = refused.value.failure
        assert (failure.code, failure.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 1.0)
        again = asyncio.create_task(scheduler.place(query(request_id=b"b", block_hashes=LONG, answer_within_s=60.0)))
        await settle()
        await scheduler.finished(RequestActuals(decision_id=placed.decision_id, outcome="stop"))
        assert isinstance(await again, Placement)
        assert scheduler.budget.used(Account.WAITING) == 0


@virtual
async def test_abandoned_request_releases_its_memory() -> None:
    async with a_scheduler(max_waiting_seqs=1, max_queued_requests=10) as (scheduler, network):
        await join(network, worker_report())
        await scheduler.place(query(request_id=b"a"))
        await scheduler.place(query(request_id=b"gone", answer_within_s=0.02))
        assert scheduler.budget.used(Account.WAITING) > 0
        await asyncio.sleep(1.0)
        assert scheduler.budget.used(Account.WAITING) == 0


@virtual
async def test_open_placements_beyond_their_memory_release_the_oldest() -> None:
    limits = {Account.PLACEMENTS: 3 * PLACEMENT_BYTES}
    async with a_scheduler(max_waiting_seqs=100, memory_limits=limits) as (scheduler, network):
        await join(network, worker_report())
        placed = [await scheduler.place(query(request_id=b"%d" % number)) for number in range(5)]
        assert scheduler.budget.used(Account.PLACEMENTS) == 3 * PLACEMENT_BYTES
        for each in placed:
            assert isinstance(each, Placement)
            await scheduler.finished(RequestActuals(decision_id=each.decision_id, outcome="stop"))
        assert scheduler.budget.used(Account.PLACEMENTS) == 0
