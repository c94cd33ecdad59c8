"""KV of a device through host memory, where nothing else reaches into the device: copied out before peers are
told of it, and in once it has come."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.runtime.logging import get_logger
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState, TransferBackend

log = get_logger(__name__)


class BlockCopies(Protocol):
    """Between blocks of a device and those of the same numbers in host memory. Both return when it is done,
    from any thread."""

    def to_host(self, block_ids: Sequence[int]) -> None: ...

    def to_device(self, block_ids: Sequence[int]) -> None: ...

    def close(self) -> None:
        """Once nothing is copied any more, and before the host memory goes."""


class StagedBackend:
    """Implements `TransferBackend` for a device's blocks over one for host memory, which it owns. A block's
    life is one for both: what lies in host memory is of the life in which it was offered, and a later one
    fails the reader's proof."""

    def __init__(self, host: TransferBackend, copies: BlockCopies) -> None:
        self._host = host
        self._copies = copies
        self._receiving: dict[ReadId, asyncio.Task[ReadState]] = {}

    @property
    def two_sided(self) -> bool:
        return self._host.two_sided

    @property
    def memory(self) -> tuple[KvMemory, ...]:
        return self._host.memory

    def connect(self, peer: KvMemory, layout: KvLayout) -> None:
        self._host.connect(peer, layout)

    def forget(self, peer: KvMemory) -> None:
        self._host.forget(peer)

    def transport_to(self, peer: KvMemory) -> str:
        return self._host.transport_to(peer)

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        return self._host.describe(block_ids)

    def offer(self, block_ids: Sequence[int]) -> None:
        """Waits for the copy, as long as so many bytes take on their way to the host: what a peer is told of
        before that would be wrong, unseen. Raises what the device does when it fails."""
        self._copies.to_host(block_ids)

    def expect_read(self, read_id: ReadId, reader: WorkerRef, block_ids: Sequence[int]) -> None:
        self._host.expect_read(read_id, reader, block_ids)

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        self._host.start_read(read_id, source, block_ids)
        self._receiving[read_id] = asyncio.create_task(
            self._mark_received(read_id, tuple(block_ids)), name=f"kv-staged-{read_id}"
        )

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._host.start_read_generations(read_id, source)

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._host.start_probe(read_id, source)

    @property
    def max_probe_blocks(self) -> int:
        return self._host.max_probe_blocks

    def poll(self, read_id: ReadId) -> ReadState:
        receiving = self._receiving.get(read_id)
        if receiving is None:
            return self._host.poll(read_id)
        return receiving.result() if receiving.done() else ReadState.RUNNING

    async def wait(self, read_id: ReadId) -> ReadState:
        receiving = self._receiving.get(read_id)
        return await (self._host.wait(read_id) if receiving is None else asyncio.shield(receiving))

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        return self._host.generations(read_id)

    def release(self, read_id: ReadId) -> None:
        if self.poll(read_id) is ReadState.RUNNING:
            raise ValueError(f"read {read_id} is still running: what it lands in may still be written")
        self._host.release(read_id)
        self._receiving.pop(read_id, None)

    async def aclose(self) -> None:
        """As the backend below does, and waits for copies that run: they write to the device's memory."""
        await self._host.aclose()
        for read_id, receiving in self._receiving.items():
            if not receiving.done() and self._host.poll(read_id) is ReadState.RUNNING:
                receiving.cancel()
        await asyncio.gather(*self._receiving.values(), return_exceptions=True)
        self._copies.close()

    async def _mark_received(self, read_id: ReadId, block_ids: tuple[int, ...]) -> ReadState:
        state = await self._host.wait(read_id)
        if state is not ReadState.DONE:
            return state
        try:
            await asyncio.to_thread(self._copies.to_device, block_ids)
        except Exception:  # the device's own kinds
            log.exception("kv_not_copied_to_device", read_id=read_id)
            return ReadState.FAILED
        return ReadState.DONE
