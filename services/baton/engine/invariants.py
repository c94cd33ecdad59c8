"""Invariants of an engine's sequences, checked by tests between any two calls."""

from collections import Counter

from baton.core.kv.block_hash import NO_HASH, table_hash
from baton.core.kv.kv_tables import NO_BLOCK
from baton.core.state_machines import SequenceState
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.require import require
from baton.engine.state.sequence import EngineSequence
from baton.engine.state.sequence_table import SequenceTable


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
    windows, step = pool.windows, seq.num_tables
    require(seq.num_uncomputed_tokens > 0, f"no token to compute: {seq}")
    require(seq.block_ids == tuple(seq.block_table), f"stale block_ids: {seq}")
    if seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
        require(not seq.block_table and not seq.num_computed_tokens, f"queued with blocks: {seq}")
        return
    require(step == windows.num_tables and len(seq.block_table) % step == 0, f"wrong number of tables: {seq}")
    require(seq.num_blocks * pool.block_size_tokens >= len(seq.token_ids) - 1, f"blocks are missing: {seq}")
    for entry, block_id in enumerate(seq.block_table):
        index, table = divmod(entry, step)
        is_held = seq.first_blocks[table] <= index and (not windows.windows[table] or index < seq.num_covered_blocks)
        require((block_id != NO_BLOCK) is is_held, f"entry {entry} is not held as it should be: {seq}")
        if not is_held:
            continue
        if index < seq.num_hashed_blocks:
            own_hash = table_hash(seq.hashes[index], table)
            require(pool.hash_of(block_id) == own_hash, f"a block has another hash: {seq}")
        if seq.state is SequenceState.RUNNING:
            require(pool.is_readable(block_id), f"runs on blocks that were not received: {seq}")
            require(
                index < seq.num_hashed_blocks or pool.hash_of(block_id) == NO_HASH, f"would write a hashed block: {seq}"
            )
