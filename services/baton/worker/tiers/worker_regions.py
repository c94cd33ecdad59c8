"""The blocks of all regions that peers may read, under one numbering: device blocks, then slots of the host
tier."""

from collections.abc import Sequence

from baton.core.kv.block_hash import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.tiers.slots import TierSlots


class WorkerRegions:
    """Implements `core.interfaces.PinPool` over a pool and the slots of a tier. Slot s has id `num_blocks`
    + s."""

    def __init__(self, pool: BlockPool, slots: TierSlots) -> None:
        self._pool, self._slots = pool, slots
        self._begin = pool.num_blocks

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the ids of the longest known run of hashes. The device comes first, if it has a block."""
        found: list[int] = []
        for block_hash in hashes:
            if (block_id := self._pool.find(block_hash)) is not None:
                found.append(block_id)
            elif (slot := self._slots.slot_of(block_hash)) is not None:
                found.append(self._begin + slot)
            else:
                break
        return found

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks and slots from being reused. For a slot this is a use of its content."""
        on_device, slots = self._divide(block_ids)
        self._pool.pin(on_device)
        self._slots.pin(slots)
        self._slots.count_use(slots)

    def unpin(self, block_ids: Sequence[int]) -> None:
        on_device, slots = self._divide(block_ids)
        self._slots.unpin(slots)
        self._pool.unpin(on_device)

    def generation(self, block_id: int) -> int:
        if block_id < self._begin:
            return self._pool.generation(block_id)
        return self._slots.generation(block_id - self._begin)

    def _divide(self, block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the device blocks, and the slots, each in the given order."""
        begin = self._begin
        return [b for b in block_ids if b < begin], [b - begin for b in block_ids if b >= begin]
