"""Applies what a step has computed and drawn to sequences, and collects the outputs for the worker."""

from collections.abc import Callable, Sequence

from baton.core.errors import Code, Failure, Reason
from baton.core.kv.kv_tables import NO_BLOCK, hashes_of_entries
from baton.core.request import FinishReason, PromptLogprobs
from baton.core.state_machines import SequenceState
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling import step_budget
from baton.engine.scheduling.allocator import BlockAllocator
from baton.engine.scheduling.queued_prefix import QueuedPrefixEstimate
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.outcome import EngineCounters, PrefillProgress, SequenceOutput
from baton.engine.state.sequence import EngineSequence, finish_reason
from baton.engine.state.sequence_table import SequenceTable
from baton.engine.state.step import SampledToken, StepResult, StepSequence


class SequenceUpdates:
    """Changes sequences by final tokens and computed KV only. Used by `Engine`.

    progress, outputs: what has happened since the engine last took them.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        sequences: SequenceTable,
        allocator: BlockAllocator,
        counters: EngineCounters,
        queued_prefix: QueuedPrefixEstimate,
        speculation: Speculation | None,
        clock: Callable[[], float],
    ) -> None:
        """speculation: gets all new tokens; None drafts nothing."""
        self.progress: list[PrefillProgress] = []
        self.outputs: list[SequenceOutput] = []
        self._config = config
        self._pool = pool
        self._sequences = sequences
        self._allocator = allocator
        self._counters = counters
        self._queued_prefix = queued_prefix
        self._speculation = speculation
        self._clock = clock

    def apply(self, part: StepSequence, result: StepResult) -> None:
        """Apply the result of a step for one of its sequences, unless that has ended."""
        seq = self._sequences.running.get(part.seq_id)
        if seq is None:
            return
        tokens = result.samples.get(part.seq_id, ())
        failure = result.failures.get(part.seq_id)
        if (prompt_logprobs := result.prompt_logprobs.get(part.seq_id)) is not None:
            seq.prompt_logprobs.append(prompt_logprobs)
        num_drafts = part.num_drafts
        num_final = part.num_scheduled_tokens - num_drafts
        if failure is None and part.seq_id in result.deferred:
            self.advance(seq, num_final - 1)
            if num_drafts:
                self._allocator.release_unused(seq)
            return
        if failure is None and part.sample is not None:
            failure = _wrong_tokens(seq, part, tokens, result.step_id)
        if failure is not None and num_drafts and self._speculation is not None:
            # A wrong draft may be the cause. The next step has none, and fails if the sequence itself does.
            self._speculation.drop_drafts(seq.key)
            self._allocator.release_unused(seq)
            return
        if failure is not None:
            self._unpublish_own(seq)
            self.fail(seq.seq_id, failure)
            return
        self.advance(seq, num_final)
        if part.sample is None:
            return
        if self._speculation is not None:
            forced = result.forced.get(part.seq_id, ())
            self._speculation.offer_forced(seq.key, len(seq.token_ids) + len(tokens), forced)
        if num_drafts:
            self._append_verified(seq, tokens, num_drafts)
        else:
            self.append_samples(seq, tokens)

    def advance(self, seq: EngineSequence, num_tokens: int) -> None:
        """Count computed tokens, which must be final. Publish the hashes of blocks that became full.

        Blocks that no later token sees are released.
        """
        if not num_tokens:
            return
        seq.num_computed_tokens += num_tokens
        block_size_tokens, num_tables, begin = self._config.block_size_tokens, seq.num_tables, seq.num_hashed_blocks
        for index in range(seq.num_hashed_blocks, seq.num_computed_tokens // block_size_tokens):
            block_hash = seq.hash_of_block(index, block_size_tokens)
            for entry in range(index * num_tables, (index + 1) * num_tables):
                self._pool.set_hash(seq.block_table[entry], block_hash)
            seq.num_hashed_blocks = index + 1
        tenant_root = seq.request.tenant_root
        self._pool.announce(seq.hashes, begin, seq.num_hashed_blocks, is_end=False, tenant_root=tenant_root)
        if self._pool.windows.has_windows:
            self._pool.unref(seq.drop_blocks_before(self._pool.windows.first_blocks(seq.num_computed_tokens)))
        if seq.request.prefill_only:
            self.progress.append(PrefillProgress(seq_id=seq.seq_id, num_computed_tokens=seq.num_computed_tokens))

    def append_samples(self, seq: EngineSequence, tokens: Sequence[SampledToken]) -> None:
        """Append one new token per sample.

        Each unfinished sample but the first forks off as a new sequence.
        """
        by_sample = {token.sample_index: token for token in tokens}
        if seq.first_token_s is None:  # the prompt is there, in part from the cache
            tenant_root = seq.request.tenant_root
            self._pool.announce(seq.hashes, 0, seq.num_hashed_blocks, is_end=True, tenant_root=tenant_root)
        unfinished: list[SampledToken] = []
        for sample_index in seq.sample_indices:
            token = by_sample[sample_index]
            finish = self._finish_reason(seq, token)
            self._output(seq, (token,), seq.num_output_tokens, finish)
            if finish is not None and not seq.request.prefill_only:
                self._counters.sample_ended(seq.num_output_tokens + 1)
            if finish is None and not seq.request.prefill_only:
                unfinished.append(token)
        if not unfinished:
            self.end(seq, SequenceState.FINISHED)
            return
        step_budget.record_token(seq, self._clock())
        if seq.state is SequenceState.RECEIVING:
            self._sequences.received(seq)
        children = [(self._sequences.fork(seq, token.sample_index), token) for token in unfinished[1:]]
        for child, token in children:
            self._pool.ref(child.held_blocks)
            child.append(token.token_id)
            self._observe(child, 1)
        seq.sample_indices = (unfinished[0].sample_index,)
        seq.append(unfinished[0].token_id)
        self._observe(seq, 1)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """End all remaining samples of a request with `failure` as their last output."""
        for seq in self._sequences.of_request(seq_id):
            for sample_index in seq.sample_indices:
                self.outputs.append(
                    SequenceOutput(
                        seq_id=seq_id,
                        sample_index=sample_index,
                        output_index=seq.num_output_tokens,
                        failure=failure,
                        num_cached_tokens=seq.num_cached_tokens or 0,
                    )
                )
            self.end(seq, SequenceState.FAILED)

    def end(self, seq: EngineSequence, state: SequenceState) -> None:
        """Remove `seq` and release its block references."""
        self._sequences.end(seq, state)
        if not self._sequences.of_request(seq.seq_id):
            self._queued_prefix.remove(seq.seq_id)
        if self._speculation is not None:
            self._speculation.forget(seq.key)
        self._pool.announce(seq.hashes, seq.num_hashed_blocks, seq.num_hashed_blocks, is_end=True)
        owner = seq.request.owner
        if owner is not None and owner.has_announced_turn:
            owner.leave(seq.hashes[: seq.num_hashed_blocks], seq.request.tenant_root)
        positions = seq.held_positions() if self._pool.windows.has_windows else None
        self._pool.unref(seq.drop_blocks(), owner, positions)

    def _unpublish_own(self, seq: EngineSequence) -> None:
        """Withdraw the blocks that a failed sequence has computed, but not those that others use.

        Also those that it has freed since, because no layer sees them any more: they are still in the cache,
        or in a slower tier.
        """
        pool, begin = self._pool, seq.num_cached_blocks
        held = [block_id for block_id in seq.held_blocks_from(begin) if pool.num_refs(block_id) == 1]
        windowed = range(begin * seq.num_tables, max(seq.first_blocks) * seq.num_tables)
        entries = [entry for entry in windowed if seq.block_table[entry] == NO_BLOCK]
        hashes = hashes_of_entries(seq.hashes, entries, seq.num_tables)
        freed = [found for each in hashes if (found := pool.find(each)) is not None and not pool.num_refs(found)]
        pool.withdraw_copies(hashes)
        pool.ref(freed)
        pool.unpublish([*held, *freed])
        pool.unref(freed)

    def _append_verified(self, seq: EngineSequence, tokens: Sequence[SampledToken], num_drafts: int) -> None:
        """Append the successive tokens of a sequence with drafts, up to one that ends it.

        The KV of each but the last is computed: they equal the drafts.
        """
        begin, now_s = seq.num_output_tokens, self._clock()
        finish: FinishReason | None = None
        for number, token in enumerate(tokens):
            if number:
                self.advance(seq, 1)
            finish = self._finish_reason(seq, token)
            if finish is not None:
                tokens = tokens[: number + 1]
                break
            step_budget.record_token(seq, now_s)
            seq.append(token.token_id)
        if self._speculation is not None:
            self._counters.drafts_verified(self._speculation.drafter_of(seq.key), num_drafts, len(tokens) - 1)
        self._output(seq, tuple(tokens), begin, finish, num_drafts)
        if finish is not None:
            self._counters.sample_ended(begin + len(tokens))
            self.end(seq, SequenceState.FINISHED)
            return
        self._allocator.release_unused(seq)
        self._observe(seq, len(tokens))

    def _output(
        self,
        seq: EngineSequence,
        tokens: tuple[SampledToken, ...],
        output_index: int,
        finish: FinishReason | None,
        num_drafts: int = 0,
    ) -> None:
        self.outputs.append(
            SequenceOutput(
                seq_id=seq.seq_id,
                sample_index=tokens[0].sample_index,
                output_index=output_index,
                tokens=tokens,
                finish=finish,
                num_cached_tokens=seq.num_cached_tokens or 0,
                prompt_logprobs=PromptLogprobs.joined(seq.prompt_logprobs) if seq.prompt_logprobs else None,
                num_draft_tokens=num_drafts,
                num_preemptions=seq.num_preemptions,
                num_recomputed_tokens=seq.num_recomputed_tokens,
            )
        )
        seq.num_preemptions = seq.num_recomputed_tokens = 0
        seq.prompt_logprobs, seq.has_sent_prompt = [], True

    def _observe(self, seq: EngineSequence, num_new: int) -> None:
        if self._speculation is not None:
            self._speculation.observe(seq, num_new, self._config.eos_token_ids)

    def _finish_reason(self, seq: EngineSequence, token: SampledToken) -> FinishReason | None:
        return finish_reason(
            token.token_id,
            seq.request,
            num_tokens=len(seq.token_ids),
            eos_token_ids=self._config.eos_token_ids,
            max_model_len=self._config.max_model_len,
        )


def internal_failure(message: str) -> Failure:
    """Return the failure of a sequence that a fault of Baton or of the device has ended."""
    return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)


def _wrong_tokens(
    seq: EngineSequence, part: StepSequence, tokens: Sequence[SampledToken], step_id: int
) -> Failure | None:
    """Return a failure if the executor has returned too few tokens for a sequence, or too many."""
    if len(tokens) == 1 and seq.sample_indices == (tokens[0].sample_index,):
        return None
    are_missing = not set(seq.sample_indices) <= {token.sample_index for token in tokens}
    if are_missing or (part.num_drafts and len(tokens) > part.num_drafts + 1):
        message = f"step {step_id} returned {len(tokens)} tokens for samples {seq.sample_indices}"
        return internal_failure(f"{message} and {part.num_drafts} drafts")
    return None
