"""The emulated device: it waits for the predicted duration of each step instead of computing it.

Its KV memory is real and is transferred like that of a real model. Many emulated workers can share a few
cores without slowing each other down, while everything but the forward pass runs as in production.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from baton.core.errors import LayoutMismatch
from baton.core.kv.block_hash import TokenIds
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import TokenLogprobs
from baton.engine.constraints.token_bits import Bits, ids_of
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.executors.row_drawing import draw_rows, sampled_rows
from baton.engine.kv_cache.checksum import START, KvCorrupted, extend, slots_of, token_after, wrong_slot
from baton.engine.scheduling.async_scheduling import LastResult
from baton.engine.scheduling.step_queue import StepQueue
from baton.engine.state.step import SampledToken, SampleRequest, StepPlan, StepResult, StepSequence, certain_prompt

_SLOT_BYTES = 8
_MAX_LATE_S = 0.020
"""A step that ended late shortens the next one by at most this time, in seconds. A longer delay means that
the machine was suspended or overloaded, and is not made up for."""


class EmulatedExecutor:
    """Implements `Executor` without a model.

    The KV of each token starts with a checksum of its prefix (`engine.kv_cache.checksum`), and the next token
    is computed from the last checksum. A stale, foreign or torn block therefore changes the response. All KV
    of a sequence is verified in its first decode step; every further step verifies its last slot and one more
    block.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        kv: npt.NDArray[np.uint8],
        vocab_size: int,
        step_seconds: Callable[[StepPlan], float],
        eos_token_ids: Collection[int] = (),
        constraints: TokenConstraints | None = None,
    ) -> None:
        """Create a device over memory that the caller owns.

        kv: [num_blocks, block_bytes] KV memory.
        step_seconds: returns the duration of a step in seconds.
        eos_token_ids: end tokens. They are drawn only where a grammar ends, so that other answers have their
            full length.
        constraints: computes the masks of constrained sequences; None: grammars are refused.
        Raises LayoutMismatch if the blocks are not of the size of `layout`, or too small for the checksums.
        """
        num_blocks, block_bytes = kv.shape
        token_bytes = block_bytes // layout.block_size_tokens
        if block_bytes != layout.block_bytes or token_bytes < _SLOT_BYTES:
            raise LayoutMismatch(
                f"block_bytes is {block_bytes}; must be {layout.block_bytes}, with at least {_SLOT_BYTES} bytes a token"
            )
        self._layout = layout
        self._kv = kv
        tokens = kv[:, : token_bytes * layout.block_size_tokens].reshape(
            num_blocks, layout.block_size_tokens, token_bytes
        )
        self._slots = tokens[:, :, :_SLOT_BYTES].view(np.uint64)[:, :, 0]
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._eos_token_ids = frozenset(eos_token_ids)
        self._constraints = constraints or TokenConstraints(vocab_size=vocab_size)
        self._queue = StepQueue()
        self._last = LastResult()
        self._late_s = 0.0
        self._sampled: dict[int, tuple[int, int]] = {}
        """(final KV entries, checksum of the last one) of each sequence that sampled in the preceding step,
        by seq_id."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV memory."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the KV memory."""
        return len(self._kv)

    async def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait until its predicted duration is over. Raises KvCorrupted for wrong KV.

        The time that the emulation itself takes is part of the duration. If a step ends late, the next is
        shorter.
        """
        loop = asyncio.get_running_loop()
        async with self._queue.turn(plan.step_id):
            plan = self._last.fill_in(plan)
            end_s = loop.time() + self._step_seconds(plan) - self._late_s
            result = self._run(plan)
            await asyncio.sleep(max(0.0, end_s - loop.time()))
            self._late_s = min(loop.time() - end_s, _MAX_LATE_S)
            return self._last.keep(result)

    def withdraw(self, step_id: int) -> bool:
        """Cancel a queued step. Returns False if it is not queued."""
        return self._queue.withdraw(step_id)

    async def aclose(self) -> None:
        """Do nothing: the caller owns the memory."""

    def _run(self, plan: StepPlan) -> StepResult:
        for source, destination in plan.block_copies:
            self._kv[destination] = self._kv[source]
        for sequence in plan.sequences:
            self._write(sequence)
        rows = sampled_rows(plan)
        continued: list[tuple[StepSequence, TokenIds]] = []
        for one in rows:
            history = one.requests[-1].tokens_before
            if self._continues(one.sequence):
                continued.append((one.sequence, history))
            else:
                self._verify_all(one.sequence, history)
        self._verify_one_block_each(continued, plan.step_id)
        drawn = draw_rows(rows, self._constraints, self._draw)
        ends = [(one.sequence, one.final_context_len(drawn.samples.get(one.sequence.seq_id, ()))) for one in rows]
        self._sampled = {one.seq_id: (end, self._slot(one, end - 1)) for one, end in ends if end}
        return StepResult(
            step_id=plan.step_id,
            samples=drawn.samples,
            failures=drawn.failures,
            prompt_logprobs={s.seq_id: certain_prompt(s.prompt) for s in plan.sequences if s.prompt is not None},
            forced=drawn.forced,
        )

    def _write(self, sequence: StepSequence) -> None:
        begin = sequence.kv_begin
        before = self._slot(sequence, begin - 1) if begin else START
        if sequence.num_scheduled_tokens == 1:
            block, offset = divmod(begin, self._layout.block_size_tokens)
            self._slots[sequence.block_table[block], offset] = extend(before, sequence.token_ids[0])
        else:
            self._slots[self._slot_indices(sequence, begin, sequence.context_len)] = slots_of(
                sequence.token_ids, before
            )

    def _continues(self, sequence: StepSequence) -> bool:
        """Return True if the sequence sampled in the preceding step and has only one new token since.

        Raises KvCorrupted if its last slot has changed in between.
        """
        num_slots, content = self._sampled.get(sequence.seq_id, (0, 0))
        if num_slots == 0 or num_slots != sequence.kv_begin:
            return False
        if self._slot(sequence, num_slots - 1) != content:
            raise _corrupted(sequence, num_slots - 1)
        return True

    def _verify_all(self, sequence: StepSequence, history: TokenIds) -> None:
        """Compare all slots of a sequence with its tokens."""
        slots = self._slots[self._slot_indices(sequence, 0, sequence.context_len)]
        if wrong := wrong_slot(slots[None], history, [START]):
            raise _corrupted(sequence, wrong[1])

    def _verify_one_block_each(self, sequences: Sequence[tuple[StepSequence, TokenIds]], step_id: int) -> None:
        """Compare one full block of each sequence with its tokens. The block changes with the step."""
        size = self._layout.block_size_tokens
        chosen = [(s, history, step_id % (s.kv_begin // size) * size) for s, history in sequences if s.kv_begin >= size]
        if not chosen:
            return
        slots = self._slots[[s.block_table[begin // size] for s, _, begin in chosen]]
        tokens = b"".join(history[begin : begin + size] for _, history, begin in chosen)
        before = [self._slot(s, begin - 1) if begin else START for s, _, begin in chosen]
        if wrong := wrong_slot(slots, tokens, before):
            sequence, _, begin = chosen[wrong[0]]
            raise _corrupted(sequence, begin + wrong[1])

    def _draw(self, sequence: StepSequence, sample: SampleRequest, allowed: Bits | None) -> tuple[SampledToken, ...]:
        last = self._slot(sequence, sample.position - sequence.position_begin + sequence.kv_begin - 1)
        logprobs = None if sample.sampling.num_logprobs is None else TokenLogprobs(logprob=0.0)
        choices = None if allowed is None else ids_of(allowed)
        return tuple(
            SampledToken(sample_index=index, token_id=self._token(last, sample, index, choices), logprobs=logprobs)
            for index in sample.sample_indices
        )

    def _token(self, last: int, sample: SampleRequest, index: int, choices: npt.NDArray[np.intp] | None) -> int:
        """Return the token after a slot with checksum `last`.

        choices: the tokens that a constrained sequence may draw. Otherwise banned and end tokens are replaced
            by the next id.
        With greedy sampling it is the same for all seeds and samples, as with a real model.
        """
        seed, index = (0, 0) if sample.sampling.is_greedy else (sample.sampling.seed, index)
        if choices is not None:
            return int(choices[token_after(last, seed, index, sample.position, len(choices))])
        token_id = token_after(last, seed, index, sample.position, self._vocab_size)
        while token_id in self._eos_token_ids or token_id in sample.banned_token_ids:
            token_id = (token_id + 1) % self._vocab_size
        return token_id

    def _slot(self, sequence: StepSequence, index: int) -> int:
        block, offset = divmod(index, self._layout.block_size_tokens)
        return int(self._slots[sequence.block_table[block], offset])

    def _slot_indices(
        self, sequence: StepSequence, begin: int, end: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return (block ids, offsets) of the slots `begin` to `end`."""
        blocks, offsets = np.divmod(np.arange(begin, end), self._layout.block_size_tokens)
        first = begin // self._layout.block_size_tokens
        table = np.array(sequence.block_table[first : int(blocks[-1]) + 1], dtype=np.intp)
        return table[blocks - first], offsets


def _corrupted(sequence: StepSequence, slot: int) -> KvCorrupted:
    return KvCorrupted(f"sequence {sequence.seq_id}, slot {slot} of {sequence.context_len}: KV of another prefix")
