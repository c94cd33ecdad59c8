"""Allocates KV blocks to sequences: for decode, with preemption if blocks run out, and on batch admission."""

from collections.abc import Sequence

from baton.core.kv.block_hash import first_visible_block, num_blocks_for
from baton.core.state_machines import SequenceState
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling.batcher import admission_order, decode_order, preemption_victim
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.outcome import AdmittedSequence, EngineCounters
from baton.engine.state.sequence import EngineSequence, max_cached_blocks, num_blocks_needed
from baton.engine.state.sequence_table import SequenceTable


class BlockAllocator:
    """Allocates the blocks of one pool: first to running sequences for their next token, then to queued ones.

    copies: (source, destination) blocks that the current plan must copy. The allocator holds a reference to
        each source until `release_copies`.
    admissions: admissions since the engine last took them.
    """

    def __init__(
        self, config: EngineConfig, pool: BlockPool, sequences: SequenceTable, counters: EngineCounters
    ) -> None:
        self.copies: list[tuple[int, int]] = []
        self.admissions: list[AdmittedSequence] = []
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
            if not most and not seq.waits_for_pull:
                num_set_aside += num_blocks_needed(seq, self._config.block_size_tokens)
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
            num_slots = len(seq.block_table) * size - seq.num_computed_tokens - 1
            if num_drafts > num_slots:
                if spare is None:
                    spare = sum(s.num_slots for s in self._sequences.admitted())
                missing = num_blocks_for(num_drafts - num_slots, size)
                if missing + spare <= self._pool.num_allocatable:
                    new = self._pool.allocate(missing) or []
                    seq.block_table += new
                    num_slots += len(new) * size
            found.append(min(num_drafts, num_slots))
        return found

    def release_unused(self, seq: EngineSequence) -> None:
        """Release the blocks of rejected drafts. No step that uses them may be in flight."""
        self._pool.unref(seq.drop_last_blocks(num_blocks_needed(seq, self._config.block_size_tokens)))

    def release_copies(self) -> None:
        """Release the sources of block copies after the step that made them."""
        self._pool.unref([source for source, _ in self.copies])
        self._counters.block_copies += len(self.copies)
        self.copies.clear()

    def _ensure_writable_block(self, seq: EngineSequence) -> bool:
        """Make the block of the next token writable. Returns False if that needs a block and none is free.

        A block that other samples share is copied (copy on write).
        """
        index = seq.num_computed_tokens // self._config.block_size_tokens
        if index == len(seq.block_table):
            new = self._pool.allocate(1)
            if new is None:
                return False
            seq.block_table += new
            return True
        shared = seq.block_table[index]
        if self._pool.num_refs(shared) - sum(source == shared for source, _ in self.copies) == 1:
            return True
        new = self._pool.allocate(1)
        if new is None:
            return False
        self.copies.append((shared, new[0]))  # takes over the sequence's reference to the source
        seq.replace_block(index, new[0])
        return True

    def _preempt(self, seq: EngineSequence) -> None:
        self._pool.unref(seq.drop_blocks())
        self._sequences.preempt(seq)
        self._counters.preemptions += 1

    def _give_blocks(self, seq: EngineSequence, num_set_aside: int) -> bool:
        """Give a queued sequence all its blocks or none: cached ones for its prefix, new ones for the rest.

        Leaves `num_set_aside` blocks, and one block for each running sequence that may need one soon.
        """
        block_size_tokens = self._config.block_size_tokens
        most = 0 if seq.reports_prompt else max_cached_blocks(len(seq.token_ids), block_size_tokens)
        window = self._config.kv_window
        prefix = self._pool.lookup_prefix(seq.hashes[:most], window)
        num_freed, cached = prefix
        if seq.waits_for_pull:  # it continues after its last token, and so sees fewer blocks
            num_freed = first_visible_block(len(seq.token_ids), window, block_size_tokens)
            cached = cached[max(0, num_freed - prefix.num_unseen_blocks) :]
        missing = num_blocks_needed(seq, block_size_tokens) - num_freed - len(cached)
        spare = sum(s.num_slots for s in self._sequences.admitted() if not s.request.prefill_only)
        if missing + spare + num_set_aside > self._pool.num_allocatable - self._pool.num_idle(cached):
            return False
        self._pool.ref(cached)
        new = self._pool.allocate_receiving(missing) if seq.waits_for_pull else self._pool.allocate(missing)
        if new is None:  # enough blocks are free, but a step in flight may still write to them
            self._pool.unref(cached)
            return False
        self._start(seq, cached, new, num_freed)
        return True

    def _start(self, seq: EngineSequence, cached: list[int], new: list[int], num_freed: int) -> None:
        is_first = seq.num_cached_tokens is None
        seq.take_blocks(cached, new, self._config.block_size_tokens, num_freed_blocks=num_freed)
        self._sequences.start(seq)
        if is_first:
            self._counters.cached_tokens += seq.num_computed_tokens
            self.admissions.append(
                AdmittedSequence(
                    seq_id=seq.seq_id,
                    block_table=seq.block_ids,
                    num_cached_blocks=seq.num_cached_blocks,
                    num_freed_blocks=num_freed,
                    receiving_block_ids=tuple(new) if seq.state is SequenceState.RECEIVING else (),
                )
            )
