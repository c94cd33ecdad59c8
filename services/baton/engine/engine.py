"""The engine: sequences and blocks in, step plans out, step results in, tokens out. Integers only, no clock, no device."""

from collections.abc import Iterable, Sequence
from itertools import islice

from baton.core.costs import attended_tokens
from baton.core.errors import Code, ConfigError, Failure, Reason
from baton.core.lifecycle import SequenceState
from baton.engine.batcher import one_token_behind, queue_order, share_budget, victim
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig as EngineConfig
from baton.engine.config import check_possible, no_room
from baton.engine.invariants import check_sequences, demand
from baton.engine.outcome import Admission, EngineCounters, Outcome, Progress, SequenceOutput
from baton.engine.sequence import EngineSequence, SequenceRequest, ends_of_text, finish_with, max_cached_blocks, num_blocks_wanted
from baton.engine.step import SampledToken, SampleRequest, StepPlan, StepResult, StepSequence


class Engine:
    """Iteration-level batching over one block pool.

    One caller: `plan`, then the step, then `apply` with its result; `add`, `cancel`, `fail` and `landed` between steps. What a worker must
    know is collected and handed over by `take_outcome` (which `apply` calls).
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        if pool.block_size_tokens != config.block_size_tokens:
            raise ConfigError(f"the pool has blocks of {pool.block_size_tokens} tokens, the engine of {config.block_size_tokens}")
        self.config = config
        self.pool = pool
        self.counters = EngineCounters()
        self._queue: dict[int, EngineSequence] = {}  # WAITING or PREEMPTED, by key
        self._landing: dict[int, EngineSequence] = {}
        self._running: dict[int, EngineSequence] = {}
        self._of_request: dict[int, list[EngineSequence]] = {}  # by the caller's seq_id; one until it forks
        self._next_key = 0
        self._next_step_id = 1
        self._copies: list[tuple[int, int]] = []  # of the plan that is not applied yet; each source has a reference until then
        self._admissions: list[Admission] = []
        self._progress: list[Progress] = []
        self._outputs: list[SequenceOutput] = []

    # -- counts -------------------------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._of_request

    @property
    def waiting_seqs(self) -> int:
        """Sequences that have no blocks (yet, or any more)."""
        return len(self._queue)

    @property
    def running_seqs(self) -> int:
        """Sequences that have their blocks, those that still land included."""
        return len(self._running) + len(self._landing)

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens that the device must still compute before their sequences give a next token; cached ones may turn out fewer."""
        return sum(seq.num_tokens_behind for seq in self._prefills())

    @property
    def waiting_prefill_attended_tokens(self) -> int:
        """(query, context) pairs of these tokens, `core.costs.attended_tokens`."""
        return sum(attended_tokens(seq.num_tokens_behind, seq.num_computed_tokens) for seq in self._prefills())

    @property
    def running_context_tokens(self) -> int:
        """KV entries that the running and landing sequences hold or will hold once landed."""
        landing = sum(len(seq.token_ids) for seq in self._landing.values())
        return landing + sum(seq.num_computed_tokens for seq in self._running.values())

    # -- between steps ------------------------------------------------------------------------------------------------------------------

    def check_request(self, request: SequenceRequest, *, num_more_waiting: int = 0) -> None:
        """Raises Refused for what can never run here, or if the queue (with `num_more_waiting` about to join it) is full; ValueError for
        a `seq_id` that lives here already."""
        if request.seq_id in self._of_request:
            raise ValueError(f"sequence {request.seq_id} exists already")
        check_possible(request, self.config, self.pool.num_blocks)
        num_waiting = sum(seq.state is SequenceState.WAITING for seq in self._queue.values()) + num_more_waiting
        if num_waiting >= self.config.max_waiting_seqs:
            raise no_room(Reason.QUEUE_FULL, f"{num_waiting} sequences wait here already; try again later")

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence. Raises as `check_request`."""
        self.check_request(request)
        seq = EngineSequence(request, key=self._new_key(), arrival=self._next_key)
        self._queue[seq.key] = seq
        self._of_request[seq.seq_id] = [seq]

    def cancel(self, seq_id: int, sample_indices: Sequence[int] = ()) -> None:
        """End these samples (none named: all) without another output. Idempotent; unknown ids are ignored. Blocks that a pull is landing in
        stay out of use until the pull has dropped, landed or quarantined them."""
        for seq in list(self._of_request.get(seq_id, ())):
            left = tuple(i for i in seq.sample_indices if sample_indices and i not in sample_indices)
            if left:
                seq.sample_indices = left
            else:
                self._end(seq, SequenceState.CANCELLED)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """End all samples that are left, each with this failure as its last output. Unknown ids are ignored."""
        for seq in list(self._of_request.get(seq_id, ())):
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

    def landed(self, seq_id: int, first_tokens: Sequence[SampledToken]) -> None:
        """All KV of a LANDING sequence is here and proven, and its owner has sampled these tokens. Ignored for a sequence that is not
        (any more) landing. One that is, but whose blocks are not all here with its own content, or whose tokens are not, fails."""
        seq = next((s for s in self._of_request.get(seq_id, ()) if s.state is SequenceState.LANDING), None)
        if seq is None:
            return
        num_wrong = sum(not self.pool.is_readable(b) for b in seq.block_table)
        num_wrong += sum(self.pool.hash_of(b) != its for b, its in zip(seq.block_table, seq.request.block_hashes, strict=False))
        if num_wrong or not set(seq.sample_indices) <= {token.sample_index for token in first_tokens}:
            self.fail(seq_id, _internal(f"the pull ended with {num_wrong} blocks not landed as asked and {len(first_tokens)} first tokens"))
            return
        seq.num_computed_tokens = len(seq.token_ids)
        seq.num_hashed_blocks = seq.num_computed_tokens // self.config.block_size_tokens
        self._take_tokens(seq, first_tokens)

    # -- a step -------------------------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step, perhaps empty. Admits and preempts; admissions are in the next `take_outcome`, before the step need run."""
        self._give_room_to_decode()
        shares = share_budget(self._running.values(), self.config.max_num_batched_tokens)
        shares += self._admit(self.config.max_num_batched_tokens - sum(n for _, n in shares))
        plan = StepPlan(
            step_id=self._next_step_id,
            sequences=tuple(self._step_sequence(seq, num_scheduled_tokens) for seq, num_scheduled_tokens in shares),
            block_copies=tuple(self._copies),
        )
        if not plan.is_empty:
            self._next_step_id += 1
            self.pool.step_launched()
        return plan

    def request_of(self, key: int) -> int:
        """Whose sequence that is which the present plan calls `key`: the `seq_id` that it was added with, shared by all samples."""
        return self._running[key].seq_id

    def apply(self, plan: StepPlan, result: StepResult) -> Outcome:
        """What the step has brought. Sequences that ended while it ran are passed over."""
        if result.step_id != plan.step_id:
            raise ValueError(f"result of step {result.step_id} for plan {plan.step_id}")
        self.pool.step_finished()
        self.pool.unref([source for source, _ in self._copies])
        self.counters.steps += 1
        self.counters.scheduled_tokens += plan.num_tokens
        self.counters.block_copies += len(self._copies)
        self._copies.clear()
        for part in plan.sequences:
            seq = self._running.get(part.seq_id)
            if seq is None:
                continue
            tokens = result.samples.get(part.seq_id, ())
            failure = result.failures.get(part.seq_id)
            if failure is None and part.sample is not None and not set(seq.sample_indices) <= {token.sample_index for token in tokens}:
                failure = _internal(f"step {plan.step_id} answered {len(tokens)} tokens for samples {seq.sample_indices}")
            if failure is not None:
                self.pool.unpublish([b for b in seq.block_table[seq.num_cached_blocks :] if self.pool.num_refs(b) == 1])
                self.fail(seq.seq_id, failure)
                continue
            self._advance(seq, part.num_scheduled_tokens)
            if part.sample is not None:
                self._take_tokens(seq, tokens)
        return self.take_outcome()

    def take_outcome(self) -> Outcome:
        """What has happened since the last call."""
        outcome = Outcome(admissions=tuple(self._admissions), progress=tuple(self._progress), outputs=tuple(self._outputs))
        self._admissions.clear()
        self._progress.clear()
        self._outputs.clear()
        return outcome

    # -- planning -----------------------------------------------------------------------------------------------------------------------

    def _give_room_to_decode(self) -> None:
        """Each sequence that is one token behind gets a block of its own to write it to, or somebody is preempted, in the end itself."""
        for seq in one_token_behind(self._running.values()):
            while seq.state is SequenceState.RUNNING and not self._has_or_gets_room(seq):
                loser = victim(self._running.values())
                if loser is None:  # `seq` itself may not be preempted, so its blocks came all at once and it cannot lack one
                    raise AssertionError(f"no block for {seq}")
                self._preempt(loser)

    def _has_or_gets_room(self, seq: EngineSequence) -> bool:
        """Whether the next token has a place of its own: if not, and there is a block, a new one, or a copy of what other samples share."""
        index = seq.num_computed_tokens // self.config.block_size_tokens
        if index == len(seq.block_table):
            new = self.pool.allocate(1)
            if new is None:
                return False
            seq.block_table += new
            return True
        shared = seq.block_table[index]
        if self.pool.num_refs(shared) - sum(source == shared for source, _ in self._copies) == 1:
            return True
        new = self.pool.allocate(1)
        if new is None:
            return False
        self._copies.append((shared, new[0]))  # its reference to the source lasts until the copy is done
        seq.replace_block(index, new[0])
        return True

    def _preempt(self, seq: EngineSequence) -> None:
        self.pool.unref(seq.drop_blocks())
        del self._running[seq.key]
        seq.lifecycle.move(SequenceState.PREEMPTED)
        self._queue[seq.key] = seq
        self.counters.preemptions += 1

    def _admit(self, budget: int) -> list[tuple[EngineSequence, int]]:
        """Give waiting sequences all blocks of the tokens they have, in order: who does not fit stops those behind. A prefill that lacks
        only this step's tokens keeps its claim on blocks, and pulled sequences, which need none of the step, may pass it. Prefills for
        another worker wait, and all may pass them, while transfers hold more than half of the pool."""
        shares: list[tuple[EngineSequence, int]] = []
        slots = self.config.max_num_seqs - sum(seq.num_slots for seq in self._admitted())
        if not slots:
            return shares
        holds_too_much = 2 * self.pool.held_for_others > self.pool.num_blocks
        claimed = 0
        for seq in queue_order(self._queue.values()):
            if seq.request.for_reader and holds_too_much:
                continue
            if seq.num_slots > slots or claimed >= self.pool.num_allocatable:
                break
            if not budget and not seq.waits_for_pull:
                claimed += num_blocks_wanted(seq, self.config.block_size_tokens)
                continue
            if not self._give_blocks(seq, claimed):
                break
            slots -= seq.num_slots
            if seq.state is SequenceState.RUNNING:
                num_scheduled_tokens = min(seq.num_tokens_behind, budget)
                shares.append((seq, num_scheduled_tokens))
                budget -= num_scheduled_tokens
        return shares

    def _give_blocks(self, seq: EngineSequence, claimed: int) -> bool:
        """All blocks or none: cached ones for as much of its beginning as is here, new ones for the rest, leaving what is claimed and
        one for each sequence that may soon need it."""
        block_size_tokens = self.config.block_size_tokens
        cached = self.pool.lookup(islice(seq.hashes, max_cached_blocks(len(seq.token_ids), block_size_tokens)))
        missing = num_blocks_wanted(seq, block_size_tokens) - len(cached)
        spare = sum(s.num_slots for s in self._admitted() if not s.request.prefill_only)
        if missing + spare + claimed > self.pool.num_allocatable - self.pool.num_idle(cached):
            return False
        self.pool.ref(cached)
        new = self.pool.allocate_landing(missing) if seq.waits_for_pull else self.pool.allocate(missing)
        if new is None:  # enough, but a step in flight may still write to them
            self.pool.unref(cached)
            return False
        self._start(seq, cached, new)
        return True

    def _start(self, seq: EngineSequence, cached: list[int], new: list[int]) -> None:
        is_first = seq.num_cached_tokens is None
        seq.take_blocks(cached, new, self.config.block_size_tokens)
        del self._queue[seq.key]
        lands = seq.waits_for_pull
        seq.lifecycle.move(SequenceState.LANDING if lands else SequenceState.RUNNING)
        (self._landing if lands else self._running)[seq.key] = seq
        if is_first:
            self.counters.cached_tokens += seq.num_computed_tokens
            self._admissions.append(
                Admission(
                    seq_id=seq.seq_id,
                    block_table=seq.table,
                    num_cached_blocks=len(cached),
                    landing_block_ids=tuple(new) if lands else (),
                )
            )

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

    def _sample_request(self, seq: EngineSequence) -> SampleRequest:
        sampling = seq.request.sampling
        is_too_early_to_end = seq.num_output_tokens < sampling.min_tokens
        return SampleRequest(
            sampling=sampling,
            sample_indices=seq.sample_indices,
            position=len(seq.token_ids),
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
            self._progress.append(Progress(seq_id=seq.seq_id, num_computed_tokens=seq.num_computed_tokens))

    def _take_tokens(self, seq: EngineSequence, tokens: Sequence[SampledToken]) -> None:
        """One new token for each sample. Each that has not ended goes on, all but the first as new sequences over the same blocks."""
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
        if seq.state is SequenceState.LANDING:
            del self._landing[seq.key]
            seq.lifecycle.move(SequenceState.RUNNING)
            self._running[seq.key] = seq
        for token in going_on[1:]:
            child = seq.fork(key=self._new_key(), sample_index=token.sample_index)
            self.pool.ref(child.block_table)
            child.append(token.token_id)
            self._running[child.key] = child
            self._of_request[child.seq_id].append(child)
        seq.sample_indices = (going_on[0].sample_index,)
        seq.append(going_on[0].token_id)

    def _end(self, seq: EngineSequence, state: SequenceState) -> None:
        """Out of everything; its references go back at once."""
        seq.lifecycle.move(state)
        for place in (self._queue, self._landing, self._running):
            place.pop(seq.key, None)
        siblings = self._of_request[seq.seq_id]
        siblings.remove(seq)
        if not siblings:
            del self._of_request[seq.seq_id]
        self.pool.unref(seq.drop_blocks())

    # -- invariants ---------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError naming the first invariant that does not hold, the pool's included. For tests: reads everything."""
        self.pool.check()
        slots = sum(seq.num_slots for seq in self._admitted())
        demand(slots <= self.config.max_num_seqs, f"{slots} sequences run, {self.config.max_num_seqs} may")
        places = {
            SequenceState.WAITING: self._queue,
            SequenceState.PREEMPTED: self._queue,
            SequenceState.LANDING: self._landing,
            SequenceState.RUNNING: self._running,
        }
        check_sequences(places, (seq for seqs in self._of_request.values() for seq in seqs), self.pool)

    # -- inside -------------------------------------------------------------------------------------------------------------------------

    def _prefills(self) -> Iterable[EngineSequence]:
        yield from (seq for seq in self._queue.values() if not seq.waits_for_pull)
        yield from (seq for seq in self._running.values() if seq.num_tokens_behind > 1)

    def _admitted(self) -> Iterable[EngineSequence]:
        yield from self._running.values()
        yield from self._landing.values()

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key


def _internal(message: str) -> Failure:
    return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)
