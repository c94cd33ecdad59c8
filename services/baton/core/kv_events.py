"""What a worker tells the cluster about the blocks it holds: stored, evicted, or all gone."""

from dataclasses import dataclass
from enum import Enum

from baton.core.blocks import BlockHash
from baton.core.ids import WorkerRef


class KvEventKind(Enum):
    STORED = "stored"
    EVICTED = "evicted"
    RESET = "reset"


class Tier(Enum):
    """Where a block lies. Only the device's memory today."""

    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvent:
    """One entry of a worker's event stream, numbered from 1 without gaps within the worker's epoch."""

    worker: WorkerRef
    event_seq: int
    kind: KvEventKind
    hashes: tuple[BlockHash, ...]
    block_size_tokens: int
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSnapshot:
    """All hashes a worker holds as of `event_seq`; events up to and including it are already in."""

    worker: WorkerRef
    event_seq: int
    hashes: tuple[BlockHash, ...]
    block_size_tokens: int
    tier: Tier = Tier.DEVICE
