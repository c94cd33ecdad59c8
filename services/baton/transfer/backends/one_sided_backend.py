"""Base of the transfer backends in which the reader accesses the owner's memory without the owner."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.transfer.backend import (
    MAX_READ_BYTES,
    KvDescriptor,
    NoReadServer,
    ReadServer,
    ReadState,
    SendGroup,
)
from baton.transfer.backends.block_ranges import check_ids
from baton.transfer.backends.read_table import TrackedReads
from baton.transfer.integrity.generation_table import ENTRY_BYTES

BufferT = TypeVar("BufferT")
PeerT = TypeVar("PeerT")


def probe_blocks(num_blocks: int, layout: KvLayout) -> int:
    """Return how many blocks a probe may read, and so the size of the memory that it reads into."""
    return max(1, min(num_blocks, MAX_READ_BYTES // layout.block_bytes))


class OneSidedBackend(TrackedReads, ABC, Generic[BufferT, PeerT]):
    """The part of `TransferBackend` that does not depend on how bytes are copied.

    A subclass connects peers, which it keeps in `_peers` by agent name. It copies blocks and reads generation
    tables, and reports the end of both to `_reads`.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        memory: KvMemory,
        kv: BufferT,
        scratch: BufferT,
        added: tuple[KvMemory, ...] = (),
    ) -> None:
        """`kv` holds the worker's own blocks, `scratch` as many as a probe may read (`probe_blocks`).

        added: further regions that peers may read
        """
        super().__init__()
        self.max_probe_blocks = probe_blocks(memory.num_blocks, layout)
        self.num_blocks = memory.num_blocks
        self.transfers = (memory.transfer,)
        self._layout = layout
        self._memory = memory
        self._added = added
        self._kv = kv
        self._scratch = scratch
        self._peers: dict[str, PeerT] = {}

    @property
    def failure(self) -> BaseException | None:
        """None: a backend that copies in the reader's process keeps working. NIXL's can fail."""
        return None

    @property
    def memory(self) -> tuple[KvMemory, ...]:
        return (self._memory, *self._added)

    def is_two_sided(self, peer: KvMemory) -> bool:
        return False

    def receive(self, peer: KvMemory, message: GroupMessage) -> None:
        """Do nothing: reads are one-sided."""

    def serve(self, reader: WorkerRef, send: SendGroup) -> ReadServer:
        return NoReadServer()

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        check_ids(block_ids, self._memory.num_blocks, "own")
        return KvDescriptor(memory=self._memory, block_ids=tuple(block_ids))

    def offer(self, block_ids: Sequence[int]) -> None:
        """Do nothing: peers read the memory directly."""

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        check_ids(block_ids, self._memory.num_blocks, "own")
        self._start_copy(read_id, source, self._kv, block_ids)

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        if len(source.block_ids) > self.max_probe_blocks:
            raise ValueError(f"a probe has {len(source.block_ids)} blocks; must be at most {self.max_probe_blocks}")
        self._start_copy(read_id, source, self._scratch, range(len(source.block_ids)))

    @abstractmethod
    def _start_copy(self, read_id: ReadId, source: KvDescriptor, into: BufferT, block_ids: Sequence[int]) -> None:
        """Start to copy the blocks of `source` to the positions `block_ids` of `into`."""

    def _check_layout(self, peer: KvMemory, layout: KvLayout) -> None:
        """Raise LayoutMismatch if blocks of the peer differ from those of this worker."""
        mismatch = self._layout.mismatch(layout)
        if mismatch is not None:
            raise LayoutMismatch(mismatch)
        if peer.block_stride_bytes != layout.block_bytes or peer.generation_entry_bytes != ENTRY_BYTES:
            raise LayoutMismatch(
                f"block_stride_bytes: the peer has {peer.block_stride_bytes}, this worker {layout.block_bytes}"
            )

    def _begin(self, read_id: ReadId, source: KvDescriptor) -> PeerT | None:
        """Register the read.

        Returns the peer; if it is not connected, the read fails and None is returned.
        """
        check_ids(source.block_ids, source.memory.num_blocks, "the peer's")
        self._reads.begin(read_id)
        peer = self._peers.get(source.memory.agent_name)
        if peer is None:
            self._reads.end(read_id, ReadState.FAILED)
        return peer
