"""A corrupted generation-table entry costs time, but no token: its blocks are discarded and recomputed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.ids import ReadId
from baton.sim import virtual_time
from baton.sim.sim_clients import SimAnswer, SimRequest, run_client
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_transfer_backend import SimTransferBackend
from baton.transfer.backend import KvDescriptor, ReadState
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim
MODEL = SimModel()


@pytest.mark.fault("F-21")
@pytest.mark.parametrize("num_corrupted", [1, 2, 5])
@pytest.mark.parametrize("field", ["generation", "worker_epoch", "block_hash"])
def test_corrupted_entries_are_discarded_and_the_answer_is_exact(
    field: str, num_corrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One corrupted read is repeated. Two in a row fail the pull, and the prompt is computed again."""
    left = [num_corrupted]
    destinations: dict[tuple[int, ...], Sequence[int | None]] = {}
    intact, intact_read = SimTransferBackend._read_generations, SimTransferBackend._read

    async def noted_read(self: SimTransferBackend, source: KvDescriptor, into: Sequence[int | None]) -> ReadState:
        destinations[source.block_ids] = into
        return await intact_read(self, source, into)

    async def corrupted(self: SimTransferBackend, read_id: ReadId, source: KvDescriptor) -> ReadState:
        state = await intact(self, read_id, source)
        entries = self._reads[read_id].entries
        if left[0] and entries:
            left[0] -= 1
            value = getattr(entries[0], field)
            flipped = bytes([value[0] ^ 1]) + value[1:] if isinstance(value, bytes) else value ^ 1
            entries[0] = replace(entries[0], **{field: flipped})
            own = destinations[source.block_ids][0]
            assert own is not None
            self._own.write_block(own, [7] * len(self._own.block(own)))  # as if the block had been reused
        return state

    monkeypatch.setattr(SimTransferBackend, "_read_generations", corrupted)
    monkeypatch.setattr(SimTransferBackend, "_read", noted_read)

    async def run() -> list[SimAnswer]:
        cluster = SimCluster(config(), MODEL, 21)
        await cluster.start()
        await asyncio.sleep(1.0)
        requests = [
            SimRequest(number=number, start_s=0.0, prompt=tuple(range(number + 1, number + 41)), max_tokens=6)
            for number in range(3)
        ]
        answers = [await run_client(request, cluster.gateway) for request in requests]
        await asyncio.sleep(5.0)
        for worker in cluster.workers.values():
            counts = worker.pool.counts()
            assert counts.free + counts.cached == counts.total, counts
        await cluster.aclose()
        return answers

    for answer in virtual_time.run(run()):
        assert answer.outcome == "finished"
        answer.check(MODEL.vocab_size)
    assert left == [0]
