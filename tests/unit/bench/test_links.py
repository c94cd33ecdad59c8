"""`bench links`: what is read in one slice, and the tables of its figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.core.ids import ReadId
from baton.core.kv.kv_layout import KvMemory
from baton.transfer.backend import KvDescriptor, ReadState
from baton.transfer.backends.host_memory import HostMemory
from baton.transfer.integrity.generation_table import MemoryGenerationTable
from bench.scenarios.cluster import links
from bench.support.saved_figures import SavedFigures
from bench.systems import link_pair
from bench.systems.link_pair import KIB, LAYOUT, LINKS, MIB, ROUNDS, TimedReads, content, positions, slices, time_reads


def figures(**seconds: float) -> dict[str, Any]:
    """Return a repeat in which every size took so long for each of the links."""
    return {
        name: {"transport": name, "seconds": {str(size): seconds.get(name, 1e-3) for size in ROUNDS}}
        for name in links.COLUMNS
    }


def test_a_read_above_8_mib_is_several_slices() -> None:
    assert LAYOUT.block_bytes == 64 * KIB
    assert [len(each) for each in slices(5, 8 * MIB // LAYOUT.block_bytes)] == [128]
    found = list(slices(5, 300))
    assert [len(each) for each in found] == [128, 128, 44]
    assert sum(found, ()) == tuple(range(5, 305))


def test_consecutive_reads_go_through_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_pair, "NUM_BLOCKS", 8)
    assert list(positions(4, 5)) == [0, 4, 0, 4, 0]


async def test_reads_of_all_sizes_bring_the_owners_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_pair, "NUM_BLOCKS", 256)
    monkeypatch.setattr(link_pair, "ROUNDS", {64 * KIB: 2, 16 * MIB: 2})
    owner, memory = opened("owner")
    reader, own = opened("reader")
    memory.kv[:] = content()
    reader.connect(owner.memory[0], LAYOUT)
    seen: list[tuple[ReadId, int]] = []

    def announce(read_id: ReadId, source: KvDescriptor) -> None:
        assert reader.poll(read_id) in (ReadState.RUNNING, ReadState.DONE), "a read is announced after its start"
        seen.append((read_id, len(source.block_ids)))

    found = await time_reads(TimedReads(reader, owner.memory[0], announce))
    assert list(found) == [64 * KIB, 16 * MIB]
    assert all(seconds > 0 for seconds in found.values())
    assert np.array_equal(own.kv, content())
    assert [num_blocks for _, num_blocks in seen] == [128, 128, 1, 1, 128, 128, 128, 128]
    assert len({read_id for read_id, _ in seen}) == len(seen)
    for backend, each in ((reader, own), (owner, memory)):
        await backend.aclose()
        each.close()


def opened(worker_id: str) -> tuple[Any, HostMemory]:
    worker, memory = link_pair.new_worker(worker_id), link_pair.allocate("local", 256, LAYOUT)
    MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    return link_pair.open_backend("local", worker, memory, LAYOUT), memory


class FailingReads:
    """A backend whose reads fail."""

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        pass

    async def wait(self, read_id: ReadId) -> ReadState:
        return ReadState.FAILED


async def test_a_failed_read_ends_the_measurement() -> None:
    backend: Any = FailingReads()
    memory: Any = KvMemory.__new__(KvMemory)
    with pytest.raises(RuntimeError, match="ended in state failed"):
        await TimedReads(backend, memory, lambda read_id, source: None).read(0, 1)


def test_tables_have_median_least_and_greatest_of_the_repeats() -> None:
    repeats = [figures(gloo=each) for each in (4e-3, 1e-3, 2e-3)]
    text = links.tables(repeats)
    assert text.startswith("| ms | memcpy | NIXL, CMA | NIXL, TCP | shared memory | Gloo |")
    assert "| 64 MiB | 1 (1 to 1) | 1 (1 to 1) | 1 (1 to 1) | 1 (1 to 1) | 2 (1 to 4) |" in text
    assert "| 67.1 (67.1 to 67.1) | 33.6 (16.8 to 67.1) |" in text
    assert "NIXL, CMA: transport nixl-cma" in text


def test_a_link_that_fails_is_named_and_the_others_have_figures() -> None:
    broken = {**figures(), "nixl-cma": {"problem": "no such device"}}
    text = links.tables([broken, broken])
    assert "| 1 MiB | 1 (1 to 1) | failed | 1 (1 to 1) |" in text
    assert text.count("NIXL, CMA: failed: no such device") == 1


def test_repeats_measure_everything_and_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        measured.append(name)
        return figures()[name]

    monkeypatch.setattr(links, "measure", measure)
    links.run(1, SavedFigures(tmp_path / "links.json"))
    assert sorted(measured) == sorted(["memcpy", *LINKS])
    links.run(3, SavedFigures(tmp_path / "links.json"))
    assert len(measured) == 3 * len(links.COLUMNS)
    assert len({tuple(measured[begin : begin + 5]) for begin in (0, 5, 10)}) > 1, "the order changes"
