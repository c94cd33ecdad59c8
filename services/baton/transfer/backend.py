"""`TransferBackend`: the interface for reading KV blocks and generation-table entries from another worker's
memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage

SendGroup = Callable[[GroupMessage], None]
"""Sends a message to the other worker of a pair, on their stream. If that is broken, the message is lost."""


MAX_READ_BYTES = 8 * 2**20
"""Most bytes of one read, of blocks or for a probe, if a block is not larger."""


class ReadState(Enum):
    """State of a read. DONE, FAILED and LOST are terminal: no byte is written after them.

    LOST: the owner has not served it, because it refused it or left the process group. This says nothing of
    the link, and the read can be repeated.

    RUNNING may last for ever, because a slow peer cannot be told apart from a dead one. IN_DOUBT: the
    transport reported an error, but not that the read has ended, so bytes may still be written. It may last
    for ever, too, and ends as FAILED.
    """

    RUNNING = "running"
    IN_DOUBT = "in_doubt"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDescriptor:
    """Blocks in the KV memory of one worker, as plain integers and bytes."""

    memory: KvMemory
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEntry:
    """One generation-table entry as read from the owner."""

    generation: int
    block_hash: bytes
    worker_epoch: int


def drop_message(message: GroupMessage) -> None:
    """Drop a message: a `SendGroup` for backends whose reads are one-sided."""


class ReadServer(Protocol):
    """The owner's part in the two-sided reads of one reader, for as long as one stream of the reader lives.

    Methods never block. Only the event loop may call them.
    """

    def receive(self, message: GroupMessage) -> None:
        """Handle a message of the reader's side of a process group."""
        ...

    def expect_read(self, read_id: ReadId, block_ids: Sequence[int]) -> None:
        """Send the blocks of a read, then their generation-table entries as they are after the blocks were
        copied out of memory.

        block_ids: of both regions, in the numbering of announcements. Reads are served in the order of calls.
        """
        ...

    def refuse_read(self, read_id: ReadId, num_blocks: int) -> None:
        """Let a read of so many blocks fail, because the reader may not read them."""
        ...

    def close(self) -> None:
        """Stop to serve the reader, because its stream has ended."""
        ...


class NoReadServer:
    """Implements `ReadServer` for backends whose reads are one-sided: there is nothing to do."""

    def receive(self, message: GroupMessage) -> None:
        pass

    def expect_read(self, read_id: ReadId, block_ids: Sequence[int]) -> None:
        pass

    def refuse_read(self, read_id: ReadId, num_blocks: int) -> None:
        pass

    def close(self) -> None:
        pass


class TransferBackend(Protocol):
    """Reads complete KV blocks from the memory of peers into own blocks.

    Methods never block; a backend that must wait does so in its own thread. Not thread-safe: only the event
    loop may call it.
    """

    @property
    def transfers(self) -> tuple[str, ...]:
        """Names of the kinds of memory (`KvMemory.transfer`) that this backend reads, the preferred one
        first."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of own blocks, which reads go to."""
        ...

    @property
    def memory(self) -> tuple[KvMemory, ...]:
        """The regions of this worker's own memory, for `PeerHelloReply`.

        For each of `transfers`: first the region with its own blocks, then those that were added.
        """
        ...

    def is_two_sided(self, peer: KvMemory) -> bool:
        """Return True if the peer takes part in each read of this memory (`WillRead`, `ReadServer`)."""
        ...

    def connect(self, peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
        """Start to connect to a peer. Idempotent for one incarnation.

        send: sends messages of process groups to the peer. After the stream broke, call this again with that
            of the new stream.

        Raises LayoutMismatch if the peer's layout or memory does not fit.
        """
        ...

    def receive(self, peer: KvMemory, message: GroupMessage) -> None:
        """Handle a message of the owner's side of a process group."""
        ...

    def serve(self, reader: WorkerRef, send: SendGroup) -> ReadServer:
        """Start to serve the reads that a reader announces on one stream. Called at the owner."""
        ...

    def forget(self, peer: KvMemory) -> None:
        """Drop a peer incarnation that has ended.

        Its running reads can still be polled until they are terminal.
        """
        ...

    def transport_to(self, peer: KvMemory) -> str:
        """Return the transport that reads use: `shared-memory`, `cma`, `tcp`, `rdma`, …; empty until
        the first read has ended, `unknown` if it cannot be told."""
        ...

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        """Return the descriptor of own blocks. Raises ValueError for a block id outside the memory."""
        ...

    def offer(self, block_ids: Sequence[int]) -> None:
        """Prepare own blocks of the first region for reading, before they are announced to a peer. Called
        at the owner."""
        ...

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        """Start to read the source's blocks into own blocks, in the same order.

        If the read is two-sided, the caller announces it to the owner (`WillRead`) after this call, and in
        the order of its calls. Raises ValueError for invalid ids.
        """
        ...

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
        """Start to read the generation-table entries of the source's blocks.

        Call it after the read of these blocks is terminal; otherwise the entries validate nothing.

        payload: that read, which must not be released yet; None if there was none, as in an audit. A
            two-sided read brings the entries with the blocks and keeps them until its release; its backend
            raises ValueError if `payload` is None, has read other blocks or is released. One-sided backends
            ignore it.
        """
        ...

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        """Start to read the source's blocks into scratch memory, to check and measure the link.

        Raises ValueError for more than `max_probe_blocks` blocks.
        """
        ...

    @property
    def max_probe_blocks(self) -> int:
        """The most blocks of one probe; at least 1."""
        ...

    def poll(self, read_id: ReadId) -> ReadState:
        """Return the state of a read. Raises ValueError for an unknown id."""
        ...

    async def wait(self, read_id: ReadId) -> ReadState:
        """Wait until the read is terminal or in doubt and return its state.

        Cancelling the wait does not stop the read.
        """
        ...

    async def wait_ended(self, read_id: ReadId) -> ReadState:
        """Wait until the read is terminal, even if it is in doubt now, and return its state."""
        ...

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        """Return the entries of a DONE `start_read_generations`, in the order of the source's blocks."""
        ...

    def release(self, read_id: ReadId) -> None:
        """Drop a terminal read.

        Raises ValueError for one that runs or is in doubt, because its destination may still be written.
        """
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error after which this backend moves no KV any more; None while it works.

        The worker must then be replaced: its peers cannot read from it either.
        """
        ...

    async def aclose(self) -> None:
        """Wait a limited time for running reads, then close connections and threads."""
        ...
