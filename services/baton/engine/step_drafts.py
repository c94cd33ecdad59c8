"""Chooses the draft tokens of each step, and plans the rounds of a draft model. Used by `Engine`."""

from collections.abc import Callable, Mapping, Sequence

from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.scheduling.allocator import BlockAllocator
from baton.engine.scheduling.batcher import MAX_PROMPT_ROWS, prompt_rows_left
from baton.engine.scheduling.step_budget import DraftSpeedup
from baton.engine.speculation.draft_model import DraftJob, DraftModel
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.outcome import EngineCounters
from baton.engine.state.sequence import EngineSequence
from baton.engine.state.sequence_table import SequenceTable
from baton.engine.state.step import StepPlan

Drafts = Mapping[int, tuple[int, ...]]
"""Draft tokens by `EngineSequence.key`."""
NO_DRAFT_TOKENS: Drafts = {}


class StepDrafts:
    """The drafts of one engine's steps, within the limits of a step and of the block pool."""

    def __init__(
        self,
        speculation: Speculation,
        config: EngineConfig,
        sequences: SequenceTable,
        allocator: BlockAllocator,
        counters: EngineCounters,
        step_costs: Callable[[], StepCostModel | None],
    ) -> None:
        self._speculation = speculation
        self._config = config
        self._sequences = sequences
        self._allocator = allocator
        self._counters = counters
        self._step_costs = step_costs
        self._wants_round = False  # the last round that was planned had jobs

    @property
    def model(self) -> DraftModel | None:
        """The draft model, if there is one."""
        return self._speculation.model

    def allocate(self, scheduled: Sequence[tuple[EngineSequence, int]]) -> Drafts:
        """Return the draft tokens of each sequence in a step, after allocating their blocks.

        scheduled: (sequence, num_tokens) of the step without drafts.
        """
        chosen = self._choose(scheduled)
        if not chosen:
            return NO_DRAFT_TOKENS
        seqs = [seq for seq, _ in scheduled if seq.key in chosen]
        lengths = self._allocator.allocate_for_drafts([(seq, len(chosen[seq.key])) for seq in seqs])
        return {seq.key: chosen[seq.key][:length] for seq, length in zip(seqs, lengths, strict=True)}

    def gain_more_than_planning_ahead(self, plan: StepPlan) -> bool:
        """Return True if the step after `plan` should not be planned ahead, because drafts gain more.

        A step that is planned ahead has no drafts, because its tokens are not known yet.
        """
        if plan.follows is not None:  # nothing was chosen for `plan` itself: find out what it could have saved
            running = (self._sequences.running.get(part.seq_id) for part in plan.sequences)
            self._choose([(seq, 1) for seq in running if seq is not None])
            self.plan_round()
        return self._wants_round or self._speculation.saves_more_than_gap

    def plan_round(self) -> tuple[DraftJob, ...]:
        """Return what the draft model should compute before the next step is planned; empty if nothing pays.

        While prompts wait or are computed it has no jobs: they would wait for it.
        """
        jobs = self._round_jobs()
        self._wants_round = bool(jobs)
        return jobs

    def _round_jobs(self) -> tuple[DraftJob, ...]:
        if self._speculation.model is None or next(iter(self._sequences.prefills()), None) is not None:
            return ()
        decoding = [
            seq
            for seq in self._sequences.running.values()
            if seq.num_uncomputed_tokens == 1 and not seq.request.prefill_only
        ]
        if not decoding:
            return ()
        return self._speculation.plan_round(
            decoding,
            StepWork.of((), [seq.num_computed_tokens for seq in decoding]),
            self._step_costs(),
            max_drafts=min(self._config.max_num_batched_tokens - len(decoding), MAX_PROMPT_ROWS),
            max_model_len=self._config.max_model_len,
            mean_output_tokens=self._counters.mean_output_tokens,
        )

    def offer_round(self, drafts: Drafts, round_s: float) -> None:
        """Take the drafts of a round of the draft model, which took `round_s` seconds."""
        self._speculation.offer_round(drafts, round_s)

    def tokens_per_step(self, speedup: DraftSpeedup, seq: EngineSequence) -> float:
        """Return the tokens that a sequence gets in the time of a step without drafts, by its recent steps.

        speedup: of all sequences, which stands for its own while little is known of it.
        """
        usual = speedup.tokens_per_step * speedup.step_length
        return self._speculation.tokens_per_step(seq.key, usual) / speedup.step_length

    def observe_gap(self, gap_s: float) -> None:
        """Record that the device waited `gap_s` seconds for a step that was not planned ahead."""
        self._speculation.observe_gap(gap_s)

    def check(self) -> None:
        """Check that nothing is kept of sequences that have ended. Raises AssertionError. For tests."""
        self._speculation.check(seq.key for seq in self._sequences.all_by_request())

    def _choose(self, scheduled: Sequence[tuple[EngineSequence, int]]) -> Drafts:
        """Return the draft tokens that a step with these (sequence, num_tokens) should verify."""
        decoding: list[EngineSequence] = []
        chunks: list[tuple[int, int]] = []
        num_tokens = 0
        for seq, count in scheduled:
            num_tokens += count
            if seq.num_uncomputed_tokens > 1:
                chunks.append((count, seq.num_computed_tokens))
            elif not seq.request.prefill_only:
                decoding.append(seq)
        if not decoding:
            return NO_DRAFT_TOKENS
        return self._speculation.choose(
            decoding,
            StepWork.of(chunks, [seq.num_computed_tokens for seq in decoding]),
            self._step_costs(),
            max_drafts=min(self._config.max_num_batched_tokens - num_tokens, prompt_rows_left(scheduled)),
            max_model_len=self._config.max_model_len,
        )
