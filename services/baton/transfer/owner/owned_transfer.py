"""The state of one transfer at its owner, from which its next announcement follows."""

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.errors import Reason
from baton.core.ids import JobId, TransferId, WorkerRef
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.messages.peer_messages import FirstToken, HashRange, KvReady
from baton.core.request import LegTimeline, SessionKey
from baton.core.state_machines import Lifecycle
from baton.core.state_machines import OwnedTransferState as State
from baton.runtime.observability.tracing import NO_SPAN, Span
from baton.transfer.owner.ended_transfers import Key


@dataclass(slots=True, kw_only=True)
class OwnedTransfer:
    """One transfer at its owner.

    block_ids: all blocks that the reader needs, of all block tables; empty until allocated. NO_BLOCK where
        the worker has no block yet, because the tokens are not scheduled. Indices of blocks count these.
    hashes: of `block_ids`, as far as the blocks will be full
    first_blocks: for each table, the first block of the prompt that the reader needs
    pinned: the blocks that are pinned
    num_ready: number of computed blocks
    next_block: index of the first block that was not announced to the reader
    lost: why the sequence ended early; None otherwise
    stream_number: the stream on which the last Follow arrived
    announced_ids: ids of all blocks that were ever announced
    prefix: the cached prefix that the reader wants; None for a job
    max_regions: regions of this worker's memory that the reader of a prefix can read from
    moving_session: the session that goes on at the reader once it has read the blocks; None if none does
    span: trace span from the Follow to the end
    """

    key: Key
    lifecycle: Lifecycle[State]
    reader: WorkerRef | None = None
    job: JobId | None = None
    transfer_id: TransferId | None = None
    block_ids: tuple[int, ...] = ()
    hashes: tuple[BlockHash, ...] = ()
    first_blocks: tuple[int, ...] = (0,)
    pinned: tuple[int, ...] = ()
    num_ready: int = 0
    next_block: int = 0
    num_computed_tokens: int = 0
    is_final: bool = False
    final_sent: bool = False
    first_tokens: tuple[FirstToken, ...] = ()
    timeline: LegTimeline | None = None
    lost: Reason | None = None
    stream_number: int = 0
    announced_ids: set[int] = field(default_factory=set)
    prefix: HashRange | None = None
    max_regions: int = 1
    moving_session: SessionKey | None = None
    span: Span = NO_SPAN

    @property
    def announced(self) -> tuple[int, ...]:
        """The blocks that were announced to the reader."""
        return self.block_ids[: min(self.next_block, self.num_ready)]

    def take_announcement(self, generation: Callable[[int], int]) -> KvReady | None:
        """Return the message that announces what the reader does not know yet, and record it as announced.

        generation: returns the current generation of a block's content
        None if the transfer is not followed, or if nothing is new.
        """
        if self.lifecycle.state is not State.FOLLOWED or self.reader is None or self.transfer_id is None:
            return None
        begin = min(self.next_block, self.num_ready)
        block_ids = self.block_ids[begin : self.num_ready]
        if self.final_sent or not (block_ids or self.is_final):
            return None
        hashes = self.hashes[begin : self.num_ready]
        self.next_block = max(self.next_block, self.num_ready)
        self.final_sent = self.is_final
        self.announced_ids.update(block_ids)
        return KvReady(
            transfer_id=self.transfer_id,
            first_block_index=begin,
            block_ids=block_ids,
            generations=tuple(generation(block_id) for block_id in block_ids),
            hashes=hashes + (NO_HASH,) * (len(block_ids) - len(hashes)),
            num_computed_tokens=self.num_computed_tokens,
            final=self.is_final,
            first_tokens=self.first_tokens if self.is_final else (),
            timeline=self.timeline if self.is_final else None,
        )
