"""Tests that links measure what pulls cost beyond their bytes, and what connecting costs."""

import asyncio

import pytest

from baton.core.cluster.worker_report import LinkReport
from baton.core.messages.peer_messages import HashRange
from baton.transfer.reader.bandwidth import Bandwidth
from baton.transfer.reader.pull_costs import PullCosts
from baton.transfer.reader.pull_record import PullRecord
from tests import builders
from tests.unit.transfer.pulls import virtual
from tests.unit.transfer.transfer_rig import OWNER, READ_S, Rig, rig


def link_of(r: Rig) -> LinkReport:
    (link,) = r.kv_reader.links()
    return link


async def pull_prefix(r: Rig, text: str) -> None:
    """Pull four cached blocks that the owner has computed."""
    hashes = r.hashes(text, 4)
    r.owner.pool.unref(r.owner.compute(text, hashes, 4))
    pull = r.kv_reader.pull(OWNER, HashRange(hashes=hashes), have_blocks=0)
    await pull.first_ready()
    receiving = r.mark_received(pull, 4)
    await pull.done()
    r.release(receiving)


async def pull_prompt(r: Rig, text: str, request: int) -> None:
    """Pull a prompt of 18 tokens with the memory for it known before its last announcement."""
    hashes, job = r.hashes(text, 4), builders.job_id(request)
    r.service.create(job, builders.worker_ref("d0", epoch=8))
    pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
    block_ids = r.owner.compute(text, hashes, 5)
    r.service.allocated(job, block_ids, hashes)
    r.service.announce(job, 8)
    await pull.first_ready()
    receiving = r.mark_received(pull, 5)
    await asyncio.sleep(1.0)
    r.service.announce(job, 18, final=True)
    await pull.done()
    r.owner.pool.unref(block_ids)
    r.release(receiving)


@virtual
async def test_a_new_link_reports_what_connecting_took_and_no_pull_costs() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        link = link_of(r)
        assert link.dial_s == pytest.approx(READ_S), "the first read"
        assert (link.pull_s, link.exposed_s) == (0.0, 0.0)


@virtual
async def test_pulls_show_their_cost_beyond_their_bytes() -> None:
    """Blocks are read one by one here, so only the generations of the last one are read at the end."""
    async with rig() as r:
        await r.kv_reader.warmed(OWNER)
        for request, text in enumerate("abcdefgh"):
            await pull_prefix(r, text)
            await pull_prompt(r, text * 2, request)
        link = link_of(r)
        assert link.bytes_per_s == pytest.approx(builders.layout().block_bytes / READ_S)
        assert link.pull_s == pytest.approx(READ_S / 10)
        assert link.exposed_s == pytest.approx(READ_S / 10)


@virtual
async def test_a_pull_that_waits_for_the_connection_shows_no_pull_cost() -> None:
    async with rig() as r:
        await pull_prefix(r, "a")
        assert link_of(r).pull_s == 0.0
        await pull_prefix(r, "b")
        assert link_of(r).pull_s > 0.0


def measured(*, at_1_s: int, total_bytes: int) -> PullCosts:
    """The costs after a pull of 2 s, on a link of 1,000 bytes/s that had read `at_1_s` bytes before."""
    bandwidth, costs = Bandwidth(deadline_min_s=1.0, deadline_max_s=1.0), PullCosts()
    bandwidth.ended(1000, 0.0, 1.0)
    bandwidth.total_bytes = total_bytes
    record = PullRecord(1.0, at_1_s)
    record.on_received(500)
    record.on_end(3.0)
    record.add_costs_to(costs, bandwidth, is_prefix=True)
    return costs


def test_bytes_of_other_pulls_on_the_link_are_no_fixed_cost() -> None:
    assert measured(at_1_s=1000, total_bytes=1500).pull_s == pytest.approx(1.5)
    assert measured(at_1_s=1000, total_bytes=2400).pull_s == pytest.approx(0.6)
    assert measured(at_1_s=1000, total_bytes=9000).pull_s == 0.0


def test_single_slow_pulls_do_not_change_the_costs() -> None:
    costs = PullCosts()
    for duration_s in (0.002, 0.002, 1.5, 0.002, 0.002):
        costs.pulled_prefix(duration_s, 0.001)
    assert costs.pull_s == pytest.approx(0.001)
    for _ in range(16):
        costs.pulled_prefix(0.011, 0.001)
    assert costs.pull_s == pytest.approx(0.01), "but a lasting change does"
