"""What must hold between any two calls of an engine. Raises AssertionError naming the first thing that does not."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from baton.core.blocks import NO_HASH
from baton.core.lifecycle import SequenceState
from baton.engine.sequence import EngineSequence

if TYPE_CHECKING:  # the pool demands here what must hold in it
    from baton.engine.block_pool import BlockPool


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def check_sequences(
    places: Mapping[SequenceState, Mapping[int, EngineSequence]], alive: Iterable[EngineSequence], pool: "BlockPool"
) -> None:
    """`places`: where a sequence in each state stands, by key; `alive`: all of them, found by request."""
    num_placed = sum(len(place) for place in {id(place): place for place in places.values()}.values())
    seqs = list(alive)
    demand(len(seqs) == num_placed, f"{num_placed} sequences in their places, {len(seqs)} found by request")
    refs: Counter[int] = Counter()
    for seq in seqs:
        demand(places[seq.state].get(seq.key) is seq, f"not where its state says: {seq}")
        refs.update(seq.block_table)
        _check_sequence(seq, pool)
    for block_id, count in refs.items():
        demand(pool.num_refs(block_id) >= count, f"block {block_id} has fewer references than sequences over it")


def _check_sequence(seq: EngineSequence, pool: "BlockPool") -> None:
    hashed, open_ended = seq.block_table[: seq.num_hashed_blocks], seq.block_table[seq.num_hashed_blocks :]
    demand(seq.num_tokens_behind > 0, f"no token to compute: {seq}")
    demand(seq.table == tuple(seq.block_table), f"stale table: {seq}")
    if seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
        demand(not seq.block_table and not seq.num_computed_tokens, f"waits with blocks: {seq}")
        return
    demand(len(seq.block_table) * pool.block_size_tokens >= len(seq.token_ids) - 1, f"blocks are missing: {seq}")
    demand([pool.hash_of(b) for b in hashed] == seq.hashes[: len(hashed)], f"a block has another hash: {seq}")
    if seq.state is SequenceState.RUNNING:
        demand(all(pool.is_readable(b) for b in seq.block_table), f"runs on blocks that have not landed: {seq}")
        demand(all(pool.hash_of(b) == NO_HASH for b in open_ended), f"would write a hashed block: {seq}")
