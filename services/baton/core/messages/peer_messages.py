"""Messages of the stream between a reader of KV and its owner; see docs/design/protocol.md.

The reader opens the stream.
"""

from dataclasses import dataclass

from baton.core.errors import Reason
from baton.core.ids import JobId, ReadId, TransferId, WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.jobs import PROTOCOL_VERSION
from baton.core.request import FinishReason, LegTimeline, PromptLogprobs, SessionKey, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHello:
    """The reader's first message.

    owner: the incarnation that it wants to reach; any other one refuses
    max_regions: regions of the owner's memory that the reader can read from; 0 means 1
    transfers: names of the transfer backends that the reader has. Readers of earlier releases send none and
        have the owner's first one
    """

    reader: WorkerRef
    owner: WorkerRef
    layout: KvLayout
    max_regions: int = 0
    transfers: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION

    @property
    def num_readable_regions(self) -> int:
        """Regions that the reader can read from. One of an earlier release does not say, and reads one."""
        return max(1, self.max_regions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHelloReply:
    """The owner's first message.

    memory: its regions, for each transfer backend that both have: device memory, then slower tiers, at most
        as many as the reader can read from. Announcements number the blocks of all regions in one sequence
    refusal: the reason value and field that do not match (layout, epoch or protocol version); empty if
    accepted. After a refusal `memory` is empty and the stream ends.
    """

    owner: WorkerRef
    layout: KvLayout
    memory: tuple[KvMemory, ...]
    lease_s: float
    refusal: str = ""
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class HashRange:
    """Requests the leading blocks of a prefix by their hashes.

    moving_session: goes on at the reader, so that it no longer needs its KV at the owner; None if the owner's
        copy is still needed
    reload_within_s: time that the owner may take to reload blocks that the reader cannot read, because they
        are on its disk only; 0: it announces what can be read at once
    """

    hashes: tuple[BlockHash, ...]
    cache_salt: bytes = b""
    moving_session: SessionKey | None = None
    reload_within_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Asks the owner to announce blocks of a job or prefix. It counts as the first renewal of the lease.

    have_blocks: number of leading blocks that the reader holds
    resume_from_block: first block to announce; later Follows with the same `transfer_id` resume the transfer
    trace_context: W3C traceparent of the pull, or empty
    """

    transfer_id: TransferId
    subject: JobId | HashRange
    have_blocks: int
    resume_from_block: int
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Extends all leases between this reader and owner. `renewal` numbers it."""

    renewal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WillRead:
    """Announces a read to the owner. Used by two-sided backends only.

    block_ids: in the numbering of announcements
    """

    transfer_id: TransferId
    read_id: ReadId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMessage:
    """Carries what a reader and an owner exchange to form a process group. Used by two-sided backends only.

    group: number of the group on this stream, which the reader has chosen; larger than those before it
    key, value: what one side publishes to the other. An empty key ends the group
    """

    group: int
    key: str
    value: bytes = b""


RECEIVED = "received"
"""Outcome of a transfer whose blocks have all arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Ends a transfer that the reader has finished, so that the owner unpins its blocks.

    outcome: `RECEIVED`, or the reason why it failed
    """

    transfer_id: TransferId
    outcome: str
    transfer_bytes: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Ends a transfer while `blocks_in_doubt` blocks are still being read.

    The owner unpins its blocks. It may reuse them, because the reader detects a reuse by the generation.
    """

    transfer_id: TransferId
    blocks_in_doubt: int


ReaderMessage = PeerHello | Follow | Renew | WillRead | GroupMessage | Release | Abandon


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first output token of one sample, sampled by the owner.

    `finish` is set if the sample ended with it. The first sample's token has the `prompt_logprobs`, if the
    job asks for them.
    """

    sample_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReady:
    """Announces computed blocks to the reader.

    first_block_index: position of `block_ids[0]` in the prompt's blocks
    generations: current generation of each block
    hashes: hash of each block; NO_HASH for a partial last block, which only the final KvReady announces
    final: the prompt is complete
    first_tokens, timeline: set in the final KvReady. The reader repeats them to the gateway, so that no token
    is lost if the owner dies.
    """

    transfer_id: TransferId
    first_block_index: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    num_computed_tokens: int
    final: bool
    first_tokens: tuple[FirstToken, ...] = ()
    timeline: LegTimeline | None = None
    shard: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Answers the `Renew` with the same number. `lost`: transfers whose lease has ended."""

    renewal: int
    lost: tuple[TransferId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Ends a transfer: the owner cannot finish it, does not know it, or its lease has ended."""

    transfer_id: TransferId
    reason: Reason


OwnerMessage = PeerHelloReply | KvReady | Renewed | Lost | GroupMessage
