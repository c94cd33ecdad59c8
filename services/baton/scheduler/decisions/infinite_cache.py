"""Estimates how many blocks of prompts an infinite cache would have had, in bounded memory.

An infinite cache misses a block once: when it is first seen. Hits are therefore all blocks less the new ones,
and only new blocks need an estimate, which blocks that are used often do not distort.

All block hashes are remembered up to a limit, so far the count is exact. Beyond it, only hashes below a
threshold are remembered, which is halved whenever there are too many. Each remembered new block then
stands for 1 / (share of the hashes below the threshold) blocks. Whether a block is sampled depends on its
hash alone, so all its uses are seen or none. Block hashes are uniform, and contain the tenant's salt.

Sources: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15, sections 3 and 4.3 (spatial
sampling at a fixed size, with hits from the exact number of references, as in SHARDS-adj); Flajolet, "On
adaptive sampling", Computing 43 (1990), for the threshold.
"""

from collections.abc import Sequence

from baton.core.kv.block_hash import HASH_BYTES, BlockHash

MAX_HASHES = 65_536
"""Hashes to remember, about a million prompt tokens in blocks of 16. The standard error of the number of new
blocks is then at most 0.6 %."""
HASH_MEMORY_BYTES = 128
"""Upper bound for the memory of one remembered hash: the object, and its place in a set."""


class InfiniteCache:
    """The blocks that an infinite cache would have. Takes at most `max_hashes * HASH_MEMORY_BYTES` bytes."""

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._hashes: set[BlockHash] = set()
        self._num_halvings = 0
        self._threshold: BlockHash | None = None  # None: all hashes are remembered

    @property
    def sampled_share(self) -> float:
        """Share of all block hashes that are remembered; 1 while the counts are exact."""
        return 0.5**self._num_halvings

    @property
    def num_hashes(self) -> int:
        """Number of remembered hashes."""
        return len(self._hashes)

    def add(self, hashes: Sequence[BlockHash], *, num_known: int, num_usable: int) -> float:
        """Remember the blocks of a prompt. Return how many of its usable blocks the cache had before.

        num_known: leading blocks that a worker is known to have or to have had. They may be new here, because
            they were generated as an answer.
        num_usable: leading blocks that a request can reuse; the last token of a prompt is always computed.
        """
        num_new = 0.0
        for position, block_hash in enumerate(hashes):
            if (self._threshold is not None and block_hash >= self._threshold) or block_hash in self._hashes:
                continue
            self._hashes.add(block_hash)
            if num_known <= position < num_usable:
                num_new += 1 / self.sampled_share
            if len(self._hashes) > self._max_hashes:
                self._halve()
        return num_usable - num_new

    def _halve(self) -> None:
        """Halve the threshold and forget the hashes above it."""
        self._num_halvings += 1
        threshold = (1 << (8 * HASH_BYTES - self._num_halvings)).to_bytes(HASH_BYTES, "big")
        self._hashes = {block_hash for block_hash in self._hashes if block_hash < threshold}
        self._threshold = threshold
