"""Messages of the standing stream between a reader of KV and its owner (`wire.md`, Peer). The reader opens
the stream."""

from dataclasses import dataclass

from baton.core.errors import Reason
from baton.core.ids import JobId, ReadId, TransferId, WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.jobs import PROTOCOL_VERSION
from baton.core.request import FinishReason, LegTimeline, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHello:
    """The reader's first message. `owner`: the life it means to read from; another life refuses."""

    reader: WorkerRef
    owner: WorkerRef
    layout: KvLayout
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHelloReply:
    """`refusal` names what does not fit (layout field, epoch, protocol version); then nothing else is set and
    the stream ends."""

    owner: WorkerRef
    layout: KvLayout
    memory: tuple[KvMemory, ...]
    lease_s: float
    refusal: str = ""
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class HashRange:
    """Leading blocks of a prefix, asked for by content."""

    hashes: tuple[BlockHash, ...]
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Announce to me the blocks of this job from index `have_blocks` on; the same `transfer_id` again goes on
    after a broken stream, from `resume_from_block`. Counts as the transfer's first renewal. `trace_context`:
    W3C's traceparent of the pull, or empty."""

    transfer_id: TransferId
    subject: JobId | HashRange
    have_blocks: int
    resume_from_block: int
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Extend every lease of this pair; numbered, one per pair and interval."""

    renewal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WillRead:
    """For two-sided backends only: these blocks are about to be read."""

    transfer_id: TransferId
    read_id: ReadId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The reader is done with the transfer: its pins may end."""

    transfer_id: TransferId
    outcome: str
    transfer_bytes: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """The reader gave the transfer up with reads perhaps still running; the owner's blocks are safe to reuse
    (lives tell), so pins end."""

    transfer_id: TransferId
    blocks_in_doubt: int


ReaderMessage = PeerHello | Follow | Renew | WillRead | Release | Abandon


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """What the owner sampled at the prompt's end for one sample; `finish` if the sample ended with it."""

    sample_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReady:
    """These blocks are computed. `lives[i]` is the life that `block_ids[i]` is in; `hashes[i]` is NO_HASH for
    a tail that is not full, which only a final KvReady announces. `first_block_index`: position of
    `block_ids[0]` in the prompt's blocks. `timeline`: the owner's leg, in a final one: the reader repeats it
    to the gateway, as it does the first tokens, so that the owner need not be heard."""

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
    """Answers `Renew` by number and names leases that the owner no longer holds."""

    renewal: int
    lost: tuple[TransferId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """This transfer will not go on: the owner cannot finish it, never knew it, or its lease ended."""

    transfer_id: TransferId
    reason: Reason


OwnerMessage = PeerHelloReply | KvReady | Renewed | Lost
