from prometheus_client import CollectorRegistry

import baton
from baton.runtime.metrics import (
    EngineMetrics,
    GatewayMetrics,
    ProcessMetrics,
    SchedulerMetrics,
    TransferMetrics,
    expose,
    process_registry,
)

FAMILIES = (ProcessMetrics, GatewayMetrics, SchedulerMetrics, EngineMetrics, TransferMetrics)


def test_all_parts_fit_into_one_registry_and_are_named_for_baton() -> None:
    registry = CollectorRegistry()
    for family in FAMILIES:
        family(registry)
    names = [metric.name for metric in registry.collect()]
    assert len(names) == len(set(names)) > 30
    assert all(name.startswith("baton_") for name in names)


def test_two_workers_in_one_process_count_apart() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    EngineMetrics(first).blocks.labels("free").set(5)
    EngineMetrics(second).blocks.labels("free").set(7)
    assert first.get_sample_value("baton_kv_blocks", {"state": "free"}) == 5
    assert second.get_sample_value("baton_kv_blocks", {"state": "free"}) == 7


def test_exposition() -> None:
    registry = process_registry("worker")
    TransferMetrics(registry).bytes.labels("nixl").inc(4096)
    text = expose(registry).decode()
    assert 'baton_transfer_bytes_total{transport="nixl"} 4096.0' in text
    assert f'baton_build_info{{service="worker",version="{baton.__version__}"}} 1.0' in text
