import asyncio

from prometheus_client import CollectorRegistry

import baton
from baton.runtime.observability.metrics import (
    BudgetMetrics,
    EngineMetrics,
    GatewayMetrics,
    ProcessMetrics,
    SchedulerMetrics,
    TransferMetrics,
    expose,
    process_registry,
)
from baton.runtime.process.byte_budget import Account, ByteBudget

FAMILIES = (ProcessMetrics, BudgetMetrics, GatewayMetrics, SchedulerMetrics, EngineMetrics, TransferMetrics)


def test_all_metric_names_are_unique_and_start_with_baton() -> None:
    registry = CollectorRegistry()
    for family in FAMILIES:
        family(registry)
    names = [metric.name for metric in registry.collect()]
    assert len(names) == len(set(names)) > 30
    assert all(name.startswith("baton_") for name in names)


def test_metrics_of_two_workers_in_one_process_are_separate() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    EngineMetrics(first).blocks.labels("device", "free").set(5)
    EngineMetrics(second).blocks.labels("device", "free").set(7)
    assert first.get_sample_value("baton_kv_blocks", {"tier": "device", "state": "free"}) == 5
    assert second.get_sample_value("baton_kv_blocks", {"tier": "device", "state": "free"}) == 7


def test_budget_is_exported_by_account() -> None:
    registry, budget = CollectorRegistry(), ByteBudget({Account.JOBS: 100, Account.SESSIONS: 50})
    BudgetMetrics(registry).follow(budget)
    budget.reserve(Account.JOBS, 7, "the job")
    assert registry.get_sample_value("baton_memory_budget_used_bytes", {"account": "jobs"}) == 7
    assert registry.get_sample_value("baton_memory_budget_limit_bytes", {"account": "sessions"}) == 50


async def test_unfinished_tasks_are_counted_by_function() -> None:
    registry = CollectorRegistry()
    metrics = ProcessMetrics(registry)

    def sleeping() -> float | None:
        return registry.get_sample_value("baton_event_loop_tasks", {"function": "sleep"})

    metrics.observe_loop(0.001, 0.0)
    assert sleeping() is None
    sleepers = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
    metrics.observe_loop(0.002, 0.0)
    assert sleeping() == 3
    for sleeper in sleepers:
        sleeper.cancel()
    await asyncio.gather(*sleepers, return_exceptions=True)
    metrics.observe_loop(0.003, 0.0)
    assert sleeping() is None
    assert registry.get_sample_value("baton_event_loop_lag_seconds_count") == 3


def test_exposition_has_values_and_build_info() -> None:
    registry = process_registry("worker")
    TransferMetrics(registry).bytes.labels("nixl").inc(4096)
    text = expose(registry).decode()
    assert 'baton_transfer_bytes_total{transport="nixl"} 4096.0' in text
    assert f'baton_build_info{{service="worker",version="{baton.__version__}"}} 1.0' in text
