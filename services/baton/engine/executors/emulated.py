"""A device that computes nothing and takes exactly as long as one would: its KV memory is real, its steps
last what a cost model says.

Workers that share a few cores do not slow each other so, and everything but the computing is what it is in
production.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from baton.core.errors import LayoutMismatch
from baton.core.kv.block_hash import TokenIds
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import TokenLogprobs
from baton.engine.kv_cache.checksum import START, KvCorrupted, extend, slots_of, token_after, wrong_slot
from baton.engine.scheduling.async_scheduling import LastResult
from baton.engine.scheduling.step_queue import StepQueue
from baton.engine.state.step import SampledToken, SampleRequest, StepPlan, StepResult, StepSequence

_SLOT_BYTES = 8
_MAX_LATE_S = 0.020
"""By how much steps that ended late may shorten those that follow. What is more was no timer but a machine
that stood still."""


class EmulatedExecutor:
    """Implements `Executor`. Each token's KV begins with its content (`content.py`), and the next token
    follows from the last one, so a stale, foreign or torn block shows in the answer. In the first of a row of
    steps in which a sequence samples all its KV is compared with its history, in the others its last slot and
    one of its blocks in turn. The memory is its giver's."""

    def __init__(
        self, *, layout: KvLayout, kv: npt.NDArray[np.uint8], vocab_size: int, step_seconds: Callable[[StepPlan], float]
    ) -> None:
        """`kv`: [num_blocks, block_bytes]. Raises LayoutMismatch if those are not the layout's blocks, or
        have no room for the contents."""
        num_blocks, block_bytes = kv.shape
        token_bytes = block_bytes // layout.block_size_tokens
        if block_bytes != layout.block_bytes or token_bytes < _SLOT_BYTES:
            raise LayoutMismatch(
                f"block_bytes: the memory has {block_bytes}, the layout {layout.block_bytes}; a token needs {_SLOT_BYTES}"
            )
        self._layout = layout
        self._kv = kv
        tokens = kv.reshape(num_blocks, layout.block_size_tokens, token_bytes)
        self._slots = tokens[:, :, :_SLOT_BYTES].view(np.uint64)[:, :, 0]
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._turns = StepQueue()
        self._last = LastResult()
        self._late_s = 0.0
        self._going_on: dict[int, tuple[int, int]] = {}
        """(KV entries, content of the last) of each sequence that sampled in the step before."""

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return len(self._kv)

    async def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor`. Raises KvCorrupted. Our own work is part of a step's time. By how much a step ends
        late, the next is shorter."""
        loop = asyncio.get_running_loop()
        async with self._turns.turn(plan.step_id):
            plan = self._last.fill_in(plan)
            end_s = loop.time() + self._step_seconds(plan) - self._late_s
            result = self._run(plan)
            await asyncio.sleep(max(0.0, end_s - loop.time()))
            self._late_s = min(loop.time() - end_s, _MAX_LATE_S)
            return self._last.keep(result)

    def withdraw(self, step_id: int) -> bool:
        return self._turns.withdraw(step_id)

    async def aclose(self) -> None:
        """Nothing to free."""

    def _run(self, plan: StepPlan) -> StepResult:
        for source, destination in plan.block_copies:
            self._kv[destination] = self._kv[source]
        for sequence in plan.sequences:
            self._write(sequence)
        sampling = [(sequence, sequence.sample) for sequence in plan.sequences if sequence.sample is not None]
        going_on: list[tuple[StepSequence, TokenIds]] = []
        for sequence, sample in sampling:
            if self._goes_on(sequence):
                going_on.append((sequence, sample.history))
            else:
                self._check(sequence, sample.history)
        self._check_a_block_each(going_on, plan.step_id)
        last = {sequence.seq_id: self._slot(sequence, sequence.context_len - 1) for sequence, _ in sampling}
        self._going_on = {sequence.seq_id: (sequence.context_len, last[sequence.seq_id]) for sequence, _ in sampling}
        return StepResult(
            step_id=plan.step_id, samples={s.seq_id: self._draw(last[s.seq_id], sample) for s, sample in sampling}
        )

    def _write(self, sequence: StepSequence) -> None:
        begin = sequence.kv_begin
        before = self._slot(sequence, begin - 1) if begin else START
        if sequence.num_scheduled_tokens == 1:
            block, offset = divmod(begin, self._layout.block_size_tokens)
            self._slots[sequence.block_table[block], offset] = extend(before, sequence.token_ids[0])
        else:
            self._slots[self._places(sequence, begin, sequence.context_len)] = slots_of(sequence.token_ids, before)

    def _goes_on(self, sequence: StepSequence) -> bool:
        """Whether it has nothing but its last token since the step before. Raises KvCorrupted if what was its
        last slot has changed."""
        num_slots, content = self._going_on.get(sequence.seq_id, (0, 0))
        if num_slots == 0 or num_slots != sequence.kv_begin:
            return False
        if self._slot(sequence, num_slots - 1) != content:
            raise _corrupted(sequence, num_slots - 1)
        return True

    def _check(self, sequence: StepSequence, history: TokenIds) -> None:
        """Compare all its slots with its history."""
        slots = self._slots[self._places(sequence, 0, sequence.context_len)]
        if wrong := wrong_slot(slots[None], history, [START]):
            raise _corrupted(sequence, wrong[1])

    def _check_a_block_each(self, sequences: Sequence[tuple[StepSequence, TokenIds]], turn: int) -> None:
        """Compare one full block of each sequence with its history, another one at each turn."""
        size = self._layout.block_size_tokens
        chosen = [(s, history, turn % (s.kv_begin // size) * size) for s, history in sequences if s.kv_begin >= size]
        if not chosen:
            return
        slots = self._slots[[s.block_table[begin // size] for s, _, begin in chosen]]
        tokens = b"".join(history[begin : begin + size] for _, history, begin in chosen)
        before = [self._slot(s, begin - 1) if begin else START for s, _, begin in chosen]
        if wrong := wrong_slot(slots, tokens, before):
            sequence, _, begin = chosen[wrong[0]]
            raise _corrupted(sequence, begin + wrong[1])

    def _draw(self, last: int, sample: SampleRequest) -> tuple[SampledToken, ...]:
        logprobs = None if sample.sampling.num_logprobs is None else TokenLogprobs(logprob=0.0)
        tokens = ((index, self._allowed(last, sample, index)) for index in sample.sample_indices)
        return tuple(
            SampledToken(sample_index=index, token_id=token_id, logprobs=logprobs) for index, token_id in tokens
        )

    def _allowed(self, last: int, sample: SampleRequest, sample_index: int) -> int:
        """The token after a slot of content `last`, or the next that is not banned. Without a temperature it
        is the same for all seeds and samples, as it is of a model."""
        seed, index = (0, 0) if sample.sampling.is_greedy else (sample.sampling.seed, sample_index)
        token_id = token_after(last, seed, index, sample.position, self._vocab_size)
        while token_id in sample.banned_token_ids:
            token_id = (token_id + 1) % self._vocab_size
        return token_id

    def _slot(self, sequence: StepSequence, index: int) -> int:
        block, offset = divmod(index, self._layout.block_size_tokens)
        return int(self._slots[sequence.block_table[block], offset])

    def _places(
        self, sequence: StepSequence, begin: int, end: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """(block ids, offsets) of the slots from `begin` to `end`."""
        blocks, offsets = np.divmod(np.arange(begin, end), self._layout.block_size_tokens)
        first = begin // self._layout.block_size_tokens
        table = np.array(sequence.block_table[first : int(blocks[-1]) + 1], dtype=np.intp)
        return table[blocks - first], offsets


def _corrupted(sequence: StepSequence, slot: int) -> KvCorrupted:
    return KvCorrupted(f"sequence {sequence.seq_id}, slot {slot} of {sequence.context_len}")
