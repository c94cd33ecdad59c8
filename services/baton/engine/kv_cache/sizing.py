"""Computes how many KV blocks fit into the available memory. Uses no tensors."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from baton.core.errors import ConfigError
from baton.core.kv.kv_layout import KvLayout
from baton.runtime.config.byte_sizes import format_size

HOST_SHARE = 0.5
"""Share of the host memory left after weights and peak activations that is used for KV. The rest is for other
processes and the page cache."""
DEVICE_SHARE = 0.9
"""The same share of GPU memory. The rest is for CUDA graphs and libraries, which allocate later. The value is
vLLM's default; it was not tuned."""
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
"""Files of cgroup version 2 and 1: limit, usage, and statistics with the names of the page cache counters.
The kernel frees the page cache (weights that were just read, for example) when memory is needed."""


def free_host_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the free memory of this machine in bytes, within the limit of this process's cgroup."""
    free, left = int(psutil.virtual_memory().available), left_in_cgroup_bytes(cgroup)
    return free if left is None else max(0, min(free, left))


def left_in_cgroup_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Return how many bytes the limit of this process's cgroup leaves, or None without a limit.

    Under cgroup version 1 an unlimited group reports a limit larger than any machine, which has the same
    effect.
    """
    for limit, current, stat, page_cache in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # another cgroup version, or the limit is "max"
            return (
                int((cgroup / limit).read_text())
                - int((cgroup / current).read_text())
                + _sum_of(cgroup / stat, page_cache)
            )
    return None


def _sum_of(stat: Path, names: Collection[str]) -> int:
    """Return the sum of the named values in a file of `NAME BYTES` lines; 0 if the file is missing."""
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
    chunk_tokens: int,
    free: int,
    step_bytes: int = 0,
    share: float = HOST_SHARE,
    num_sharing: int = 1,
    kv_memory: int | None = None,
    draft_block_bytes: int = 0,
) -> int:
    """Return the number of KV blocks of one worker.

    chunk_tokens: most tokens of one sequence that a step computes.
    free: free memory in bytes, shared by `num_sharing` workers.
    step_bytes: peak activations of the largest step, per worker.
    share: share of the remaining memory that is used for KV.
    kv_memory: size in bytes that was configured; replaces the share.
    draft_block_bytes: bytes of the draft model's KV for each block; 0 without one.

    Without `kv_memory`, never more blocks than `max_num_seqs` sequences of `max_model_len` can use. Raises
    ConfigError if one sequence of `max_model_len` does not fit, or if `kv_memory` is more than what is free.
    """
    if num_sharing < 1:
        raise ValueError(f"num_sharing is {num_sharing}; must be at least 1")
    least = layout.windows.num_blocks_at_once(max_model_len, chunk_tokens)
    block_bytes = layout.block_bytes + draft_block_bytes
    if kv_memory is not None:
        if kv_memory > free - step_bytes:
            raise ConfigError(
                f"--kv-memory is {format_size(kv_memory)}; must be at most {max(0, free - step_bytes) >> 20} MiB: "
                f"{free >> 20} MiB are free, and the largest step needs {step_bytes >> 20} MiB"
            )
        blocks = kv_memory // block_bytes
        given = f"--kv-memory {format_size(kv_memory)}"
    else:
        budget = int(max(0, free - step_bytes * num_sharing) * share) // num_sharing
        blocks = min(budget // block_bytes, least * max_num_seqs)
        given = f"this worker's share of the free memory, {budget >> 20} MiB,"
    if blocks < least:
        held_blocks = layout.windows.longest_sequence_blocks(blocks, chunk_tokens, at_most=blocks)
        held_tokens = held_blocks * layout.block_size_tokens
        raise ConfigError(
            f"{given} holds the KV of {held_tokens} tokens; must hold one sequence of "
            f"{max_model_len}: set --kv-memory to at least {format_size(least * block_bytes)}, "
            "or lower --max-model-len"
        )
    return blocks


TIER_SHARE = 0.5
"""Share of the free host memory that copies of a GPU's KV take by default. The rest is for the page cache,
from which models are loaded, and for other processes."""
MAX_TIER_RATIO = 1
"""Most memory that the host tier takes by default, as a multiple of the KV cache. Registering memory with
transports takes time and pins it."""


def num_tier_slots(
    layout: KvLayout, num_blocks: int, *, free: int, host_kv_memory: int | None, is_host: bool, num_sharing: int = 1
) -> int:
    """Return the number of slots of one worker's host tier; 0 for no tier.

    free: host memory in bytes that is left beside the KV cache, shared by `num_sharing` workers.
    is_host: the KV cache is in host memory, too; then there is no tier by default.
    host_kv_memory: size in bytes that was configured; replaces the default.

    Raises ConfigError if `host_kv_memory` is more than what is free, or less than one block.
    """
    if host_kv_memory is None:
        budget = min(int(max(0, free) * TIER_SHARE) // num_sharing, MAX_TIER_RATIO * num_blocks * layout.block_bytes)
        return 0 if is_host else budget // layout.block_bytes
    if host_kv_memory > max(0, free):
        raise ConfigError(
            f"--host-kv-memory is {format_size(host_kv_memory)}; must be at most {max(0, free) >> 20} MiB, which are "
            "free beside the KV cache"
        )
    if 0 < host_kv_memory < layout.block_bytes:
        raise ConfigError(
            f"--host-kv-memory is {format_size(host_kv_memory)}; must be 0, or at least one block of "
            f"{format_size(layout.block_bytes)}"
        )
    return host_kv_memory // layout.block_bytes
