"""How many KV blocks a worker can have in the memory that there is. Knows no tensors."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from baton.core.errors import ConfigError
from baton.core.kv.block_hash import num_blocks_for
from baton.core.kv.kv_layout import KvLayout
from baton.runtime.config.byte_sizes import format_size

HOST_SHARE = 0.5
"""Of the memory that is free beside the model and its largest step, for KV; the rest is left to other
processes and the page cache."""
DEVICE_SHARE = 0.9
"""The same of a GPU's, where recorded steps and libraries take some, later. As vLLM leaves by default; not
tried here."""
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)
"""Of version 2, and of 1: limit, what is taken, and how much of that is files that the kernel keeps (weights
just read) and gives up for whoever asks."""


def free_host_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory of this machine that can still be taken, within the limit of this process's cgroup."""
    free, left = int(psutil.virtual_memory().available), left_in_cgroup_bytes(cgroup)
    return free if left is None else max(0, min(free, left))


def left_in_cgroup_bytes(cgroup: Path = _CGROUP) -> int | None:
    """What the limit of this process's cgroup leaves; None where there is none. Without one version 1 has
    more than any machine."""
    for limit, current, stat, kept in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # not of this version, or "max"
            return (
                int((cgroup / limit).read_text()) - int((cgroup / current).read_text()) + _sum_of(cgroup / stat, kept)
            )
    return None


def _sum_of(stat: Path, names: Collection[str]) -> int:
    """Bytes under these names in lines of NAME BYTES; 0 where there is no such file."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(size) for name, _, size in (line.partition(" ") for line in lines) if name in names)


def num_kv_blocks(
    layout: KvLayout,
    *,
    max_model_len: int,
    max_num_seqs: int,
    free: int,
    step_bytes: int = 0,
    share: float = HOST_SHARE,
    num_sharing: int = 1,
    kv_memory: int | None = None,
) -> int:
    """Blocks that fit into `kv_memory` bytes, or without it into this worker's part of a share of what is
    free: `free` bytes, between `num_sharing` workers, of which the largest step of each takes `step_bytes`.

    Without `kv_memory` there are never more blocks than `max_num_seqs` sequences of full length can use.
    Raises ConfigError if not even one such sequence fits, or if more is asked for than is free.
    """
    if num_sharing < 1:
        raise ValueError(f"num_sharing is {num_sharing}")
    least = num_blocks_for(max_model_len, layout.block_size_tokens)
    if kv_memory is not None:
        if kv_memory > free - step_bytes:
            raise ConfigError(
                f"--kv-memory {format_size(kv_memory)} is more than there is: {free >> 20} MiB are free here, of which the largest step "
                f"takes {step_bytes >> 20}; give less"
            )
        blocks = kv_memory // layout.block_bytes
        given = f"--kv-memory {format_size(kv_memory)}"
    else:
        budget = int(max(0, free - step_bytes * num_sharing) * share) // num_sharing
        blocks = min(budget // layout.block_bytes, least * max_num_seqs)
        given = f"this worker's share of the free memory, {budget >> 20} MiB,"
    if blocks < least:
        raise ConfigError(
            f"{given} holds the KV of {blocks * layout.block_size_tokens} tokens, less than one sequence of {max_model_len}: give at least "
            f"--kv-memory {format_size(least * layout.block_bytes)}, or a smaller --max-model-len"
        )
    return blocks
