"""What a worker finds out about its GPU before it loads a model."""

import pytest
import torch

from baton.core.errors import ConfigError
from baton.runtime.config.settings import WorkerConfig
from baton.worker.device import gpu_start
from baton.worker.device.gpu_start import kv_path_of, refused_on_gpu
from baton.worker.device.kv_path import KvPath, KvPathChoice

MEASURED = KvPathChoice(path=KvPath.STAGED, reason="measured")


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_start, "path_facts", dict)
    monkeypatch.setattr(gpu_start, "kv_path_for", lambda setting, facts: MEASURED)


def test_the_path_is_measured_for_nixl_on_a_gpu_only() -> None:
    assert kv_path_of(WorkerConfig(device="cuda")) == MEASURED
    assert kv_path_of(WorkerConfig(device="auto")) == MEASURED
    for config in (WorkerConfig(device="cpu"), WorkerConfig(device="cuda", transfer="local")):
        assert kv_path_of(config) == KvPathChoice(path=KvPath.DIRECT, reason="")


def test_expandable_segments_keep_a_worker_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="expandable_segments"):
        kv_path_of(WorkerConfig(device="cuda"))
    kv_path_of(WorkerConfig(device="cuda", transfer="local"))
    kv_path_of(WorkerConfig(device="cpu"))


def test_nothing_is_checked_where_no_gpu_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused_on_gpu(WorkerConfig(device="cuda", kernels="torch")) == {}
    assert refused_on_gpu(WorkerConfig(device="cpu")) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused_on_gpu(WorkerConfig(device="auto")) == {}
