"""Stages GPU blocks through host memory, if the transport cannot access GPU memory.

Blocks are copied to the host before they are announced, and from the host to the GPU after they were read.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.runtime.logging import get_logger
from baton.transfer.backend import (
    GenerationEntry,
    KvDescriptor,
    ReadServer,
    ReadState,
    SendGroup,
    TransferBackend,
    drop_message,
)

log = get_logger(__name__)


class BlockCopies(Protocol):
    """Copies blocks between a device and host memory, under the same block ids.

    Thread-safe. Each call blocks its thread until the copy is complete.
    """

    def to_host(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the device to the host."""
        ...

    def to_device(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the host to the device."""
        ...

    def close(self) -> None:
        """Release the host memory. Call it after the last copy and before the memory is freed."""
        ...


class StagedBackend:
    """Implements `TransferBackend` for device blocks on top of a host-memory backend, which it owns.

    Host and device share one generation table. The host copy belongs to the generation in which it was
    announced; after a reuse of the block, the reader's validation fails.
    """

    def __init__(self, host: TransferBackend, copies: BlockCopies) -> None:
        self._host = host
        self._copies = copies
        self._receiving: dict[ReadId, asyncio.Task[ReadState]] = {}

    @property
    def host(self) -> TransferBackend:
        """The backend that reads host memory."""
        return self._host

    @property
    def transfers(self) -> tuple[str, ...]:
        return self._host.transfers

    @property
    def num_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def memory(self) -> tuple[KvMemory, ...]:
        return self._host.memory

    def is_two_sided(self, peer: KvMemory) -> bool:
        return self._host.is_two_sided(peer)

    def connect(self, peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
        self._host.connect(peer, layout, send)

    def receive(self, peer: KvMemory, message: GroupMessage) -> None:
        self._host.receive(peer, message)

    def serve(self, reader: WorkerRef, send: SendGroup) -> ReadServer:
        return self._host.serve(reader, send)

    def forget(self, peer: KvMemory) -> None:
        self._host.forget(peer)

    def transport_to(self, peer: KvMemory) -> str:
        return self._host.transport_to(peer)

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        return self._host.describe(block_ids)

    def offer(self, block_ids: Sequence[int]) -> None:
        """Copy the blocks to the host and wait for it. Raises the device's error if the copy fails.

        An earlier announcement would let the peer read old bytes under a valid generation.
        """
        self._copies.to_host(block_ids)

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        self._host.start_read(read_id, source, block_ids)
        self._receiving[read_id] = asyncio.create_task(
            self._copy_to_device(read_id, tuple(block_ids)), name=f"kv-staged-{read_id}"
        )

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
        self._host.start_read_generations(read_id, source, payload)

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._host.start_probe(read_id, source)

    @property
    def max_probe_blocks(self) -> int:
        return self._host.max_probe_blocks

    @property
    def failure(self) -> BaseException | None:
        return self._host.failure

    def poll(self, read_id: ReadId) -> ReadState:
        receiving = self._receiving.get(read_id)
        if receiving is not None and not receiving.done():
            return ReadState.RUNNING
        if receiving is None or receiving.result() is ReadState.IN_DOUBT:
            return self._host.poll(read_id)
        return receiving.result()

    async def wait(self, read_id: ReadId) -> ReadState:
        receiving = self._receiving.get(read_id)
        return await (self._host.wait(read_id) if receiving is None else asyncio.shield(receiving))

    async def wait_ended(self, read_id: ReadId) -> ReadState:
        receiving = self._receiving.get(read_id)
        if receiving is not None and (state := await asyncio.shield(receiving)) is not ReadState.IN_DOUBT:
            return state
        return await self._host.wait_ended(read_id)

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        return self._host.generations(read_id)

    def release(self, read_id: ReadId) -> None:
        if self.poll(read_id) in (ReadState.RUNNING, ReadState.IN_DOUBT):
            raise ValueError(f"read {read_id} is still running or in doubt and may still write its destination")
        self._host.release(read_id)
        self._receiving.pop(read_id, None)

    async def aclose(self) -> None:
        """Close the host backend, and wait for running copies, because they write to the device."""
        await self._host.aclose()
        for read_id, receiving in self._receiving.items():
            if not receiving.done() and self._host.poll(read_id) is ReadState.RUNNING:
                receiving.cancel()
        await asyncio.gather(*self._receiving.values(), return_exceptions=True)
        self._copies.close()

    async def _copy_to_device(self, read_id: ReadId, block_ids: tuple[int, ...]) -> ReadState:
        state = await self._host.wait(read_id)
        if state is not ReadState.DONE:
            return state
        try:
            await asyncio.to_thread(self._copies.to_device, block_ids)
        except Exception:  # errors of the device library
            log.exception("kv_copy_to_device_failed", read_id=read_id)
            return ReadState.FAILED
        return ReadState.DONE
