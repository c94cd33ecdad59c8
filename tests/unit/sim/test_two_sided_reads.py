"""Simulated two-sided reads: grants, groups that fail, and entries that belong to the copied blocks."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.ids import ReadId
from baton.sim.sim_memory import EMPTY
from baton.sim.sim_tier import REUSED
from baton.sim.sim_transfer_backend import LinkModel
from baton.transfer.backend import ReadState
from tests import builders
from tests.sim_pair import NUM_BLOCKS, NUM_SLOTS, SimPair
from tests.unit.worker.virtual_loop import virtual

BLOCK_S = 0.1
SLOW = LinkModel(bytes_per_s=builders.layout().block_bytes / BLOCK_S)
"""A link that reads one block in `BLOCK_S`."""
LONG_S = 10.0
UNREAD = (EMPTY,) * builders.layout().block_size_tokens


async def end(pair: SimPair) -> None:
    """Close the pair. No task may be left once the cancelled ones have ended."""
    await pair.aclose()
    await asyncio.sleep(LONG_S)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_read_waits_for_its_grant_and_fills_exactly_its_blocks() -> None:
    pair = SimPair()
    read_id = pair.start({3: 1, 5: 0})
    await asyncio.sleep(LONG_S)
    assert pair.is_running(read_id)
    assert pair.received(0, 1) == [UNREAD, UNREAD]
    pair.stream.expect_read(read_id, (3, 5))
    assert await pair.state(read_id) is ReadState.DONE
    assert pair.received(1, 0) == [pair.content(3), pair.content(5)]
    assert pair.received(*range(2, NUM_BLOCKS)) == [UNREAD] * (NUM_BLOCKS - 2)
    await end(pair)


@virtual
async def test_probe_waits_for_its_grant_and_writes_nothing() -> None:
    pair = SimPair()
    probe = pair.start_probe(2)
    await asyncio.sleep(LONG_S)
    assert pair.is_running(probe)
    pair.stream.expect_read(probe, (2,))
    assert await pair.state(probe) is ReadState.DONE
    assert pair.received(*range(NUM_BLOCKS)) == [UNREAD] * NUM_BLOCKS
    assert await pair.entries(2) is not None, "those of its blocks, as over a process group"
    await end(pair)


@virtual
async def test_refused_read_is_lost_and_the_next_one_is_served_in_the_same_group() -> None:
    pair = SimPair()
    refused, following = pair.start({1: 1, 2: 2}), pair.start({3: 3})
    pair.stream.refuse_read(refused, 2)
    assert await pair.state(refused) is ReadState.LOST
    assert pair.is_running(following)
    pair.stream.expect_read(following, (3,))
    assert await pair.state(following) is ReadState.DONE
    assert pair.received(1, 2, 3) == [UNREAD, UNREAD, pair.content(3)]
    await end(pair)


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS + NUM_SLOTS, 2**40])
@virtual
async def test_block_that_the_owner_does_not_have_is_refused(block_id: int) -> None:
    pair = SimPair()
    outside, following = pair.start({1: 1}), pair.start({3: 3})
    pair.stream.expect_read(outside, (block_id,))
    pair.stream.expect_read(following, (3,))
    assert await pair.state(outside) is ReadState.LOST
    assert await pair.state(following) is ReadState.DONE
    await end(pair)


@virtual
async def test_reads_of_a_group_are_served_one_after_the_other() -> None:
    pair = SimPair(link=SLOW)
    first, second = pair.start_granted({1: 1, 2: 2}), pair.start_granted({3: 3})
    await asyncio.sleep(2.5 * BLOCK_S)
    assert pair.received(1, 2, 3) == [pair.content(1), pair.content(2), UNREAD]
    assert (pair.is_running(first), pair.is_running(second)) == (False, True)
    assert await pair.state(second) is ReadState.DONE
    await end(pair)


@pytest.mark.parametrize("grant", ["of the next read", "of an unknown read", "of more blocks"])
@virtual
async def test_wrong_answer_ends_the_group_and_the_next_read_forms_another_one(grant: str) -> None:
    pair = SimPair()
    reads = pair.start({1: 1}), pair.start({2: 2})
    match grant:
        case "of the next read":
            pair.stream.expect_read(reads[1], (2,))
            pair.stream.expect_read(reads[0], (1,))
        case "of an unknown read":
            pair.stream.expect_read(ReadId(99), (1,))
        case _:
            pair.stream.expect_read(reads[0], (1, 2))
    assert [await pair.state(each) for each in reads] == [ReadState.FAILED] * 2
    assert await pair.read({3: 3}) is ReadState.DONE
    assert pair.received(1, 2, 3) == [UNREAD, UNREAD, pair.content(3)]
    await end(pair)


@virtual
async def test_grants_of_a_group_that_failed_do_not_answer_reads_of_the_next_one() -> None:
    """They are on the stream already when the reader forms the next group."""
    pair = SimPair(link=SLOW)
    first, second = pair.start_granted({1: 1}), pair.start({2: 2})
    pair.fabric.link = replace(SLOW, failed=1.0)
    assert await pair.state(first) is ReadState.FAILED
    assert await pair.state(second) is ReadState.FAILED
    pair.fabric.link = SLOW
    pair.stream.expect_read(second, (2,))
    assert await pair.read({3: 3}) is ReadState.DONE
    assert pair.received(1, 2, 3) == [UNREAD, UNREAD, pair.content(3)]
    await end(pair)


@virtual
async def test_new_stream_ends_all_reads_of_the_old_one_and_nothing_is_written_for_them_later() -> None:
    pair = SimPair(link=SLOW)
    copied, waiting = pair.start_granted({1: 1, 2: 2}), pair.start({3: 3})
    await asyncio.sleep(1.5 * BLOCK_S)
    old = pair.stream
    pair.open_stream()
    assert not pair.is_running(copied)
    assert [await pair.state(each) for each in (copied, waiting)] == [ReadState.LOST] * 2
    old.expect_read(waiting, (3,))
    await asyncio.sleep(LONG_S)
    assert pair.received(1, 2, 3) == [pair.content(1), UNREAD, UNREAD]
    assert await pair.read({4: 4}) is ReadState.DONE
    await end(pair)


@virtual
async def test_late_close_of_an_old_server_harms_no_read_of_the_new_stream() -> None:
    pair = SimPair(link=SLOW)
    assert await pair.read({0: 0}) is ReadState.DONE
    old = pair.stream
    old.cut()
    pair.open_stream()
    copied, waiting = pair.start_granted({1: 1, 2: 2}), pair.start({3: 3})
    await asyncio.sleep(1.5 * BLOCK_S)
    old.server.close()
    assert await pair.state(copied) is ReadState.DONE
    pair.stream.expect_read(waiting, (3,))
    assert await pair.state(waiting) is ReadState.DONE
    await end(pair)


@virtual
async def test_close_of_the_server_ends_reads_until_there_is_a_new_stream() -> None:
    pair = SimPair(link=SLOW)
    copied, waiting = pair.start_granted({1: 1, 2: 2}), pair.start({3: 3})
    await asyncio.sleep(1.5 * BLOCK_S)
    pair.stream.server.close()
    assert [await pair.state(each) for each in (copied, waiting)] == [ReadState.LOST] * 2
    unanswered = pair.start_granted({4: 4})
    await asyncio.sleep(LONG_S)
    assert pair.is_running(unanswered)
    assert pair.received(1, 2, 3, 4) == [pair.content(1), UNREAD, UNREAD, UNREAD]
    pair.open_stream()
    assert await pair.state(unanswered) is ReadState.LOST
    assert await pair.read({5: 5}) is ReadState.DONE
    await end(pair)


@virtual
async def test_death_of_the_owner_ends_all_reads() -> None:
    pair = SimPair(link=SLOW)
    copied, waiting = pair.start_granted({1: 1, 2: 2}), pair.start({3: 3})
    await asyncio.sleep(1.5 * BLOCK_S)
    pair.owner.backend.kill()
    assert [await pair.state(each) for each in (copied, waiting)] == [ReadState.LOST] * 2
    assert pair.received(1, 2, 3) == [pair.content(1), UNREAD, UNREAD]
    await end(pair)


@virtual
async def test_death_of_the_reader_stops_its_copies() -> None:
    pair = SimPair(link=SLOW)
    pair.start_granted({1: 1, 2: 2})
    await asyncio.sleep(1.5 * BLOCK_S)
    pair.reader.backend.kill()
    await asyncio.sleep(LONG_S)
    assert pair.received(1, 2) == [pair.content(1), UNREAD]
    await end(pair)


@pytest.mark.parametrize("paused", ["p0", "d0"])
@virtual
async def test_nothing_is_copied_while_one_of_the_two_processes_is_paused(paused: str) -> None:
    pair = SimPair(link=SLOW)
    read_id = pair.start_granted({1: 1, 2: 2})
    await asyncio.sleep(1.5 * BLOCK_S)
    pair.fabric.block_reads_of(paused)
    await asyncio.sleep(LONG_S)
    assert pair.is_running(read_id)
    assert pair.received(1, 2) == [pair.content(1), UNREAD]
    pair.fabric.allow_reads_of(paused)
    assert await pair.state(read_id) is ReadState.DONE
    assert pair.received(1, 2) == [pair.content(1), pair.content(2)]
    await end(pair)


@virtual
async def test_one_sided_read_goes_on_while_its_reader_is_paused() -> None:
    pair = SimPair(two_sided=False)
    pair.fabric.block_reads_of("d0")
    assert await pair.read({1: 1}) is ReadState.DONE
    await end(pair)


@pytest.mark.parametrize("answer", ["granted", "refused", "closed", "killed"])
@virtual
async def test_no_answer_reaches_the_reader_during_a_partition(answer: str) -> None:
    pair = SimPair()
    assert await pair.read({0: 0}) is ReadState.DONE
    pair.fabric.partition("p0", "d0")
    read_id = pair.start({1: 1})
    match answer:
        case "granted":
            pair.stream.expect_read(read_id, (1,))
        case "refused":
            pair.stream.refuse_read(read_id, 1)
        case "closed":
            pair.stream.server.close()
        case _:
            pair.owner.backend.kill()
    await asyncio.sleep(LONG_S)
    assert pair.is_running(read_id)
    pair.fabric.heal("p0", "d0")
    is_granted = answer == "granted"
    assert await pair.state(read_id) is (ReadState.DONE if is_granted else ReadState.LOST)
    assert pair.received(1) == [pair.content(1) if is_granted else UNREAD]
    await end(pair)


@virtual
async def test_copy_does_not_go_on_after_a_partition_in_which_the_owner_has_left() -> None:
    pair = SimPair(link=SLOW)
    read_id = pair.start_granted({1: 1, 2: 2})
    await asyncio.sleep(1.5 * BLOCK_S)
    pair.fabric.partition("p0", "d0")
    await asyncio.sleep(LONG_S)
    pair.stream.server.close()
    await asyncio.sleep(LONG_S)
    assert pair.is_running(read_id)
    pair.fabric.heal("p0", "d0")
    assert await pair.state(read_id) is ReadState.LOST
    assert pair.received(1, 2) == [pair.content(1), UNREAD]
    await end(pair)


@virtual
async def test_new_stream_ends_reads_during_a_partition() -> None:
    pair = SimPair()
    read_id = pair.start_granted({1: 1})
    pair.fabric.partition("p0", "d0")
    await asyncio.sleep(LONG_S)
    pair.open_stream()
    assert await pair.state(read_id) is ReadState.LOST
    pair.fabric.heal("p0", "d0")
    await asyncio.sleep(LONG_S)
    assert pair.received(1) == [UNREAD]
    await end(pair)


@virtual
async def test_forgotten_owner_is_not_read_until_it_is_connected_again() -> None:
    pair = SimPair()
    waiting = pair.start({1: 1})
    for region in pair.owner.backend.memory:
        pair.reader.backend.forget(region)
    assert await pair.state(waiting) is ReadState.LOST
    assert await pair.read({2: 2}) is ReadState.FAILED
    pair.open_stream()
    assert await pair.read({3: 3}) is ReadState.DONE
    await end(pair)


@virtual
async def test_group_of_two_regions_stays_until_both_are_forgotten() -> None:
    pair = SimPair()
    device, tier = pair.owner.backend.memory
    pair.reader.backend.forget(tier)
    assert await pair.read({1: 1}) is ReadState.DONE
    assert await pair.read({1: 2}, region=1) is ReadState.FAILED
    pair.reader.backend.forget(device)
    assert await pair.read({1: 1}) is ReadState.FAILED
    await end(pair)


@virtual
async def test_blocks_and_entries_of_a_tier_are_read() -> None:
    pair = SimPair()
    assert pair.owner.tier is not None
    pair.owner.tier.generations.begin_generation(4)
    pair.owner.tier.generations.set_hash(4, b"\4" * 16)
    assert await pair.read({4: 0, 1: 1}, region=1) is ReadState.DONE
    assert pair.received(0, 1) == [pair.content(4, region=1), pair.content(1, region=1)]
    entries = await pair.entries(1, 4, region=1)
    assert entries is not None
    assert [(each.generation, each.block_hash, each.worker_epoch) for each in entries] == [
        (0, bytes(16), 7),
        (1, b"\4" * 16, 7),
    ]
    assert await pair.entries(4) is None  # a block of the first region that was not read
    await end(pair)


@virtual
async def test_entries_show_a_block_that_is_reused_after_its_copy_and_before_that_of_the_next_block() -> None:
    pair = SimPair(link=SLOW)
    read_id = pair.start_granted({1: 1, 2: 2})
    await asyncio.sleep(1.5 * BLOCK_S)
    pair.owner.generations.begin_generation(1)
    assert await pair.state(read_id) is ReadState.DONE
    entries = await pair.entries(1, 2)
    assert entries is not None
    assert [each.generation for each in entries] == [1, 0]
    await end(pair)


@virtual
async def test_entries_are_those_of_the_last_read_of_each_block_not_those_of_now() -> None:
    pair = SimPair()
    assert await pair.read({1: 1, 2: 2}) is ReadState.DONE
    pair.owner.generations.begin_generation(1)
    pair.owner.generations.begin_generation(2)
    assert await pair.read({2: 3}) is ReadState.DONE
    pair.owner.generations.begin_generation(2)
    entries = await pair.entries(2, 1)
    assert entries is not None
    assert [each.generation for each in entries] == [1, 0]
    assert await pair.entries(1, 3) is None
    await end(pair)


@virtual
async def test_entries_of_a_failed_read_are_not_kept() -> None:
    pair = SimPair(link=replace(SLOW, failed=1.0))
    assert await pair.read({1: 1}) is ReadState.FAILED
    assert await pair.entries(1) is None
    await end(pair)


@virtual
async def test_stuck_read_delays_the_reads_after_it() -> None:
    pair = SimPair(link=LinkModel(stuck=1.0, stuck_s=5.0))
    first = pair.start_granted({1: 1})
    await asyncio.sleep(1.0)
    pair.fabric.link = LinkModel()
    second = pair.start_granted({2: 2})
    await asyncio.sleep(3.0)
    assert pair.is_running(first, second)
    assert [await pair.state(each) for each in (first, second)] == [ReadState.DONE] * 2
    await end(pair)


@pytest.mark.parametrize("two_sided", [False, True])
@virtual
async def test_reuse_under_a_read_shows_in_the_entry_of_that_read_only(two_sided: bool) -> None:
    pair = SimPair(two_sided=two_sided, link=LinkModel(reused=1.0))
    assert await pair.read({1: 1}) is ReadState.DONE
    assert pair.received(1) == [(REUSED,) * len(UNREAD)]
    pair.fabric.link = LinkModel()
    for generation in (1, 0):
        entries = await pair.entries(1)
        assert entries is not None
        assert [each.generation for each in entries] == [generation]
        assert await pair.read({1: 1}) is ReadState.DONE
    await end(pair)


@virtual
async def test_reuse_under_a_read_that_fails_is_forgotten() -> None:
    pair = SimPair(link=replace(SLOW, reused=1.0))
    read_id = pair.start_granted({1: 1, 2: 2})
    await asyncio.sleep(1.5 * BLOCK_S)
    pair.open_stream()
    assert await pair.state(read_id) is ReadState.LOST
    pair.fabric.link = SLOW
    assert await pair.read({1: 1}) is ReadState.DONE
    entries = await pair.entries(1)
    assert entries is not None
    assert [each.generation for each in entries] == [0]
    await end(pair)
