"""A device of plain Python integers. Its tokens are a pure function of the prompt, and it detects wrong KV:
every slot must hold what the sequence's own tokens would have written."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain

from baton.core.errors import Failure
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import NO_BLOCK
from baton.core.request import FinishReason, Sampling
from baton.engine.scheduling.async_scheduling import LastResult
from baton.engine.scheduling.step_queue import StepQueue
from baton.engine.state.draft_rows import rows_of, verified
from baton.engine.state.step import SampledToken, SampleRequest, StepPlan, StepResult, StepSequence
from tests import builders

NOTHING = -1
EMPTY_CONTENT = 0


def extend(content: int, token_id: int) -> int:
    """Return the content of the slot of `token_id` after a slot with `content`. It depends on the whole
    prefix."""
    return hash((content, token_id)) & (2**61 - 1)


def contents(token_ids: Iterable[int]) -> list[int]:
    return list(accumulate(token_ids, extend, initial=EMPTY_CONTENT))[1:]


def in_table(content: int, table: int) -> int:
    """Return what a slot of a block table holds for a token whose slot in table 0 holds `content`."""
    return content + (table << 62)


def out_of_table(content: int, table: int) -> int:
    """Return the inverse of `in_table`."""
    return content - (table << 62)


def draw(content: int, sampling: Sampling, sample_index: int, banned: Sequence[int] = (), vocab_size: int = 50) -> int:
    """Return the token after a prefix."""
    token_id = hash((content, sampling.seed, sample_index)) % vocab_size
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


def expected_answer(
    prompt: Sequence[int],
    sampling: Sampling,
    sample_index: int,
    *,
    eos: Sequence[int] = (),
    max_model_len: int = 10_000,
) -> tuple[list[int], FinishReason]:
    """Return all output tokens of one sample and its finish reason, by definition: without cache, batch or
    block."""
    enders = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    tokens, outputs = list(prompt), list[int]()
    while True:
        banned = tuple(enders) if len(outputs) < sampling.min_tokens else ()
        outputs.append(draw(contents(tokens)[-1], sampling, sample_index, banned))
        tokens.append(outputs[-1])
        if outputs[-1] in enders and not banned:
            return outputs, FinishReason.STOP
        if len(outputs) == sampling.max_tokens or len(tokens) == max_model_len:
            return outputs, FinishReason.LENGTH


class FakeGenerationTable:
    """Implements `GenerationTable`."""

    def __init__(self, num_blocks: int) -> None:
        self.generations = [0] * num_blocks
        self.hashes = [NO_HASH] * num_blocks
        self._on_new_generation: list[Callable[[int], None]] = []

    def on_new_generation(self, callback: Callable[[int], None]) -> None:
        """Call `callback` with each block that starts a new generation."""
        self._on_new_generation.append(callback)

    def begin_generation(self, block_id: int) -> int:
        self.generations[block_id] += 1
        self.hashes[block_id] = NO_HASH
        for callback in self._on_new_generation:
            callback(block_id)
        return self.generations[block_id]

    def set_hash(self, block_id: int, block_hash: BlockHash) -> None:
        self.hashes[block_id] = block_hash

    def generation(self, block_id: int) -> int:
        return self.generations[block_id]


class FakeExecutor:
    """Implements `Executor`. `memory[block][slot]` holds contents.

    A step raises AssertionError if it attends to a wrong slot, writes to a block that has a hash, or if two
    sequences write to one block. A token attends to the last slots of each block table, as many as its
    window; all others may hold anything. One window is at least 2, or 0 for all. Slots of different tables
    have different contents.

    raises_for: if true for a sequence, the step raises.
    failing: failure that the result contains for a sequence, or None.
    deferring: if true for a sequence, the result defers it.
    gate: if set, a step waits for it.
    num_turns: turns of the event loop that a step takes.
    num_ahead: steps that were planned before the preceding one had ended.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        generation_table: FakeGenerationTable,
        *,
        spoil_new_blocks: bool = True,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        self.memory = [[NOTHING] * block_size_tokens for _ in range(num_blocks)]
        self.plans: list[StepPlan] = []
        self.num_ahead = 0
        self.raises_for: Callable[[StepSequence], bool] = lambda _: False
        self.failing: Callable[[StepSequence], Failure | None] = lambda _: None
        self.deferring: Callable[[StepSequence], bool] = lambda _: False
        self.gate: asyncio.Event | None = None
        self.num_turns = 1
        self._windows = windows
        self._block_size_tokens = block_size_tokens
        self._generation_table = generation_table
        self._queue = StepQueue()
        self._last = LastResult()
        if spoil_new_blocks:
            generation_table.on_new_generation(self.overwrite)

    @property
    def layout(self) -> KvLayout:
        return builders.layout(block_size_tokens=self._block_size_tokens)

    @property
    def num_blocks(self) -> int:
        return len(self.memory)

    async def execute(self, plan: StepPlan) -> StepResult:
        async with self._queue.turn(plan.step_id):
            for _ in range(self.num_turns):
                await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            return self.run(plan)

    def withdraw(self, step_id: int) -> bool:
        return self._queue.withdraw(step_id)

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""

    def overwrite(self, block_id: int) -> None:
        """Overwrite a block, as a late read or its previous user may do."""
        self.memory[block_id] = [NOTHING] * self._block_size_tokens

    def write(self, block_table: Sequence[int], token_ids: Sequence[int], begin: int = 0, table: int = 0) -> None:
        """Write the KV of these tokens from index `begin` on into a table, as computing or receiving it
        would."""
        blocks = block_table[table :: len(self._windows)]
        for index, content in enumerate(contents(token_ids)):
            if index >= begin:
                self.memory[blocks[index // self._block_size_tokens]][index % self._block_size_tokens] = in_table(
                    content, table
                )

    def read(self, block_table: Sequence[int], num_tokens: int, begin: int = 0, table: int = 0) -> list[int]:
        """Return the contents of slots [begin, num_tokens) of a sequence in a table."""
        size, blocks = self._block_size_tokens, block_table[table :: len(self._windows)]
        first = begin // size
        return list(chain.from_iterable(self.memory[b] for b in blocks[first : -(-num_tokens // size)]))[
            begin - first * size : num_tokens - first * size
        ]

    def first_seen(self, index: int, table: int = 0) -> int:
        """Return the first slot of a table that the token at `index` attends to."""
        return max(0, index - self._windows[table] + 1) if self._windows[table] else 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_ahead += plan.follows is not None
        plan = self._last.fill_in(plan)
        self.plans.append(plan)
        if any(self.raises_for(part) for part in plan.sequences):
            raise RuntimeError("injected")
        for source, destination in plan.block_copies:
            assert self._generation_table.hashes[destination] == NO_HASH, "a copy over a shared block"
            self.memory[destination] = self.memory[source][:]
        written: dict[int, int] = {}
        for part in plan.sequences:
            self._write(part, written)
        failures = {part.seq_id: failure for part in plan.sequences if (failure := self.failing(part)) is not None}
        samples = {
            p.seq_id: self._sample(p, p.sample)
            for p in plan.sequences
            if p.sample is not None and p.seq_id not in failures
        }
        deferred = frozenset(p.seq_id for p in plan.sequences if p.seq_id in samples and self.deferring(p))
        samples = {seq_id: tokens for seq_id, tokens in samples.items() if seq_id not in deferred}
        return self._last.keep(StepResult(step_id=plan.step_id, samples=samples, failures=failures, deferred=deferred))

    def _write(self, part: StepSequence, written: dict[int, int]) -> None:
        assert part.position_begin == part.kv_begin
        size, content = self._block_size_tokens, EMPTY_CONTENT
        for table, window in enumerate(self._windows):
            before = self.read(part.block_table, part.kv_begin, self.first_seen(part.kv_begin, table), table)
            assert NOTHING not in before, f"sequence {part.seq_id} attends to slots that were not written"
            if before and window != 1:
                content = out_of_table(before[-1], table)
        for index, token_id in enumerate(part.token_ids, part.kv_begin):
            content = extend(content, token_id)
            for table in range(len(self._windows)):
                block_id = part.block_table[index // size * len(self._windows) + table]
                assert block_id != NO_BLOCK, f"sequence {part.seq_id} has no block for slot {index} in table {table}"
                assert self._generation_table.hashes[block_id] == NO_HASH, (
                    f"sequence {part.seq_id} writes to block {block_id}, which is shared"
                )
                owner = written.setdefault(block_id, part.seq_id)
                assert owner == part.seq_id, f"two sequences write to block {block_id}"
                self.memory[block_id][index % size] = in_table(content, table)

    def _sample(self, part: StepSequence, sample: SampleRequest) -> tuple[SampledToken, ...]:
        rows = rows_of(sample)
        assert sample.position == len(sample.history) == part.context_len - len(sample.drafts)
        tokens = rows[-1].tokens_before
        expected = contents(tokens)
        for table in range(len(self._windows)):
            begin = self.first_seen(sample.position - 1, table)
            seen = self.read(part.block_table, part.context_len, begin, table)
            assert seen == [in_table(content, table) for content in expected[begin:]], (
                f"sequence {part.seq_id} attends to wrong KV in table {table}"
            )
        drawn = [
            SampledToken(
                sample_index=i,
                token_id=draw(expected[row.position - 1], row.sampling, i, row.banned_token_ids),
            )
            for row in rows
            for i in row.sample_indices
        ]
        return verified(sample.drafts, drawn) if sample.drafts else tuple(drawn)
