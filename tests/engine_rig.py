"""An engine with a block pool and a fake device, run step by step."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from baton.core.kv.block_hash import table_hash
from baton.core.kv.kv_tables import TableWindows
from baton.core.request import FinishReason
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine, EngineConfig, unknown_costs
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling.step_budget import DraftSpeedup
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.outcome import (
    AdmittedSequence,
    EngineOutcome,
    GrownSequence,
    PreemptedSequence,
    PrefillProgress,
    ReturningSequence,
    SequenceOutput,
)
from baton.engine.state.sequence import SequenceRequest
from baton.engine.state.step import SampledToken, StepPlan
from tests.builders import BLOCK_SIZE_TOKENS, hashes_of
from tests.fake_executor import FakeExecutor, FakeGenerationTable, expected_answer


class EngineRig:
    """Runs an engine and records what it produces.

    outputs: (seq_id, sample_index) -> output tokens.
    ends: (seq_id, sample_index) -> finish reason or failure.
    admissions: seq_id -> its admission.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        engine_type: type[Engine] = Engine,
        executor_type: type[FakeExecutor] = FakeExecutor,
        step_costs: Callable[[], StepCostModel | None] = unknown_costs,
        clock: Callable[[], float] = lambda: 0.0,
        speculation: Speculation | None = None,
        draft_speedup: Callable[[], DraftSpeedup] = DraftSpeedup,
        kv_windows: tuple[int, ...] = (0,),
        announce_every: int = 1,
        reloads_preempted: bool = False,
        **config: Any,
    ) -> None:
        """kv_windows: of the block tables."""
        limits = {
            "max_num_batched_tokens": 32,
            "max_num_seqs": 8,
            "max_model_len": 1000,
            "block_size_tokens": BLOCK_SIZE_TOKENS,
        }
        self.config = EngineConfig(**(limits | config))
        self.generation_table = FakeGenerationTable(num_blocks)
        windows = TableWindows(kv_windows, self.config.block_size_tokens)
        self.pool = BlockPool(
            num_blocks,
            self.config.block_size_tokens,
            self.generation_table,
            windows,
            announce_every=announce_every,
        )
        self.executor = executor_type(
            num_blocks, self.config.block_size_tokens, self.generation_table, windows=kv_windows
        )
        self.engine = engine_type(
            self.config,
            self.pool,
            step_costs=step_costs,
            clock=clock,
            speculation=speculation,
            draft_speedup=draft_speedup,
            reloads_preempted=reloads_preempted,
        )
        self.outputs: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[int, int], object] = {}
        self.admissions: dict[int, AdmittedSequence] = {}
        self.growths: list[GrownSequence] = []
        self.preemptions: list[PreemptedSequence] = []
        self.returns: list[ReturningSequence] = []
        self.progress: list[PrefillProgress] = []
        self.all_outputs: list[SequenceOutput] = []

    def add(self, request: SequenceRequest) -> SequenceRequest:
        self.engine.add(request)
        return request

    def plan(self) -> StepPlan:
        plan = self.engine.plan()
        self.note(self.engine.take_outcome())
        self.engine.check()
        return plan

    def apply(self, plan: StepPlan) -> None:
        self.note(self.engine.apply(plan, self.executor.run(plan)))
        self.engine.check()

    def step(self) -> StepPlan:
        plan = self.plan()
        if not plan.is_empty:
            self.apply(plan)
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Run until nothing is left to do. Returns the number of steps. Fails after `max_steps`."""
        for num_steps in range(max_steps):
            if self.step().is_empty:
                return num_steps
        raise AssertionError(f"no end after {max_steps} steps")

    def run_until(self, condition: Callable[[], bool], max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"the condition is not true after {max_steps} steps")

    def note(self, outcome: EngineOutcome) -> None:
        self.progress.extend(outcome.progress)
        self.growths.extend(outcome.growths)
        self.preemptions.extend(outcome.preemptions)
        self.returns.extend(outcome.returns)
        for admission in outcome.admissions:
            assert admission.seq_id not in self.admissions, "admitted twice"
            self.admissions[admission.seq_id] = admission
            self.pool.count_use(admission.cached_block_ids)
        for output in outcome.outputs:
            self.all_outputs.append(output)
            sample = output.seq_id, output.sample_index
            assert sample not in self.ends, f"{output} after the end"
            self.outputs[sample] += [token.token_id for token in output.tokens]
            if output.finish or output.failure:
                self.ends[sample] = output.finish or output.failure

    def expected(self, request: SequenceRequest, sample_index: int) -> tuple[list[int], FinishReason]:
        """Return the defined output tokens of a sample after those that `request` replays, and its finish
        reason."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        tokens, finish = expected_answer(
            prompt,
            request.sampling,
            sample_index,
            eos=self.config.eos_token_ids,
            max_model_len=self.config.max_model_len,
        )
        return tokens[len(request.token_ids) - request.num_prompt_tokens :], finish

    def first_tokens(self, request: SequenceRequest) -> list[SampledToken]:
        """Return the tokens that the owner of a pulled sequence's KV samples."""
        return [SampledToken(sample_index=i, token_id=self.expected(request, i)[0][0]) for i in request.sample_indices]

    def receiving_entries(self, request: SequenceRequest) -> list[int]:
        """Return the entries of a pulled sequence's block table that the pull must fill."""
        admission = self.admissions[request.seq_id]
        return [admission.block_table.index(block_id) for block_id in admission.receiving_block_ids]

    def mark_received(self, request: SequenceRequest, entries: Sequence[int] | None = None) -> None:
        """Fill the receiving blocks of a pulled sequence as a pull does; all, or those of these entries."""
        admission, size = self.admissions[request.seq_id], self.config.block_size_tokens
        hashes = hashes_of(request.token_ids, size)
        for entry in self.receiving_entries(request) if entries is None else entries:
            index, table = divmod(entry, self.pool.windows.num_tables)
            self.executor.write(admission.block_table, request.token_ids[: (index + 1) * size], index * size, table)
            block_hash = table_hash(hashes[index], table) if index < len(hashes) else bytes(16)
            self.pool.mark_received(admission.block_table[entry], block_hash)

    def assert_answered(self, *requests: SequenceRequest) -> None:
        """Assert that every sample has exactly its defined tokens and finish reason."""
        for request in requests:
            for i in request.sample_indices:
                assert (self.outputs[request.seq_id, i], self.ends[request.seq_id, i]) == self.expected(request, i)

    def assert_clean(self) -> None:
        """Assert that no block leaks: every block is free or cached, and the engine is idle."""
        counts = self.pool.counts()
        assert (counts.free + counts.cached, counts.held_for_others) == (counts.total, 0), counts
        assert self.engine.is_idle
        self.engine.check()
