"""Names memory to NIXL: its segments, the registration of a region, and the address ranges of a read."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.transfer.backends.block_ranges import CopyRange
from baton.transfer.backends.host_memory import HOST, KvRegion

SEGMENTS = {HOST: "DRAM", "cuda": "VRAM"}
Segment = tuple[str, int]
"""(NIXL memory segment, device id)."""
HOST_SEGMENT: Segment = (SEGMENTS[HOST], 0)


def memory_kind_of(segment: Segment) -> str:
    """Return the kind of memory of a segment."""
    return next(kind for kind, name in SEGMENTS.items() if name == segment[0])


def register(agent: Any, region: KvRegion) -> None:
    """Register a region with `agent`. The caller keeps it allocated as long as the agent exists."""
    agent.register_memory([(region.address, region.num_bytes, region.device_id, "")], SEGMENTS[region.memory_kind])


def prepare_read(agent: Any, owner: str, copies: Sequence[CopyRange], local: Segment, remote: Segment) -> Any:
    """Return the handle of a read of several address ranges, which was not posted yet.

    owner: name of the agent to read from. Raises NIXL's exceptions.
    """
    local_descs = agent.get_xfer_descs(
        np.array([(address, size, local[1]) for _, address, size in copies], dtype=np.uint64), local[0]
    )
    remote_descs = agent.get_xfer_descs(
        np.array([(address, size, remote[1]) for address, _, size in copies], dtype=np.uint64), remote[0]
    )
    return agent.initialize_xfer("READ", local_descs, remote_descs, owner)
