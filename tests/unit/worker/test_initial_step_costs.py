"""Tests of the step costs that a worker starts with: known, stored or measured ones."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.step_cost import StepCostModel
from baton.engine.state.step import DeviceFault
from baton.runtime.observability.health import Health
from baton.sim.sim_executor import SimStepCost
from baton.store.memory.memory_stores import MemoryCostStore
from baton.worker.costs.step_cost_keeper import step_costs_key
from baton.worker.device.worker_device import Device
from baton.worker.worker_lifecycle import WorkerUnhealthy
from baton.worker.worker_main import initial_step_costs
from tests import builders
from tests.unit.worker.test_measure_costs import CostedExecutor
from tests.unit.worker.test_worker_main import Opened, config
from tests.unit.worker.virtual_loop import virtual

KNOWN = SimStepCost().model


def opened(**changes: Any) -> Device:
    device = Opened().open(config(), builders.worker_ref("w"), lambda text: None)
    return replace(device, **{"executor": CostedExecutor(), "costs_key": "k", **changes})


@virtual
async def test_costs_are_measured_once_then_read_from_the_store(tmp_path: Path) -> None:
    store, first, second = MemoryCostStore(), opened(), opened()
    costs = await initial_step_costs(first, store, Health(), tmp_path / "lock")
    assert isinstance(costs, StepCostModel)
    assert await initial_step_costs(second, store, Health(), tmp_path / "lock") == costs
    assert (len(first.executor.plans) > 0, second.executor.plans) == (True, [])  # type: ignore[attr-defined]


@virtual
async def test_workers_of_one_kind_that_start_together_measure_once(tmp_path: Path) -> None:
    store, devices = MemoryCostStore(), [opened() for _ in range(4)]
    lock = tmp_path / "lock"
    found = await asyncio.gather(*(initial_step_costs(device, store, Health(), lock) for device in devices))
    assert len(set(found)) == 1
    assert sum(bool(device.executor.plans) for device in devices) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("costs", "key"), [(KNOWN, "k"), (KNOWN, ""), (None, "")])
@virtual
async def test_device_with_known_costs_or_without_a_key_is_not_measured(
    costs: StepCostModel | None, key: str, tmp_path: Path
) -> None:
    device = opened(costs=costs, costs_key=key)
    assert await initial_step_costs(device, MemoryCostStore(), Health(), tmp_path / "lock") == costs
    assert device.executor.plans == []  # type: ignore[attr-defined]


@virtual
async def test_device_fault_while_measuring_makes_the_worker_unhealthy(tmp_path: Path) -> None:
    executor, health = CostedExecutor(), Health()
    executor.error = DeviceFault("gone")
    with pytest.raises(WorkerUnhealthy, match="gone"):
        await initial_step_costs(opened(executor=executor), MemoryCostStore(), health, tmp_path / "lock")
    assert not health.is_alive


def test_cost_key_depends_on_every_part() -> None:
    parts = ("model", "cpu", "float32", 2, "torch", 16)
    others = [(*parts[:i], "other", *parts[i + 1 :]) for i in range(len(parts))]
    assert len({step_costs_key(*each) for each in (parts, *others)}) == len(parts) + 1
    assert step_costs_key(*parts) == step_costs_key(*parts)
