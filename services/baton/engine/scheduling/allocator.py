"""Allocates KV blocks to sequences: for decode, with preemption if blocks run out, and on batch admission."""

from collections.abc import Sequence

from baton.core.kv.block_hash import num_blocks_for
from baton.core.kv.kv_tables import NO_BLOCK
from baton.core.state_machines import SequenceState
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling.batcher import admission_order, decode_order, preemption_victim
from baton.engine.scheduling.block_grants import (
    entries_to_cover,
    grant_for_prompt,
    grant_for_pull,
    num_reserved_blocks,
    usable_hashes,
)
from baton.engine.state.block_grant import BlockGrant
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.outcome import (
    AdmittedSequence,
    EngineCounters,
    GrownSequence,
    PreemptedSequence,
    ReturningSequence,
)
from baton.engine.state.sequence import EngineSequence, ReloadWait, num_blocks_needed
from baton.engine.state.sequence_table import SequenceTable


class BlockAllocator:
    """Allocates the blocks of one pool: first to running sequences for their next token, then to queued ones.

    copies: (source, destination) blocks that the current plan must copy. The allocator holds a reference to
        each source until `release_copies`.
    admissions, growths: admissions, and further blocks of `prefill_only` sequences, since the engine last
        took them.
    preemptions, returns: the same, with `reloads_preempted` only.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        sequences: SequenceTable,
        counters: EngineCounters,
        *,
        reloads_preempted: bool = False,
    ) -> None:
        """`reloads_preempted`: see `Engine`."""
        self.copies: list[tuple[int, int]] = []
        self.admissions: list[AdmittedSequence] = []
        self.growths: list[GrownSequence] = []
        self.preemptions: list[PreemptedSequence] = []
        self.returns: list[ReturningSequence] = []
        self._reloads_preempted = reloads_preempted
        self._config = config
        self._pool = pool
        self._sequences = sequences
        self._counters = counters

    def allocate_for_decode(self) -> None:
        """Make sure that every decoding sequence has a writable block for its next token.

        If blocks run out, sequences are preempted: others first, then the sequence itself.
        """
        running = self._sequences.running
        for seq in decode_order(running.values()):
            while seq.state is SequenceState.RUNNING and not self._ensure_writable_block(seq):
                victim = preemption_victim(running.values())
                if victim is None:  # impossible: a sequence that cannot be preempted got all its blocks at admission
                    raise AssertionError(f"no block for {seq}")
                self._preempt(victim)

    def admit(self, budget: int, prompt_rows: int) -> list[tuple[EngineSequence, int]]:
        """Admit queued sequences to the batch in order: each gets the blocks of all its tokens.

        Returns (sequence, scheduled tokens) of those that are in this step, with at most `budget` tokens in
        all, of which at most `prompt_rows` are of prompts whose logprobs are reported.

        - A sequence that does not get its blocks holds up those behind it.
        - If only the token budget is used up, a prefill keeps blocks set aside. Pulled sequences, which
          need no tokens in this step, may overtake it.
        - While readers hold more than half of the pool, prefills for readers are skipped, and others overtake
          them.
        - While a preempted sequence waits for its reload, it keeps blocks and slots set aside.
        """
        scheduled: list[tuple[EngineSequence, int]] = []
        slots = self._config.max_num_seqs - sum(seq.num_slots for seq in self._sequences.admitted())
        if not slots:
            return scheduled
        readers_hold_too_much = 2 * self._pool.held_for_others > self._pool.num_blocks
        num_set_aside = 0
        for seq in admission_order(self._sequences.queue.values()):
            if seq.request.for_reader and readers_hold_too_much:
                continue
            if seq.num_slots > slots or num_set_aside >= self._pool.num_allocatable:
                break
            most = min(budget, prompt_rows) if seq.reports_prompt else budget
            is_reloading = self._is_reloading(seq, num_set_aside)
            if is_reloading:
                slots -= seq.num_slots
            if is_reloading or (not most and not seq.waits_for_pull):
                num_set_aside += self._pool.windows.num_blocks_at_once(
                    len(seq.token_ids), self._config.max_num_batched_tokens
                )
                continue
            if not self._give_blocks(seq, num_set_aside):
                break
            slots -= seq.num_slots
            if seq.state is SequenceState.RUNNING:
                num_scheduled_tokens = min(seq.num_uncomputed_tokens, most)
                scheduled.append((seq, num_scheduled_tokens))
                budget -= num_scheduled_tokens
                prompt_rows -= num_scheduled_tokens if seq.reports_prompt else 0
        return scheduled

    def allocate_for_drafts(self, drafts: Sequence[tuple[EngineSequence, int]]) -> list[int]:
        """Allocate blocks for draft tokens after the next token of decoding sequences.

        drafts: (sequence, number of its draft tokens). Drafts preempt nothing, and leave one block for each
        running sequence that may need one soon. Returns how many of each have a slot now.
        """
        size, spare = self._config.block_size_tokens, None
        found: list[int] = []
        for seq, num_drafts in drafts:
            num_slots = seq.num_blocks * size - seq.num_computed_tokens - 1
            if num_drafts > num_slots:
                num_tables = seq.num_tables
                if spare is None:
                    spare = sum(s.num_slots for s in self._sequences.admitted())
                missing = num_blocks_for(num_drafts - num_slots, size)
                if (missing + spare) * num_tables <= self._num_unreserved():
                    new = self._pool.allocate(missing * num_tables, range(missing * num_tables)) or []
                    seq.append_blocks(new)
                    num_slots += len(new) // num_tables * size
            found.append(min(num_drafts, num_slots))
        return found

    def cover(self, seq: EngineSequence, num_tokens: int) -> int:
        """Give a running sequence the windowed blocks of its next `num_tokens` tokens.

        Returns how many of them have blocks now: all, unless transfers pin too many blocks.
        """
        size = self._config.block_size_tokens
        if seq.num_covered_blocks * size >= seq.num_computed_tokens + num_tokens:
            return num_tokens
        entries = entries_to_cover(seq, self._pool.windows, num_tokens)
        new = self._pool.allocate(len(entries), entries)
        if new is None:
            return seq.num_covered_blocks * size - seq.num_computed_tokens
        seq.fill_blocks(entries, new)
        seq.num_covered_blocks = num_blocks_for(seq.num_computed_tokens + num_tokens, size)
        if seq.request.prefill_only:
            self.growths.append(GrownSequence(seq_id=seq.seq_id, block_table=seq.block_ids))
        return num_tokens

    @property
    def num_reserved(self) -> int:
        """Allocatable blocks that only partly covered prompts may take."""
        return num_reserved_blocks(self._sequences.running.values(), self._pool, self._config.max_num_batched_tokens)

    def release_unused(self, seq: EngineSequence) -> None:
        """Release the blocks of rejected drafts. No step that uses them may be in flight."""
        self._pool.unref(seq.drop_last_blocks(num_blocks_needed(seq, self._config.block_size_tokens)))

    def release_copies(self) -> None:
        """Release the sources of block copies after the step that made them."""
        self._pool.unref([source for source, _ in self.copies])
        self._counters.block_copies += len(self.copies)
        self.copies.clear()

    def _num_unreserved(self) -> int:
        return self._pool.num_allocatable - self.num_reserved

    def _ensure_writable_block(self, seq: EngineSequence) -> bool:
        """Make the blocks of the next token writable. Returns False if that needs blocks and too few are
        free.

        A block that other samples share is copied (copy on write). An entry without a block is no reason to
        copy: `cover` gives the last token of a prompt its windowed blocks when it is scheduled.
        """
        index, num_tables = seq.num_computed_tokens // self._config.block_size_tokens, seq.num_tables
        entries: Sequence[int] = range(index * num_tables, (index + 1) * num_tables)
        if index < seq.num_blocks:
            entries = [entry for entry in entries if self._is_shared(seq.block_table[entry])]
            if not entries:
                return True
        if len(entries) > self._num_unreserved():
            return False
        new = self._pool.allocate(len(entries), entries)
        if new is None:
            return False
        if index == seq.num_blocks:
            seq.append_blocks(new)
            return True
        for entry, block_id in zip(entries, new, strict=True):
            self.copies.append((seq.block_table[entry], block_id))  # takes over the sequence's reference
            seq.replace_block(entry, block_id)
        return True

    def _is_shared(self, block_id: int) -> bool:
        if block_id == NO_BLOCK:
            return False
        return self._pool.num_refs(block_id) - sum(source == block_id for source, _ in self.copies) > 1

    def _preempt(self, seq: EngineSequence) -> None:
        if self._reloads_preempted:
            hashes = tuple(seq.hashes[: seq.num_hashed_blocks])
            self.preemptions.append(PreemptedSequence(seq_id=seq.seq_id, hashes=hashes))
        seq.num_lost_tokens = seq.num_computed_tokens
        seq.num_preemptions += 1
        self._counters.lost_tokens += seq.num_computed_tokens
        positions = seq.held_positions() if self._pool.windows.has_windows else None
        self._pool.unref(seq.drop_blocks(), seq.request.owner, positions)
        self._sequences.preempt(seq)
        self._counters.preemptions += 1

    def _is_reloading(self, seq: EngineSequence, num_set_aside: int) -> bool:
        """Return True while a preempted sequence waits for its reload, which is requested once it would be
        admitted."""
        if not self._reloads_preempted or seq.state is not SequenceState.PREEMPTED:
            return False
        if seq.reload is ReloadWait.NOT_BEGUN and (grant := self._grant(seq, num_set_aside)) is not None:
            usable = usable_hashes(seq, self._config.block_size_tokens)
            if grant.num_cached_blocks < len(usable):
                seq.reload = ReloadWait.RUNNING
                request = seq.request
                self.returns.append(
                    ReturningSequence(
                        key=seq.key, hashes=tuple(usable), tenant_root=request.tenant_root, owner=request.owner
                    )
                )
        return seq.reload is ReloadWait.RUNNING

    def _grant(self, seq: EngineSequence, num_set_aside: int) -> BlockGrant | None:
        """Return the blocks that a queued sequence would get; None if too few are free.

        Leaves `num_set_aside` blocks, what partly covered prompts need, and the blocks of one token for each
        running sequence that may need them soon.
        """
        pool, chunk_tokens = self._pool, self._config.max_num_batched_tokens
        grant = grant_for_pull(seq, pool) if seq.waits_for_pull else grant_for_prompt(seq, pool, chunk_tokens)
        spare = sum(s.num_slots for s in self._sequences.admitted() if not s.request.prefill_only)
        spare = spare * pool.windows.num_tables + num_set_aside
        spare += num_reserved_blocks(self._sequences.running.values(), pool, chunk_tokens, grant)
        is_free = len(grant.new_entries) + spare <= pool.num_allocatable_without(grant.cached)
        return grant if is_free else None

    def _give_blocks(self, seq: EngineSequence, num_set_aside: int) -> bool:
        """Give a queued sequence all blocks of its grant or none."""
        pulled, pool, grant = seq.waits_for_pull, self._pool, self._grant(seq, num_set_aside)
        if grant is None:
            return False
        pool.ref(grant.cached)
        new = (pool.allocate_receiving if pulled else pool.allocate)(len(grant.new_entries), grant.new_entries)
        if new is None:  # enough blocks are free, but a step in flight may still write to them
            pool.unref(grant.cached)
            return False
        self._start(seq, grant, new)
        return True

    def _start(self, seq: EngineSequence, grant: BlockGrant, new: list[int]) -> None:
        is_first = seq.num_cached_tokens is None
        seq.take_blocks(grant, grant.cached + new, self._config.block_size_tokens)
        num_recomputed = max(0, seq.num_lost_tokens - seq.num_computed_tokens)
        self._counters.recomputed_tokens += num_recomputed
        seq.num_recomputed_tokens += num_recomputed
        seq.num_lost_tokens = 0
        self._sequences.start(seq)
        if is_first:
            self._counters.cached_tokens += seq.num_computed_tokens
            self.admissions.append(
                AdmittedSequence(
                    seq_id=seq.seq_id,
                    block_table=seq.block_ids,
                    num_cached_blocks=seq.num_cached_blocks,
                    cached_block_ids=tuple(grant.cached),
                    receiving_block_ids=tuple(new) if seq.state is SequenceState.RECEIVING else (),
                )
            )
