"""Reads the cached blocks of workers as a peer does: with the real protocol, transport and read validation.

    async with cache_reader(layout, transfer="nixl") as reader:
        table = await reader.generation_table(worker)             # hashes by block id
        blocks = await reader.read(worker, table.values())  # their contents

For a worker this is one more reader of cached prefixes.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import numpy as np

from baton.core.errors import Reason, Refused
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import HashRange, PeerHello, PeerHelloReply
from baton.rpc.grpc_network import GrpcNetwork
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState, TransferBackend
from baton.transfer.backends.host_memory import HostMemory, allocate_private, allocate_shared
from baton.transfer.reader.kv_reader import KvReader
from baton.transfer.reader.peer_reads import ReaderTimes
from tests.group_reads import entries_over_group, gloo_backend

Block = np.ndarray
"""The bytes of a block, uint8 [block_bytes]."""

NUM_BLOCKS = 512
"""Number of blocks of the reader's memory, and so the most that are read at once."""
TRIES = 4
RETRY_S = 0.5
READ_S = 30.0
TIMES = ReaderTimes(lease_s=2.0, renew_s=0.2, deadline_min_s=5.0, deadline_max_s=READ_S)
_FIRST_OWN_READ = 2**40
"""First read number above those that `KvReader` uses."""


class CacheUnreadable(AssertionError):
    """A worker's cache could not be read."""


class _Receiving:
    """Implements `ReceivingPool` for a private range of blocks. Blocks of abandoned reads are not reused."""

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))

    def take(self, num_blocks: int) -> list[int]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def mark_received(self, block_id: int, block_hash: BlockHash) -> None:
        self.free.append(block_id)

    def drop_receiving(self, block_ids: Sequence[int]) -> None:
        self.free.extend(block_ids)

    def num_refs(self, block_id: int) -> int:
        return 1

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Do nothing: no block is published."""

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Keep the blocks out of the free list."""

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        self.free.extend(block_ids)


class CacheReader:
    """Reads cached blocks of workers. It is not safe for concurrent use."""

    def __init__(
        self, layout: KvLayout, backend: TransferBackend, memory: HostMemory, me: WorkerRef, transfer: str
    ) -> None:
        self._layout, self._backend, self._memory, self._me = layout, backend, memory, me
        self._transfer = transfer
        self._pool = _Receiving()
        self._network = GrpcNetwork(heartbeat_s=1.0)
        self._reader = KvReader(
            worker=me,
            layout=layout,
            backend=backend,
            network=self._network,
            pool=self._pool,
            rng=Random(me.worker_epoch),
            times=TIMES,
        )
        self._next_read = _FIRST_OWN_READ

    async def memory_of(self, worker: WorkerRef) -> KvMemory:
        """Return the KV memory of a worker.

        Uses a separate stream under another reader id. Raises CacheUnreadable.
        """
        stream = await self._network.open_peer(worker.address)
        try:
            hello_ref = replace(self._me, worker_id=f"{self._me.worker_id}-hello")
            transfers = self._backend.transfers
            stream.send(PeerHello(reader=hello_ref, owner=worker, layout=self._layout, transfers=transfers))
            async with asyncio.timeout(READ_S):
                reply = await stream.receive()
        finally:
            await stream.aclose()
        if not isinstance(reply, PeerHelloReply) or reply.refusal:
            raise CacheUnreadable(f"{worker} refuses the reader: {reply}")
        return reply.memory[0]

    async def generation_table(self, worker: WorkerRef) -> dict[int, BlockHash]:
        """Return {block_id: hash} of all blocks with final content, cached or not. Raises CacheUnreadable."""
        memory = await self.memory_of(worker)
        if self._transfer == "collective":
            hello = PeerHello(
                reader=replace(self._me, worker_id=f"{self._me.worker_id}-table"),
                owner=worker,
                layout=self._layout,
                transfers=self._backend.transfers,
            )
            async with asyncio.timeout(READ_S):
                entries = await entries_over_group(self._network, hello)
        else:
            entries = await self._read_entries(memory)
        other_epoch = [block_id for block_id, entry in enumerate(entries) if entry.worker_epoch != worker.worker_epoch]
        if other_epoch:
            raise CacheUnreadable(f"blocks {other_epoch} of {worker} have another epoch in its generation table")
        return {block_id: entry.block_hash for block_id, entry in enumerate(entries) if entry.block_hash != NO_HASH}

    async def _read_entries(self, memory: KvMemory) -> tuple[GenerationEntry, ...]:
        self._backend.connect(memory, self._layout)
        read_id, self._next_read = ReadId(self._next_read), self._next_read + 1
        self._backend.start_read_generations(
            read_id, KvDescriptor(memory=memory, block_ids=tuple(range(memory.num_blocks))), None
        )
        async with asyncio.timeout(READ_S):
            state = await self._backend.wait(read_id)
        if state is not ReadState.DONE:
            raise CacheUnreadable(f"the generation table of {memory.owner} could not be read")
        entries = self._backend.generations(read_id)
        self._backend.release(read_id)
        return entries

    async def read(self, worker: WorkerRef, hashes: Iterable[BlockHash]) -> dict[BlockHash, Block]:
        """Pull the blocks of `hashes` that the worker still caches, in order, and validate them.

        Raises CacheUnreadable.
        """
        found: dict[BlockHash, Block] = {}
        left = list(hashes)
        # An owner takes the hashes for one prefix, and sends only the blocks that a continuation sees.
        most = 1 if self._layout.windows.has_windows else NUM_BLOCKS
        while left:
            asked = left[: min(most, len(self._pool.free))]
            blocks = await self._read(worker, asked)
            found.update(zip(asked, blocks, strict=False))
            left = left[len(blocks) + (len(blocks) < len(asked)) :]  # a prefix ends with the first missing block
        return found

    async def aclose(self) -> None:
        await self._reader.aclose()
        await self._network.aclose()

    async def _read(self, worker: WorkerRef, hashes: Sequence[BlockHash]) -> list[Block]:
        """Return the leading blocks that exist.

        Temporary errors are retried, but a failed validation is an error.
        """
        for _ in range(TRIES - 1):
            try:
                return await self._try_to_read(worker, hashes)
            except Refused as refused:
                if not refused.failure.retriable or refused.failure.reason is Reason.VALIDATION_FAILED:
                    raise CacheUnreadable(f"blocks of {worker} could not be read: {refused}") from refused
            await asyncio.sleep(RETRY_S)
        try:
            return await self._try_to_read(worker, hashes)
        except Refused as refused:
            raise CacheUnreadable(f"blocks of {worker} could not be read, {TRIES} times: {refused}") from refused

    async def _try_to_read(self, worker: WorkerRef, hashes: Sequence[BlockHash]) -> list[Block]:
        if not hashes:
            raise CacheUnreadable("no block is left: abandoned reads may still write to all blocks of this reader")
        pull = self._reader.pull(worker, HashRange(hashes=tuple(hashes)), have_blocks=0, deadline_s=READ_S)
        await pull.first_ready()
        own = self._pool.take(len(hashes))
        pull.receive_into(dict(enumerate(own)), 0)
        result = await pull.done()
        return [self._memory.kv[block_id].copy() for block_id in own[: result.num_blocks]]


@asynccontextmanager
async def cache_reader(layout: KvLayout, *, transfer: str) -> AsyncIterator[CacheReader]:
    """Create a reader for workers on this machine with this layout and `--transfer` backend."""
    me = WorkerRef(worker_id="cache-audit", worker_epoch=secrets.randbits(64), address="")
    transfer = "local" if transfer == "auto" else transfer
    memory = (allocate_shared if transfer == "local" else allocate_private)(NUM_BLOCKS, layout.block_bytes)
    backend = await asyncio.to_thread(_open_backend, layout, memory, me, transfer)
    reader = CacheReader(layout, backend, memory, me, transfer)
    try:
        yield reader
    finally:
        await reader.aclose()
        await backend.aclose()
        memory.close()


def _open_backend(layout: KvLayout, memory: HostMemory, me: WorkerRef, transfer: str) -> TransferBackend:
    if transfer == "local":
        from baton.transfer.backends.local_backend import LocalBackend

        return LocalBackend(worker=me, layout=layout, memory=memory)
    if transfer == "collective":
        return gloo_backend(layout, memory, me)
    from baton.transfer.backends.nixl.nixl_backend import NixlBackend

    return NixlBackend.over(memory, worker=me, layout=layout, loopback_only=True)
