"""KV staging through host memory, tested without a GPU: NIXL refuses this memory as GPU memory."""

import asyncio
from itertools import count

import pytest
import torch

from baton.core.errors import ConfigError
from baton.core.ids import ReadId
from baton.model.device.kv_tensors import KvCache
from baton.runtime.config.settings import WorkerConfig
from baton.transfer.backend import ReadState
from baton.transfer.backends.staged_backend import StagedBackend
from baton.worker.device.kv_memory.kv_registration import register_gpu_memory
from tests import builders

pytestmark = pytest.mark.integration

NUM_BLOCKS = 8
WORKERS = (builders.worker_ref("p0"), builders.worker_ref("d0"))


@pytest.mark.parametrize("transfer", ["nixl", "local"])
async def test_gpu_kv_is_staged_through_host_memory(transfer: str) -> None:
    config = WorkerConfig(transfer=transfer)  # type: ignore[arg-type]
    caches = [KvCache.zeros(builders.layout(), NUM_BLOCKS) for _ in WORKERS]
    memories = [
        await asyncio.to_thread(register_gpu_memory, config, *pair) for pair in zip(WORKERS, caches, strict=True)
    ]
    owner, reader = (memory.backend for memory in memories)
    assert isinstance(owner, StagedBackend)
    assert all("staged through host memory" in memory.note for memory in memories)
    reader.connect(owner.memory[0], builders.layout())
    caches[0].memory.random_(0, 256)
    read_ids = map(ReadId, count(1))

    async def read(blocks: dict[int, int]) -> None:
        owner.offer(tuple(blocks))
        read_id = next(read_ids)
        reader.start_read(read_id, owner.describe(tuple(blocks)), tuple(blocks.values()))
        assert await reader.wait(read_id) is ReadState.DONE
        reader.release(read_id)

    await asyncio.gather(read({1: 6, 2: 7}), read({5: 0}))
    for owner_block, reader_block in {1: 6, 2: 7, 5: 0}.items():
        assert torch.equal(caches[1].memory[reader_block], caches[0].memory[owner_block])
    assert not caches[1].memory[1:6].any()
    for memory in memories:
        await memory.backend.aclose()
        memory.close()


def test_staging_with_too_little_host_memory_is_refused_with_a_remedy() -> None:
    cache = KvCache.zeros(builders.layout(), NUM_BLOCKS)
    with pytest.raises(ConfigError, match="only 0 MiB are free: set a smaller --kv-memory"):
        register_gpu_memory(WorkerConfig(transfer="local"), WORKERS[0], cache, free_bytes=lambda: 1)
