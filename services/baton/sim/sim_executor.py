"""A simulated device. It takes virtual time, and its tokens depend on the actual content of its KV memory."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import TokenLogprobs
from baton.core.step_cost import StepCostModel
from baton.engine.constraints.token_bits import Bits, ids_of
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.executors.row_drawing import SampledRows, draw_rows, sampled_rows
from baton.engine.kv_cache.checksum import START, KvCorrupted, extend, token_after
from baton.engine.scheduling.async_scheduling import LastResult
from baton.engine.scheduling.step_queue import StepQueue
from baton.engine.state.step import (
    SampledToken,
    SampleRequest,
    StepPlan,
    StepResult,
    StepSequence,
    certain_prompt,
)
from baton.sim.sim_memory import SimMemory, contents

MAX_KNOWN_SEQS = 64
"""Sequences whose expected slots are kept from step to step."""
_NO_TOKENS = token_ids()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStepCost:
    """Duration of a step in seconds: `base_s` plus `per_token_s` for each scheduled token."""

    base_s: float = 0.004
    per_token_s: float = 0.0001

    @property
    def model(self) -> StepCostModel:
        """The same cost as the model that workers report. It is exact."""
        return StepCostModel(
            step_s=self.base_s,
            prefill_token_s=self.per_token_s,
            prefill_attended_s=0.0,
            decode_seq_s=self.per_token_s,
            decode_context_s=0.0,
            draft_token_s=self.per_token_s,
        )

    def step_s(self, plan: StepPlan) -> float:
        """Return how long the simulated step takes, in seconds."""
        return self.base_s + self.per_token_s * plan.num_tokens


class _ExpectedSlots:
    """Slot contents that follow from the tokens of sequences, without a look at the memory.

    Those of a sequence's tokens are kept, so that its next step computes only those of the new ones.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[TokenIds, list[int]]] = OrderedDict()

    def of(self, seq_id: int, tokens: TokenIds, num_final: int) -> list[int]:
        """Return the contents [len(tokens)] of all slots. Tokens after the first `num_final` are drafts."""
        before, slots = self._known.pop(seq_id, (_NO_TOKENS, []))
        if tokens[: len(before)] != before:
            before, slots = _NO_TOKENS, []
        added = tokens[len(before) :]
        slots = slots + (contents(added, slots[-1] if slots else START) if added else [])
        self._known[seq_id] = tokens[:num_final], slots[:num_final]
        if len(self._known) > MAX_KNOWN_SEQS:
            self._known.popitem(last=False)
        return slots


class SimExecutor:
    """Implements `Executor` over simulated memory.

    The next token is a function of the content of the sequence's blocks, so a stale, wrong or partly written
    block changes the answer. A step that samples also compares every slot that it sees with the sequence's
    history and raises KvCorrupted on a difference. The layout's window, if it has one, is at least 2.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        memory: SimMemory,
        vocab_size: int,
        cost: SimStepCost,
        constraints: TokenConstraints | None = None,
    ) -> None:
        """constraints: computes the masks of constrained sequences; None: grammars are refused."""
        self._layout = layout
        self.memory = memory
        self.num_corrupted = 0
        """Steps that met wrong KV. A draft model's caller goes on without drafts."""
        self._vocab_size = vocab_size
        self._cost = cost
        self._constraints = constraints or TokenConstraints(vocab_size=vocab_size, in_threads=False)
        self._step_queue = StepQueue()
        self._last = LastResult()
        self._expected = _ExpectedSlots()

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    async def execute(self, plan: StepPlan) -> StepResult:
        async with self._step_queue.turn(plan.step_id):
            return self._last.keep(await self._run(self._last.fill_in(plan)))

    def withdraw(self, step_id: int) -> bool:
        return self._step_queue.withdraw(step_id)

    async def aclose(self) -> None:
        """Nothing to free."""

    async def _run(self, plan: StepPlan) -> StepResult:
        for source, destination in plan.block_copies:
            self.memory.write_block(destination, self.memory.block(source))
        for sequence in plan.sequences:
            self._write(sequence)
        await asyncio.sleep(self._cost.step_s(plan))
        return self._sampled(plan)

    def _sampled(self, plan: StepPlan) -> StepResult:
        rows = sampled_rows(plan)
        for one in rows:
            self._verify(one)
        drawn = draw_rows(rows, self._constraints, self._draw)
        return StepResult(
            step_id=plan.step_id,
            samples=drawn.samples,
            failures=drawn.failures,
            prompt_logprobs={s.seq_id: certain_prompt(s.prompt) for s in plan.sequences if s.prompt is not None},
            forced=drawn.forced,
        )

    def _write(self, sequence: StepSequence) -> None:
        tables = self._tables_of(sequence)
        content = self.memory.prefix_before(tables[0], sequence.kv_begin)
        for index, token_id in enumerate(sequence.token_ids, sequence.kv_begin):
            content = extend(content, token_id)
            for table, blocks in enumerate(tables):
                self.memory.write_slot(blocks, index, content + table)

    def _tables_of(self, sequence: StepSequence) -> list[tuple[int, ...]]:
        """Return the block tables of a sequence. Slots of table t hold t more than those of table 0."""
        num_tables = self._layout.windows.num_tables
        return [sequence.block_table[table::num_tables] for table in range(num_tables)]

    def _verify(self, rows: SampledRows) -> None:
        """Compare all visible slots of a sequence with its tokens, drafts included."""
        sequence, begins_at = rows.sequence, rows.requests[0].position
        expected = self._expected.of(sequence.seq_id, rows.requests[-1].tokens_before, begins_at)
        for table, (blocks, window) in enumerate(
            zip(self._tables_of(sequence), self._layout.windows.windows, strict=True)
        ):
            begin = max(0, begins_at - window) if window else 0
            found = self.memory.slots(blocks, begin, len(expected))
            visible = [content + table for content in expected[begin:]] if table else expected[begin:]
            if found != visible:
                same = (one == other for one, other in zip(found, visible, strict=False))
                index = begin + next((i for i, is_same in enumerate(same) if not is_same), len(found))
                self.num_corrupted += 1
                raise KvCorrupted(f"sequence {sequence.seq_id}, slot {index} of {len(expected)}, table {table}")

    def _draw(self, sequence: StepSequence, sample: SampleRequest, allowed: Bits | None) -> tuple[SampledToken, ...]:
        last = self.memory.slot(self._tables_of(sequence)[0], sample.position - 1)
        choices = range(self._vocab_size) if allowed is None else ids_of(allowed).tolist()
        seed = sample.sampling.seed
        return tuple(
            SampledToken(
                sample_index=index,
                token_id=choices[token_after(last, seed, index, sample.position, len(choices))],
                logprobs=None if sample.sampling.num_logprobs is None else TokenLogprobs(logprob=0.0),
            )
            for index in sample.sample_indices
        )
