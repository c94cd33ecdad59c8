"""Invariants of an engine's sequences, checked by tests between any two calls."""

from collections import Counter

from baton.core.kv.block_hash import NO_HASH
from baton.core.state_machines import SequenceState
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.require import require
from baton.engine.state.sequence import EngineSequence
from baton.engine.state.sequence_table import SequenceTable
from baton.engine.state.step import NO_BLOCK


def check_sequences(sequences: SequenceTable, pool: BlockPool) -> None:
    """Check that every sequence is where its state says, is found by its request, and owns its blocks.

    Raises AssertionError naming the first violation. The pool has its own check, `BlockPool.check`.
    """
    places = {
        SequenceState.WAITING: sequences.queue,
        SequenceState.PREEMPTED: sequences.queue,
        SequenceState.RECEIVING: sequences.receiving,
        SequenceState.RUNNING: sequences.running,
    }
    num_placed = len(sequences.queue) + len(sequences.receiving) + len(sequences.running)
    seqs = list(sequences.all_by_request())
    require(len(seqs) == num_placed, f"{num_placed} sequences by state, {len(seqs)} by request")
    refs: Counter[int] = Counter()
    for seq in seqs:
        require(places[seq.state].get(seq.key) is seq, f"not in the dictionary of its state: {seq}")
        refs.update(seq.held_blocks)
        _check_sequence(seq, pool)
    for block_id, count in refs.items():
        require(pool.num_refs(block_id) >= count, f"block {block_id} has fewer references than users")


def _check_sequence(seq: EngineSequence, pool: BlockPool) -> None:
    num_freed, num_hashed = seq.num_freed_blocks, seq.num_hashed_blocks
    hashed, open_ended = seq.block_table[num_freed:num_hashed], seq.block_table[max(num_freed, num_hashed) :]
    require(seq.block_table[:num_freed] == [NO_BLOCK] * num_freed, f"a block was not freed: {seq}")
    require(NO_BLOCK not in seq.held_blocks, f"a block is missing: {seq}")
    require(seq.num_uncomputed_tokens > 0, f"no token to compute: {seq}")
    require(seq.block_ids == tuple(seq.block_table), f"stale block_ids: {seq}")
    if seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
        require(not seq.block_table and not seq.num_computed_tokens, f"queued with blocks: {seq}")
        return
    require(len(seq.block_table) * pool.block_size_tokens >= len(seq.token_ids) - 1, f"blocks are missing: {seq}")
    own_hashes = seq.hashes[num_freed : num_freed + len(hashed)]
    require([pool.hash_of(b) for b in hashed] == own_hashes, f"a block has another hash: {seq}")
    if seq.state is SequenceState.RUNNING:
        require(all(pool.is_readable(b) for b in seq.held_blocks), f"runs on blocks that were not received: {seq}")
        require(all(pool.hash_of(b) == NO_HASH for b in open_ended), f"would write a hashed block: {seq}")
