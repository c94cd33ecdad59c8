"""Validates a read: the generation table, read after the blocks, must equal what the owner announced
before."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.kv.block_hash import BlockHash
from baton.transfer.backend import GenerationEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedBlock:
    """One block as announced by a KvReady.

    index: position in the prompt's blocks
    block_id: position in the owner's memory
    """

    index: int
    block_id: int
    generation: int
    block_hash: BlockHash


def mismatch(announced: Sequence[AnnouncedBlock], entries: Sequence[GenerationEntry], worker_epoch: int) -> str | None:
    """Return which field differs ("shape", "epoch", "generation" or "hash"), or None if all entries match.

    A block gets a new generation before it is written again. If the generation is the same before and after a
    read, the read saw exactly the announced content, whatever happened to leases and requests meanwhile.
    """
    if len(entries) != len(announced):
        return "shape"
    for block, entry in zip(announced, entries, strict=True):
        if entry.worker_epoch != worker_epoch:
            return "epoch"
        if entry.generation != block.generation:
            return "generation"
        if entry.block_hash != block.block_hash:
            return "hash"
    return None


def foreign_entries(entries: Sequence[GenerationEntry], num_blocks: int, worker_epoch: int) -> str | None:
    """Return which field shows that entries are not those of `num_blocks` blocks of the owner ("shape" or
    "epoch"), or None.

    For reads of blocks that were not announced, so that generations and hashes are not known.
    """
    if len(entries) != num_blocks:
        return "shape"
    return "epoch" if any(entry.worker_epoch != worker_epoch for entry in entries) else None
