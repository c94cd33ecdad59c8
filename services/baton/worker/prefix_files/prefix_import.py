"""Imports a file of a cached prefix: verifies its blocks, and adds them to the device's prefix cache."""

from collections.abc import Sequence

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import entries_from, hashes_of_prefix
from baton.core.messages.prefix_messages import ImportedBlocks, ImportPrefix
from baton.engine.engine import Engine
from baton.worker.prefix_files.file_parts import PartReader
from baton.worker.prefix_files.prefix_format import (
    FIXED_BYTES,
    RECORD_BYTES,
    PrefixHeader,
    damaged,
    decode_header,
    rest_bytes,
)
from baton.worker.prefix_files.staged_blocks import StagedBlocks


class PrefixImport:
    """One import. No block is visible before all that are imported have been verified."""

    def __init__(self, asked: ImportPrefix, *, engine: Engine, blocks: StagedBlocks, layout: KvLayout) -> None:
        self._engine, self._pool = engine, engine.pool
        self._blocks, self._layout = blocks, layout
        self._tenant_root = asked.tenant_root

    async def receive(self, parts: PartReader) -> ImportedBlocks:
        """Read a file, or its leading blocks if not all fit, and cache their content.

        Raises Refused if the file does not fit this worker or tenant, is damaged or cut off, or if no block
        is free. Then nothing was imported.
        """
        fixed = await parts.take(FIXED_BYTES, "its header")
        rest = await parts.take(rest_bytes(fixed), "its header")
        chain = decode_header(fixed, rest, PrefixHeader.of(self._layout, self._tenant_root)).chain
        num_cached = min(len(chain), self._pool.lookup_prefix(chain).num_blocks)
        fitting = self._fitting(chain)
        needed = hashes_of_prefix(fitting, self._pool.windows)
        held = {each: block_id for each in needed if (block_id := self._pool.find(each)) is not None}
        missing = [index for index, each in enumerate(needed) if each not in held]
        self._pool.ref(held.values())
        receiving = self._allocate(missing, len(fitting))
        if receiving is None:
            self._pool.unref(list(held.values()))
            raise _no_free_blocks(len(missing))
        block_of = held | {needed[index]: block_id for index, block_id in zip(missing, receiving, strict=True)}
        is_valid = False
        try:
            await self._fill(parts, needed, {needed[index] for index in missing}, block_of)
            if len(fitting) == len(chain) and not await parts.ended():
                raise damaged("bytes follow its last block")
            is_valid = True
        finally:
            self._end(receiving if is_valid else [], [] if is_valid else receiving, fitting, block_of, needed)
        return ImportedBlocks(
            num_blocks=len(fitting), num_cached_before=min(num_cached, len(fitting)), num_file_blocks=len(chain)
        )

    def _end(
        self,
        filled: Sequence[int],
        dropped: Sequence[int],
        chain: Sequence[BlockHash],
        block_of: dict[BlockHash, int],
        needed: Sequence[BlockHash],
    ) -> None:
        hash_of = {block_id: block_hash for block_hash, block_id in block_of.items()}
        for block_id in filled:
            self._pool.mark_received(block_id, hash_of[block_id])
        if filled:
            self._pool.announce(chain, 0, len(chain), is_end=True, tenant_root=self._tenant_root)
        self._pool.drop_receiving(dropped)
        self._pool.unref([block_of[each] for each in needed])

    async def _fill(
        self, parts: PartReader, needed: Sequence[BlockHash], missing: set[BlockHash], block_of: dict[BlockHash, int]
    ) -> None:
        """Read and verify the records of the blocks, and write the missing ones. Raises Refused if one is not
        valid."""
        num_rows = self._blocks.num_rows
        for begin in range(0, len(needed), num_rows):
            hashes = needed[begin : begin + num_rows]
            records: list[bytes] = []
            for number in range(begin + 1, begin + 1 + len(hashes)):
                what = f"KV block {number} of {len(needed)}"
                records.append(await parts.take(RECORD_BYTES + self._layout.block_bytes, what))
            block_ids = [block_of[each] if each in missing else None for each in hashes]
            num_good = await self._blocks.write(block_ids, hashes, records)
            if num_good < len(hashes):
                raise damaged(f"the checksum of KV block {begin + num_good + 1} of {len(needed)} is wrong")

    def _fitting(self, chain: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Return the leading blocks for which blocks are free. Raises Refused if there are none.

        With sliding windows a shorter prefix needs other blocks than the file has, so it fits as a whole.
        """
        pool = self._pool
        needed = hashes_of_prefix(chain, pool.windows)
        missing = [index for index, each in enumerate(needed) if pool.find(each) is None]
        num_own = pool.num_idle(found for each in needed if (found := pool.find(each)) is not None)
        spare = self._engine.running_seqs * pool.windows.num_tables + self._engine.num_reserved_blocks
        num_free = max(0, pool.num_allocatable - num_own - spare)
        if len(missing) <= num_free:
            return chain
        if pool.windows.has_windows:
            raise _no_free_blocks(len(missing))
        num_fitting = missing[num_free] // pool.windows.num_tables
        if not num_fitting:
            raise _no_free_blocks(1)
        return chain[:num_fitting]

    def _allocate(self, missing: Sequence[int], num_blocks: int) -> list[int] | None:
        """Allocate blocks for entries of the prefix; None if they are not free."""
        if not missing:
            return []
        windows = self._pool.windows
        entries = entries_from(windows.first_blocks(num_blocks * windows.block_size_tokens), num_blocks)
        return self._pool.allocate_receiving(len(missing), [entries[index] for index in missing])


def _no_free_blocks(num_blocks: int) -> Refused:
    message = (
        f"the worker has fewer than {num_blocks} free KV blocks, which the import needs; retry when it is less busy, "
        "name another with --worker, or raise --kv-memory"
    )
    failure = Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.NO_FREE_BLOCKS, message=message, retry_after_s=1.0)
    return Refused(failure)
