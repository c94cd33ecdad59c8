"""Scenarios in which only validation by the generation table keeps reused blocks invisible.

Each scenario is also run without validation, where it must fail.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from baton.core.errors import Reason, Refused
from baton.core.messages.peer_messages import FirstToken
from baton.sim import virtual_time
from baton.transfer.backend import GenerationEntry
from tests import builders
from tests.unit.transfer import transfer_rig as rigs
from tests.unit.transfer.transfer_rig import OWNER, READER, Rig, rig

FAULTS: dict[str, Callable[[Rig], None]] = {}


def fault(scenario: Callable[[Rig], None]) -> Callable[[Rig], None]:
    FAULTS[scenario.__name__] = scenario
    return scenario


@fault
def owner_cancels_during_a_read_with_memory_pressure(r: Rig) -> None:
    """Cancel the request at the owner while its stream is broken.

    The lease then ends by the owner's clock.
    """
    r.cut()
    r.service.lost(builders.job_id(), Reason.CANCELLED)
    r.service.owner.expire(asyncio.get_running_loop().time() + rigs.LEASE_S)
    r.owner.reuse_everything_free("other")


@fault
def owner_pauses_three_leases_with_memory_pressure(r: Rig) -> None:
    """Resume the owner after three leases; it expires leases before it handles waiting renewals.

    The reader's host was paused as long, so the reader's clock has not moved. The stream breaks, so the
    reader is not told.
    """
    r.cut()
    r.service.owner.expire(asyncio.get_running_loop().time() + 3 * rigs.LEASE_S)
    r.owner.reuse_everything_free("other")


SeenEntry = Callable[[GenerationEntry, GenerationEntry], GenerationEntry]
"""Returns what the reader sees of a block's entry, from the entry as announced and as it is now."""


def current(announced: GenerationEntry, now: GenerationEntry) -> GenerationEntry:
    return now


def as_announced(announced: GenerationEntry, now: GenerationEntry) -> GenerationEntry:
    """Validate nothing: every entry matches."""
    return announced


def ignore_generation(announced: GenerationEntry, now: GenerationEntry) -> GenerationEntry:
    return replace(now, generation=announced.generation)


def ignore_hash(announced: GenerationEntry, now: GenerationEntry) -> GenerationEntry:
    return replace(now, block_hash=announced.block_hash)


def show_entries(r: Rig, block_ids: Sequence[int], seen: SeenEntry) -> None:
    """Let the reader see the entries of announced blocks through `seen`."""
    table = r.fabric.tables[OWNER.worker_id]
    announced = {block_id: table.entry(block_id) for block_id in block_ids}
    r.fabric.seen_entry = lambda block_id, now: seen(announced[block_id], now)


async def pull_under(scenario: Callable[[Rig], None], seen: SeenEntry = current) -> set[str]:
    """Pull five blocks, with the fault in the middle of the second read.

    Returns the blocks that became visible under a wrong hash.
    """
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, hashes = builders.job_id(), r.hashes("a", 4)
        r.service.create(job, READER)
        blocks = r.owner.compute("a", hashes, 5)
        r.service.allocated(job, blocks, hashes)
        r.service.announce(job, 16)
        show_entries(r, blocks, seen)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0, expected=hashes)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)

        def inject_fault() -> None:
            if len(r.fabric.reads) == 2:
                r.fabric.mid_read_fault = None
                r.owner.pool.unref(blocks)  # the sequence has ended
                scenario(r)

        r.fabric.mid_read_fault = inject_fault
        waiting = asyncio.ensure_future(pull.done())
        await asyncio.sleep(0.3)
        assert r.fabric.mid_read_fault is None, "the fault did not happen"
        assert r.owner.contents[blocks[1]] == "other", "there was no memory pressure"
        r.service.announce(job, 18, final=True, first_tokens=[FirstToken(sample_index=0, token_id=1)])
        pull.cancel()
        with pytest.raises(Refused):
            await waiting
        right = {block_hash: f"a:{index}" for index, block_hash in enumerate(hashes)}
        visible = {
            r.reader.contents[b]
            for b in receiving.values()
            if r.reader.pool.hash_of(b) in right and r.reader.contents[b] != right[r.reader.pool.hash_of(b)]
        }
        r.release(receiving)
        return visible


@pytest.mark.fault("F-3", "F-20")
@pytest.mark.parametrize("name", FAULTS)
def test_validation_keeps_reused_blocks_invisible(name: str) -> None:
    assert virtual_time.run(pull_under(FAULTS[name])) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_reused_blocks_become_visible_without_validation(name: str) -> None:
    """The scenarios do reuse blocks: without validation they become visible."""
    assert virtual_time.run(pull_under(FAULTS[name], as_announced)) == {"other"}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("ignored_field", [ignore_generation, ignore_hash])
def test_generation_or_hash_alone_detects_the_reuse(name: str, ignored_field: SeenEntry) -> None:
    """A reused block has a new generation, and no hash until it is full."""
    assert virtual_time.run(pull_under(FAULTS[name], ignored_field)) == set()


async def stopped_owner(seen: SeenEntry) -> set[str]:
    """Pause the owner for three leases, also by the reader's clock: reads hang and nothing is answered."""
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, blocks = r.prefill("a", 18)
        show_entries(r, blocks, seen)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        r.fabric.reads_may_end.clear()
        r.network.remove(OWNER.address)
        await asyncio.sleep(3 * rigs.LEASE_S)
        r.network.add_worker(OWNER.address, r.end)
        r.owner.reuse_everything_free("other")
        with pytest.raises(Refused):
            await pull.done()
        r.release(receiving)
        r.reader.reuse_everything_free("canary")
        r.fabric.reads_may_end.set()
        await asyncio.sleep(0.1)
        in_use = {r.reader.contents[b] for b in range(rigs.NUM_BLOCKS)} - {"canary", "other"}
        assert r.reader.contents.count("canary") >= rigs.NUM_BLOCKS - 1
        await asyncio.sleep(rigs.LEASE_S)
        r.check_nothing_leaks()
        return rigs.seen(in_use, "a:") | rigs.seen(r.reader.visible(), "other")


@pytest.mark.parametrize("seen", [current, as_announced])
def test_late_write_hits_no_block_in_use(seen: SeenEntry) -> None:
    """Quarantine and lease are enough here, with or without validation: the canary in reused memory stays
    intact."""
    assert virtual_time.run(stopped_owner(seen)) == set()
