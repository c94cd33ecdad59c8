"""What can happen to the blocks that a worker holds, where they lie, and how a worker tells it: numbered
events and snapshots.

Events of one worker life are numbered from 1 without gaps. RESET stands for everything that its number jumps
over: what is held as of it stands in a snapshot, which is written with it. Whoever misses a number reads the
snapshot, and goes on from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash

MAX_EVENT_HASHES = 512
"""Of one event: 8 KiB, so that a read of many events has a bound in bytes. A worker splits what is more."""


class KvEventKind(Enum):
    STORED = "stored"
    EVICTED = "evicted"
    RESET = "reset"


class Tier(Enum):
    """Where a block lies, the fastest first. Workers keep blocks in the device's memory only, today."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvent:
    """One numbered change. The order of `hashes` says nothing; RESET has none."""

    worker: WorkerRef
    event_seq: int
    kind: KvEventKind
    tier: Tier = Tier.DEVICE
    hashes: tuple[BlockHash, ...] = ()
    block_size_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableEvent:
    """An entry of the log that this release cannot read. `is_from_later_release`: it is well-formed, but of a
    kind or tier that we do not know, so nothing that we could use is lost with it; otherwise it is damaged,
    or somebody else's."""

    worker: WorkerRef
    event_seq: int
    problem: str
    is_from_later_release: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSnapshot:
    """All that a worker holds once the event `event_seq` has been counted."""

    worker: WorkerRef
    event_seq: int
    block_size_tokens: int
    hashes: Mapping[Tier, tuple[BlockHash, ...]]
