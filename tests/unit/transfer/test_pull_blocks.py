"""Tests of the block bookkeeping of a pull: announced, waiting, being read, received."""

import pytest

from baton.core.ids import TransferId
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.messages.peer_messages import KvReady
from baton.transfer.reader.pull_blocks import PullBlocks

NUM_OWNER_BLOCKS = 100


def block_hash(index: int) -> BlockHash:
    return BlockHash(bytes([index + 1]) * 16)


def ready(begin: int, *block_ids: int, generation: int = 1) -> KvReady:
    return KvReady(
        transfer_id=TransferId(1),
        first_block_index=begin,
        block_ids=block_ids,
        generations=(generation,) * len(block_ids),
        hashes=tuple(block_hash(begin + offset) for offset in range(len(block_ids))),
        num_computed_tokens=0,
        final=False,
    )


def one_region(block_id: int) -> int:
    return 0


def blocks(*messages: KvReady, num_receiving: int = 4) -> PullBlocks:
    """Own block 10 + i for prompt block i."""
    made = PullBlocks((), 0)
    made.receive_into({index: 10 + index for index in range(num_receiving)}, 0)
    for message in messages:
        made.announce(message)
    return made


def test_slices_take_waiting_blocks_in_order_of_announcement() -> None:
    made = blocks(ready(0, 20, 21, 22))
    first = made.begin_read(2, one_region)
    assert ([block.block_id for block in first.blocks], first.own) == ([20, 21], (10, 11))
    assert made.begin_read(5, one_region).own == (12,)
    assert (made.any_waiting, made.num_reading) == (False, 3)


def test_a_slice_is_of_one_region() -> None:
    """The owner's first region ends before block 22."""
    made = blocks(ready(0, 20, 22, 23, 21))

    def region_of(block_id: int) -> int:
        return int(block_id >= 22)

    slices = [[block.block_id for block in made.begin_read(5, region_of).blocks] for _ in range(3)]
    assert slices == [[20], [22, 23], [21]]
    assert not made.any_waiting


def test_blocks_announced_before_memory_wait_once_it_is_there() -> None:
    made = PullBlocks((), 0)
    made.announce(ready(0, 20, 21))
    assert not made.any_waiting
    made.receive_into({1: 11, 2: 12}, 1)
    assert made.begin_read(5, one_region).own == (11,)


def test_a_repeated_announcement_changes_only_what_still_waits() -> None:
    made = blocks(ready(0, 20, 21, 22))
    received, reading = made.begin_read(1, one_region), made.begin_read(1, one_region)
    made.end_read(received)
    made.received(received.blocks[0])
    made.announce(ready(0, 30, 31, 32, generation=2))
    waiting = made.begin_read(5, one_region)
    assert [(block.index, block.block_id, block.generation) for block in waiting.blocks] == [(2, 32, 2)]
    made.end_read(reading)
    made.forget(reading)
    made.announce(ready(1, 41))
    assert [block.block_id for block in made.begin_read(5, one_region).blocks] == [41], "forgotten, it is new again"


def test_repeated_announcement_does_not_change_a_running_read() -> None:
    made = blocks(ready(0, 20))
    reading = made.begin_read(1, one_region)
    made.announce(ready(0, 30, generation=2))
    made.end_read(reading)
    assert made._announced[0] == reading.blocks[0]


def test_stop_returns_blocks_that_no_read_may_write() -> None:
    made = blocks(ready(0, 20, 21, 22))
    received, _reading = made.begin_read(1, one_region), made.begin_read(1, one_region)
    made.end_read(received)
    made.received(received.blocks[0])
    assert made.missing() == {1: 11, 2: 12, 3: 13}
    assert made.stop() == [12, 13]
    assert not made.any_waiting


def test_destination_of_a_lost_read_is_not_returned() -> None:
    made = blocks(ready(0, 20))
    lost = made.begin_read(1, one_region)
    made.lose_memory(lost)
    made.end_read(lost)
    assert made.stop() == [11, 12, 13]


def test_new_stream_resumes_after_the_announced_prefix() -> None:
    made = blocks(ready(0, 20, 21), ready(3, 23))
    assert made.first_unannounced() == 2


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (ready(0, 20, 21), ""),
        (ready(0, NUM_OWNER_BLOCKS), f"a block id is outside the owner's memory of {NUM_OWNER_BLOCKS} blocks"),
        (ready(0, -1), f"a block id is outside the owner's memory of {NUM_OWNER_BLOCKS} blocks"),
        (ready(3, 20, 21), "more blocks than the prompt has"),
    ],
)
def test_announcement_is_checked_before_use(message: KvReady, problem: str) -> None:
    assert blocks().problem(message, NUM_OWNER_BLOCKS) == problem


def test_announced_hashes_must_match_known_prompt_hashes() -> None:
    made = PullBlocks((block_hash(0), NO_HASH, block_hash(7)), 0)
    assert made.problem(ready(0, 20, 21), NUM_OWNER_BLOCKS) == ""
    assert made.problem(ready(2, 22), NUM_OWNER_BLOCKS) == "a hash differs from the hash of the prompt's block"
