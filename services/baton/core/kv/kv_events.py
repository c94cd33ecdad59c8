"""Events and snapshots that describe which KV blocks a worker holds.

A worker announces every k-th block of a chain and its last full one (`WorkerReport.announce_every`).
The events of one worker incarnation are numbered from 1 without gaps. A RESET replaces all events before it;
the snapshot that is written with it contains what the worker holds. A reader that misses an event reads the
snapshot and continues from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash

MAX_EVENT_HASHES = 512
"""Most hashes of one event (8 KiB), which bounds the bytes of a read. Workers split larger changes."""


class KvEventKind(Enum):
    """Kind of an event. RESET: the snapshot with the same number replaces all earlier events."""

    STORED = "stored"
    EVICTED = "evicted"
    RESET = "reset"


class Tier(Enum):
    """Memory tier of a block, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvent:
    """One numbered change of the held blocks. The order of `hashes` has no meaning; RESET has no hashes."""

    worker: WorkerRef
    event_seq: int
    kind: KvEventKind
    tier: Tier = Tier.DEVICE
    hashes: tuple[BlockHash, ...] = ()
    block_size_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableEvent:
    """An entry of the log that this release cannot decode.

    is_from_later_release: True if it is well-formed but has an unknown kind or tier, so it may be skipped.
    Otherwise it is corrupt or was written by another program.
    """

    worker: WorkerRef
    event_seq: int
    problem: str
    is_from_later_release: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSnapshot:
    """All announced blocks that a worker holds after the event `event_seq`."""

    worker: WorkerRef
    event_seq: int
    block_size_tokens: int
    hashes: Mapping[Tier, tuple[BlockHash, ...]]
