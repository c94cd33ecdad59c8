"""KV of a draft model: which tokens of each decoding sequence it holds, in a block pool of its own.

It is a cache. Blocks of final tokens are published by their hash, so a prefix that several sequences share is
computed once, and a sequence that comes back after a preemption finds what was not evicted. What is missing
is computed again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from baton.core.kv.block_hash import num_blocks_for
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.require import require
from baton.engine.state.sequence import EngineSequence, max_cached_blocks


@dataclass(slots=True)
class _HeldKv:
    """The KV of one sequence.

    block_table: its blocks, in order.
    num_computed: leading tokens of the sequence whose KV is there.
    num_hashed: leading blocks whose hash is published.
    drafts: tokens after these whose KV is there, too. They were guesses when it was computed.
    """

    block_table: list[int]
    num_computed: int
    num_hashed: int
    drafts: tuple[int, ...] = ()


class DraftKv:
    """The KV of all sequences that a draft model follows, by key.

    Used between steps of the draft model only.
    """

    def __init__(self, pool: BlockPool) -> None:
        """pool: of the draft model's KV memory. Nobody else uses it."""
        self._pool = pool
        self._held: dict[int, _HeldKv] = {}

    def num_missing(self, seq: EngineSequence) -> int:
        """Return how many tokens at the end of a sequence must be computed for the logits of its last one.

        At least one. A sequence that was not known takes over blocks with the same prefix.
        """
        return len(seq.token_ids) - self._begin(self._of(seq), seq)

    def allocate(self, seq: EngineSequence, num_tokens: int) -> tuple[int, ...] | None:
        """Return the block table of a sequence for `num_tokens` tokens, its missing blocks allocated.

        None, and nothing changes, if too few blocks are free.
        """
        held = self._of(seq)
        missing = num_blocks_for(num_tokens, self._pool.block_size_tokens) - len(held.block_table)
        if missing > 0:
            new = self._pool.allocate(missing)
            if new is None:
                return None
            held.block_table += new
        return tuple(held.block_table)

    def computed(self, seq: EngineSequence, num_computed: int, drafts: tuple[int, ...] = ()) -> None:
        """Record that the KV of the first `num_computed` tokens is there, and that of `drafts` behind them.

        There are drafts only after all tokens of the sequence.
        """
        held = self._of(seq)
        held.num_computed, held.drafts = num_computed, drafts
        self._publish(held, seq)

    def forget(self, key: int) -> None:
        """Release the blocks of a sequence. Unknown keys are ignored."""
        held = self._held.pop(key, None)
        if held is not None:
            self._pool.unref(held.block_table)

    def keep_only(self, keys: Collection[int]) -> None:
        """Release the blocks of all other sequences, which do not decode now. They stay cached."""
        for key in [key for key in self._held if key not in keys]:
            self.forget(key)

    def check(self, keys: Iterable[int]) -> None:
        """Check that only sequences with these keys have blocks. Raises AssertionError. For tests."""
        require(self._held.keys() <= set(keys), "draft KV of a sequence that has ended")
        self._pool.check()
        num_refs = sum(len(held.block_table) for held in self._held.values())
        found = sum(self._pool.num_refs(block_id) for block_id in range(self._pool.num_blocks))
        require(num_refs == found, f"{found} references to draft blocks, {num_refs} of sequences")

    def _of(self, seq: EngineSequence) -> _HeldKv:
        held = self._held.get(seq.key)
        if held is None:
            size = self._pool.block_size_tokens
            cached = self._pool.lookup(seq.hashes[: max_cached_blocks(len(seq.token_ids), size)])
            self._pool.ref(cached)
            held = self._held[seq.key] = _HeldKv(cached, len(cached) * size, len(cached))
        elif held.drafts and len(seq.token_ids) > held.num_computed:
            self._settle(held, seq)
        return held

    def _settle(self, held: _HeldKv, seq: EngineSequence) -> None:
        """Keep the KV of drafts that have become tokens of the sequence."""
        for guess, token_id in zip(held.drafts, seq.token_ids[held.num_computed :], strict=False):
            if guess != token_id:
                break
            held.num_computed += 1
        held.drafts = ()
        self._publish(held, seq)

    def _begin(self, held: _HeldKv, seq: EngineSequence) -> int:
        return min(held.num_computed, len(seq.token_ids) - 1)

    def _publish(self, held: _HeldKv, seq: EngineSequence) -> None:
        """Publish full blocks, but not that of the last token: it may be computed once more."""
        size = self._pool.block_size_tokens
        num_full = self._begin(held, seq) // size
        for index in range(held.num_hashed, num_full):
            self._pool.set_hash(held.block_table[index], seq.hash_of_block(index, size))
            held.num_hashed = index + 1
