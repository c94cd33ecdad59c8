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
from baton.transfer.backend import GenerationEntry, KvDescriptor
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim
MODEL = SimModel()


@pytest.mark.fault("F-21")
@pytest.mark.parametrize("num_corrupted", [1, 2, 5])
@pytest.mark.parametrize("field", ["generation", "worker_epoch", "block_hash"])
@pytest.mark.parametrize("two_sided", [False, True])
def test_corrupted_entries_are_discarded_and_the_answer_is_exact(
    two_sided: bool, field: str, num_corrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One corrupted read is repeated. Two in a row fail the pull, and the prompt is computed again."""
    left = [num_corrupted]
    destinations: dict[tuple[int, ...], int] = {}
    sources: dict[tuple[int, ReadId], tuple[int, ...]] = {}
    intact_read, intact_start = SimTransferBackend.start_read, SimTransferBackend.start_read_generations
    intact = SimTransferBackend.generations

    def noted_read(self: SimTransferBackend, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        destinations[source.block_ids] = block_ids[0]
        intact_read(self, read_id, source, block_ids)

    def noted_start(self: SimTransferBackend, read_id: ReadId, source: KvDescriptor, payload: ReadId) -> None:
        sources[id(self), read_id] = source.block_ids
        intact_start(self, read_id, source, payload)

    def corrupted(self: SimTransferBackend, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        entries = intact(self, read_id)
        if not left[0]:
            return entries
        left[0] -= 1
        value = getattr(entries[0], field)
        flipped = bytes([value[0] ^ 1]) + value[1:] if isinstance(value, bytes) else value ^ 1
        own = destinations[sources[id(self), read_id]]
        self._own.write_block(own, [7] * len(self._own.block(own)))  # as if the block had been reused
        return (replace(entries[0], **{field: flipped}), *entries[1:])

    monkeypatch.setattr(SimTransferBackend, "start_read", noted_read)
    monkeypatch.setattr(SimTransferBackend, "start_read_generations", noted_start)
    monkeypatch.setattr(SimTransferBackend, "generations", corrupted)

    async def run() -> list[SimAnswer]:
        cluster = SimCluster(config(), replace(MODEL, two_sided=two_sided), 21)
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
