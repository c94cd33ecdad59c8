"""The bytes seam: reads of whole blocks and of generation-table entries out of another worker's memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory


class ReadState(Enum):
    """RUNNING may last for ever: nothing tells a slow peer from a dead one. DONE and FAILED are terminal: no
    byte will be written any more."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDescriptor:
    """Blocks in one shard of a worker's memory, as plain integers and bytes."""

    memory: KvMemory
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEntry:
    """One generation-table entry as it was read from the owner."""

    generation: int
    block_hash: bytes
    worker_epoch: int


class TransferBackend(Protocol):
    """Moves whole blocks. Methods never block: a backend that must wait does so in a thread of its own. Not
    thread-safe: one caller, the event loop."""

    @property
    def two_sided(self) -> bool:
        """Whether the owner must be told of each read (`WillRead`, `expect_read`) before it is started."""
        ...

    @property
    def memory(self) -> tuple[KvMemory, ...]:
        """This worker's own memory, for its peers (`PeerHelloReply`)."""
        ...

    def connect(self, peer: KvMemory, layout: KvLayout) -> None:
        """Make the pair usable and start warming it. Raises LayoutMismatch if blocks cannot be exchanged.
        Idempotent for one life."""
        ...

    def forget(self, peer: KvMemory) -> None:
        """That life of the peer is over. Reads of it that are still running stay pollable until terminal."""
        ...

    def transport_to(self, peer: KvMemory) -> str:
        """What carries the bytes: `shared-memory`, `cma`, `tcp`, `rdma`, …; empty until known."""
        ...

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        """Own blocks as a peer would name them."""
        ...

    def offer(self, block_ids: Sequence[int]) -> None:
        """Owner's side: a peer is about to be told of these own blocks. From now on it may read what they
        hold now."""
        ...

    def expect_read(self, read_id: ReadId, reader: WorkerRef, block_ids: Sequence[int]) -> None:
        """Owner's side of a two-sided backend: post the sends, the blocks first and then, once those are read
        out of memory, their generation-table entries. Nothing to do where reads are one-sided."""
        ...

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        """Begin to read the source's blocks into own blocks, pair by pair: one slice of a transfer."""
        ...

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor) -> None:
        """Begin to read the generation-table entries of the source's blocks: the proof, taken after a read of
        those blocks is terminal."""
        ...

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        """Begin to read the source's blocks (at most `max_probe_blocks`) into memory that nobody looks at: is
        the pair alive, and how fast is it?"""
        ...

    @property
    def max_probe_blocks(self) -> int:
        """At least 1."""
        ...

    def poll(self, read_id: ReadId) -> ReadState: ...

    async def wait(self, read_id: ReadId) -> ReadState:
        """Returns when the read is terminal. Cancelling the wait leaves the read running."""
        ...

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        """The entries that a DONE `start_read_generations` brought, in the source's order."""
        ...

    def release(self, read_id: ReadId) -> None:
        """Forget a terminal read. Raises ValueError for a running one: its destination may still be
        written."""
        ...

    async def aclose(self) -> None: ...
