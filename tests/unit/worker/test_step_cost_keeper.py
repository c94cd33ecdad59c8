"""Tests of step costs: correction by steps, storing, and reuse by the next worker of the same kind."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import StoreUnavailable
from baton.core.kv.block_hash import token_ids
from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.state.step import StepPlan, StepSequence
from baton.store.memory.memory_stores import MemoryCostStore
from baton.worker.costs.step_cost_keeper import COSTS_TTL_S, SAVE_S, CostKeeper, known_or_measured, work_of
from tests.unit.worker.virtual_loop import virtual

COSTS = StepCostModel(
    step_s=0.01, prefill_token_s=1e-4, prefill_attended_s=0, decode_seq_s=1e-4, decode_context_s=0, num_measured=9
)


class UnavailableStore:
    """A store that cannot be reached."""

    async def put(self, key: str, costs: StepCostModel, ttl_s: float) -> None:
        raise StoreUnavailable("unavailable")

    async def get(self, key: str) -> StepCostModel | None:
        raise StoreUnavailable("unavailable")


class MeasurementRecorder:
    def __init__(self, costs: StepCostModel | None = COSTS) -> None:
        self.costs = costs
        self.times = 0

    async def __call__(self) -> StepCostModel | None:
        self.times += 1
        return self.costs


def part(num_tokens: int, kv_begin: int) -> StepSequence:
    return StepSequence(
        seq_id=1, token_ids=token_ids(range(num_tokens)), position_begin=kv_begin, kv_begin=kv_begin, block_table=()
    )


def plan(*parts: StepSequence) -> StepPlan:
    return StepPlan(step_id=1, sequences=parts)


def test_step_work_consists_of_chunks_and_decoding_sequences() -> None:
    assert work_of(plan(part(1, 7), part(3, 10), part(1, 0))) == StepWork(
        num_prefill_tokens=3, prefill_attended_tokens=11 + 12 + 13, num_decode_seqs=2, decode_context_tokens=7
    )


def test_steps_correct_the_costs_of_their_kind_most() -> None:
    keeper = CostKeeper(COSTS)
    slow = work_of(plan(part(1, 5)))
    for _ in range(200):
        keeper.observe(slow, 2 * COSTS.step_seconds(slow))
        keeper.observe(work_of(StepPlan(step_id=1, sequences=(), block_copies=((1, 2),))), 60.0)
    assert keeper.costs is not None
    assert keeper.costs.decode_factor == pytest.approx(2.0, rel=0.05)
    assert 1.5 < keeper.costs.prefill_factor < 1.9, "what was not seen follows"


def test_keeper_without_costs_stores_nothing() -> None:
    keeper = CostKeeper(None)
    keeper.observe(work_of(plan(part(1, 5))), 1.0)
    assert keeper.costs is None


@virtual
async def test_corrected_costs_are_saved_periodically_and_at_the_end() -> None:
    store = MemoryCostStore()
    keeper = CostKeeper(COSTS, store, "k")
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(SAVE_S + 1)
    assert await store.get("k") is None, "nothing was observed"
    keeper.observe(work_of(plan(part(1, 5))), 1.0)
    await asyncio.sleep(SAVE_S)
    assert await store.get("k") == keeper.costs != COSTS
    keeper.observe(work_of(plan(part(1, 5))), 1.0)
    task.cancel()
    await asyncio.wait((task,))
    assert await store.get("k") == keeper.costs


@virtual
async def test_unavailable_cost_store_is_tolerated(caplog: pytest.LogCaptureFixture) -> None:
    keeper = CostKeeper(COSTS, UnavailableStore(), "k")
    keeper.observe(work_of(plan(part(1, 5))), 1.0)
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(3 * SAVE_S)
    assert not task.done()
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert await known_or_measured(UnavailableStore(), "k", MeasurementRecorder()) == COSTS
    logged: list[Any] = [record.msg for record in caplog.records if record.name == known_or_measured.__module__]
    assert [(event["event"], event["use"]) for event in logged] == [("store_read_failed", "step_costs")]


@virtual
async def test_worker_of_the_same_kind_uses_stored_costs() -> None:
    store, measure = MemoryCostStore(), MeasurementRecorder()
    assert await known_or_measured(store, "k", measure) == COSTS
    assert (await known_or_measured(store, "k", measure), measure.times) == (COSTS, 1)
    corrected = replace(COSTS, decode_factor=1.5)
    await store.put("k", corrected, COSTS_TTL_S)
    assert await known_or_measured(store, "k", measure) == corrected
    await known_or_measured(store, "another", measure)
    assert measure.times == 2


@virtual
async def test_failed_measurement_is_not_stored() -> None:
    store, measure = MemoryCostStore(), MeasurementRecorder(None)
    assert await known_or_measured(store, "k", measure) is None
    assert await store.get("k") is None
