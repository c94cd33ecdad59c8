"""`SeveralBackends`: all transfer backends of a worker as one, so that each pair can use the fastest."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.transfer.backend import (
    GenerationEntry,
    KvDescriptor,
    ReadServer,
    ReadState,
    SendGroup,
    TransferBackend,
    drop_message,
)


class SeveralBackends:
    """Implements `TransferBackend` over the same blocks as each of the backends, which it owns.

    A descriptor says which backend reads it (`KvMemory.transfer`). Which of them a pair uses is decided by
    `transfer.reader.backend_choice`.
    """

    def __init__(self, backends: Sequence[TransferBackend], *, not_available: Mapping[str, str] | None = None) -> None:
        """Take ownership of backends.

        backends: at least one, with different `transfers` and equal blocks; the preferred one first
        not_available: by name, why others could not be opened; for operators
        """
        self.not_available = dict(not_available or {})
        self._by_transfer = {transfer: backend for backend in backends for transfer in backend.transfers}
        self._backends = tuple(backends)
        self._of_read: dict[ReadId, TransferBackend] = {}
        self.transfers = tuple(self._by_transfer)
        self.num_blocks = backends[0].num_blocks
        self.memory = tuple(memory for backend in backends for memory in backend.memory)
        self.max_probe_blocks = min(backend.max_probe_blocks for backend in backends)

    @property
    def failure(self) -> BaseException | None:
        """The first error of a backend, because a pair may use any of them."""
        return next((backend.failure for backend in self._backends if backend.failure is not None), None)

    def is_two_sided(self, peer: KvMemory) -> bool:
        return self._of(peer).is_two_sided(peer)

    def connect(self, peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
        self._of(peer).connect(peer, layout, send)

    def forget(self, peer: KvMemory) -> None:
        self._of(peer).forget(peer)

    def receive(self, peer: KvMemory, message: GroupMessage) -> None:
        self._of(peer).receive(peer, message)

    def serve(self, reader: WorkerRef, send: SendGroup) -> ReadServer:
        return _Servers([backend.serve(reader, send) for backend in self._backends])

    def transport_to(self, peer: KvMemory) -> str:
        return self._of(peer).transport_to(peer)

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        return self._backends[0].describe(block_ids)

    def offer(self, block_ids: Sequence[int]) -> None:
        for backend in self._backends:
            backend.offer(block_ids)

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        self._start(read_id, source, lambda backend: backend.start_read(read_id, source, block_ids))

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
        self._start(read_id, source, lambda backend: backend.start_read_generations(read_id, source, payload))

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._start(read_id, source, lambda backend: backend.start_probe(read_id, source))

    def poll(self, read_id: ReadId) -> ReadState:
        return self._find(read_id).poll(read_id)

    async def wait(self, read_id: ReadId) -> ReadState:
        return await self._find(read_id).wait(read_id)

    async def wait_ended(self, read_id: ReadId) -> ReadState:
        return await self._find(read_id).wait_ended(read_id)

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        return self._find(read_id).generations(read_id)

    def release(self, read_id: ReadId) -> None:
        self._find(read_id).release(read_id)
        del self._of_read[read_id]

    async def aclose(self) -> None:
        results = await asyncio.gather(*(backend.aclose() for backend in self._backends), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _of(self, peer: KvMemory) -> TransferBackend:
        return self._by_transfer.get(peer.transfer, self._backends[0])

    def _start(self, read_id: ReadId, source: KvDescriptor, start: Callable[[TransferBackend], None]) -> None:
        if read_id in self._of_read:
            raise ValueError(f"read {read_id} exists already; ids must not be reused")
        backend = self._of(source.memory)
        start(backend)
        self._of_read[read_id] = backend

    def _find(self, read_id: ReadId) -> TransferBackend:
        backend = self._of_read.get(read_id)
        if backend is None:
            raise ValueError(f"read {read_id} is unknown or has been released")
        return backend


class _Servers:
    """Implements `ReadServer` for the backends of one worker. At most one of them is two-sided."""

    def __init__(self, servers: Sequence[ReadServer]) -> None:
        self._servers = tuple(servers)

    def receive(self, message: GroupMessage) -> None:
        for server in self._servers:
            server.receive(message)

    def expect_read(self, read_id: ReadId, block_ids: Sequence[int]) -> None:
        for server in self._servers:
            server.expect_read(read_id, block_ids)

    def refuse_read(self, read_id: ReadId, num_blocks: int) -> None:
        for server in self._servers:
            server.refuse_read(read_id, num_blocks)

    def close(self) -> None:
        with ExitStack() as stack:
            for server in self._servers:
                stack.callback(server.close)
