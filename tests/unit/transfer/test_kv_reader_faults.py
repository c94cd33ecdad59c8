"""Tests of reads that are late, fail, are cancelled or fail validation: no block becomes visible and nothing
leaks."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import Reason, Refused
from baton.transfer.backend import GenerationEntry
from baton.transfer.reader import peer_reads
from baton.transfer.reader.peer_reads import BLOCKED_DEADLINES
from baton.transfer.reader.pull import MAX_LOST_SLICES
from tests import builders
from tests.unit.transfer import transfer_rig as rigs
from tests.unit.transfer.pulls import failure_of, pull_all, refusal_of, virtual
from tests.unit.transfer.transfer_rig import OWNER, READER, Rig, rig


@virtual
async def test_stuck_read_quarantines_its_blocks_until_it_is_terminal() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        r.fabric.reads_may_end.clear()
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_TIMEOUT
        r.release(receiving)
        assert r.reader.pool.counts().quarantined == 1 == r.kv_reader.quarantined_blocks
        assert r.observed.quarantined_blocks == [1]
        (link,) = r.kv_reader.links()
        assert link.broken
        with pytest.raises(Refused) as refused:
            r.kv_reader.pull(OWNER, builders.job_id(1), have_blocks=0)
        assert refused.value.failure.blamed == OWNER
        r.reader.reuse_everything_free("mine")
        await asyncio.sleep(10)
        assert r.reader.pool.counts().quarantined == 1
        r.fabric.reads_may_end.set()  # the late write comes now
        await asyncio.sleep(0.1)
        assert seen_elsewhere(r, "a:") == set()
        await asyncio.sleep(rigs.LEASE_S)
        r.check_nothing_leaks()
        await asyncio.sleep(5)
        assert not r.kv_reader.links()[0].broken
        await pull_all(r, "b", request=2)


def seen_elsewhere(r: Rig, text: str) -> set[str]:
    return rigs.seen(r.reader.visible(), text)


@virtual
async def test_read_in_doubt_quarantines_its_blocks_until_it_is_terminal() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        r.fabric.in_doubt = True
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_FAILED
        r.release(receiving)
        r.fabric.in_doubt = False
        r.reader.reuse_everything_free("mine")
        probes = r.fabric.probes
        await asyncio.sleep(60)
        assert r.fabric.probes > probes
        assert r.reader.pool.counts().quarantined == 1 == r.kv_reader.quarantined_blocks
        assert r.kv_reader.links()[0].broken  # probes succeed, but every block that may be in flight is quarantined
        r.fabric.doubts_may_end.set()  # the late write comes now
        await asyncio.sleep(0.1)
        assert seen_elsewhere(r, "a:") == set()
        await asyncio.sleep(rigs.LEASE_S)
        r.check_nothing_leaks()
        assert not r.kv_reader.links()[0].broken
        await pull_all(r, "b", request=2)


@virtual
async def test_timed_out_read_fails_all_pulls_of_the_link_and_blames_the_owner() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        r.fabric.reads_may_end.clear()
        reading, waiting = [
            r.kv_reader.pull(OWNER, r.prefill(text, 18, i)[0], have_blocks=0) for i, text in enumerate("ab")
        ]
        receiving = []
        for pull in (reading, waiting):
            await pull.first_ready()
            receiving.append(r.mark_received(pull, 5))
        failures = [await refusal_of(pull.done()) for pull in (reading, waiting)]
        with pytest.raises(Refused) as too_late:
            r.kv_reader.pull(OWNER, builders.job_id(2), have_blocks=0)
        for failure in (*failures, too_late.value.failure):
            assert (failure.reason, failure.blamed, failure.retriable) == (Reason.TRANSFER_TIMEOUT, OWNER, True)
        assert r.observed.ended == [Reason.TRANSFER_TIMEOUT] * 2
        for blocks in receiving:
            r.release(blocks)
        r.fabric.reads_may_end.set()


@virtual
async def test_timed_out_first_read_fails_the_waiting_pull() -> None:
    async with rig() as r:
        r.fabric.reads_may_end.clear()
        pull = r.kv_reader.pull(OWNER, r.prefill("a", 18)[0], have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_TIMEOUT
        r.release(receiving)
        r.fabric.reads_may_end.set()


@pytest.mark.fault("F-15")
@virtual
async def test_broken_link_is_probed_with_bounded_probes() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        probes = r.fabric.probes
        job, _blocks = r.prefill("a", 18)
        r.fabric.reads_may_end.clear()
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        await failure_of(pull.done())
        await asyncio.sleep(60)
        assert 2 <= r.fabric.probes - probes <= 4
        r.fabric.reads_may_end.set()
        await asyncio.sleep(1)
        assert [link.broken for link in r.kv_reader.links()] == [False]
        assert r.observed.broken[-2:] == [True, False]
        r.release(receiving)


@virtual
async def test_late_generation_read_makes_no_block_visible() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        r.fabric.generation_reads_may_end.clear()
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_TIMEOUT
        r.release(receiving)
        assert r.reader.pool.lookup(r.hashes("a", 4)) == []
        await asyncio.sleep(1)
        assert r.reader.pool.counts().quarantined == 0  # the blocks themselves were read whole
        assert not r.kv_reader.links()[0].broken  # a probe came through
        r.fabric.generation_reads_may_end.set()
        await pull_all(r, "b", request=2)


@virtual
async def test_failed_read_makes_no_block_visible() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        r.fabric.failing = True
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_FAILED
        r.release(receiving)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
@pytest.mark.parametrize("when", ["before memory", "while reading", "between slices"])
async def test_cancelled_pull_frees_everything(when: str) -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        if when == "before memory":
            pull.cancel()
        receiving = r.mark_received(pull, 5)
        if when != "before memory":
            await asyncio.sleep(rigs.READ_S * (0.5 if when == "while reading" else 1.05))
            pull.cancel()
        assert await failure_of(pull.done()) is Reason.CANCELLED
        r.release(receiving)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()
        assert not r.kv_reader.links()[0].broken


@virtual
async def test_request_deadline_ends_the_pull() -> None:
    async with rig() as r:
        r.service.create(builders.job_id(), READER)
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0, deadline_s=0.7)
        assert await failure_of(pull.first_ready()) is Reason.DEADLINE
        assert asyncio.get_running_loop().time() == pytest.approx(0.7)


@pytest.mark.fault("F-21")
@virtual
@pytest.mark.parametrize(
    ("what", "flip"),
    [
        ("generation", lambda e: replace(e, generation=e.generation ^ 1)),
        ("hash", lambda e: replace(e, block_hash=bytes([e.block_hash[0] ^ 1]) + e.block_hash[1:])),
        ("epoch", lambda e: replace(e, worker_epoch=e.worker_epoch ^ 1)),
    ],
)
async def test_flipped_bit_is_retried_once_and_then_fails_the_pull(what: str, flip: Any) -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        for times, outcome in ((1, None), (2, Reason.VALIDATION_FAILED)):
            r.observed.mismatches.clear()
            job, _blocks = r.prefill("a", 18, request=times)
            flips = iter([flip] * times)
            r.fabric.seen_entry = lambda block_id, entry, flips=flips: next(flips, lambda e: e)(entry)
            pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
            await pull.first_ready()
            receiving = r.mark_received(pull, 5)
            if outcome is None:
                assert (await pull.done()).num_blocks == 5
            else:
                assert await failure_of(pull.done()) is outcome
            assert r.observed.mismatches == [what] * times
            r.release(receiving)
            await asyncio.sleep(0.1)
            r.check_nothing_leaks()


@pytest.mark.parametrize("torn", range(6))
@virtual
async def test_blocks_that_are_read_out_of_order_are_requested_again_from_the_first(
    torn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has lost blocks since its Follow reads announced blocks first, then earlier ones."""
    monkeypatch.setattr(peer_reads, "MAX_INFLIGHT_SHARE", 2 / rigs.NUM_BLOCKS)  # a slice has two blocks
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, blocks = r.prefill("a", 24)
        torn_once = {blocks[torn]}

        def seen_entry(block_id: int, entry: GenerationEntry) -> GenerationEntry:
            if block_id not in torn_once:
                return entry
            torn_once.clear()
            return replace(entry, generation=entry.generation ^ 1)

        r.fabric.seen_entry = seen_entry
        pull = r.kv_reader.pull(OWNER, job, have_blocks=3)
        await pull.first_ready()
        receiving = r.mark_received(pull, 6)
        await asyncio.wait_for(pull.done(), 10.0)
        assert (blocks[5], blocks[0]) in [source for source, _own in r.fabric.reads]
        assert [r.reader.contents[receiving[i]] for i in range(6)] == [f"a:{i}" for i in range(6)]
        r.release(receiving)
        r.check_nothing_leaks()


@pytest.mark.fault("F-21")
@virtual
async def test_announced_hashes_must_be_the_prompts() -> None:
    async with rig() as r:
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0, expected=r.hashes("b", 4))
        assert await failure_of(pull.first_ready()) is Reason.VALIDATION_FAILED


@pytest.mark.fault("F-26")
@virtual
async def test_lease_end_during_a_read_discards_its_blocks() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        r.network.remove(OWNER.address)  # renewals stay unanswered from here on
        await asyncio.sleep(rigs.LEASE_S * 0.95 - 0.1 * rigs.READ_S)
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.LEASE_LOST
        r.release(receiving)
        assert seen_elsewhere(r, "a:") == set()
        await asyncio.sleep(rigs.LEASE_S)
        r.check_nothing_leaks()


@pytest.mark.parametrize("probes_in_doubt", [False, True])
@virtual
async def test_link_that_reads_in_doubt_block_makes_the_reader_ask_for_its_replacement(probes_in_doubt: bool) -> None:
    """One block may be in flight here, so one read in doubt is enough, or four probes."""
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        r.fabric.in_doubt, r.fabric.probes_in_doubt = not probes_in_doubt, probes_in_doubt
        r.fabric.failing = probes_in_doubt
        pull = r.kv_reader.pull(OWNER, r.prefill("a", 18)[0], have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_FAILED
        r.release(receiving)
        r.fabric.in_doubt = r.fabric.failing = False
        await asyncio.sleep(BLOCKED_DEADLINES * rigs.DEADLINE_MAX_S - 0.1)
        assert not r.kv_reader.needs_replacement
        await asyncio.sleep(rigs.LEASE_S)
        assert r.kv_reader.needs_replacement
        assert r.kv_reader.links()[0].broken
        r.fabric.probes_in_doubt = False
        r.fabric.doubts_may_end.set()
        await asyncio.sleep(rigs.LEASE_S)
        assert not r.kv_reader.needs_replacement  # the request is withdrawn
        await pull_all(r, "b", request=2)


@virtual
async def test_link_that_timed_out_reads_block_does_not_ask_for_a_replacement() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        r.fabric.reads_may_end.clear()
        pull = r.kv_reader.pull(OWNER, r.prefill("a", 18)[0], have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_TIMEOUT
        r.release(receiving)
        await asyncio.sleep(10 * BLOCKED_DEADLINES * rigs.DEADLINE_MAX_S)
        assert not r.kv_reader.needs_replacement
        r.fabric.reads_may_end.set()


@virtual
async def test_quarantine_limit_is_a_tenth_of_the_pool() -> None:
    async with rig() as r:
        r.fabric.reads_may_end.clear()
        assert not r.kv_reader.needs_replacement
        taken = r.reader.pool.allocate_receiving(7)
        assert taken is not None
        r.kv_reader._quarantine.num_blocks = 7
        assert r.kv_reader.needs_replacement
        r.reader.pool.drop_receiving(taken)
        r.reader.pool.unref(taken)


@virtual
@pytest.mark.parametrize("num_lost", [1, 5, MAX_LOST_SLICES])
async def test_reads_that_the_owner_has_not_served_are_repeated(num_lost: int) -> None:
    async with rig(two_sided=True) as r:
        assert await r.kv_reader.warmed(OWNER)
        r.fabric.num_to_lose = num_lost
        await pull_all(r)
        assert r.fabric.num_to_lose == 0
        (link,) = r.kv_reader.links()
        assert not link.broken
        assert True not in r.observed.broken


@virtual
async def test_an_owner_that_serves_no_reads_breaks_the_link() -> None:
    async with rig(two_sided=True) as r:
        assert await r.kv_reader.warmed(OWNER)
        r.fabric.num_to_lose = 10**6
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_FAILED
        r.release(receiving)
        (link,) = r.kv_reader.links()
        assert link.broken
        r.fabric.num_to_lose = 0
        await asyncio.sleep(2)
        r.check_nothing_leaks()
        await pull_all(r, "b", request=2)


@virtual
async def test_reads_of_a_transfer_that_the_owner_has_ended_break_no_link() -> None:
    async with rig(two_sided=True) as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        r.fabric.num_to_lose = 10**6  # the owner refuses them, and its message about the transfer comes later
        receiving = r.mark_received(pull, 5)
        r.service.owner.close(Reason.CANCELLED, asyncio.get_running_loop().time())
        assert await failure_of(pull.done()) in (Reason.CANCELLED, Reason.LEASE_LOST)
        r.release(receiving)
        r.fabric.num_to_lose = 0
        assert not r.kv_reader.links()[0].broken


@virtual
async def test_two_sided_reads_wait_for_a_new_stream() -> None:
    async with rig(two_sided=True) as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        r.cut()
        await asyncio.sleep(0)
        receiving = r.mark_received(pull, 5)
        await pull.done()
        r.release(receiving)
        announced = [blocks for _read, _reader, blocks in r.owner.backend.expected]
        assert announced[-len(r.fabric.reads) :] == [source for source, _own in r.fabric.reads]
