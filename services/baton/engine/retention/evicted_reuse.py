"""Measures what it costs to evict KV: how much of it is computed again."""

from collections import OrderedDict

from baton.core.kv.block_hash import BlockHash

MAX_REMEMBERED = 8_192
"""Hashes of evicted blocks to remember, which take 1.5 MB. A worker with more blocks samples them by hash."""
MIN_STORED = 64
"""Sampled blocks to be stored before the share is known."""
COUNTED_TURNOVERS = 4
"""The share is that of the blocks stored last: at most so many times as many as the worker holds."""


class EvictedReuse:
    """Counts evicted blocks that are computed again, per block that is stored.

    This share is what one more stored block costs, in blocks to compute. A worker that holds C blocks keeps a
    new one until it has stored C others. Meanwhile it computes R of the last C evicted blocks again. With one
    more place it would have kept one of them, and would have saved R / C computations. That is the number of
    blocks computed again, divided by the number of stored ones, if C evicted blocks are remembered.

    A worker sees only what it computes itself. What another worker computes after this one has evicted it is
    not counted, and neither is KV that is received again, so the share is rather too low.

    Source: ghost lists, as in Megiddo and Modha, "ARC", FAST '03; spatial sampling, as in Waldspurger et al.,
    "SHARDS", FAST '15, section 3.
    """

    def __init__(self, num_blocks: int, max_remembered: int = MAX_REMEMBERED) -> None:
        """num_blocks: places for blocks in all tiers.

        If several tiers hold the same content, the worker holds fewer blocks, and the share is too high.
        """
        self._sampled_one_in = max(1, -(-num_blocks // max_remembered))
        self._max_evicted = max(1, num_blocks // self._sampled_one_in)
        self._evicted: OrderedDict[BlockHash, None] = OrderedDict()
        self._num_stored = 0.0
        self._num_computed_again = 0.0

    @property
    def share(self) -> float:
        """Blocks computed again per stored block, 0 to 1; 0 while it is not known."""
        return self._num_computed_again / self._num_stored if self._num_stored >= MIN_STORED else 0.0

    def stored(self, block_hash: BlockHash, *, is_computed: bool) -> None:
        """Count content that the worker did not have.

        is_computed: it was computed here, not read from another worker
        """
        if not self._is_sampled(block_hash):
            return
        was_evicted = block_hash in self._evicted
        self._evicted.pop(block_hash, None)
        self._num_stored += 1
        self._num_computed_again += was_evicted and is_computed
        if self._num_stored > max(COUNTED_TURNOVERS * self._max_evicted, 2 * MIN_STORED):
            self._num_stored /= 2
            self._num_computed_again /= 2

    def evicted(self, block_hash: BlockHash) -> None:
        """Remember content that the worker has in no tier any more."""
        if self._is_sampled(block_hash):
            self._evicted[block_hash] = None
            self._evicted.move_to_end(block_hash)
            if len(self._evicted) > self._max_evicted:
                self._evicted.popitem(last=False)

    def _is_sampled(self, block_hash: BlockHash) -> bool:
        return int.from_bytes(block_hash[:4], "little") % self._sampled_one_in == 0
