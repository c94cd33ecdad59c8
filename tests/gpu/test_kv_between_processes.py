"""Reads KV blocks from the GPU memory of another process over NIXL."""

import asyncio
import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from baton.core.ids import ReadId
from baton.model.device.kv_tensors import KvCache
from baton.runtime.config.settings import WorkerConfig
from baton.transfer.backend import ReadState
from baton.worker.device.kv_memory.kv_registration import RegisteredMemory, register_gpu_memory
from tests import builders

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NUM_BLOCKS = 64
OFFERED = (1, 2, 3, 40, 63)
START_S = 60.0


def registered(worker: str) -> tuple[KvCache, RegisteredMemory]:
    cache = KvCache.zeros(builders.layout(), NUM_BLOCKS, "cuda")
    memory = register_gpu_memory(WorkerConfig(transfer="nixl"), builders.worker_ref(worker), cache)
    assert not memory.note, "the GPU memory itself is registered"
    return cache, memory


def own_blocks(pipe: Connection) -> None:
    """Fill blocks, offer them and keep them until the other end of the pipe is closed."""
    cache, memory = registered("p0")
    cache.memory.copy_(torch.arange(cache.memory.numel(), device="cuda").view(cache.memory.shape) % 251)
    torch.cuda.synchronize()
    memory.backend.offer(OFFERED)
    pipe.send((memory.backend.memory[0], memory.backend.describe(OFFERED), cache.memory.cpu()))
    pipe.poll(None)
    asyncio.run(memory.backend.aclose())
    memory.close()


async def test_blocks_are_read_between_gpu_processes() -> None:
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    owner = spawn.Process(target=own_blocks, args=(theirs,))
    owner.start()
    theirs.close()
    try:
        assert pipe.poll(START_S)
        owned, descriptor, expected = pipe.recv()
        cache, memory = registered("d0")
        reader = memory.backend
        reader.connect(owned, builders.layout())
        reader.start_probe(ReadId(1), descriptor)
        reader.start_read(ReadId(2), descriptor, (5, 6, 7, 8, 9))
        for read_id in (ReadId(1), ReadId(2)):
            assert await reader.wait(read_id) is ReadState.DONE
            reader.release(read_id)
        torch.cuda.synchronize()
        assert torch.equal(cache.memory[5:10].cpu(), expected[list(OFFERED)])
        assert not cache.memory[:5].any()
        assert not cache.memory[10:].any()
        assert reader.transport_to(owned) == "cuda_ipc"
        await reader.aclose()
        memory.close()
    finally:
        pipe.close()
        owner.join(START_S)
    assert owner.exitcode == 0
