"""What can happen to the blocks that a worker holds, and where they lie."""

from enum import Enum


class KvEventKind(Enum):
    STORED = "stored"
    EVICTED = "evicted"
    RESET = "reset"


class Tier(Enum):
    """Where a block lies. Only the device's memory today."""

    DEVICE = "device"
