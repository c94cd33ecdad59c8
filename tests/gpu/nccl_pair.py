"""Two processes that move KV between GPUs over a process group of NCCL.

They exchange the messages of the group, and what a reader announces, over a pipe.
"""

import asyncio
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.model.device.kv_tensors import KvCache
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadServer, ReadState
from baton.transfer.backends.collective.collective_backend import CollectiveBackend
from baton.transfer.backends.collective.group_kinds import NcclKind
from baton.transfer.backends.host_memory import anonymous
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from tests import builders

LAYOUT = builders.layout()
NUM_BLOCKS = 64
SILENCE_S = 20.0
ROUNDS = 20


class _Side:
    """One process: its KV cache, backend, and the pipe to the other process."""

    def __init__(self, pipe: Connection, worker: WorkerRef, device: str) -> None:
        self.pipe = pipe
        self.cache = KvCache.zeros(LAYOUT, NUM_BLOCKS, device)
        table = np.frombuffer(anonymous(NUM_BLOCKS * ENTRY_BYTES), dtype=np.uint8)
        self.generations = MemoryGenerationTable(table, worker.worker_epoch)
        kind = NcclKind(LAYOUT, self.cache.memory, table)
        self.backend = CollectiveBackend(
            worker=worker, layout=LAYOUT, kind=kind, num_blocks=NUM_BLOCKS, silence_s=SILENCE_S
        )

    def send(self, message: GroupMessage) -> None:
        self.pipe.send(("group", message))

    async def receive_until_closed(self, handlers: dict[str, Callable[..., None]]) -> None:
        """Handle messages of the other process until it says that it is done."""
        while (message := await asyncio.to_thread(self.pipe.recv))[0] != "done":
            handlers[message[0]](*message[1:])


def content(block_id: int, device: torch.device) -> torch.Tensor:
    """Return what the owner's block holds, uint8 [block_bytes]."""
    generator = torch.Generator().manual_seed(block_id)
    return torch.randint(0, 256, (LAYOUT.block_bytes,), generator=generator, dtype=torch.uint8).to(device)


def run_owner(pipe: Connection, device: str) -> None:
    """Fill KV memory and serve reads of it until the reader is done."""
    asyncio.run(_own(_Side(pipe, builders.worker_ref("p0", epoch=7), device)))


async def _own(side: _Side) -> None:
    for block_id in range(NUM_BLOCKS):
        side.cache.memory[block_id].copy_(content(block_id, side.cache.device))
        side.generations.begin_generation(block_id)
        side.generations.set_hash(block_id, bytes([block_id]) * 16)
    torch.cuda.synchronize(side.cache.device)
    server: ReadServer = side.backend.serve(builders.worker_ref("d0", epoch=8), side.send)
    side.pipe.send(("memory", side.backend.memory[0]))
    await side.receive_until_closed({"group": server.receive, "expect": server.expect_read})
    side.pipe.send(("done",))
    server.close()
    await side.backend.aclose()


def run_reader(pipe: Connection, device: str) -> None:
    """Read the owner's memory and check content and entries."""
    asyncio.run(_read(_Side(pipe, builders.worker_ref("d0", epoch=8), device)))


async def _read(side: _Side) -> None:
    owner: list[KvMemory] = []
    known = asyncio.Event()

    def on_memory(memory: KvMemory) -> None:
        owner.append(memory)
        known.set()

    handlers: dict[str, Any] = {
        "memory": on_memory,
        "group": lambda message: side.backend.receive(owner[0], message),
    }
    receiving = asyncio.create_task(side.receive_until_closed(handlers))
    await known.wait()
    side.backend.connect(owner[0], LAYOUT, side.send)
    for number in range(ROUNDS):
        block_ids = tuple((number + each) % NUM_BLOCKS for each in range(side.backend.max_probe_blocks % 8 + 1))
        own = tuple(NUM_BLOCKS - 1 - each for each in range(len(block_ids)))
        source, read_id, entries_id = (
            KvDescriptor(memory=owner[0], block_ids=block_ids),
            ReadId(2 * number + 1),
            ReadId(2 * number + 2),
        )
        side.backend.start_read(read_id, source, own)
        side.pipe.send(("expect", read_id, block_ids))
        state = await side.backend.wait(read_id)
        assert state is ReadState.DONE, f"read {number} ended in state {state.value}"
        side.backend.start_read_generations(entries_id, source, read_id)
        expected = tuple(GenerationEntry(generation=1, block_hash=bytes([b]) * 16, worker_epoch=7) for b in block_ids)
        assert side.backend.generations(entries_id) == expected
        for mine, theirs in zip(own, block_ids, strict=True):
            assert torch.equal(side.cache.memory[mine], content(theirs, side.cache.device))
    side.backend.forget(owner[0])
    side.pipe.send(("done",))
    await receiving
    await side.backend.aclose()
