"""A two-sided `TransferBackend` over Gloo. It tests that the contract fits backends such as NCCL.

The owner copies the announced blocks, then their generation-table entries, and sends both. The reader posts
both receives. The entries are thus read from the owner's memory after the blocks, as validation requires.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState
from baton.transfer.backends.block_ranges import check_ids
from baton.transfer.backends.host_memory import HostMemory
from baton.transfer.backends.read_table import ReadTable
from baton.transfer.integrity.generation_table import ENTRY_BYTES, decode_entries

TIMEOUT = timedelta(seconds=60)
PROBE_BLOCKS = 2


class GlooBackend:
    """One of two ranks. `ranks` maps workers to ranks."""

    two_sided = True
    max_probe_blocks = PROBE_BLOCKS
    failure: BaseException | None = None

    def __init__(
        self,
        *,
        worker: WorkerRef,
        layout: KvLayout,
        memory: HostMemory,
        store: dist.Store,
        rank: int,
        ranks: dict[WorkerRef, int],
    ) -> None:
        self._layout, self._own, self._rank, self._ranks = layout, memory, rank, ranks
        self._store = store
        self._group: dist.ProcessGroupGloo | None = None
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="gloo")
        self._peers: dict[str, KvMemory] = {}
        self._entries: dict[tuple[str, int], GenerationEntry] = {}
        self._reads = ReadTable()
        self._memory = KvMemory(
            owner=worker,
            agent_name=f"gloo-{worker}",
            agent_metadata=str(rank).encode(),
            memory_kind="host",
            device_id=0,
            base_address=0,
            block_stride_bytes=layout.block_bytes,
            num_blocks=memory.num_blocks,
            generation_table_address=0,
            generation_entry_bytes=ENTRY_BYTES,
        )

    def join(self) -> None:
        """Connect to the other rank. Blocks until it has joined."""
        self._group = dist.ProcessGroupGloo(self._store, self._rank, 2, TIMEOUT)

    @property
    def memory(self) -> tuple[KvMemory, ...]:
        return (self._memory,)

    def connect(self, peer: KvMemory, layout: KvLayout) -> None:
        if mismatch := self._layout.mismatch(layout):
            raise LayoutMismatch(mismatch)
        self._peers[peer.agent_name] = peer

    def forget(self, peer: KvMemory) -> None:
        self._peers.pop(peer.agent_name, None)

    def transport_to(self, peer: KvMemory) -> str:
        return "gloo" if peer.agent_name in self._peers else ""

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        check_ids(block_ids, self._memory.num_blocks, "own")
        return KvDescriptor(memory=self._memory, block_ids=tuple(block_ids))

    def offer(self, block_ids: Sequence[int]) -> None:
        """Do nothing: blocks are sent by `expect_read`."""

    def expect_read(self, read_id: ReadId, reader: WorkerRef, block_ids: Sequence[int]) -> None:
        blocks = torch.from_numpy(self._own.kv[list(block_ids)].copy())
        generations = torch.from_numpy(self._own.generation_table.reshape(-1, ENTRY_BYTES)[list(block_ids)].copy())
        rank = self._ranks[reader]
        self._pool.submit(self._send, rank, read_id, blocks, generations)

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        check_ids(block_ids, self._memory.num_blocks, "own")
        if len(block_ids) != len(source.block_ids):
            raise ValueError("source and own blocks differ in number")
        self._receive_later(read_id, source, list(block_ids))

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._receive_later(read_id, source, None)

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor) -> None:
        """Do nothing: the entries were received with the blocks."""
        self._reads.begin(read_id)
        entries = [self._entries.get((source.memory.agent_name, block_id)) for block_id in source.block_ids]
        known = tuple(entry for entry in entries if entry is not None)
        self._reads.end(read_id, ReadState.DONE if len(known) == len(entries) else ReadState.FAILED, known)

    def poll(self, read_id: ReadId) -> ReadState:
        return self._reads.poll(read_id)

    async def wait(self, read_id: ReadId) -> ReadState:
        return await self._reads.wait(read_id)

    async def wait_ended(self, read_id: ReadId) -> ReadState:
        return await self._reads.wait_ended(read_id)

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        return self._reads.generations(read_id)

    def release(self, read_id: ReadId) -> None:
        self._reads.release(read_id)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)
        self._group = None

    def _receive_later(self, read_id: ReadId, source: KvDescriptor, into: list[int] | None) -> None:
        check_ids(source.block_ids, source.memory.num_blocks, "the peer's")
        self._reads.begin(read_id)
        if source.memory.agent_name not in self._peers:
            self._reads.end(read_id, ReadState.FAILED)
            return
        self._pool.submit(self._receive, read_id, source, into)

    def _send(self, rank: int, read_id: ReadId, blocks: torch.Tensor, generations: torch.Tensor) -> None:
        assert self._group is not None
        sends = [self._group.send([blocks], rank, 2 * read_id), self._group.send([generations], rank, 2 * read_id + 1)]
        for send in sends:
            send.wait(TIMEOUT)

    def _receive(self, read_id: ReadId, source: KvDescriptor, into: list[int] | None) -> None:
        try:
            assert self._group is not None
            rank = int(source.memory.agent_metadata)
            blocks = torch.empty((len(source.block_ids), self._layout.block_bytes), dtype=torch.uint8)
            generations = torch.empty((len(source.block_ids), ENTRY_BYTES), dtype=torch.uint8)
            receives = [
                self._group.recv([blocks], rank, 2 * read_id),
                self._group.recv([generations], rank, 2 * read_id + 1),
            ]
            for receive in receives:
                receive.wait(TIMEOUT)
        except RuntimeError:
            self._reads.report(read_id, ReadState.FAILED)
            return
        if into is not None:
            self._own.kv[into] = blocks.numpy()
            entries = decode_entries(np.ascontiguousarray(generations.numpy()).tobytes())
            for block_id, entry in zip(source.block_ids, entries, strict=True):
                self._entries[source.memory.agent_name, block_id] = entry
        self._reads.report(read_id, ReadState.DONE)
