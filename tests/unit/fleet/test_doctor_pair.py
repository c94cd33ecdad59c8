"""The process of `baton doctor links` that reads fails if what it reads is not the owner's."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from baton.core.ids import ReadId
from baton.fleet.doctor.doctor_pair import LAYOUT, allocate, check_entries, new_worker, open_backend, probe
from baton.transfer.backend import KvDescriptor
from baton.transfer.integrity.generation_table import MemoryGenerationTable


@pytest.mark.parametrize("epoch_offset", [0, 1])
async def test_entries_that_are_not_the_owners_are_an_error(epoch_offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, memory = new_worker("owner"), allocate("local", 4)
    MemoryGenerationTable(memory.generation_table, owner.worker_epoch)
    served = open_backend("local", owner, memory)
    reader = open_backend("local", new_worker("reader"), allocate("local", 4))
    try:
        reader.connect(served.memory[0], LAYOUT)
        source = KvDescriptor(memory=served.memory[0], block_ids=(0, 1))
        await probe(reader, ReadId(1), source, lambda *_: None)
        read = reader.generations
        monkeypatch.setattr(
            reader,
            "generations",
            lambda read_id: tuple(replace(e, worker_epoch=e.worker_epoch + epoch_offset) for e in read(read_id)),
        )
        with pytest.raises(RuntimeError, match="their epoch differs") if epoch_offset else nullcontext():
            await check_entries(reader, ReadId(1), source)
    finally:
        await reader.aclose()
        await served.aclose()
