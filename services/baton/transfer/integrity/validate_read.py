"""When bytes that were read may be believed: the generation table said, after the read, what the owner had
said before it (rule R4)."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.kv.block_hash import BlockHash
from baton.transfer.backend import GenerationEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedBlock:
    """One block as a KvReady named it. `index`: its position in the prompt's blocks; `block_id`: its place in
    the owner's memory."""

    index: int
    block_id: int
    generation: int
    block_hash: BlockHash


def mismatch(announced: Sequence[AnnouncedBlock], entries: Sequence[GenerationEntry], worker_epoch: int) -> str | None:
    """What does not fit, or None when every entry, read after the payload, equals what was announced before
    it.

    A block is given a new life before it is written again, so equal lives on both sides of a read mean that
    what was read is what was announced, whatever leases, clocks and cancels did meanwhile.
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
