"""Tests of the emulated device: configured costs, and separation from real workers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.core.client_api import WorkerStatus
from baton.core.errors import ConfigError, LayoutMismatch
from baton.engine.executors.emulated import EmulatedExecutor
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.config.worker_settings import draft_model_of, parse_step_costs
from baton.worker.device.open_device import open_device
from baton.worker.device.worker_device import Device
from tests import builders

Open = Callable[..., Device]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Yield a function that opens devices, and close them after the test."""
    devices: list[Device] = []

    def open_one(worker_id: str = "w", **changes: Any) -> Device:
        shared: dict[str, Any] = {
            "device": "emulated",
            "transfer": "local",
            "kv_memory": 8 * 2**20,
            "max_model_len": 256,
            "dtype": "float32",
        }
        devices.append(open_device(WorkerConfig(**{**shared, **changes}), builders.worker_ref(worker_id)))
        return devices[-1]

    yield open_one
    for device in devices:
        device.close_memory()


def test_emulated_device_uses_the_configured_costs_and_stores_none(opened: Open) -> None:
    text = "step=4ms,prefill_token=50us,decode_seq=0.5ms"
    device = opened(emulated_costs=text)
    assert isinstance(device.executor, EmulatedExecutor)
    assert (device.costs, device.costs_key) == (parse_step_costs(text), "")
    assert device.summary == (
        "emulated, 4ms a step, 50us a prompt token, 500us a decoding sequence, "
        "KV 85 blocks of 16 tokens in float32 (8 MiB), local"
    )


def test_draft_model_needs_a_device_with_models(opened: Open) -> None:
    with pytest.raises(ConfigError, match="--speculate draft:x: an emulated device runs no draft model; use auto"):
        opened(speculate="draft:x")
    with pytest.raises(ConfigError, match="speculate: expected one of auto, ngram, off, draft:DIR, got 'draft:'"):
        WorkerConfig(speculate="draft:")
    names = [draft_model_of(value) for value in ("off", "auto", "draft:a/b:c")]
    assert names == [None, None, "a/b:c"]


@pytest.mark.parametrize("device", [{}, {"device": "cpu", "kernels": "torch", "threads_per_worker": 1}])
def test_workers_with_kv_in_int8_hold_more_and_exchange_none_with_others(device: dict[str, Any], opened: Open) -> None:
    plain, int8 = opened("a", **device, dtype="bfloat16"), opened("b", **device, dtype="bfloat16", kv_dtype="int8")
    assert int8.executor.num_blocks == pytest.approx(plain.executor.num_blocks * 64 / 33, abs=2)
    assert "in int8" in int8.summary
    assert int8.executor.layout.model_fingerprint != plain.executor.layout.model_fingerprint
    for ours, theirs in ((plain, int8), (int8, plain)):
        with pytest.raises(LayoutMismatch, match="model_fingerprint"):
            ours.backend.connect(theirs.backend.memory[0], theirs.executor.layout)


def test_emulated_device_ends_grammars_with_the_models_end_tokens(opened: Open) -> None:
    config = opened(max_num_seqs=7, max_queued_jobs=9).engine_config
    assert config.eos_token_ids == (2, 0)
    assert (config.max_num_seqs, config.max_model_len, config.max_waiting_seqs) == (7, 256, 9)


def test_emulated_and_real_workers_do_not_exchange_kv(opened: Open) -> None:
    emulated, slower = opened("a"), opened("b", emulated_costs="step=1s")
    emulated.backend.connect(slower.backend.memory[0], slower.executor.layout)
    real = opened("c", device="cpu", kernels="torch", threads_per_worker=1)
    for ours, theirs in ((emulated, real), (real, emulated)):
        with pytest.raises(LayoutMismatch, match="model_fingerprint"):
            ours.backend.connect(theirs.backend.memory[0], theirs.executor.layout)


def test_summary_names_the_emulated_device(opened: Open) -> None:
    assert WorkerStatus.of(builders.worker_report("w")).model == "demo"
    assert WorkerStatus.of(builders.worker_report("w", layout=opened().executor.layout)).model == "demo (emulated)"


def test_too_little_kv_memory_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError, match="must hold one sequence of 256"):
        opened(kv_memory=2**20)
