"""Exports a cached prefix of one worker: reads its KV from all tiers, and sends it as a file."""

from collections.abc import Sequence

from baton.core.errors import Code, Failure, Reason, Refused, invalid
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import entries_from, hashes_of_prefix
from baton.core.messages.prefix_messages import ExportPrefix
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.content_index import longest_prefix
from baton.worker.prefix_files.file_parts import PartWriter
from baton.worker.prefix_files.prefix_format import PrefixHeader
from baton.worker.prefix_files.staged_blocks import StagedBlocks
from baton.worker.tiers.slower_tiers import SlowerTiers

MAX_RELOAD_S = 30.0
"""Longest time for the reload of a few blocks, which keeps device blocks from requests."""


class PrefixExport:
    """One export.

    What the device holds is pinned until its end. Other blocks are reloaded, a few at a time.
    """

    def __init__(
        self, asked: ExportPrefix, *, pool: BlockPool, tiers: SlowerTiers, blocks: StagedBlocks, layout: KvLayout
    ) -> None:
        """Find the longest prefix that the tiers hold now. `chain` is empty if there is none."""
        self._pool, self._tiers, self._blocks, self._layout = pool, tiers, blocks, layout
        self._tenant_root = asked.tenant_root
        self.chain = asked.hashes[: self._num_held(asked.hashes)]

    async def send(self, parts: PartWriter) -> None:
        """Send the file. Raises Refused if blocks were evicted meanwhile, or cannot be reloaded."""
        pool, size = self._pool, self._layout.block_size_tokens
        if self._num_held(self.chain) < len(self.chain):
            raise _evicted()
        needed = hashes_of_prefix(self.chain, pool.windows)
        entries = entries_from(pool.windows.first_blocks(len(self.chain) * size), len(self.chain))
        pinned = [found for each in needed if (found := pool.find(each)) is not None]
        pool.pin(pinned)
        try:
            await parts.write(PrefixHeader.of(self._layout, self._tenant_root, self.chain).encoded())
            for begin in range(0, len(needed), self._blocks.num_rows):
                end = begin + self._blocks.num_rows
                for record in await self._records(needed[begin:end], entries[begin:end]):
                    await parts.write(record)
            await parts.end()
        finally:
            pool.unpin(pinned)

    async def _records(self, hashes: Sequence[BlockHash], entries: Sequence[int]) -> list[bytes]:
        """Return the records of a few blocks."""
        pool = self._pool
        held = {each: block_id for each in hashes if (block_id := pool.find(each)) is not None}
        missing = [index for index, each in enumerate(hashes) if each not in held]
        pool.ref(held.values())
        try:
            loaded = await self._reload([hashes[i] for i in missing], [entries[i] for i in missing])
        except BaseException:
            pool.unref(list(held.values()))
            raise
        block_of = held | {hashes[i]: block_id for i, block_id in zip(missing, loaded, strict=True)}
        ordered = {block_of[each]: each for each in hashes}
        try:
            generations = [pool.generation(block_id) for block_id in ordered]
            records = await self._blocks.read(ordered)
            if [pool.generation(block_id) for block_id in ordered] != generations:
                raise invalid("the KV of the prompt was withdrawn, because it may be wrong; compute the prompt again")
            return records
        finally:
            pool.unref(list(ordered))

    async def _reload(self, hashes: Sequence[BlockHash], entries: Sequence[int]) -> list[int]:
        """Load blocks from slower tiers into device blocks, and return these, each with a reference."""
        pool = self._pool
        if not hashes:
            return []
        receiving = pool.allocate_receiving(len(hashes), entries)
        if receiving is None:
            message = f"{len(hashes)} device blocks must be free to reload KV from slower tiers; retry when they are"
            raise Refused(
                Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.NO_FREE_BLOCKS, message=message, retry_after_s=1.0)
            )
        num_loaded = 0
        try:
            num_loaded = await self._tiers.load(hashes, receiving, within_s=MAX_RELOAD_S)
            if num_loaded < len(hashes):
                raise _evicted()
        except BaseException:
            pool.drop_receiving(receiving[num_loaded:])
            self._publish(receiving[:num_loaded], hashes)
            pool.unref(receiving)
            raise
        self._publish(receiving, hashes)
        return receiving

    def _publish(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        for block_id, block_hash in zip(block_ids, hashes, strict=False):
            self._pool.mark_received(block_id, block_hash)
        self._pool.announce(self.chain, 0, len(self.chain), is_end=True, tenant_root=self._tenant_root)

    def _num_held(self, hashes: Sequence[BlockHash]) -> int:
        pool, tiers = self._pool, self._tiers
        return longest_prefix(hashes, pool.windows, lambda each: pool.find(each) is not None or tiers.holds(each))


def _evicted() -> Refused:
    message = "the prefix was evicted in part before it was read; run the export again"
    return Refused(Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.NO_FREE_BLOCKS, message=message, retriable=True))
