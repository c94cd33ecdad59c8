"""Contract of `TransferBackend`: complete blocks, generations read after them, and terminal states."""

import asyncio
from collections.abc import Iterable
from dataclasses import fields
from random import Random

import pytest

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState
from baton.transfer.integrity.validate_read import foreign_entries
from tests import builders
from tests.contract.transfer_backends import BACKENDS, LAYOUT, NUM_BLOCKS

pytestmark = pytest.mark.contract

UNCHECKED = {"sim"}
"""Backends that do not detect misuse."""
NEED_GPUS = {"nccl"}


def _each_of(names: Iterable[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=pytest.mark.gpu) if name in NEED_GPUS else name for name in names]
    return pytest.mark.parametrize("backend", marked)


all_backends = _each_of(BACKENDS)
checking_backends = _each_of(name for name in BACKENDS if name not in UNCHECKED)


@all_backends
async def test_read_fills_exactly_the_destination_blocks(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        for block_id in range(NUM_BLOCKS):
            pair.owner.fill(block_id, 100 + block_id)
            pair.reader.fill(block_id, 900 + block_id)
        blocks = {3: 9, 4: 10, 5: 11, 20: 1, 19: 2, 31: 0, 0: 31}
        assert await pair.read(blocks) is ReadState.DONE
        for owner_block, reader_block in blocks.items():
            assert pair.reader.holds(reader_block, 100 + owner_block)
        for reader_block in set(range(NUM_BLOCKS)) - set(blocks.values()):
            assert pair.reader.holds(reader_block, 900 + reader_block)


@all_backends
async def test_many_concurrent_reads_succeed(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        order = Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        for block_id in range(NUM_BLOCKS):
            pair.owner.fill(block_id, block_id)
        read_ids = [pair.start({owner_block: reader_block}) for reader_block, owner_block in enumerate(order)]
        assert await asyncio.gather(*(pair.reader.backend.wait(r) for r in read_ids)) == [ReadState.DONE] * NUM_BLOCKS
        assert all(pair.reader.holds(reader_block, owner_block) for reader_block, owner_block in enumerate(order))
        for read_id in read_ids:
            assert pair.reader.backend.poll(read_id) is ReadState.DONE
            pair.reader.backend.release(read_id)


@all_backends
async def test_generations_are_returned_in_the_requested_order(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        for block_id in (4, 9):
            pair.owner.generation_table.begin_generation(block_id)
            pair.owner.generation_table.set_hash(block_id, bytes([block_id]) * 16)
        pair.owner.generation_table.begin_generation(9)
        assert await pair.read_validated({9: 0, 4: 1, 5: 2}) == (
            GenerationEntry(generation=2, block_hash=bytes(16), worker_epoch=7),
            GenerationEntry(generation=1, block_hash=b"\4" * 16, worker_epoch=7),
            GenerationEntry(generation=0, block_hash=bytes(16), worker_epoch=7),
        )


@all_backends
async def test_generation_begun_before_a_read_is_returned_after_it(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        assert (await pair.read_validated({4: 1}))[0].generation == 0
        pair.owner.generation_table.begin_generation(4)
        assert (await pair.read_validated({4: 1}))[0].generation == 1


@all_backends
async def test_probe_changes_no_block(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        for block_id in range(NUM_BLOCKS):
            pair.owner.fill(block_id, 1)
            pair.reader.fill(block_id, 2)
        assert await pair.probe(*range(min(2, pair.reader.backend.max_probe_blocks))) is ReadState.DONE
        assert all(pair.reader.holds(block_id, 2) for block_id in range(NUM_BLOCKS))


@all_backends
async def test_entries_after_a_probe_are_the_owners(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        block_ids = tuple(range(min(2, pair.reader.backend.max_probe_blocks)))
        probe, read_id, reader = ReadId(999), ReadId(1000), pair.reader.backend
        reader.start_probe(probe, pair.describe(block_ids))
        pair.announce(probe, block_ids)
        assert await reader.wait(probe) is ReadState.DONE
        reader.start_read_generations(read_id, pair.describe(block_ids), probe)
        assert await reader.wait(read_id) is ReadState.DONE
        entries = reader.generations(read_id)
        assert foreign_entries(entries, len(block_ids), pair.owner.worker.worker_epoch) is None
        for each in (read_id, probe):
            reader.release(each)


@all_backends
async def test_transport_is_named_after_the_first_read(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        await pair.read({0: 0})
        assert pair.reader.backend.transport_to(pair.memory)


@all_backends
async def test_released_read_is_unknown(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        read_id = pair.start({0: 0})
        waiting = asyncio.ensure_future(pair.reader.backend.wait(read_id))
        await asyncio.sleep(0)
        waiting.cancel()  # leaves the read running
        assert await pair.reader.backend.wait(read_id) is ReadState.DONE
        pair.reader.backend.release(read_id)
        with pytest.raises((ValueError, KeyError)):
            pair.reader.backend.poll(read_id)


@checking_backends
async def test_read_id_in_use_is_refused(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        read_id = pair.start({0: 0})
        with pytest.raises(ValueError, match=str(read_id)):
            pair.reader.backend.start_read(read_id, pair.describe((0,)), (0,))
        await pair.reader.backend.wait(read_id)


@all_backends
async def test_running_read_cannot_be_released(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        read_id = pair.start({0: 0})  # the event loop has not run yet, so the read has not ended
        with pytest.raises(ValueError, match="running"):
            pair.reader.backend.release(read_id)
        await pair.reader.backend.wait(read_id)
        pair.reader.backend.release(read_id)


@checking_backends
@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS, 2**40])
async def test_block_outside_the_memory_is_refused(backend: str, block_id: int) -> None:
    async with BACKENDS[backend]() as pair:
        outside = KvDescriptor(memory=pair.memory, block_ids=(block_id,))
        with pytest.raises(ValueError, match="outside"):
            pair.reader.backend.start_read(ReadId(1), outside, (0,))
        with pytest.raises(ValueError, match="outside"):
            pair.reader.backend.start_read(ReadId(2), pair.describe((0,)), (block_id,))
        with pytest.raises(ValueError, match="outside"):
            pair.owner.backend.describe((block_id,))


@all_backends
async def test_other_layout_is_refused_and_names_the_field(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        with pytest.raises(LayoutMismatch, match="model_fingerprint"):
            pair.reader.backend.connect(pair.memory, builders.layout(model_fingerprint="other"), pair.send)


@all_backends
async def test_repeated_connect_and_forget_have_no_effect(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        memory = pair.memory
        pair.reader.backend.connect(memory, LAYOUT, pair.send)
        assert await pair.read({0: 0}) is ReadState.DONE
        pair.reader.backend.forget(memory)
        pair.reader.backend.forget(memory)
        pair.reader.backend.connect(memory, LAYOUT, pair.send)
        assert await pair.read({0: 0}) is ReadState.DONE


@checking_backends
async def test_forgotten_peer_cannot_be_read(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        pair.reader.backend.forget(pair.memory)
        read_id = ReadId(next(pair.read_ids))
        pair.reader.backend.start_read(read_id, pair.describe((0,)), (0,))
        assert await pair.reader.backend.wait(read_id) is ReadState.FAILED


@all_backends
async def test_descriptors_are_integers_and_bytes(backend: str) -> None:
    async with BACKENDS[backend]() as pair:
        memory = pair.memory
        assert memory.num_blocks == NUM_BLOCKS
        assert memory.owner == pair.owner.worker
        values = [getattr(memory, field.name) for field in fields(memory) if field.name != "owner"]
        assert all(isinstance(value, int | str | bytes) for value in values)
