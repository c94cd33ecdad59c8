"""Decides which blocks a sequence gets, and how many must stay free for prompts that are partly computed.

Tables without a window get blocks for all tokens on admission. A table with a window gets blocks for the
tokens of the next chunk only, as chunks are scheduled, because the blocks of earlier chunks are freed
meanwhile. A prompt of any length thus needs a constant number of windowed blocks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress

from baton.core.kv.block_hash import BlockHash, num_blocks_for
from baton.core.kv.kv_tables import TableWindows, entries_from, hashes_of_entries
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.block_grant import BlockGrant
from baton.engine.state.sequence import EngineSequence, max_cached_blocks


def usable_hashes(seq: EngineSequence, block_size_tokens: int) -> Sequence[BlockHash]:
    """Return the hashes of the leading blocks of a sequence that may come from the cache.

    None if the logprobs of its prompt are reported, because every position is then computed.
    """
    return seq.hashes[: 0 if seq.reports_prompt else max_cached_blocks(len(seq.token_ids), block_size_tokens)]


def grant_for_prompt(seq: EngineSequence, pool: BlockPool, chunk_tokens: int) -> BlockGrant:
    """Return the blocks of a queued sequence that is computed here: cached ones for its prefix, new ones for
    the rest."""
    windows, num_tokens = pool.windows, len(seq.token_ids)
    num_blocks = num_blocks_for(num_tokens, windows.block_size_tokens)
    prefix = pool.lookup_prefix(usable_hashes(seq, windows.block_size_tokens))
    covered = num_blocks
    if windows.has_windows:
        covered = min(covered, prefix.num_blocks + num_blocks_for(chunk_tokens, windows.block_size_tokens))
    entries = entries_from(prefix.first_blocks, num_blocks)
    if covered < num_blocks:
        entries = _covered_entries(entries, windows, covered)
    return BlockGrant(
        num_blocks=num_blocks,
        first_blocks=prefix.first_blocks,
        num_covered_blocks=covered,
        num_cached_blocks=prefix.num_blocks,
        entries=entries,
        cached=prefix.block_ids,
    )


def grant_for_pull(seq: EngineSequence, pool: BlockPool) -> BlockGrant:
    """Return the blocks of a queued sequence whose KV is pulled.

    It continues after its last token, and gets only what that sees. Cached blocks are used as far as the
    reader needs no block before them.
    """
    windows, num_tokens = pool.windows, len(seq.token_ids)
    num_blocks = num_blocks_for(num_tokens, windows.block_size_tokens)
    first_blocks = windows.first_blocks(num_tokens)
    entries = entries_from(first_blocks, num_blocks)
    usable = seq.hashes[: max_cached_blocks(num_tokens, windows.block_size_tokens)]
    cached = pool.lookup(hashes_of_entries(usable, entries, windows.num_tables))
    missing = entries[len(cached) :]
    num_cached = missing[0] // windows.num_tables if missing else num_blocks
    return BlockGrant(
        num_blocks=num_blocks,
        first_blocks=first_blocks,
        num_covered_blocks=num_blocks,
        num_cached_blocks=num_cached if cached else 0,  # blocks that are not needed are no hit of themselves
        entries=entries,
        cached=cached,
    )


def entries_to_cover(seq: EngineSequence, windows: TableWindows, num_tokens: int) -> Sequence[int]:
    """Return the entries that lack a block for the next `num_tokens` tokens of a sequence."""
    end = num_blocks_for(seq.num_computed_tokens + num_tokens, windows.block_size_tokens)
    tables = [table for table, window in enumerate(windows.windows) if window]
    return [index * windows.num_tables + table for index in range(seq.num_covered_blocks, end) for table in tables]


def num_reserved_blocks(
    running: Iterable[EngineSequence], pool: BlockPool, chunk_tokens: int, grant: BlockGrant | None = None
) -> int:
    """Return how many blocks must stay allocatable, so that all partly covered prompts can be computed.

    grant: of a sequence that will be admitted, too.

    Each prompt may need `most_windowed_blocks` at once. What partly covered prompts hold alone counts,
    because it is free again when they no longer see it. Blocks that others hold, too, do not count. Only
    blocks that a transfer pins meanwhile are missing for as long as its lease, and the prompt then waits.
    """
    windows = pool.windows
    if not windows.has_windows:
        return 0
    lengths, num_new, holders = list[int](), 0, Counter[int]()
    for seq in running:
        if seq.num_covered_blocks < seq.num_blocks:
            lengths.append(seq.num_blocks)
            holders.update(_windowed_blocks(seq, windows))
    if grant is not None and grant.num_covered_blocks < grant.num_blocks:
        lengths.append(grant.num_blocks)
        is_windowed = [windows.windows[entry % windows.num_tables] > 0 for entry in grant.entries]
        holders.update(compress(grant.cached, is_windowed))
        num_new = sum(is_windowed[len(grant.cached) :])
    if not lengths:
        return 0
    granted = frozenset(grant.cached) if grant is not None else frozenset()
    num_alone = sum(pool.num_refs(block_id) + (block_id in granted) == count for block_id, count in holders.items())
    needed = sum(windows.most_windowed_blocks(num_blocks, chunk_tokens) for num_blocks in lengths)
    return max(0, needed - num_alone - num_new)


def _windowed_blocks(seq: EngineSequence, windows: TableWindows) -> Iterable[int]:
    step = windows.num_tables
    for table, (window, first) in enumerate(zip(windows.windows, seq.first_blocks, strict=True)):
        if window:
            yield from seq.block_table[first * step + table : seq.num_covered_blocks * step + table : step]


def _covered_entries(entries: Sequence[int], windows: TableWindows, num_covered: int) -> Sequence[int]:
    step = windows.num_tables
    return [entry for entry in entries if entry < num_covered * step or not windows.windows[entry % step]]
