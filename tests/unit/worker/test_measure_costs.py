"""Tests of measuring step costs: results, time limit, and the lock between workers of one host."""

import asyncio
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import Code, Failure, Reason
from baton.core.kv.kv_layout import KvLayout
from baton.core.step_cost import StepCostModel
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.step import DeviceFault, SampledToken, StepPlan, StepResult
from baton.worker.costs.measure_costs import NUM_TOKEN_IDS, measure_costs, measurement_lock, step_sizes
from baton.worker.costs.step_cost_keeper import work_of
from tests import builders
from tests.fake_executor import FakeGenerationTable
from tests.unit.worker.virtual_loop import virtual

COSTS = StepCostModel(
    step_s=0.003,
    prefill_token_s=4e-5,
    prefill_attended_s=3e-8,
    decode_seq_s=1e-4,
    decode_context_s=4e-7,
    draft_token_s=6e-5,
)


class CostedExecutor:
    """An executor whose steps take the time of a cost model.

    The first step of each size takes `first_s` longer.
    """

    def __init__(self, costs: StepCostModel = COSTS, *, first_s: float = 0.0) -> None:
        self.costs = costs
        self.first_s = first_s
        self.error: Exception | None = None
        self.failure: Failure | None = None
        self.plans: list[StepPlan] = []

    layout: KvLayout = builders.layout()
    num_blocks = 0

    async def execute(self, plan: StepPlan) -> StepResult:
        is_first = work_of(plan) not in map(work_of, self.plans)
        self.plans.append(plan)
        await asyncio.sleep(self.costs.step_seconds(work_of(plan)) + (self.first_s if is_first else 0.0))
        if self.error is not None:
            raise self.error
        if self.failure is not None:
            return StepResult(step_id=plan.step_id, samples={}, failures={plan.sequences[0].seq_id: self.failure})
        return StepResult(
            step_id=plan.step_id,
            samples={s.seq_id: (SampledToken(sample_index=0, token_id=0),) for s in plan.sequences},
        )

    def withdraw(self, step_id: int) -> bool:
        return False

    async def aclose(self) -> None:
        """Do nothing."""


def limits(**changes: int) -> EngineConfig:
    known = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 16_384, "block_size_tokens": 16}
    return EngineConfig(**(known | changes))


def pool(num_blocks: int = 5_000, block_size_tokens: int = 16) -> BlockPool:
    return BlockPool(num_blocks, block_size_tokens, FakeGenerationTable(num_blocks))


async def measured(
    executor: CostedExecutor, config: EngineConfig | None = None, blocks: BlockPool | None = None
) -> StepCostModel | None:
    return await measure_costs(executor, config or limits(), blocks or pool())


@virtual
async def test_costs_of_the_device_are_measured() -> None:
    found = await measured(CostedExecutor(first_s=0.02))
    assert found is not None
    assert found.coefficients == pytest.approx(COSTS.coefficients, rel=1e-6)


@virtual
async def test_measuring_steps_respect_the_engine_limits() -> None:
    executor, config = CostedExecutor(), limits(max_num_seqs=8, max_model_len=1_500)
    await measured(executor, config, pool(200))
    for plan in executor.plans:
        tables = [block for part in plan.sequences for block in part.block_table]
        assert len(tables) == len(set(tables))
        assert set(tables) <= set(range(200))
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.sequences) <= config.max_num_seqs
        for part in plan.sequences:
            assert part.sample is not None
            assert part.sample.history[part.kv_begin :] == part.token_ids
            assert part.context_len <= min(config.max_model_len, 16 * len(part.block_table))
            assert max(part.token_ids) < NUM_TOKEN_IDS
            assert isinstance(part.token_ids, array)
    assert {len(plan.sequences) for plan in executor.plans} == {1, 8}
    assert max(part.kv_begin for plan in executor.plans for part in plan.sequences) > 900


@virtual
async def test_measuring_leaves_the_pool_unchanged() -> None:
    blocks = pool()
    await measured(CostedExecutor(), blocks=blocks)
    assert blocks.counts().free == 5_000
    assert blocks.take_events() == []
    blocks.check()


@pytest.mark.parametrize("slower", [1, 10, 100, 1_000])
@virtual
async def test_slow_device_is_measured_in_fewer_sizes_within_the_budget(slower: int) -> None:
    changed: dict[str, Any] = {"step_s": 0.003 * slower, "prefill_token_s": 4e-5 * slower}
    costs = StepCostModel(**{**COSTS.to_plain(), **changed})
    executor = CostedExecutor(costs)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    found = await measured(executor)
    needed_s = costs.step_seconds(work_of(executor.plans[0])) + costs.step_seconds(work_of(executor.plans[1]))
    assert loop.time() - began_s <= max(needed_s, 2.0) * 1.2
    assert found is not None
    assert found.is_usable
    assert found.prefill_s(64) == pytest.approx(costs.prefill_s(64), rel=0.5)


@virtual
async def test_failing_device_has_no_costs() -> None:
    executor = CostedExecutor()
    executor.error = RuntimeError("out of memory")
    assert await measured(executor) is None
    executor.error, executor.failure = None, Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="NaN")
    assert await measured(executor) is None
    executor.failure = None
    executor.error = DeviceFault("it is gone")
    blocks = pool()
    with pytest.raises(DeviceFault):
        await measured(executor, blocks=blocks)
    assert blocks.counts().free == 5_000


@virtual
async def test_steps_without_duration_give_no_costs() -> None:
    nothing = StepCostModel(step_s=0, prefill_token_s=0, prefill_attended_s=0, decode_seq_s=0, decode_context_s=0)
    assert await measured(CostedExecutor(nothing)) is None


@pytest.mark.parametrize(
    ("num_blocks", "changes"),
    [(1, {}), (2, {"max_model_len": 1}), (3, {"max_num_batched_tokens": 1, "max_num_seqs": 1})],
)
def test_all_step_sizes_fit_any_limits(num_blocks: int, changes: dict[str, int]) -> None:
    config = limits(**{"max_num_seqs": 1} | changes)
    for size in step_sizes(config, num_blocks):
        assert size.num_blocks(16) <= num_blocks
        assert 0 < size.num_tokens <= config.max_num_batched_tokens
        assert size.context_tokens >= 0
        assert size.context_tokens + size.num_tokens <= config.max_model_len


async def test_workers_of_one_host_measure_one_after_the_other(tmp_path: Path) -> None:
    order: list[str] = []

    async def measure(name: str) -> None:
        async with measurement_lock(tmp_path / "lock", wait_s=30) as alone:
            order.append(f"{name} {alone}")
            await asyncio.sleep(0.02)
            order.append(name)

    await asyncio.gather(measure("a"), measure("b"))
    assert order in (["a True", "a", "b True", "b"], ["b True", "b", "a True", "a"])


async def test_lock_timeout_lets_the_worker_measure(tmp_path: Path) -> None:
    async with measurement_lock(tmp_path / "lock"), measurement_lock(tmp_path / "lock", wait_s=0.1) as alone:
        assert not alone


async def test_unusable_lock_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    async with measurement_lock(tmp_path / "link") as alone:
        assert not alone
    assert not (tmp_path / "elsewhere").exists()


async def test_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    program = (
        "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(  # noqa: ASYNC220 - it lives for a moment
        [sys.executable, "-c", program, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        async with measurement_lock(tmp_path / "lock", wait_s=0.1) as alone:
            assert not alone
        process.kill()
        async with measurement_lock(tmp_path / "lock", wait_s=30) as alone:
            assert alone
