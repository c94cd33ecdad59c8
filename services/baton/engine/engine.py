"""The engine: sequences and blocks in, step plans out, step results in, tokens out. Integers only, no device;
promises of time are kept by the clock of `pace`."""

from collections.abc import Iterable, Sequence

from baton.core.errors import Code, ConfigError, Failure, Reason
from baton.core.state_machines import SequenceState
from baton.core.step_cost import attended_tokens
from baton.engine.invariants import check_sequences
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling import async_scheduling, slo_slack
from baton.engine.scheduling.allocator import BlockAllocator
from baton.engine.scheduling.batcher import share_budget
from baton.engine.scheduling.queued_prefix import QueuedPrefixEstimate
from baton.engine.scheduling.step_budget import MixedStep, StepTiming
from baton.engine.state.engine_config import EngineConfig as EngineConfig
from baton.engine.state.engine_config import check_possible, no_capacity
from baton.engine.state.outcome import EngineCounters, EngineOutcome, PrefillProgress, SequenceOutput
from baton.engine.state.require import require
from baton.engine.state.sequence import EngineSequence, SequenceRequest, ends_of_text, finish_with
from baton.engine.state.sequence_table import SequenceTable
from baton.engine.state.step import SampledToken, SampleRequest, StepPlan, StepResult, StepSequence


class Engine:
    """Iteration-level batching over one block pool.

    One caller: `plan`, then the step, then `apply` with its result; `add`, `cancel`, `fail` and `received`
    between steps. What a worker must know is collected and handed over by `take_outcome` (which `apply`
    calls).
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        if pool.block_size_tokens != config.block_size_tokens:
            raise ConfigError(
                f"the pool has blocks of {pool.block_size_tokens} tokens, the engine of {config.block_size_tokens}"
            )
        self.config = config
        self.pool = pool
        self.counters = EngineCounters()
        self._sequences = SequenceTable()
        self.coming = QueuedPrefixEstimate(pool)
        self.pace: StepTiming | None = None
        """For whoever knows what steps cost to set; without it a step takes as many tokens as fit."""
        self._room = BlockAllocator(config, pool, self._sequences, self.counters)
        self._next_step_id = 1
        self._progress: list[PrefillProgress] = []
        self._outputs: list[SequenceOutput] = []

    # -- counts -------------------------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self._sequences.is_empty

    @property
    def waiting_seqs(self) -> int:
        """Sequences that have no blocks (yet, or any more)."""
        return len(self._sequences.queue)

    @property
    def running_seqs(self) -> int:
        """Sequences that have their blocks, those that still land included."""
        return len(self._sequences.running) + len(self._sequences.receiving)

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens that the device is expected to compute still before their sequences give a next token."""
        return sum(behind for behind, _ in self._prefills())

    @property
    def waiting_prefill_attended_tokens(self) -> int:
        """(query, context) pairs of these tokens, `core.step_cost.attended_tokens`."""
        return sum(attended_tokens(behind, before) for behind, before in self._prefills())

    def _prefills(self) -> Iterable[tuple[int, int]]:
        """(tokens to compute, tokens before them)"""
        for seq in self._sequences.prefills():
            before = seq.num_computed_tokens
            if seq.state is SequenceState.WAITING:
                before = self.coming.shared_tokens(seq.seq_id)
            yield len(seq.token_ids) - before, before

    @property
    def running_context_tokens(self) -> int:
        """KV entries that the running and receiving sequences hold or will hold once landed."""
        receiving = sum(len(seq.token_ids) for seq in self._sequences.receiving.values())
        return receiving + sum(seq.num_computed_tokens for seq in self._sequences.running.values())

    # -- between steps ------------------------------------------------------------------------------------------------------------------

    def check_request(self, request: SequenceRequest, *, num_more_waiting: int = 0) -> None:
        """Raises Refused for what can never run here, or if the queue (with `num_more_waiting` about to join
        it) is full; ValueError for a `seq_id` that lives here already."""
        if self._sequences.of_request(request.seq_id):
            raise ValueError(f"sequence {request.seq_id} exists already")
        check_possible(request, self.config, self.pool.num_blocks)
        num_waiting = (
            sum(seq.state is SequenceState.WAITING for seq in self._sequences.queue.values()) + num_more_waiting
        )
        if num_waiting >= self.config.max_waiting_seqs:
            raise no_capacity(Reason.QUEUE_FULL, f"{num_waiting} sequences wait here already; try again later")

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence. Raises as `check_request`."""
        self.check_request(request)
        self.coming.add(request)
        self._sequences.add(request)

    def cancel(self, seq_id: int, sample_indices: Sequence[int] = ()) -> None:
        """End these samples (none named: all) without another output. Idempotent; unknown ids are ignored.
        Blocks that a pull is receiving in stay out of use until the pull has dropped, landed or quarantined
        them."""
        for seq in self._sequences.of_request(seq_id):
            left = tuple(i for i in seq.sample_indices if sample_indices and i not in sample_indices)
            if left:
                seq.sample_indices = left
            else:
                self._end(seq, SequenceState.CANCELLED)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """End all samples that are left, each with this failure as its last output. Unknown ids are
        ignored."""
        for seq in self._sequences.of_request(seq_id):
            for sample_index in seq.sample_indices:
                self._outputs.append(
                    SequenceOutput(
                        seq_id=seq_id,
                        sample_index=sample_index,
                        output_index=seq.num_output_tokens,
                        failure=failure,
                        num_cached_tokens=seq.num_cached_tokens or 0,
                    )
                )
            self._end(seq, SequenceState.FAILED)

    def received(self, seq_id: int, first_tokens: Sequence[SampledToken]) -> None:
        """All KV of a LANDING sequence is here and proven, and its owner has sampled these tokens. Ignored
        for a sequence that is not (any more) receiving. One that is, but whose blocks are not all here with
        its own content, or whose tokens are not, fails."""
        seq = next((s for s in self._sequences.of_request(seq_id) if s.state is SequenceState.RECEIVING), None)
        if seq is None:
            return
        num_wrong = sum(not self.pool.is_readable(b) for b in seq.block_table)
        num_wrong += sum(
            self.pool.hash_of(b) != its for b, its in zip(seq.block_table, seq.request.block_hashes, strict=False)
        )
        if num_wrong or not set(seq.sample_indices) <= {token.sample_index for token in first_tokens}:
            self.fail(
                seq_id,
                _internal(
                    f"the pull ended with {num_wrong} blocks not landed as asked and {len(first_tokens)} first tokens"
                ),
            )
            return
        seq.num_computed_tokens = len(seq.token_ids)
        seq.num_hashed_blocks = seq.num_computed_tokens // self.config.block_size_tokens
        self._take_tokens(seq, first_tokens)

    # -- a step -------------------------------------------------------------------------------------------------------------------------

    @property
    def step_budget_tokens(self) -> int:
        """Of the next step: `max_num_batched_tokens`, or less where sequences decode that would wait too long
        for it."""
        most = self.config.max_num_batched_tokens
        decoding = self._decoding()
        if (beside := self._step_beside(decoding)) is None:
            return most
        begun = (seq.num_computed_tokens for seq in self._sequences.running.values() if seq.num_tokens_behind > 1)
        return len(decoding) + beside.most_tokens(
            self._slo_step_s(decoding, beside),
            max(begun, default=0),
            at_most=most - len(decoding),
            at_least=self.config.block_size_tokens,
        )

    @property
    def slo_step_s(self) -> float:
        """The next step may take so long, for the promises to those that decode; 0 where they allow nothing
        (`promises.limit_s`)."""
        decoding = self._decoding()
        beside = self._step_beside(decoding)
        return 0.0 if beside is None else self._slo_step_s(decoding, beside)

    def _slo_step_s(self, decoding: Sequence[EngineSequence], beside: MixedStep) -> float:
        assert self.pace is not None
        return slo_slack.limit_s(
            decoding,
            self.pace.now_s(),
            beside.decode_s,
            later_s=beside.least_s,
            mean_output_tokens=self.counters.mean_output_tokens,
            max_model_len=self.config.max_model_len,
        )

    def _step_beside(self, decoding: Sequence[EngineSequence]) -> MixedStep | None:
        """The next step, where any decode in it and what steps take is known."""
        if self.pace is None or not decoding or (costs := self.pace.costs()) is None:
            return None
        return MixedStep.of(costs, [seq.num_computed_tokens for seq in decoding], tuple(self._prefills()))

    def _decoding(self) -> list[EngineSequence]:
        """Those that the next step carries by one token."""
        return [seq for seq in self._sequences.running.values() if seq.num_tokens_behind == 1]

    def plan(self) -> StepPlan:
        """The next step, perhaps empty. Admits and preempts; admissions are in the next `take_outcome`,
        before the step need run."""
        self._room.give_to_decode()
        has_prompts = next(iter(self._sequences.prefills()), None) is not None
        budget = self.step_budget_tokens if has_prompts else self.config.max_num_batched_tokens
        shares = share_budget(self._sequences.running.values(), budget, self.config.max_num_batched_tokens)
        shares += self._room.admit(budget - sum(n for _, n in shares))
        plan = StepPlan(
            step_id=self._next_step_id,
            sequences=tuple(self._step_sequence(seq, num_scheduled_tokens) for seq, num_scheduled_tokens in shares),
            block_copies=tuple(self._room.copies),
        )
        if not plan.is_empty:
            self._next_step_id += 1
            self.pool.step_launched()
        return plan

    def plan_ahead(self, plan: StepPlan) -> StepPlan:
        """The step after `plan`, which runs now and has no result yet; empty where only that result can tell.
        It is launched like any other, after which `apply` comes for `plan` and then for it; or it is
        `withdrawn`, before it has begun or after it has failed."""
        after = StepPlan(
            step_id=self._next_step_id,
            sequences=tuple(
                self._step_ahead(seq)
                for seq in async_scheduling.plan_next_decode(plan, self._sequences, self.pool, self.config)
            ),
            follows=plan.step_id,
        )
        if not after.is_empty:
            self._next_step_id += 1
            self.pool.step_launched()
        return after

    def withdrawn(self) -> None:
        """The step that was planned ahead has no result and will have none."""
        self.pool.step_withdrawn()

    def known(self, plan: StepPlan) -> StepPlan:
        """`plan`, the step in flight, with the tokens that were not known when it was made, without the
        sequences that have ended since."""
        if plan.follows is None:
            return plan
        seqs = [seq for part in plan.sequences if (seq := self._sequences.running.get(part.seq_id)) is not None]
        return StepPlan(step_id=plan.step_id, sequences=tuple(self._step_sequence(seq, 1) for seq in seqs))

    def request_of(self, key: int) -> int:
        """Whose sequence that is which the present plan calls `key`: the `seq_id` that it was added with,
        shared by all samples."""
        return self._sequences.running[key].seq_id

    def apply(self, plan: StepPlan, result: StepResult) -> EngineOutcome:
        """What the step has brought. Sequences that ended while it ran are passed over."""
        if result.step_id != plan.step_id:
            raise ValueError(f"result of step {result.step_id} for plan {plan.step_id}")
        self.pool.step_finished()
        self._room.copies_done()
        self.counters.steps += 1
        self.counters.scheduled_tokens += plan.num_tokens
        for part in plan.sequences:
            seq = self._sequences.running.get(part.seq_id)
            if seq is None:
                continue
            tokens = result.samples.get(part.seq_id, ())
            failure = result.failures.get(part.seq_id)
            if (
                failure is None
                and part.sample is not None
                and not set(seq.sample_indices) <= {token.sample_index for token in tokens}
            ):
                failure = _internal(
                    f"step {plan.step_id} answered {len(tokens)} tokens for samples {seq.sample_indices}"
                )
            if failure is not None:
                self.pool.unpublish([b for b in seq.block_table[seq.num_cached_blocks :] if self.pool.num_refs(b) == 1])
                self.fail(seq.seq_id, failure)
                continue
            self._advance(seq, part.num_scheduled_tokens)
            if part.sample is not None:
                self._take_tokens(seq, tokens)
        return self.take_outcome()

    def take_outcome(self) -> EngineOutcome:
        """What has happened since the last call."""
        outcome = EngineOutcome(
            admissions=tuple(self._room.admissions), progress=tuple(self._progress), outputs=tuple(self._outputs)
        )
        self._room.admissions.clear()
        self._progress.clear()
        self._outputs.clear()
        return outcome

    # -- planning -----------------------------------------------------------------------------------------------------------------------

    def _step_sequence(self, seq: EngineSequence, num_scheduled_tokens: int) -> StepSequence:
        begin = seq.num_computed_tokens
        return StepSequence(
            seq_id=seq.key,
            token_ids=seq.token_ids[begin : begin + num_scheduled_tokens],
            position_begin=begin,
            kv_begin=begin,
            block_table=seq.table,
            sample=self._sample_request(seq) if num_scheduled_tokens == seq.num_tokens_behind else None,
        )

    def _step_ahead(self, seq: EngineSequence) -> StepSequence:
        """Of the step after the one that is about to append a token."""
        begin = len(seq.token_ids)
        return StepSequence(
            seq_id=seq.key,
            token_ids=async_scheduling.UNKNOWN,
            position_begin=begin,
            kv_begin=begin,
            block_table=seq.table,
            sample=self._sample_request(seq, num_more_tokens=1),
        )

    def _sample_request(self, seq: EngineSequence, num_more_tokens: int = 0) -> SampleRequest:
        """Once it has so many tokens more."""
        sampling = seq.request.sampling
        is_too_early_to_end = seq.num_output_tokens + num_more_tokens < sampling.min_tokens
        return SampleRequest(
            sampling=sampling,
            sample_indices=seq.sample_indices,
            position=len(seq.token_ids) + num_more_tokens,
            history=seq.token_ids,
            num_prompt_tokens=seq.request.num_prompt_tokens,
            banned_token_ids=ends_of_text(sampling, self.config.eos_token_ids) if is_too_early_to_end else (),
        )

    # -- applying -----------------------------------------------------------------------------------------------------------------------

    def _advance(self, seq: EngineSequence, num_scheduled_tokens: int) -> None:
        """KV up to here is written; blocks that are full now are final, and found by others from now on."""
        seq.num_computed_tokens += num_scheduled_tokens
        block_size_tokens = self.config.block_size_tokens
        for index in range(seq.num_hashed_blocks, seq.num_computed_tokens // block_size_tokens):
            self.pool.set_hash(seq.block_table[index], seq.hash_of_block(index, block_size_tokens))
            seq.num_hashed_blocks = index + 1
        if seq.request.prefill_only:
            self._progress.append(PrefillProgress(seq_id=seq.seq_id, num_computed_tokens=seq.num_computed_tokens))

    def _take_tokens(self, seq: EngineSequence, tokens: Sequence[SampledToken]) -> None:
        """One new token for each sample. Each that has not ended goes on, all but the first as new sequences
        over the same blocks."""
        by_sample = {token.sample_index: token for token in tokens}
        going_on: list[SampledToken] = []
        for sample_index in seq.sample_indices:
            token = by_sample[sample_index]
            finish = finish_with(
                token.token_id,
                seq.request,
                num_tokens=len(seq.token_ids),
                eos_token_ids=self.config.eos_token_ids,
                max_model_len=self.config.max_model_len,
            )
            self._outputs.append(
                SequenceOutput(
                    seq_id=seq.seq_id,
                    sample_index=sample_index,
                    output_index=seq.num_output_tokens,
                    tokens=(token,),
                    finish=finish,
                    num_cached_tokens=seq.num_cached_tokens or 0,
                )
            )
            self.counters.sampled_tokens += 1
            if finish is not None and not seq.request.prefill_only:
                self.counters.sample_ended(seq.num_output_tokens + 1)
            if finish is None and not seq.request.prefill_only:
                going_on.append(token)
        if not going_on:
            self._end(seq, SequenceState.FINISHED)
            return
        if self.pace is not None:
            slo_slack.token_came(seq, self.pace.now_s())
        if seq.state is SequenceState.RECEIVING:
            self._sequences.received(seq)
        for token in going_on[1:]:
            child = self._sequences.fork(seq, token.sample_index)
            self.pool.ref(child.block_table)
            child.append(token.token_id)
        seq.sample_indices = (going_on[0].sample_index,)
        seq.append(going_on[0].token_id)

    def _end(self, seq: EngineSequence, state: SequenceState) -> None:
        """Out of everything; its references go back at once."""
        self._sequences.end(seq, state)
        if not self._sequences.of_request(seq.seq_id):
            self.coming.remove(seq.seq_id)
        self.pool.unref(seq.drop_blocks())

    # -- invariants ---------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError naming the first invariant that does not hold, the pool's included. For
        tests: reads everything."""
        self.pool.check()
        slots = sum(seq.num_slots for seq in self._sequences.admitted())
        require(slots <= self.config.max_num_seqs, f"{slots} sequences run, {self.config.max_num_seqs} may")
        check_sequences(self._sequences, self.pool)


def _internal(message: str) -> Failure:
    return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)
