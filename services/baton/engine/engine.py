"""The engine: turns sequences and free blocks into step plans, and step results into tokens.

It handles integers only. The device is behind the `Executor` Protocol, and the loop (`engine.loop`) runs the
steps.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from baton.core.errors import QUEUE_FULL_RETRY_S, ConfigError, Failure, Reason
from baton.core.kv.kv_tables import entries_from, hashes_of_entries
from baton.core.state_machines import SequenceState
from baton.core.step_cost import StepCostModel, attended_tokens
from baton.core.step_targets import LatencyTargets
from baton.engine.invariants import check_sequences
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling import async_scheduling, step_budget
from baton.engine.scheduling.allocator import BlockAllocator
from baton.engine.scheduling.batcher import prompt_rows_left, split_budget
from baton.engine.scheduling.queued_prefix import QueuedPrefixEstimate
from baton.engine.scheduling.step_budget import DraftSpeedup, PrefillPart, StepBudget
from baton.engine.scheduling.step_parts import step_part, step_part_ahead
from baton.engine.sequence_updates import SequenceUpdates, internal_failure
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.engine_config import EngineConfig as EngineConfig
from baton.engine.state.engine_config import check_possible, no_capacity
from baton.engine.state.outcome import EngineCounters, EngineOutcome
from baton.engine.state.require import require
from baton.engine.state.sequence import EngineSequence, ReloadWait, SequenceRequest
from baton.engine.state.sequence_table import SequenceTable
from baton.engine.state.step import SampledToken, StepPlan, StepResult
from baton.engine.step_drafts import NO_DRAFT_TOKENS, StepDrafts


def unknown_costs() -> StepCostModel | None:
    """Return None: the costs of an engine whose steps were not measured."""
    return None


class Engine:
    """Iteration-level batching (continuous batching) over one block pool.

    A single caller repeats `plan`, runs the step, and calls `apply` with the result. Between steps it may
    call `add`, `cancel`, `fail` and `received`. Everything that the worker must know is collected and
    returned by `take_outcome`, and by `apply`, which calls it.

    drafts: chooses the draft tokens of steps; None if there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        *,
        clock: Callable[[], float],
        step_costs: Callable[[], StepCostModel | None] = unknown_costs,
        speculation: Speculation | None = None,
        draft_speedup: Callable[[], DraftSpeedup] = DraftSpeedup,
        reloads_preempted: bool = False,
    ) -> None:
        """Create an engine without sequences. Raises ConfigError if block sizes of pool and config differ.

        clock: returns the time in seconds by which latency targets are kept.
        step_costs: returns what a step costs now, or None. Without costs a step takes as many tokens as
            `max_num_batched_tokens` allows.
        speculation: drafts for decoding sequences, which steps verify. None drafts nothing.
        draft_speedup: returns what drafts give the sequences of this engine now. A sequence is taken to be
            as fast until its own steps are known.
        reloads_preempted: the caller can reload blocks from a slower tier. Outcomes then name preempted
            sequences, and each waits for `returned` before it is admitted again.
        """
        if pool.block_size_tokens != config.block_size_tokens:
            raise ConfigError(
                f"the pool has blocks of {pool.block_size_tokens} tokens, the engine of {config.block_size_tokens}; "
                "give both the same block size"
            )
        self.config = config
        self.pool = pool
        self.counters = EngineCounters()
        self.queued_prefix = QueuedPrefixEstimate(pool)
        self._step_costs = step_costs
        self._draft_speedup = draft_speedup
        self._clock = clock
        self._sequences = SequenceTable()
        self._allocator = BlockAllocator(
            config, pool, self._sequences, self.counters, reloads_preempted=reloads_preempted
        )
        self._next_step_id = 1
        self._deferred: frozenset[int] = frozenset()  # by the last step whose result was applied
        self.drafts = (
            None
            if speculation is None
            else StepDrafts(speculation, config, self._sequences, self._allocator, self.counters, step_costs)
        )
        self._updates = SequenceUpdates(
            config, pool, self._sequences, self._allocator, self.counters, self.queued_prefix, speculation, clock
        )

    # -- counts --------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if no sequence is in the engine."""
        return self._sequences.is_empty

    @property
    def waiting_seqs(self) -> int:
        """Number of sequences without blocks: never admitted yet, or preempted."""
        return len(self._sequences.queue)

    @property
    def running_seqs(self) -> int:
        """Number of sequences that have their blocks, including those whose KV is still being received."""
        return len(self._sequences.running) + len(self._sequences.receiving)

    @property
    def waiting_prefill_tokens(self) -> int:
        """Prompt tokens that are expected to be computed here, over all running and queued sequences."""
        return sum(num_tokens for num_tokens, _ in self._prefills())

    @property
    def waiting_prefill_attended_tokens(self) -> int:
        """Attention work of `waiting_prefill_tokens`, in (query, context) pairs
        (`core.step_cost.attended_tokens`)."""
        return sum(attended_tokens(num_tokens, before) for num_tokens, before in self._prefills())

    @property
    def num_reserved_blocks(self) -> int:
        """Allocatable blocks that are kept for prompts whose windowed blocks are given chunk by chunk."""
        return self._allocator.num_reserved

    def _prefills(self) -> Iterable[PrefillPart]:
        return self.queued_prefix.remaining(self._sequences.prefills())

    @property
    def running_context_tokens(self) -> int:
        """KV entries of all running sequences, and those that receiving sequences will have."""
        receiving = sum(len(seq.token_ids) for seq in self._sequences.receiving.values())
        return receiving + sum(seq.num_computed_tokens for seq in self._sequences.running.values())

    # -- between steps -------------------------------------------------------------------------------------------------

    def check_request(self, request: SequenceRequest, *, num_more_waiting: int = 0) -> None:
        """Check that `request` can be added.

        num_more_waiting: sequences that were accepted by the caller but not added yet.
        Raises Refused if the request can never run here, or if the queue is full. Raises ValueError if its
        `seq_id` is already in use.
        """
        if self._sequences.of_request(request.seq_id):
            raise ValueError(f"seq_id {request.seq_id} is already in use; use a new one")
        check_possible(request, self.config, self.pool.num_blocks, self.pool.windows)
        num_waiting = (
            sum(seq.state is SequenceState.WAITING for seq in self._sequences.queue.values()) + num_more_waiting
        )
        if num_waiting >= self.config.max_waiting_seqs:
            message = f"{num_waiting} sequences are queued, the limit is {self.config.max_waiting_seqs}; retry later"
            raise no_capacity(Reason.QUEUE_FULL, message, retry_after_s=QUEUE_FULL_RETRY_S)

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence. Raises as `check_request` does."""
        self.check_request(request)
        self.queued_prefix.add(request)
        self._sequences.add(request, arrived_s=self._clock() - request.waited_s, targets=self._targets_of(request))

    def _targets_of(self, request: SequenceRequest) -> LatencyTargets | None:
        costs = self._step_costs()
        if costs is None:
            return None
        return LatencyTargets.of(
            costs,
            self.config.targets,
            num_tokens=len(request.token_ids),
            chunk_tokens=self.config.max_num_batched_tokens,
            ttft_slo_s=request.ttft_slo_s,
            tpot_slo_s=request.tpot_slo_s,
        )

    def cancel(self, seq_id: int, sample_indices: Sequence[int] = ()) -> None:
        """End the given samples (all if none is given) without further output.

        Idempotent. Unknown ids are ignored. Blocks that a pull is receiving into stay reserved until the pull
        has dropped, filled or quarantined them.
        """
        for seq in self._sequences.of_request(seq_id):
            remaining = tuple(i for i in seq.sample_indices if sample_indices and i not in sample_indices)
            if remaining:
                seq.sample_indices = remaining
            else:
                self._updates.end(seq, SequenceState.CANCELLED)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """End all remaining samples of a request with `failure` as their last output.

        Unknown ids are ignored.
        """
        self._updates.fail(seq_id, failure)

    def received(self, seq_id: int, first_tokens: Sequence[SampledToken]) -> None:
        """Start a sequence whose pulled KV has arrived completely and was validated.

        first_tokens: the tokens that the owner of the KV has sampled, one per sample.
        Ignored if the sequence is not (or no longer) receiving. The sequence fails if one of its blocks is
        missing or has other content, or if a first token is missing.
        """
        seq = next((s for s in self._sequences.of_request(seq_id) if s.state is SequenceState.RECEIVING), None)
        if seq is None:
            return
        held = seq.held_blocks
        num_wrong = sum(not self.pool.is_readable(b) for b in held)
        hashes = hashes_of_entries(
            seq.request.block_hashes, entries_from(seq.first_blocks, seq.num_blocks), seq.num_tables
        )
        num_wrong += sum(
            self.pool.hash_of(block_id) != block_hash for block_id, block_hash in zip(held, hashes, strict=False)
        )
        if num_wrong or not set(seq.sample_indices) <= {token.sample_index for token in first_tokens}:
            message = f"the pull ended with {num_wrong} missing or wrong blocks and {len(first_tokens)} first tokens"
            self.fail(seq_id, internal_failure(message))
            return
        seq.num_computed_tokens = len(seq.token_ids)
        seq.num_hashed_blocks = seq.num_computed_tokens // self.config.block_size_tokens
        self._updates.append_samples(seq, first_tokens)

    def returned(self, key: int) -> None:
        """Admit a preempted sequence again (`ReturningSequence`): what could be reloaded is in the cache now.

        Ignored if the sequence has ended.
        """
        seq = self._sequences.queue.get(key)
        if seq is not None and seq.reload is ReloadWait.RUNNING:
            seq.reload = ReloadWait.ENDED

    # -- a step --------------------------------------------------------------------------------------------------------

    def next_step_budget(self) -> StepBudget:
        """Return the budget that the next step would have with the current sequences."""
        prompts = list(self._sequences.prefills())
        return step_budget.plan(
            self._sequences.running.values(),
            list(zip(prompts, self.queued_prefix.remaining(prompts), strict=True)),
            self._step_costs(),
            self._clock(),
            config=self.config,
            mean_output_tokens=self.counters.mean_output_tokens,
            tokens_per_step=self._tokens_per_step(self._draft_speedup()),
        )

    def _tokens_per_step(self, speedup: DraftSpeedup) -> Callable[[EngineSequence], float]:
        if self.drafts is None:
            return lambda seq: speedup.tokens_per_step
        return partial(self.drafts.tokens_per_step, speedup)

    def plan(self) -> StepPlan:
        """Plan the next step; the plan is empty if there is nothing to compute.

        Admits queued sequences and preempts running ones. Admissions are in the next `take_outcome`, which
        may be called before the step runs.
        """
        self._allocator.allocate_for_decode()
        budget = self.config.max_num_batched_tokens
        if next(iter(self._sequences.prefills()), None) is not None:  # decodes alone never fill a step
            budget = self.next_step_budget().num_tokens
        scheduled = [
            (seq, covered)
            for seq, n in split_budget(self._sequences.running.values(), budget, self.config.max_num_batched_tokens)
            if (covered := self._allocator.cover(seq, n))
        ]
        scheduled += self._allocator.admit(budget - sum(n for _, n in scheduled), prompt_rows_left(scheduled))
        drafts = NO_DRAFT_TOKENS if self.drafts is None else self.drafts.allocate(scheduled)
        eos = self.config.eos_token_ids
        plan = StepPlan(
            step_id=self._next_step_id,
            sequences=tuple(step_part(seq, n, eos, drafts.get(seq.key, ())) for seq, n in scheduled),
            block_copies=tuple(self._allocator.copies),
        )
        if not plan.is_empty:
            self._next_step_id += 1
            self.pool.fence.step_launched()
        return plan

    def plan_ahead(self, plan: StepPlan) -> StepPlan:
        """Plan the step after `plan` while `plan` is running; empty if that step depends on its result.

        The new step is launched like any other. Afterwards call `apply` for `plan` and then for the new step,
        or `step_withdrawn` if the new step was withdrawn or cannot run because `plan` has failed.
        """
        if self.drafts is not None and self.drafts.gain_more_than_planning_ahead(plan):
            return StepPlan(step_id=self._next_step_id, sequences=(), follows=plan.step_id)
        following = StepPlan(
            step_id=self._next_step_id,
            sequences=tuple(
                step_part_ahead(seq, self.config.eos_token_ids)
                for seq in async_scheduling.plan_next_decode(
                    plan, self._sequences, self.pool, self.config, self._deferred
                )
            ),
            follows=plan.step_id,
        )
        if not following.is_empty:
            self._next_step_id += 1
            self.pool.fence.step_launched()
        return following

    def step_withdrawn(self) -> None:
        """Record that the step that was planned ahead will have no result."""
        self.pool.fence.step_withdrawn()

    def without_placeholders(self, plan: StepPlan) -> StepPlan:
        """Return `plan`, which is in flight, with its placeholder tokens filled in and ended sequences
        removed.

        Placeholders stand for tokens that were unknown when the step was planned ahead.
        """
        if plan.follows is None:
            return plan
        seqs = [seq for part in plan.sequences if (seq := self._sequences.running.get(part.seq_id)) is not None]
        return StepPlan(
            step_id=plan.step_id, sequences=tuple(step_part(seq, 1, self.config.eos_token_ids) for seq in seqs)
        )

    def seq_id_of(self, key: int) -> int:
        """Return the `seq_id` of the request to which the running sequence `key` belongs.

        All samples share it.
        """
        return self._sequences.running[key].seq_id

    def apply(self, plan: StepPlan, result: StepResult) -> EngineOutcome:
        """Apply the result of a step and return what has happened. Sequences that ended meanwhile are
        skipped.

        Raises ValueError if `result` is not of `plan`.
        """
        if result.step_id != plan.step_id:
            raise ValueError(f"result of step {result.step_id} for plan {plan.step_id}")
        self.pool.fence.step_finished()
        self._allocator.release_copies()
        self.counters.steps += 1
        self._deferred = result.deferred
        for part in plan.sequences:
            self._updates.apply(part, result)
        return self.take_outcome()

    def take_outcome(self) -> EngineOutcome:
        """Return everything that has happened since the last call."""
        outcome = EngineOutcome(
            admissions=tuple(self._allocator.admissions),
            growths=tuple(self._allocator.growths),
            preemptions=tuple(self._allocator.preemptions),
            returns=tuple(self._allocator.returns),
            progress=tuple(self._updates.progress),
            outputs=tuple(self._updates.outputs),
        )
        self._allocator.admissions.clear()
        self._allocator.growths.clear()
        self._allocator.preemptions.clear()
        self._allocator.returns.clear()
        self._updates.progress.clear()
        self._updates.outputs.clear()
        return outcome

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check all invariants of the engine and its pool. Expensive: for tests and audits only.

        Raises AssertionError naming the first invariant that does not hold.
        """
        self.pool.check()
        slots = sum(seq.num_slots for seq in self._sequences.admitted())
        require(slots <= self.config.max_num_seqs, f"{slots} sequences run, the limit is {self.config.max_num_seqs}")
        check_sequences(self._sequences, self.pool)
        if self.drafts is not None:
            self.drafts.check()
