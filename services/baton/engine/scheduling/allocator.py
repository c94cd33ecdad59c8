"""Who gets blocks, and who has to give them back. What a step then does with them is the engine's."""

from itertools import islice

from baton.core.state_machines import SequenceState
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling.batcher import admission_order, decode_order, preemption_victim
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.outcome import AdmittedSequence, EngineCounters
from baton.engine.state.sequence import EngineSequence, max_cached_blocks, num_blocks_needed
from baton.engine.state.sequence_table import SequenceTable


class BlockAllocator:
    """Divides one pool between the sequences of one engine: first the next token of each that runs, then the
    prompts that wait.

    `copies`: (source, destination) blocks of the plan that is not applied yet; each source has a reference
    until `release_copies`. `admissions`: made since the engine last took them.
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
        """Each sequence that is one token behind gets a block of its own to write it to, or somebody is
        preempted, in the end itself."""
        running = self._sequences.running
        for seq in decode_order(running.values()):
            while seq.state is SequenceState.RUNNING and not self._has_or_gets(seq):
                loser = preemption_victim(running.values())
                if (
                    loser is None
                ):  # `seq` itself may not be preempted, so its blocks came all at once and it cannot lack one
                    raise AssertionError(f"no block for {seq}")
                self._preempt(loser)

    def admit(self, budget: int) -> list[tuple[EngineSequence, int]]:
        """Give waiting sequences all blocks of the tokens they have, in order: who does not fit stops those
        behind. A prefill that lacks only this step's tokens keeps its claim on blocks, and pulled sequences,
        which need none of the step, may pass it. Prefills for another worker wait, and all may pass them,
        while transfers hold more than half of the pool. Returns who is in this step now, and with how many of
        the `budget` tokens."""
        shares: list[tuple[EngineSequence, int]] = []
        slots = self._config.max_num_seqs - sum(seq.num_slots for seq in self._sequences.admitted())
        if not slots:
            return shares
        holds_too_much = 2 * self._pool.held_for_others > self._pool.num_blocks
        claimed = 0
        for seq in admission_order(self._sequences.queue.values()):
            if seq.request.for_reader and holds_too_much:
                continue
            if seq.num_slots > slots or claimed >= self._pool.num_allocatable:
                break
            if not budget and not seq.waits_for_pull:
                claimed += num_blocks_needed(seq, self._config.block_size_tokens)
                continue
            if not self._give_blocks(seq, claimed):
                break
            slots -= seq.num_slots
            if seq.state is SequenceState.RUNNING:
                num_scheduled_tokens = min(seq.num_uncomputed_tokens, budget)
                shares.append((seq, num_scheduled_tokens))
                budget -= num_scheduled_tokens
        return shares

    def release_copies(self) -> None:
        """The step that made them is over: nobody needs their sources for it any more."""
        self._pool.unref([source for source, _ in self.copies])
        self._counters.block_copies += len(self.copies)
        self.copies.clear()

    def _has_or_gets(self, seq: EngineSequence) -> bool:
        """Whether the next token has a place of its own: if not, and there is a block, a new one, or a copy
        of what other samples share."""
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
        self.copies.append((shared, new[0]))  # its reference to the source lasts until the copy is done
        seq.replace_block(index, new[0])
        return True

    def _preempt(self, seq: EngineSequence) -> None:
        self._pool.unref(seq.drop_blocks())
        self._sequences.preempt(seq)
        self._counters.preemptions += 1

    def _give_blocks(self, seq: EngineSequence, claimed: int) -> bool:
        """All blocks or none: cached ones for as much of its beginning as is here, new ones for the rest,
        leaving what is claimed and one for each sequence that may soon need it."""
        block_size_tokens = self._config.block_size_tokens
        cached = self._pool.lookup(islice(seq.hashes, max_cached_blocks(len(seq.token_ids), block_size_tokens)))
        missing = num_blocks_needed(seq, block_size_tokens) - len(cached)
        spare = sum(s.num_slots for s in self._sequences.admitted() if not s.request.prefill_only)
        if missing + spare + claimed > self._pool.num_allocatable - self._pool.num_idle(cached):
            return False
        self._pool.ref(cached)
        new = self._pool.allocate_receiving(missing) if seq.waits_for_pull else self._pool.allocate(missing)
        if new is None:  # enough, but a step in flight may still write to them
            self._pool.unref(cached)
            return False
        self._start(seq, cached, new)
        return True

    def _start(self, seq: EngineSequence, cached: list[int], new: list[int]) -> None:
        is_first = seq.num_cached_tokens is None
        seq.take_blocks(cached, new, self._config.block_size_tokens)
        self._sequences.start(seq)
        if is_first:
            self._counters.cached_tokens += seq.num_computed_tokens
            self.admissions.append(
                AdmittedSequence(
                    seq_id=seq.seq_id,
                    block_table=seq.block_ids,
                    num_cached_blocks=len(cached),
                    receiving_block_ids=tuple(new) if seq.state is SequenceState.RECEIVING else (),
                )
            )
